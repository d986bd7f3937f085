#!/usr/bin/env bash
# Tests with other versions than those of constraints.txt: the newest of everything, the oldest torch, the transformers
# that vLLM accepts, and other Pythons. A line for each lane says what was run; docs/status.md has the last ones.
#
# Pythons that are not here are left out by name: PYTHONS may name others. Where pip finds the CUDA build of torch alone,
# an environment takes 6 GB, since the build cannot be imported without NVIDIA's packages; TORCH_CPU_INDEX, if set, is the
# package index asked for the CPU build. LANES may name fewer lanes.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTHON="${PYTHON:-python3}"
PYTHONS="${PYTHONS:-python3.12 python3.13}"
LANES="${LANES:-newest oldest vllm pythons}"
WORKERS=(-n "${TEST_WORKERS:-3}" --dist loadgroup)
OWN=(browser kernels real features/vllm/real features/cluster/test_hosts.py features/cluster/test_ray.py
    features/cluster/test_slurm.py features/cluster/test_slurm_briefly.py)
PIP=(-m pip install --quiet --disable-pip-version-check)
INDEX=()
test -z "${TORCH_CPU_INDEX:-}" || INDEX=(--index-url "$TORCH_CPU_INDEX")
status=0

# DIRECTORY TORCH CONSTRAINTS: an environment with one torch, which goes first and alone, and our package beside it.
install() {
    local stamp="$1/.installed-$2"
    if test "$stamp" -nt pyproject.toml && test "$stamp" -nt "$3"; then return; fi
    test -x "$1/bin/python" || "$PYTHON" -m venv "$1"
    "$1/bin/python" "${PIP[@]}" "${INDEX[@]}" "torch$2" &&
        "$1/bin/python" "${PIP[@]}" --upgrade -c "$3" -e '.[dev,lowbit,math,qlora,video,vlm]' "torch$2" && touch "$stamp"
}

# LANE DIRECTORY TORCH CONSTRAINTS: every test of `make test`, and the demo.
lane() {
    if [[ " $LANES " != *" $1 "* ]]; then return; fi
    if ! install "$2" "$3" "$4"; then
        echo "$1: not tested, since pip cannot install it here, for the reason above"
        return
    fi
    local result=passed
    "$2/bin/python" -m pytest "${WORKERS[@]}" -m "not slow and not gpu" "${OWN[@]/#/--ignore=tests/}" || result=FAILED
    "$2/bin/holdfast" demo --dir "$2/demo" >"$2/demo.txt" || result=FAILED
    echo "$1: $result: $(versions "$2/bin/python")"
    test "$result" = passed || status=1
}

versions() { # PYTHON: what the lane runs
    "$1" - <<'END'
import datetime, platform, subprocess
from importlib.metadata import version

commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True).stdout.strip()
names = ("torch", "transformers", "datasets", "peft", "pydantic", "numpy")
words = [f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)]
print(", ".join([*words, f"commit {commit}", str(datetime.date.today())]))
END
}

none="$(mktemp)" others="$(mktemp)"
grep -v '^torch==' constraints.txt >"$others"
lane newest .venv-newest '>=2.11' "$none"
lane oldest .venv-torch2.11 '==2.11.*' "$others"
lane vllm .venv-vllm-constraints "$(sed -n 's/^torch//p' constraints-vllm.txt)" constraints-vllm.txt
for python in $PYTHONS; do
    if [[ " $LANES " != *" pythons "* ]]; then
        continue
    elif ! "$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then
        echo "$python: not tested, since it is not here or older than 3.11"
    elif HOLDFAST_WHEEL_PYTHON="$(command -v "$python")" .venv/bin/python -m pytest -n 0 tests/test_wheel.py; then
        echo "$python: the wheel, its demo and its examples passed: $("$python" --version)"
    else
        echo "$python: FAILED: $("$python" --version)"
        status=1
    fi
done
exit "$status"
