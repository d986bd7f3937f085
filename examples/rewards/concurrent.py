"""A reward that waits for something, here for a pause. The completions of a batch wait side by side.

reward:
  - {kind: path, path: concurrent.py:Reviewer, kwargs: {seconds: 0.2}}
"""

from __future__ import annotations

import asyncio


class Reviewer:
    """Made once; `kwargs` go to its constructor."""

    def __init__(self, seconds: float = 0.1) -> None:
        self.seconds = seconds

    async def __call__(self, completion: str) -> float | None:
        """Return None for an empty completion: it is not scored."""
        await asyncio.sleep(self.seconds)
        return float("please" in completion) if completion else None
