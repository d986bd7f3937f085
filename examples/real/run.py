"""Run examples of this folder and print what `holdfast eval` measures before and after: run.py [NAME...]

    python examples/real/smollm2.py runs/smollm2 && python examples/real/rows.py GSM8K.jsonl
    python examples/real/run.py                       # all of them, in a night on two cores
    python examples/real/run.py sft_sums grpo_sums    # these, in this order

Each line of the table is one example; it is also added to runs/real_table.md. What a run left is found and continued.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
TABLE = Path("runs/real_table.md")


@dataclass(frozen=True)
class Example:
    """A file of this folder."""

    verb: str
    metric: str
    before: tuple[str, ...] = ()
    """Overrides with which the model of its start is evaluated."""
    cuts_from: str = ""
    """A model that its student is cut from first."""
    in_run: bool = False
    """Whether its run's last evaluation counts: an export alone is compared with itself, and every pair is tied."""


EXAMPLES = {
    "sft_sums": Example("sft", "eval/held_out/loss"),
    "grpo_sums": Example("grpo", "eval/held_out/accuracy"),
    "dpo_sums": Example("dpo", "eval/held_out/rewards/accuracies", in_run=True),
    "sft_gsm8k": Example("sft", "eval/held_out/loss"),
    "sft_gsm8k_lora": Example("sft", "eval/held_out/loss", before=("model.lora=null",)),
    "grpo_gsm8k": Example("grpo", "eval/held_out/accuracy"),
    "distill_sums": Example("distill", "eval/held_out/loss", cuts_from="runs/grpo_sums/exports/final"),
}


def holdfast(*words: str) -> str:
    """Run a command, show what it prints, and return that."""
    command = [sys.executable, "-m", "holdfast.cli.main", *words]
    print("$ holdfast", *words, flush=True)
    shown = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            shown.append(line)
    if process.returncode:
        sys.exit(process.returncode)
    return "".join(shown)


def measured(out: str, metric: str) -> float:
    """Return a number that an evaluation printed."""
    return next(float(line.split(" ")[1]) for line in out.splitlines() if line.startswith(f"{metric} "))


def last_of_run(name: str, metric: str) -> float:
    """Return a number of a run's last evaluation."""
    lines = [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [float(line[metric]) for line in lines if metric in line][-1]


def main() -> None:
    """Run the examples, and print the table."""
    names = sys.argv[1:] or list(EXAMPLES)
    if unknown := sorted({*names} - {*EXAMPLES}):
        sys.exit(f"There is no example {unknown[0]}; there are {', '.join(EXAMPLES)}.")
    lines = []
    for name in names:
        example, file = EXAMPLES[name], str(HERE / f"{name}.yaml")
        if example.cuts_from:
            subprocess.run([sys.executable, str(HERE / "student.py"), example.cuts_from, "runs/student"], check=True)
        before = measured(holdfast("eval", file, *example.before), example.metric)
        began = time.monotonic()
        holdfast(example.verb, file)
        minutes = (time.monotonic() - began) / 60
        if example.in_run:
            after = last_of_run(name, example.metric)
        else:
            after = measured(holdfast("eval", f"runs/{name}/exports/final"), example.metric)
        lines.append(f"| {name} | {example.metric} | {before:.4g} | {after:.4g} | {minutes:.0f} |")
        with TABLE.open("a", encoding="utf-8") as table:
            table.write(f"{lines[-1]}\n")
    print("\n| example | measured | before | after | minutes |\n|---|---|---|---|---|", *lines, sep="\n")


if __name__ == "__main__":
    main()
