"""The tasks of a request: which samples a worker is asked for together, and who is blamed where it gives no answer.

Protects one invariant: every sample gets exactly one outcome from every reward, whatever becomes of workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.rewards.base import Fault, SampleOutcome


@dataclass(frozen=True)
class Form:
    """How a reward is called."""

    columns: tuple[str, ...]
    """Row columns that it requires."""
    seconds: float
    """Longest time of a sample."""
    is_batched: bool
    """Whether it is called with lists."""
    is_alone: bool
    """Whether it is called with one sample after the other."""


@dataclass(frozen=True)
class Task:
    """One reward and the samples that it scores, by their indices in the request."""

    reward: int
    samples: tuple[int, ...]
    again: bool = False
    """Whether this is the second try, after a signal killed the first worker; the samples need not have caused that."""


class Running:
    """A task that a worker is at."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.waiting = list(task.samples)
        """Samples without an outcome, in order."""
        self.has_lied = False
        """Whether its worker said what cannot be."""


class Schedule:
    """The tasks and outcomes of a request.

    Args:
        forms: Of all rewards.
        wanted: Indices of the rewards that are asked.
        count: Number of samples.
        batch_size: Most samples of a task.
        workers: How many work at once.
    """

    def __init__(self, forms: Sequence[Form], wanted: Sequence[int], count: int, batch_size: int, workers: int) -> None:
        self._forms = forms
        self._outcomes: dict[int, list[SampleOutcome | None]] = {reward: [None] * count for reward in wanted}
        """By reward, for each sample."""
        tasks = [task for reward in wanted for task in _tasks(reward, forms[reward], count, batch_size, workers)]
        # By completion, so that a request that is cut short has some that every reward has scored.
        self._queue = deque(sorted(tasks, key=lambda task: task.samples[0]))

    def outcomes(self, reward: int) -> list[SampleOutcome]:
        """Return the outcome of one reward for each sample, once all of them are there."""
        complete = [outcome for outcome in self._outcomes[reward] if outcome is not None]
        assert len(complete) == len(self._outcomes[reward])
        return complete

    def next_task(self) -> Task | None:
        """Return a task for an idle worker; None if there is none now."""
        return self._queue.popleft() if self._queue else None

    def seconds(self, task: Task) -> float:
        """Return the longest wait for an answer: of a batch, they come together."""
        form = self._forms[task.reward]
        return form.seconds * (len(task.samples) if form.is_batched else 1)

    def hear(self, running: Running, answer: Mapping[str, Any]) -> bool:
        """Record the outcome of one sample; of one whose batch raised, queue it alone. Return whether that can be."""
        task, place = running.task, answer["place"]
        sample = task.samples[place] if 0 <= place < len(task.samples) else None
        is_split = answer["outcome"] is None
        if sample is None or sample not in running.waiting or (is_split and len(task.samples) == 1):
            return False
        running.waiting.remove(sample)
        if is_split:
            self._queue_alone(task, [sample])
        else:
            self._outcomes[task.reward][sample] = SampleOutcome(**answer["outcome"])
        return True

    def lose(self, running: Running, message: str, fault: Fault = "error", *, may_try_again: bool = False) -> None:
        """Handle the samples of a worker that gave no answer; if several may have caused that, each is tried alone.

        Args:
            running: Its task.
            message: What happened.
            fault: Of the outcome of a sample that is blamed.
            may_try_again: Whether a signal ended the worker, perhaps from outside as the kernel's when memory is short.
        """
        task, waiting = running.task, running.waiting
        is_alone = self._forms[task.reward].is_alone
        if is_alone and waiting[1:]:
            self._queue.appendleft(Task(task.reward, tuple(waiting[1:])))
        under_way = waiting[:1] if is_alone else waiting
        if may_try_again and not task.again:
            # As one call of a batch again, so that its rewards are what they would have been.
            self._queue.appendleft(Task(task.reward, tuple(under_way), again=True))
        elif len(under_way) == 1:
            self._outcomes[task.reward][under_way[0]] = SampleOutcome(fault=fault, message=message)
        else:
            self._queue_alone(task, under_way)

    def cut_short(self, message: str) -> None:
        """Let every sample without an outcome have timed out."""
        self._queue.clear()
        cut = SampleOutcome(fault="timeout", message=message, is_cut_short=True)
        for line in self._outcomes.values():
            line[:] = [cut if outcome is None else outcome for outcome in line]

    def _queue_alone(self, task: Task, samples: Iterable[int]) -> None:
        alone = [Task(task.reward, (sample,), task.again) for sample in samples]
        self._queue.extendleft(reversed(alone))


def _tasks(reward: int, form: Form, count: int, size: int, workers: int) -> Iterable[Task]:
    if form.is_alone:
        # Small enough that workers end together. Only here may the number of workers matter: samples are alone.
        size = min(size, max(1, count // (4 * workers)))
    for start in range(0, count, size):
        yield Task(reward, tuple(range(start, min(start + size, count))))
