#!/usr/bin/env bash
# The lane of fake devices on the newest CUDA build of torch that pip gives here, without a GPU: what a login node has.
#
# From 2.14 on it needs the guard as other builds do. It takes 8 GB, in an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PLACE="${CUDA_ENVIRONMENT:-.venv-torch-cuda}"
PIP_OPTIONS=(--quiet --disable-pip-version-check --no-cache-dir)

room="$(df --output=avail -BG "$(dirname "$PLACE")" | tail -n 1 | tr -dc 0-9)"
if ! test -x "$PLACE/bin/python" && test "$room" -lt 12; then
    echo "the CUDA build of torch is not tested: it takes 8 GB, and ${room} GB are free."
    exit 0
fi
test -x "$PLACE/bin/python" || "${PYTHON:-python3}" -m venv "$PLACE"
if ! "$PLACE/bin/python" -c "import torch" 2>/dev/null; then
    if ! "$PLACE/bin/python" -m pip install "${PIP_OPTIONS[@]}" torch; then
        echo "the CUDA build of torch is not tested: pip cannot install it here, for the reason above."
        exit 0
    fi
    others="$(mktemp)"
    grep -v '^torch==' constraints.txt >"$others"
    "$PLACE/bin/python" -m pip install "${PIP_OPTIONS[@]}" -c "$others" -e '.[dev,lowbit,mcp,qlora,video,vlm]'
fi
build="$("$PLACE/bin/python" -c "import torch; print(torch.__version__, torch.version.cuda)")"
if [[ "$build" == *None ]]; then
    echo "the CUDA build of torch is not tested: pip gave $build, a build without CUDA."
    exit 0
fi
echo "== the lane of fake devices on torch $build"
"$PLACE/bin/python" -m pytest -n 0 tests/fake_devices/test_stand_ins.py tests/fake_devices/test_lane.py
