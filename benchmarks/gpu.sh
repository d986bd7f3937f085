#!/usr/bin/env bash
# Measure on one GPU what users would ask, part by part, and put it into one table.
#
#     [WHEELS=folder] [OUT=folder] [PYTHON=python3] [ROUNDS=n] [REAL_MODEL=folder] benchmarks/gpu.sh [PART...]
#     TINY=1 benchmarks/gpu.sh [PART...]
#
# Without a PART all of them run, in the order below. A part may take 540 seconds, after which it is ended, and all of
# them together 1,500. Arms alternate for 2 rounds, for 1 where all parts run, or for $ROUNDS.
#
# Needs an interpreter with torch 2.11 or later, and no network. What else is missing is installed from the wheels in
# $WHEELS, never over a package that is there; an arm or a part whose package is missing says so. Output goes to $OUT, or
# benchmarks/results/<date>-gpu: PART.txt, and table.md with ratios, peaks and targets of every part that has run there.
# A part that fails or misses a target does not stop the next one; the last line names it, and the exit status is 1.
# TINY=1 runs the parts on a CPU with tiny shapes, which shows that they run and nothing else: no target counts.
set -euo pipefail
cd "$(dirname "$0")/.."

all=(tests sft_05b sft_15b sft_7b lora_7b head grpo decode stall plan prove recipes learning)
limit=540
limit_of_all=1500

for name in "$@"; do
    if [[ " ${all[*]} " != *" $name "* ]]; then
        echo "benchmarks/gpu.sh has no part $name. The parts are: ${all[*]}." >&2
        exit 2
    fi
done
parts=("${@:-${all[@]}}")
rounds=${ROUNDS:-$(($# ? 2 : 1))}
tiny=${TINY:+--tiny}
device=${TINY:+cpu}
device=${device:-cuda}
python=${PYTHON:-python3}
mkdir -p "${OUT:=benchmarks/results/$(date -u +%F)-gpu}"
out=$(cd "$OUT" && pwd)
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

if [[ -z $tiny ]]; then
    "$python" - <<'PYTHON'
import sys

import torch

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
    sys.exit(f"torch {torch.__version__} is too old; 2.11 or later is needed.")
if not torch.cuda.is_available():
    sys.exit("torch finds no CUDA device here. TINY=1 runs the parts on a CPU with tiny shapes.")
PYTHON
fi

# pip does nothing for a requirement that is met, so one command both looks and installs; torch stays as it is.
if [[ -n ${WHEELS:-} ]]; then
    "$python" - "$out" <<'PYTHON'
import sys
import tomllib
from pathlib import Path

import torch

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
tests = [line for line in extras["dev"] if line.startswith(("pytest", "hypothesis"))]
wanted = [line for line in project["dependencies"] if not line.startswith("torch")]
wanted += [*tests, *extras["kernels"], *extras["qlora"], *extras["trl"], "liger-kernel"]
Path(sys.argv[1], "wanted.txt").write_text("\n".join(wanted) + "\n")
Path(sys.argv[1], "torch.txt").write_text(f"torch=={torch.__version__}\n")
PYTHON
    while read -r requirement; do
        "$python" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$WHEELS" \
            --constraint "$out/torch.txt" "$requirement" >/dev/null 2>&1 || echo "missing: $requirement"
    done <"$out/wanted.txt" | tee "$out/missing.txt"
fi

has() { "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)"; }
versions() {
    "$python" - <<'PYTHON'
from importlib.metadata import PackageNotFoundError, version

for name in ("torch", "transformers", "trl", "liger-kernel", "triton", "peft"):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "not installed")
PYTHON
}
{
    date -u +"%F %H:%M UTC"
    git rev-parse HEAD 2>/dev/null || echo "no git history here"
    if [[ -n $tiny ]]; then
        echo "CPU, tiny shapes: no number here says anything"
    else
        nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    fi
    versions
} | tee "$out/machine.txt"

# The table of all parts that have run into $out, this time or before: each has left its rows in a file.
table() {
    {
        echo "$(paste -sd ';' "$out/machine.txt" | sed 's/;/; /g')"
        printf '\n| part | what | target | measured | |\n|---|---|---|---|---|\n'
        for name in "${all[@]}" all; do
            [[ ! -f $out/$name.rows ]] || sed "s/^/| $name | /" "$out/$name.rows"
        done
    } | sed -E 's/ +\|/ |/g' >"$out/table.md"
}

failed=()
skip() {
    echo "== $1"
    echo "skipped: $2" | tee "$out/$1.txt"
    echo "| | skipped: $2 | |" >"$out/$1.rows"
    table
}
part() {
    local name=$1 status=0 started=$SECONDS rows="$out/$1.rows" seconds verdict=met
    shift
    echo "== $name"
    : >"$rows"
    HOLDFAST_BENCHMARK_ROWS=$rows timeout --kill-after=30 "$limit" "$python" -W ignore "$@" 2>&1 |
        tee "$out/$name.txt" || status=$?
    seconds=$((SECONDS - started))
    [[ $name != tests ]] || echo "$(tail -n 1 "$out/tests.txt" | tr '|=' '  ') | | exit code $status | |" >>"$rows"
    if ((status)); then
        failed+=("$name")
        echo "exit code $status: it failed or missed a target, see $name.txt | | | **missed** |" >>"$rows"
    fi
    ((seconds <= limit)) || verdict='**missed**'
    echo "seconds of this part | <= $limit | $seconds | $verdict |" >>"$rows"
    table
}

for name in "${parts[@]}"; do
    case $name in
        tests)
            if [[ -n $tiny ]]; then
                skip tests "they need a CUDA device"
            elif has pytest; then
                part tests -m pytest -m gpu
            else
                skip tests "pytest is not installed"
            fi
            ;;
        sft_* | lora_7b) part "$name" benchmarks/update.py "$name" --rounds "$rounds" $tiny ;;
        head | decode) part "$name" "benchmarks/$name.py" --device "$device" --rounds "$rounds" $tiny ;;
        grpo) part grpo benchmarks/grpo_vs_trl.py --device "$device" --rounds "$rounds" $tiny ;;
        stall | plan | prove | recipes) part "$name" benchmarks/whole_runs.py "$name" $tiny ;;
        learning)
            # GRPO on sums by a pretrained model: accuracy and minutes.
            if [[ -z ${REAL_MODEL:-} ]]; then
                skip learning "it needs REAL_MODEL, a directory that examples/real/smollm2.py wrote"
            else
                part learning benchmarks/learning.py --model "$REAL_MODEL" --part grpo --ours --device "$device" \
                    ${TINY:+--steps 1 --prompts 2 --group 2 --held-out 4}
            fi
            ;;
    esac
done

rm -f "$out/all.rows"
if (($# == 0)); then
    verdict=met
    if [[ -n $tiny ]]; then
        verdict=
    elif ((SECONDS > limit_of_all)); then
        verdict='**missed**'
        failed+=("time of all parts")
    fi
    echo "seconds of all parts | <= $limit_of_all | $SECONDS | $verdict |" >"$out/all.rows"
fi
table
if ((${#failed[@]})); then
    echo "failed or missed a target: ${failed[*]}; the table is $OUT/table.md"
    exit 1
fi
echo "all parts passed; the table is $OUT/table.md"
