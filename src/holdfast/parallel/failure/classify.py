"""Recognise errors by what they mean: another rank has died or did not arrive in time, or memory is short."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
import torch.distributed as dist

_TIMED_OUT = re.compile(r"timed out|timeout", flags=re.IGNORECASE)
# gloo raises plain RuntimeErrors; their text is all that tells a lost peer from a mistake in the program.
_BROKEN_COLLECTIVE = re.compile(
    r"\bgloo\b|connection (closed|reset) by peer|broken pipe|timed out waiting \d+ ?ms|caused pair closure",
    flags=re.IGNORECASE,
)
_NO_MEMORY = ("DefaultCPUAllocator", "std::bad_alloc", "bad allocation", ": allocation failed")
"""Phrases of torch's CPU allocator, of C++ and of torch's archive reader, all of which raise a RuntimeError."""


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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python or torch means that memory could not be allocated."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _NO_MEMORY)


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
