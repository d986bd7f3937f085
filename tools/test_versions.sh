#!/usr/bin/env bash
# Tests against the other versions we promise to work with: another Python, the oldest torch, and the transformers that
# vLLM accepts.
#
# OTHER_PYTHON, the system's own if it is not set, is skipped by name where it is older than 3.11 or the version of .venv:
# patch releases differ too, as in how they pickle (3.11.0 to 3.11.3 write members of enumerations by name).
#
# An environment made by other means (.venv-torch2.11 in which `import torch` is 2.11) is used as it is. Else pip makes
# one; where it finds the CUDA build alone, that takes 6 GB, since the build cannot be imported without NVIDIA's packages.
# TORCH_CPU_INDEX, if set, is the package index asked for the CPU build.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTHON="${PYTHON:-python3}"
PIP_OPTIONS=(--quiet --disable-pip-version-check)
SMOKE=(
    tests/distributed/test_split_invariance.py tests/distributed/test_sharding_rules.py
    tests/models/test_varlen_call.py tests/optim
)
WORKERS=(-n "${TEST_WORKERS:-4}" --dist worksteal)
status=0

new_environment() {  # DIRECTORY [PYTHON]: an environment with pip, kept if it is there
    "$1/bin/python" -m pip --version >/dev/null 2>&1 || "${2:-$PYTHON}" -m venv --clear "$1"
}

install() {  # DIRECTORY CONSTRAINTS: our packages; nothing where they were installed since these files changed
    ! test "$1/.installed" -nt pyproject.toml || ! test "$1/.installed" -nt "$2" || return 0
    local pip=("$1/bin/python" -m pip install "${PIP_OPTIONS[@]}")
    # torch goes first and alone: beside other packages pip may choose another build of it.
    "${pip[@]}" "$(grep '^torch==' "$2")" && "${pip[@]}" -c "$2" -e '.[dev,lowbit,math,qlora,video,vlm]' && touch "$1/.installed"
}

version_of() {  # PYTHON
    "$1" -c "import platform; print(platform.python_version())" 2>/dev/null || echo none
}

has_torch() {  # DIRECTORY VERSION
    test -x "$1/bin/python" || return 1
    "$1/bin/python" -c "import sys, torch; sys.exit(not torch.__version__.startswith('$2.'))" 2>/dev/null
}

install_torch_2_11() {  # says why it returns 1
    local others index=()
    test -z "${TORCH_CPU_INDEX:-}" || index=(--index-url "$TORCH_CPU_INDEX")
    new_environment .venv-torch2.11
    if ! .venv-torch2.11/bin/python -m pip install "${PIP_OPTIONS[@]}" --no-cache-dir "${index[@]}" 'torch==2.11.*'; then
        echo "torch 2.11 is not tested: pip cannot install it here, for the reason above."
        return 1
    fi
    others="$(mktemp)"
    grep -v '^torch==' constraints.txt >"$others"
    .venv-torch2.11/bin/python -m pip install "${PIP_OPTIONS[@]}" -c "$others" -e '.[dev,lowbit,math,qlora,video,vlm]'
}

echo "== another Python: smoke set, saves and resumes"
OTHER_PYTHON="${OTHER_PYTHON:-/usr/bin/python3}"
other="$(version_of "$OTHER_PYTHON")" ours="$(version_of .venv/bin/python)"
if test "$other" = "$ours" || ! [[ "$other" =~ ^3\.(1[1-9]|[2-9][0-9])\. ]]; then
    echo "another Python is not tested: $OTHER_PYTHON is $other and .venv has $ours; OTHER_PYTHON may name a third."
elif new_environment ".venv-python$other" "$OTHER_PYTHON" && install ".venv-python$other" constraints.txt; then
    echo "python $other"
    ".venv-python$other/bin/python" -m pytest "${WORKERS[@]}" -m "not slow and not gpu and not deep and not devices" \
        "${SMOKE[@]}" tests/checkpoint tests/crash tests/cli tests/data tests/rewards tests/test_files.py \
        tests/test_http_client.py || status=1
else
    echo "another Python is not tested: pip cannot install for $other, for the reason above."
fi

echo "== the oldest torch: smoke set on torch 2.11"
if has_torch .venv-torch2.11 2.11 || install_torch_2_11; then
    .venv-torch2.11/bin/python -m pytest "${WORKERS[@]}" "${SMOKE[@]}" || status=1
fi

echo "== the transformers that vLLM accepts: fast tests under constraints-vllm.txt"
new_environment .venv-vllm-constraints
install .venv-vllm-constraints constraints-vllm.txt
.venv-vllm-constraints/bin/python -c "import transformers; print('transformers', transformers.__version__)"
.venv-vllm-constraints/bin/python -m pytest "${WORKERS[@]}" -m "not slow and not gpu" || status=1

exit "$status"
