"""The game of examples/grpo_guess.yaml, and the rows that examples/sft_guess.yaml starts from.

    python examples/guess.py

Half of the games to imitate heed what they are told, and the others guess at random.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.environments.base import Observation, Turn

MOST, GUESSES = 9, 4
DIRECTORY = Path("runs/guess_start")
QUESTION = {"role": "user", "content": f"guess 1 to {MOST}"}


class Guess:
    """A number from 1 to 9, to be found in four guesses; each is answered by `higher` or `lower`."""

    replayable = True

    def begin(self, row: Mapping[str, Any]) -> None:
        """Start from the number of a row."""
        self.number = int(row["number"])

    def step(self, turn: Turn) -> Observation:
        """Compare a guess with the number."""
        if turn.text == str(self.number):
            return Observation("right", reward=1.0, done=True)
        return Observation(hint(turn.text, self.number), done=turn.number + 1 == GUESSES)


def hint(guess: str, number: int) -> str:
    """Return where the number lies."""
    if not guess.isdecimal():
        return f"1 to {MOST}"
    return "higher" if int(guess) < number else "lower"


def demonstration(draw: random.Random) -> list[dict[str, str]]:
    """Return a game of guesses among all numbers, or among those that are still possible."""
    number, messages, heeds = draw.randint(1, MOST), [QUESTION], draw.random() < 0.5
    low, high = 1, MOST
    for _ in range(GUESSES):
        guess = draw.randint(low, high)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            break
        messages.append({"role": "user", "content": hint(str(guess), number)})
        if heeds:
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]


def main() -> None:
    """Write the rows."""
    draw = random.Random(0)
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[dict[str, Any]]] = {
        "sft": [{"messages": demonstration(draw)} for _ in range(8_000)],
        "prompts": [{"prompt": [QUESTION], "number": draw.randint(1, MOST)} for _ in range(4_000)],
        "held_out": [{"prompt": [QUESTION], "number": 1 + index % MOST} for index in range(8 * MOST)],
        "sft_held_out": [{"messages": demonstration(draw)} for _ in range(200)],
    }
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (DIRECTORY / f"{name}.jsonl").write_text(text, encoding="utf-8")
    print(f"rows are in {DIRECTORY}")


if __name__ == "__main__":
    main()
