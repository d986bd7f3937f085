"""The optional forms of a computation: one rule decides which of them a run uses.

An optional form computes what its plain form computes, in less time if all goes well. It is compared with the plain
form first. On a GPU it is also timed against it, and has to win every round; the number of threads is timed on a CPU.
It is used if it agrees and wins on all ranks, and on none otherwise. What is used decides the order in which numbers
are added up: it is recorded with the run and its checkpoints, and a resumed run uses the same. A form that fails later
is given up on its rank, and the run goes on by the plain form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

import torch

TIMED_TOKENS = 4096
"""Most tokens of a micro-batch that is timed."""
ROUNDS = 3
"""In each of which a form has to be faster than its plain form."""

_SAME_BITS = "copies"
"""The form whose sums are the plain form's, to the bit."""
_COUNTS = {"threads"}
"""Forms whose sums differ from value to value."""
_LATER = {"projections", "threads", "turns"}
"""Forms that earlier records lack, since runs had the plain form without a choice."""
OTHER_SUMS = "Sums are added up in another order, so numbers may differ by rounding"
BEGAN_SO = "the run began so"

Times = tuple[float, float]
"""Seconds of a form and of its plain form, one after the other."""


class Words(NamedTuple):
    """What is printed of a form."""

    subject: str
    form: str
    plain: str
    given_up: str = ""
    """Where a rank gives a part of it up; the words of the plain form where it gives up all of it."""


WORDS = {
    "head": Words("head", "Triton kernels", "torch's operations"),
    "blocks": Words("blocks", "compiled", "not compiled", "a part of them runs uncompiled"),
    "updates": Words("optimizer", "updates are compiled", "updates run operation by operation"),
    "threads": Words("threads", "{} on each rank", "1 on each rank"),
    "copies": Words("weights", "whole on one rank, with copies in the compute dtype", "sharded by FSDP2"),
    "prompts": Words("rollouts", "long prompts are computed in pieces", "long prompts are computed at once"),
    "turns": Words("rollouts", "of a turn's prompt what is new is computed", "each turn's whole prompt is computed"),
    "attention": Words("rollouts", "attention reads blocks of keys and values in place", "attention gathers blocks"),
    "steps": Words("rollouts", "steps are recorded and replayed", "steps run operation by operation"),
    "projections": Words("rollouts", "recorded steps join projections of one input", "no projections are joined"),
    "layers": Words("rollouts", "layers of recorded steps are compiled", "layers of recorded steps are not compiled"),
}
"""Name of a form, as in the record and in the columns `form/*` -> what is printed of it."""


@dataclass(frozen=True)
class Standing:
    """Whether a form is used, and why."""

    name: str
    value: int
    """0 where the plain form is used."""
    reason: str = ""
    """Why the plain form is used."""
    detail: str = ""
    agrees: int = 0
    """The value with which the form gives the plain form's numbers on all ranks; 0 for none."""
    speedups: tuple[float, ...] = ()
    """How many times as fast as the plain form it was, in each round, on the rank where it gained least."""

    @property
    def words(self) -> str:
        """The form that is used, in words."""
        return WORDS[self.name].form.format(self.value) if self.value else WORDS[self.name].plain

    def __str__(self) -> str:
        """Describe it in a line."""
        times = ", ".join(f"{speedup:.2f}" for speedup in self.speedups)
        return (
            f"{WORDS[self.name].subject}: {self.words}{self.detail if self.value else ''}"
            + (f" ({times} times as fast as the plain form)" if times and self.value else "")
            + (f", since {self.reason}" if self.reason else "")
        )


class Candidate(NamedTuple):
    """A form that may be used."""

    name: str
    use: Callable[[int], object]
    """Puts the form with a value in place, and for 0 the plain form."""
    compare: Callable[[], str]
    """Returns why this rank cannot use the form, "" if it gives the plain form's numbers. It raises nothing that the
    form alone is the cause of: other ranks may be within the same collective."""
    rounds: Callable[[], Sequence[Times]] | None = None
    """Times both; all ranks call it together. None where time does not matter."""
    value: int = 1
    is_asked: bool = False
    """Whether a user's key names the form: it is not timed, and it is used whatever was recorded."""
    detail: Callable[[], str] = str
    """Returns what is printed behind the form's words, after the comparison."""
    is_timed: bool = False
    """Whether it is timed on a CPU too."""
    takes: Callable[[int], bool] = lambda _: False
    """Returns whether a recorded value other than `value` can be used as well."""


class Forms:
    """The optional forms of one model.

    Args:
        gather: Returns an item of each rank, in their order.
        timed: Whether forms are timed.
        rank: This rank's, None for one alone.
    """

    def __init__(
        self, gather: Callable[[Any], list[Any]] = lambda item: [item], *, timed: bool = False, rank: int | None = None
    ) -> None:
        self._gather, self.times, self._rank = gather, timed, rank
        self._candidates: dict[str, Candidate] = {}
        self._given_up: set[str] = set()
        self._recorded: Mapping[str, int] = {}
        """Of the checkpoint that the run goes on from."""
        self._is_resumed = False
        self.standings: dict[str, Standing] = {}
        self.news: list[Standing] = []
        """What was decided and is not yet told."""
        self.lost: list[tuple[str, str]] = []
        """Forms that this rank has given up, with their reasons; other ranks do not know of them yet."""

    @property
    def record(self) -> dict[str, int]:
        """The value of every form that could be chosen; others keep what was recorded before."""
        return {**self._recorded, **{name: standing.value for name, standing in self.standings.items()}}

    def choose(self, candidate: Candidate) -> Standing:
        """Decide on a form, which is in place; all ranks call this together, with the same candidate."""
        name, value = candidate.name, candidate.value
        unrecorded = 0 if self._is_resumed and name in _LATER else None
        before = None if candidate.is_asked else self._recorded.get(name, unrecorded)
        self._candidates[name] = candidate
        if before == 0:
            standing = Standing(name, 0, BEGAN_SO)
        else:
            value = before or value
            reason = next(filter(None, self._gather(candidate.compare())), "")
            standing = Standing(name, 0, reason)
            if not reason:
                standing = Standing(name, value, detail=candidate.detail(), agrees=value)
            times = (self.times or candidate.is_timed) and not candidate.is_asked
            if not reason and before is None and times and candidate.rounds is not None:
                standing = _judged(standing, self._gather(list(candidate.rounds())))
        candidate.use(standing.value)
        self._decide(standing)
        return standing

    def note(self, name: str, value: int, reason: str = "") -> Standing:
        """Record a form for which there is no choice left."""
        standing = Standing(name, value, reason, agrees=value)
        self._decide(standing)
        return standing

    def give_up(self, name: str, reason: str) -> None:
        """Use the plain form on all ranks where one has a reason to; all ranks call this together."""
        if reason := next(filter(None, self._gather(reason)), ""):
            self._candidates[name].use(0)
            self._decide(Standing(name, 0, reason))

    def resume(self, recorded: Mapping[str, int] | None) -> list[str]:
        """Use what a checkpoint recorded, so far as this machine can; all ranks call this together.

        Args:
            recorded: None where there is no checkpoint, or one without a record.

        Returns:
            A line for each form that differs from what was recorded, or from what was printed at this start.
        """
        if recorded is None:
            return []
        recorded = {name: value for name, value in recorded.items() if name in WORDS}  # a later version may have others
        # A model's forms were chosen when it was built; those of rollouts are chosen when an engine has weights.
        gone = {name for name in recorded if WORDS[name].subject != "rollouts" and name not in self.standings}
        self._recorded = {name: value for name, value in recorded.items() if name not in gone}
        before = dict.fromkeys(_LATER, 0) | recorded
        self._is_resumed = True
        lines = [self._follow(standing, before.get(name)) for name, standing in list(self.standings.items())]
        lines += [_changed(Standing(name, 0), recorded[name]) for name in sorted(gone)]
        return [line for line in lines if line]

    def _follow(self, standing: Standing, before: int | None) -> str:
        """Use a form as it was recorded, None for not at all, if that is possible; return a line where it changes."""
        candidate = self._candidates.get(standing.name)
        if before is None or candidate is None or candidate.is_asked:
            return _changed(standing, before or 0)
        if before not in {0, standing.agrees} and not candidate.takes(before):
            return _changed(standing, before)
        if before == standing.value:
            return ""
        candidate.use(before)
        now = replace(standing, value=before, reason="" if before else BEGAN_SO, speedups=(), detail="")
        self._decide(now)
        return f"{now}{', as the run began' if before else ''}"

    def lose(self, name: str, reason: str) -> None:
        """Note that this rank has given a form up; other ranks learn of it after the step.

        That is printed at once, for the first part of a form that is given up.
        """
        if name in self._given_up:
            return
        self._given_up.add(name)
        words, place = WORDS[name], "" if self._rank is None else f" on rank {self._rank}"
        print(f"{words.subject}: {words.given_up or words.plain} from here on{place}, since {reason}", flush=True)
        self.lost.append((name, reason))

    def _decide(self, standing: Standing) -> None:
        self.standings[standing.name] = standing
        self.news = [*(one for one in self.news if one.name != standing.name), standing]


def _changed(standing: Standing, before: int) -> str:
    """Return the line of a form that differs from the start before; "" where sums stay as they were."""
    same = standing.value == before if standing.name in _COUNTS else bool(standing.value) == bool(before)
    if standing.name == _SAME_BITS or same:
        return ""
    return f"note: {standing}; before this start {Standing(standing.name, before).words}. {OTHER_SUMS}"


def _judged(standing: Standing, times: Sequence[Sequence[Times]]) -> Standing:
    """Return a form's standing after its rounds, [rank][round]: the plain form's, unless it won all of them."""
    if not all(times):
        return replace(standing, detail=f"{standing.detail}, not timed")
    speedups = tuple(min(plain / max(ours, 1e-9) for ours, plain in each) for each in zip(*times, strict=True))
    if min(speedups) > 1:
        return replace(standing, speedups=speedups)
    words = ", ".join(f"{speedup:.2f}" for speedup in speedups)
    reason = f"the other form was {words} times as fast in {len(speedups)} rounds"
    return replace(standing, value=0, reason=reason, speedups=speedups)


def timed_rounds(form: Callable[[], object], plain: Callable[[], object], device: torch.device) -> list[Times]:
    """Run two forms in turn, after one run of each that is not counted, and return their seconds."""

    def seconds(act: Callable[[], object]) -> float:
        _wait(device)
        began = perf_counter()
        act()
        _wait(device)
        return perf_counter() - began

    form()
    plain()
    return [(seconds(form), seconds(plain)) for _ in range(ROUNDS)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
