"""Write the rows of examples/real: python examples/real/rows.py [GSM8K.jsonl]

Sums of two two-digit numbers, each pair in one file only, whichever of the two comes first: 48 as demonstrations, 2,000
to practise on, 400 held out. Pairs of a right and a wrong answer to such sums. With a file of GSM8K's training rows,
or from the hub without one, a quarter of them for SFT and 200 others held out.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DIRECTORY = Path("runs/real_rows")
DEMONSTRATIONS, PRACTICE, HELD_OUT, PAIRS = 48, 2000, 400, 600
GSM8K_TRAINED, GSM8K_HELD_OUT = 1868, 200


def sums() -> list[dict[str, Any]]:
    """Return each unordered pair of two-digit numbers once, in one of its two orders, shuffled."""
    draw = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    draw.shuffle(pairs)
    rows = []
    for pair in pairs:
        a, b = draw.sample(pair, 2)
        rows.append({"question": f"What is {a} + {b}? Answer with the number alone.", "answer": str(a + b)})
    return rows


def preferences(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return pairs for DPO: the right sum, and one that is wrong in one of its digits."""
    draw, pairs = random.Random(1), []
    for row in rows:
        right = int(row["answer"])
        wrong = right + draw.choice([-10, -2, -1, 1, 2, 10])
        prompt = [{"role": "user", "content": row["question"]}]
        answers = {"chosen": right, "rejected": wrong}
        turns = {name: [{"role": "assistant", "content": str(value)}] for name, value in answers.items()}
        pairs.append({"prompt": prompt, **turns})
    return pairs


def gsm8k(path: str | None) -> list[dict[str, Any]]:
    """Return GSM8K's training rows, shuffled."""
    if path is not None:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    else:
        from datasets import load_dataset

        rows = list(load_dataset("openai/gsm8k", "main", split="train"))
    random.Random(2).shuffle(rows)
    return rows


def write(name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (DIRECTORY / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines):,} rows in {DIRECTORY / name}.jsonl")


def main() -> None:
    """Write all files."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    rows = sums()
    for name, count in (("demonstrations", DEMONSTRATIONS), ("sums", PRACTICE), ("sums_held_out", HELD_OUT)):
        write(name, rows[:count])
        rows = rows[count:]
    write("pairs", preferences(rows[:PAIRS]))
    write("pairs_held_out", preferences(rows[PAIRS : PAIRS + 200]))
    words = gsm8k(sys.argv[1] if len(sys.argv) > 1 else None)
    write("gsm8k", words[:GSM8K_TRAINED])
    write("gsm8k_held_out", words[GSM8K_TRAINED : GSM8K_TRAINED + GSM8K_HELD_OUT])


if __name__ == "__main__":
    main()
