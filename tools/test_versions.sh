#!/usr/bin/env bash
# Tests against the other versions we promise to work with: the oldest torch, and the transformers that vLLM accepts.
#
# torch 2.11 is tested where pip can install a build without CUDA: the CUDA build brings gigabytes of NVIDIA packages and
# cannot be imported without them. Where only that build is to be had, this says so and goes on. An environment made by
# other means (.venv-torch2.11 in which `import torch` is 2.11) is used as it is.
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
WORKERS=(-n "${TEST_WORKERS:-2}" --dist loadfile)
status=0

new_environment() {  # DIRECTORY: an environment with pip, kept if it is there
    test -x "$1/bin/python" || "$PYTHON" -m venv "$1"
}

has_torch() {  # DIRECTORY VERSION
    test -x "$1/bin/python" || return 1
    "$1/bin/python" -c "import sys, torch; sys.exit(not torch.__version__.startswith('$2.'))" 2>/dev/null
}

cuda_packages() {  # REPORT.json: names of what pip would install beside torch that only a GPU needs
    "$PYTHON" - "$1" <<'PYTHON_END'
import json
import sys

items = json.load(open(sys.argv[1]))["install"]
names = [f"{item['metadata']['name']} {item['metadata']['version']}" for item in items]
print(", ".join(name for name in names if name.startswith(("nvidia-", "cuda-", "triton "))))
PYTHON_END
}

install_torch_2_11() {  # says why it returns 1
    local report index=()
    report="$(mktemp)"
    test -z "${TORCH_CPU_INDEX:-}" || index=(--index-url "$TORCH_CPU_INDEX")
    new_environment .venv-torch2.11
    if ! .venv-torch2.11/bin/python -m pip install "${PIP_OPTIONS[@]}" "${index[@]}" --dry-run --ignore-installed \
        --report "$report" 'torch==2.11.*' 2>"$report.errors"; then
        echo "torch 2.11 is not tested: pip cannot find it here. It says:"
        tail -n 3 "$report.errors"
        return 1
    fi
    local cuda
    cuda="$(cuda_packages "$report")"
    if [ -n "$cuda" ]; then
        echo "torch 2.11 is not tested: the only build that pip finds here is the CUDA one, several gigabytes with the"
        echo "packages it cannot be imported without ($cuda)."
        echo "Set TORCH_CPU_INDEX to an index that has the CPU build, or prepare .venv-torch2.11 by hand."
        return 1
    fi
    .venv-torch2.11/bin/python -m pip install "${PIP_OPTIONS[@]}" "${index[@]}" 'torch==2.11.*'
    grep -v '^torch==' constraints.txt >"$report"
    .venv-torch2.11/bin/python -m pip install "${PIP_OPTIONS[@]}" -c "$report" -e '.[dev,lowbit,math,qlora,vlm]'
}

echo "== the oldest torch: smoke set on torch 2.11"
if has_torch .venv-torch2.11 2.11 || install_torch_2_11; then
    .venv-torch2.11/bin/python -m pytest "${WORKERS[@]}" "${SMOKE[@]}" || status=1
fi

echo "== the transformers that vLLM accepts: fast tests under constraints-vllm.txt"
stamp=.venv-vllm-constraints/.installed
if ! test "$stamp" -nt pyproject.toml || ! test "$stamp" -nt constraints-vllm.txt; then
    new_environment .venv-vllm-constraints
    vllm_pip=(.venv-vllm-constraints/bin/python -m pip install "${PIP_OPTIONS[@]}")
    # torch goes first and alone: beside other packages pip may choose another build of it.
    "${vllm_pip[@]}" "$(grep '^torch==' constraints-vllm.txt)"
    "${vllm_pip[@]}" -c constraints-vllm.txt -e '.[dev,lowbit,math,qlora,vlm]'
    touch "$stamp"
fi
.venv-vllm-constraints/bin/python -c "import transformers; print('transformers', transformers.__version__)"
.venv-vllm-constraints/bin/python -m pytest "${WORKERS[@]}" -m "not slow and not gpu" || status=1

exit "$status"
