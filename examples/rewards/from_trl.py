"""A reward with TRL's signature; it runs here and there unchanged.

reward:
  - {kind: path, path: from_trl.py:ends_with_answer}
"""

from __future__ import annotations

from typing import Any


def ends_with_answer(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:  # noqa: ARG001 - TRL's
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [float(text.strip().endswith(right)) for text, right in zip(texts, answer, strict=True)]
