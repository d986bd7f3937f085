"""A reward with verl's signature; it runs here and there unchanged.

reward:
  - {kind: path, path: from_verl.py:compute_score}
"""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    said = solution_str.rpartition("####")[2].strip()
    is_listed = (extra_info or {}).get("split", "train") == "train"
    return {"score": float(said == ground_truth), "acc": said == ground_truth, "pred": said, "is_train": is_listed,
            "from_gsm8k": data_source == "openai/gsm8k"}  # fmt: skip
