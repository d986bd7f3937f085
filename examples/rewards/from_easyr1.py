"""A reward with EasyR1's batch signature; it runs here and there unchanged.

reward:
  - {kind: path, path: from_easyr1.py:compute_score, kwargs: {format_weight: 0.2}}
"""

from __future__ import annotations

import re
from typing import Any

REWARD_NAME = "boxed"
REWARD_TYPE = "batch"


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    scores = []
    for each in reward_inputs:
        boxed = re.search(r"\\boxed\{([^{}]*)\}", each["response"])
        accuracy = float(boxed is not None and boxed[1] == each["ground_truth"])
        form = float(boxed is not None)
        overall = (1 - format_weight) * accuracy + format_weight * form
        scores.append({"overall": overall, "format": form, "accuracy": accuracy})
    return scores
