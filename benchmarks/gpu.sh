#!/usr/bin/env bash
# Run the GPU tests and the GPU arms of the benchmarks on a CUDA machine that may have no network.
#
#     [WHEELS=folder] [OUT=folder] [PYTHON=python3] [ROUNDS=3] [REAL_MODEL=folder] benchmarks/gpu.sh
#
# Needs an interpreter with torch 2.11 or later. What else is missing is installed from the wheels in $WHEELS, never from
# a network and never over a package that is there. Output goes to $OUT, or benchmarks/results/<date>-gpu. A part that
# fails or misses a target does not stop the next one; the last line names it, and the exit status is 1.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=${OUT:-benchmarks/results/$(date -u +%F)-gpu}
mkdir -p "$out"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

"$python" - <<'PYTHON'
import sys

import torch

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
    sys.exit(f"torch {torch.__version__} is too old; 2.11 or later is needed.")
if not torch.cuda.is_available():
    sys.exit("torch finds no CUDA device here.")
PYTHON

# pip does nothing for a requirement that is met, so one command both looks and installs; torch stays as it is.
"$python" - "$out" <<'PYTHON'
import sys
import tomllib
from pathlib import Path

import torch

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
tests = [line for line in extras["dev"] if line.startswith(("pytest", "hypothesis"))]
wanted = [line for line in project["dependencies"] if not line.startswith("torch")]
Path(sys.argv[1], "wanted.txt").write_text("\n".join([*wanted, *tests, *extras["trl"]]) + "\n")
Path(sys.argv[1], "torch.txt").write_text(f"torch=={torch.__version__}\n")
PYTHON
while read -r requirement; do
    "$python" -m pip install --quiet --disable-pip-version-check --no-index ${WHEELS:+--find-links "$WHEELS"} \
        --constraint "$out/torch.txt" "$requirement" >/dev/null 2>&1 || echo "missing: $requirement"
done <"$out/wanted.txt" | tee "$out/missing.txt"

{
    date -u +"%F %H:%M UTC"
    git rev-parse HEAD 2>/dev/null || echo "no git history here"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    "$python" -m pip list --disable-pip-version-check 2>/dev/null | grep -Ei '^(torch|transformers|trl|triton|numpy) '
} | tee "$out/machine.txt"

failed=()
part() {
    local name=$1
    shift
    echo "== $name"
    "$python" "$@" 2>&1 | tee "$out/$name.txt" || failed+=("$name")
}

part tests -m pytest -m gpu
part head benchmarks/head.py --device cuda --rounds "${ROUNDS:-3}"
# Of our own decoding: by CUDA graphs, and operation by operation.
part decode benchmarks/decode.py --device cuda --rounds "${ROUNDS:-3}"
for script in sft_vs_trl grpo_vs_trl; do
    if "$python" -c "import trl" 2>/dev/null; then
        part "$script" "benchmarks/$script.py" --device cuda --rounds "${ROUNDS:-3}"
    else
        echo "skipped: $script needs trl" | tee "$out/$script.txt"
    fi
done

# GRPO on sums by a pretrained model: accuracy and minutes. REAL_MODEL names what tools/real_model.py wrote elsewhere.
if [[ -n ${REAL_MODEL:-} ]]; then
    part learning benchmarks/learning.py --model "$REAL_MODEL" --part grpo --ours --device cuda
else
    echo "skipped: learning needs REAL_MODEL, a directory of tools/real_model.py" | tee "$out/learning.txt"
fi

if ((${#failed[@]})); then
    echo "failed or missed a target: ${failed[*]}"
    exit 1
fi
echo "all parts passed; output in $out"
