"""The math reward on GSM8K: every gold answer scores 1, in every way of writing it, and a wrong one scores 0.

    python benchmarks/math_reward.py [TRAIN.JSONL]

One process and one thread, called as a worker calls it. `written` is the row's own solution, ending in #### 42, `boxed`
and `spelled` say the same number otherwise, `wrong` is the number plus one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from measure import heading

ROWS = Path(__file__).parents[2] / "shared" / "data" / "gsm8k" / "train.jsonl"


def forms_of(golds: Sequence[str], solutions: Sequence[str]) -> dict[str, list[str]]:
    return {
        "written": list(solutions),
        "boxed": [rf"So it is $\boxed{{{gold}.0}}$." for gold in golds],
        "spelled": [f"She has {gold} of them. The final answer is ${gold}$. I hope it is correct." for gold in golds],
        "wrong": [f"#### {int(gold) + 1}" for gold in golds],
    }


def main() -> None:
    from holdfast.rewards.base import Sample
    from holdfast.rewards.functions.answers import final_answer
    from holdfast.rewards.functions.mathematics import MathReward

    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    solutions = [row["answer"] for row in rows]
    print(heading("math-verify"))
    print("| form | rows | score 1 | CPU seconds | ms per row |")
    print("|---|---|---|---|---|")
    reward = MathReward.checked("answer", "math")
    is_right = True
    for form, completions in forms_of([final_answer(text) for text in solutions], solutions).items():
        samples = [Sample(0, "", text, [], [], "stop", row) for text, row in zip(completions, rows, strict=True)]
        start = time.process_time()
        scores = [reward(sample) for sample in samples]
        seconds = time.process_time() - start
        is_right &= scores == [0.0 if form == "wrong" else 1.0] * len(rows)
        ones = scores.count(1.0)
        print(f"| {form} | {len(rows)} | {ones} | {seconds:.1f} | {1000 * seconds / len(rows):.2f} |", flush=True)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
