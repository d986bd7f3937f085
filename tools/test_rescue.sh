#!/usr/bin/env bash
# Checkpoints written anew by each system's own code, read back; the plug-ins inside Lightning and TRL; and environments
# and chat templates of TRL and gymnasium.
#
# The systems want other versions of common packages than .venv has, so they get an environment of their own, behind
# which those of .venv stand.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTHON="${PYTHON:-python3}"
environment="${RESCUE_VENV:-.venv-rescue}"
python="$environment/bin/python"
if ! test -e "$environment/.installed"; then
    test -x "$python" || "$PYTHON" -m venv "$environment"
    packages="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    own="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    # .venv may name further folders itself; they stand behind the environment's own.
    printf 'import site; site.addsitedir("%s")\n%s\n' "$packages" "$PWD/src" >"$own/zz_holdfast.pth"
    pip=("$python" -m pip install --quiet --disable-pip-version-check)
    "${pip[@]}" -c constraints.txt lightning==2.6.6 trl==1.16.0 accelerate==1.15.0 gymnasium==1.4.0
    "${pip[@]}" --no-deps verl==0.9.1 torchtitan==0.3.0
    "${pip[@]}" -c constraints.txt tensordict pyvers orjson codetiming omegaconf hydra-core cloudpickle torchdata kernels \
        tyro docstring_parser spmd_types==0.2.3
    touch "$environment/.installed"
fi

fresh="$(mktemp -d)"
trap 'rm -rf "$fresh"' EXIT
export PYTHONPATH=.
"$python" -W ignore -c 'from tests.features.rescue.recipes import commands; print(*commands(), sep="\n")' >"$fresh/commands" 2>/dev/null
while read -r fixture recipe ranks; do
    # --standalone finds a free port; with --master-port 0 the ranks wait for each other for ever.
    timeout 300 "$python" -W ignore -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
        tests/features/rescue/recipes.py "$recipe" "$fresh/$fixture" >"$fresh/log" 2>&1 </dev/null ||
        { echo "$fixture was not written:"; tail -n 20 "$fresh/log"; exit 1; }
done <"$fresh/commands"
echo "written anew: $(wc -l <"$fresh/commands") checkpoints, in $SECONDS s since the start"
# A mesh as torch 2.6 pickles it, written anew into tests/: its environment takes 5 GB, so only where it is asked for.
if test -n "${RESCUE_TORCH_2_6:-}"; then
    test -x .venv-torch2.6/bin/torchrun || { "$PYTHON" -m venv .venv-torch2.6 &&
        .venv-torch2.6/bin/python -m pip install --quiet --disable-pip-version-check torch==2.6.0 'numpy<2.3'; }
    .venv-torch2.6/bin/python -W ignore -m torch.distributed.run --standalone --nproc-per-node 4 \
        tests/features/rescue/torch_2_6.py "$fresh/torch-2.6" </dev/null
    tar -C "$fresh/torch-2.6" --sort=name --owner=0 --group=0 -cJf tests/features/rescue/torch_2_6.tar.xz checkpoint truth.pt
    rm -r "$fresh/torch-2.6"
fi
HOLDFAST_FOREIGN="$fresh" "$python" -m pytest -p no:xdist -q -rs tests/features/rescue/test_readers.py
"$python" -m pytest -p no:xdist -q -rs tests/features/trainers
"$python" -m pytest -p no:xdist -q -rs tests/rollout/test_episode_tokens.py tests/rollout/test_trl_environments.py \
    tests/environments/test_forms.py
