#!/usr/bin/env bash
# What a rescue looks like, from the beginning: a checkpoint of verl's own manager on 2 ranks, with a frozen tower and
# bfloat16 states, is checked, imported and continued; then a fit of Lightning with the plug-in is killed and resumed.
#
#   tools/show_rescue.sh [PYTHON]        of the environment that tools/test_rescue.sh makes; a minute or two
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONPATH="$PWD" PYTHONWARNINGS=ignore
python="$(realpath --no-symlinks "${1:-.venv-rescue/bin/python}")"
place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
say() { printf '\n$ %s\n' "$*"; }
holdfast() { say "holdfast $*"; (cd "$place" && "$python" -m holdfast.cli.main "$@" 2>/dev/null); }

"$python" -m torch.distributed.run --standalone --nproc-per-node 2 tests/features/rescue/recipes.py verl-fsdp2-bf16 "$place/verl" \
    >"$place/log" 2>&1 </dev/null || { tail -n 20 "$place/log"; exit 1; }
"$python" -c "from pathlib import Path; from tests.features.rescue.shown import write; write(Path('$place'))" 2>/dev/null
holdfast checkpoint check verl/checkpoint
holdfast checkpoint import verl/checkpoint --as run.yaml
holdfast sft run.yaml
holdfast checkpoint ls runs/rescued

say "a fit of Lightning with the plug-in: straight, then SIGKILL in the save of step 4, then resumed"
"$python" -c "from pathlib import Path; from tests.features.rescue.shown import kill_and_resume; kill_and_resume(Path('$place'))" 2>/dev/null
