"""How the ranks that check a model together agree on what each of them finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Agreement:
    """The agreements of a check; by default a process is alone."""

    all_agree: Callable[[bool], bool] = bool
    """Returns whether something is true on all ranks: each measures with its own device, and all take the same path."""
    together: Callable[[Callable[[], Any]], Any] = lambda act: act()
    """Calls a function; what it raises of its own on one rank behind its last collective is raised on all."""
    all_raise: Callable[[], bool] = lambda: True
    """Returns whether all ranks raise, asked within an error between two collectives.

    A rank that raises alone there raises its error as it is, and is reported: the others wait where none can agree."""
