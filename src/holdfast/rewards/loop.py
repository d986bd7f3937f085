"""The event loop of a worker."""

from __future__ import annotations

import asyncio
from functools import cache


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return this process's loop: one for its whole life, since clients keep the loop they were first used in."""
    return asyncio.new_event_loop()
