"""What `holdfast plan` takes: CPU seconds and memory of the process that executes it.

7B on 8 ranks: SFT in at most 30 s and GRPO in at most 60 s of CPU, in 1 GiB; 70B on 512 ranks in at most 120 s. What
takes more is printed as MISS, and the script then exits with status 1. The other recipes of examples/gpu, planned by
the command that each names, are printed beside them.
"""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LARGE = """\
steps: 10
model: {path: meta-llama/Llama-3.1-70B}
parallel: {recompute: full}
data: {path: rows.jsonl, batch_size: 512, max_length: 4096, tokens_per_micro_batch: 4096}
optim: {lr: 1.0e-5}
"""
RECIPES = ROOT / "examples" / "gpu"
CASES = (
    ("SFT of 7B on 8 ranks", "sft_7b.yaml", 8, 30.0, 1.0),
    ("GRPO of 7B on 8 ranks", "grpo_7b.yaml", 8, 60.0, 1.0),
    ("SFT of 70B on 512 ranks", "", 512, 120.0, None),
)


def main() -> int:
    """Plan each, one after the other, and print a line."""
    missed = 0
    with tempfile.TemporaryDirectory() as place:
        large = Path(place) / "run.yaml"
        large.write_text(LARGE, encoding="utf-8")
        for name, file, ranks, seconds, gib in CASES:
            took, most = measured(str(RECIPES / file if file else large), "--ranks", str(ranks))
            miss = took > seconds or (gib is not None and most > gib)
            missed += miss
            asked = f"at most {seconds:.0f} s" + ("" if gib is None else f" and {gib:.0f} GiB")
            print(f"{name}: {took:.1f} CPU s, {most:.2f} GiB resident; {asked}{'  MISS' * miss}", flush=True)
    for recipe in sorted({*RECIPES.glob("*.yaml")} - {RECIPES / file for _, file, *_ in CASES}):
        line = next(line for line in recipe.read_text(encoding="utf-8").splitlines() if "holdfast plan" in line)
        took, _ = measured(*shlex.split(line.lstrip("# "))[2:])
        print(f"{recipe.stem}: {took:.1f} CPU s", flush=True)
    return int(missed > 0)


def measured(*arguments: str) -> tuple[float, float]:
    """Return CPU seconds of the command and its children, and the most resident GiB of one of them so far."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "holdfast.cli.main", "plan", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout)["executed"], "nothing could be executed here"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, after.ru_maxrss / 2**20


if __name__ == "__main__":
    sys.exit(main())
