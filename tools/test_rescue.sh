#!/usr/bin/env bash
# Checkpoints written anew by each system's own code, read back; and the plug-ins inside Lightning and TRL.
#
# The systems want other versions of common packages than .venv has, so they get an environment of their own, behind
# which those of .venv stand.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTHON="${PYTHON:-python3}"
environment=.venv-rescue
python="$environment/bin/python"
if ! test -e "$environment/.installed"; then
    test -x "$python" || "$PYTHON" -m venv "$environment"
    packages="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    own="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    printf '%s\n%s\n' "$PWD/src" "$packages" >"$own/base.pth"
    pip=("$python" -m pip install --quiet --disable-pip-version-check)
    "${pip[@]}" -c constraints.txt lightning==2.6.6 trl==1.16.0 accelerate==1.15.0
    "${pip[@]}" --no-deps verl==0.9.1 torchtitan==0.3.0
    "${pip[@]}" -c constraints.txt tensordict pyvers orjson codetiming omegaconf hydra-core cloudpickle torchdata kernels \
        tyro docstring_parser spmd_types==0.2.3
    touch "$environment/.installed"
fi

fresh="$(mktemp -d)"
trap 'rm -rf "$fresh"' EXIT
recipes="$(PYTHONPATH=. "$python" -W ignore -c 'from tests.foreign.recipes import RECIPES; print(*RECIPES)')"
for name in $recipes; do
    PYTHONPATH=. "$python" -m torch.distributed.run --nproc-per-node 2 --master-port 0 tests/foreign/recipes.py "$name" "$fresh/$name" \
        >"$fresh/$name.log" 2>&1 || { tail -n 20 "$fresh/$name.log"; exit 1; }
done
for name in verl-fsdp2 verl-fsdp1-orig; do
    PYTHONPATH=. "$python" -m torch.distributed.run --nproc-per-node 4 --master-port 0 tests/foreign/recipes.py "$name" "$fresh/$name-4" \
        >"$fresh/$name-4.log" 2>&1
done
PYTHONPATH=. "$python" -m torch.distributed.run --nproc-per-node 1 --master-port 0 tests/foreign/recipes.py verl-fsdp2 "$fresh/verl-fsdp2-1" \
    >"$fresh/verl-fsdp2-1.log" 2>&1
HOLDFAST_FOREIGN="$fresh" "$python" -m pytest -p no:xdist -q tests/foreign/test_readers.py
"$python" -m pytest -p no:xdist -q tests/integrations
