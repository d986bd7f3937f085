"""Recognise the errors of collectives that mean that another rank has died or did not arrive in time."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch.distributed as dist

_TIMED_OUT = re.compile(r"timed out|timeout", flags=re.IGNORECASE)
# gloo raises plain RuntimeErrors; their text is all that tells a lost peer from a mistake in the program.
_BROKEN_COLLECTIVE = re.compile(
    r"\bgloo\b|connection (closed|reset) by peer|broken pipe|timed out waiting \d+ ?ms|caused pair closure",
    flags=re.IGNORECASE,
)


def broken_by_peer(error: BaseException) -> bool:
    """Return whether an error, or what it was raised from, says that another rank is gone or did not come."""
    return any(map(is_broken, _chain(error)))


def timed_out(error: BaseException) -> bool:
    """Return whether an error says that a wait was too long."""
    return _TIMED_OUT.search(str(error)) is not None


def is_broken(error: BaseException) -> bool:
    """Return whether this error itself, not one it was raised from, says that another rank is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _BROKEN_COLLECTIVE.search(str(error)) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those it was raised from, or while handling."""
    link: BaseException | None = error
    visited: set[int] = set()
    while link is not None and id(link) not in visited:
        visited.add(id(link))
        yield link
        # As Python prints tracebacks: `raise ... from None` hides the context, which then says nothing about this
        # error.
        link = link.__cause__ if link.__suppress_context__ else link.__cause__ or link.__context__
