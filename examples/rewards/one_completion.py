"""A reward of one completion, with named parts and a metric.

reward:
  - {kind: path, path: one_completion.py:short_and_right, kwargs: {longest: 200}}
"""

from __future__ import annotations

from typing import Any


def short_and_right(completion: str, completion_tokens: list[int], answer: str, longest: int = 100) -> dict[str, Any]:
    right = float(completion.strip().endswith(answer))
    short = float(len(completion_tokens) <= longest)
    return {
        "reward": right * (0.5 + 0.5 * short),
        "right": right,
        "short": short,
        "metrics": {"letters": len(completion)},
    }
