"""Reward functions in processes that can be killed: the rank asks workers for the tasks of a request."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from holdfast.config.sections.reward import Reward, RewardPoolConfig, repeated_labels
from holdfast.errors import ConfigError
from holdfast.processes.pool import Reply, WorkerPool
from holdfast.processor import usable_cores
from holdfast.rewards.base import Sample, SampleOutcome, Scored
from holdfast.rewards.combine import combine
from holdfast.rewards.schedule import Form, Running, Schedule

_AUTO_WORKERS = 4


class RewardPool(WorkerPool):
    """Scores samples in worker processes that can be killed.

    Paths of reward files are relative to `base`, and what the functions print goes to `log_path`.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        config: RewardPoolConfig,
        base: Path,
        log_dir: Path,
        *,
        silent_seconds: float = 60.0,
    ) -> None:
        if not rewards:
            raise ConfigError("reward: there is none. Name at least one, for example reward: [exact].")
        if repeated := repeated_labels(rewards):
            raise ConfigError(
                f"reward: two are called {repeated[0]}, and metrics could not tell them apart. Give one of them a name."
            )
        super().__init__("reward", log_dir, silent_seconds)
        self._rewards, self._config, self._base = tuple(rewards), config, base
        auto_workers = min(usable_cores(), _AUTO_WORKERS)
        self._workers = auto_workers if config.workers == "auto" else config.workers
        self._step_seconds = math.inf if config.step_timeout_seconds == "auto" else config.step_timeout_seconds
        self._forms: list[Form] = []
        """Known once started."""
        self.columns: dict[str, tuple[str, ...]] = {}
        """By name of the reward, the row columns that it requires; filled by `start`."""

    def start(self) -> None:
        """Start the processes and import every user file in them; started already, do nothing.

        Raises:
            ConfigError: A reward cannot work: its file, its function, its signature, or a library it needs.
        """
        if self._process is not None:
            return
        setup = {
            "rewards": [(reward.label, reward.model_dump()) for reward in self._rewards],
            "base": str(self._base.resolve()),
            "timeout_seconds": self._config.timeout_seconds,
        }
        ready = self._start(
            "holdfast.rewards.work:make_work",
            setup,
            f"reward {self._rewards[0].label}",
            self._config.start_timeout_seconds,
            "Move slow work into the first call, or raise rewards.start_timeout_seconds.",
        )
        self._forms = [Form(**{**form, "columns": tuple(form["columns"])}) for form in ready["rewards"]]
        self.columns = {reward.label: form.columns for reward, form in zip(self._rewards, self._forms, strict=True)}

    def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """Return the reward of each sample, in their order.

        Raises:
            RunStopped: The process that keeps the workers died, or hangs.
        """
        outcomes = self.outcomes(samples)
        return [
            combine(sample, [line[index] for line in outcomes], self._rewards, self._config)
            for index, sample in enumerate(samples)
        ]

    def try_out(self, samples: Sequence[Sample]) -> dict[str, list[SampleOutcome]]:
        """Score samples with only the rewards that are called with lists; return outcomes by name of the reward.

        Raises:
            RunStopped: As `score`.
        """
        forms = zip(self._rewards, self._forms, strict=True)
        batched = [reward.label for reward, form in forms if form.is_batched]
        return dict(zip(batched, self.outcomes(samples, batched), strict=True))

    def outcomes(self, samples: Sequence[Sample], only: Collection[str] | None = None) -> list[list[SampleOutcome]]:
        """Return the outcome of each reward for each sample, as one list per reward.

        Args:
            samples: The samples to score.
            only: Names of the rewards to call; the result has no lists for the others. None: all.

        Raises:
            RunStopped: As `score`.
        """
        packed: list[bytes] = []
        unseen: dict[int, SampleOutcome] = {}
        for index, sample in enumerate(samples):
            try:
                packed.append(pickle.dumps(sample))
            except Exception as error:  # noqa: BLE001 - whatever a column's class does when it is pickled
                unseen[index] = SampleOutcome(fault="error", message=f"cannot be sent the row: {error}")
        wanted = [index for index, reward in enumerate(self._rewards) if only is None or reward.label in only]
        schedule = Schedule(self._forms, wanted, len(packed), self._config.batch_size, self._workers)
        try:
            self._work_off(schedule, packed)
        except BaseException:
            self.close()  # KeyboardInterrupt: answers are still under way, and nobody will read them
            raise
        lines = [iter(schedule.outcomes(reward)) for reward in wanted]
        return [[unseen[index] if index in unseen else next(line) for index in range(len(samples))] for line in lines]

    def _work_off(self, schedule: Schedule, packed: Sequence[bytes]) -> None:
        """Let workers do the tasks of a request until every sample has its outcomes or the time of a step is over."""
        cut_at = time.monotonic() + self._step_seconds
        running: dict[int, Running] = {}
        while True:
            for key in [key for key in range(self._workers) if key not in running]:
                if (task := schedule.next_task()) is not None:
                    running[key] = Running(task)
                    request = task.reward, [packed[sample] for sample in task.samples]
                    self._ask(key, request, schedule.seconds(task), begins=True, answers=len(task.samples))
            if not running:
                return
            left = None if cut_at == math.inf else max(0.0, cut_at - time.monotonic())
            for reply in self._receive(left):
                self._hear(reply, schedule, running)
            if time.monotonic() > cut_at:
                self._cut_short(schedule, running)
                return

    def _hear(self, reply: Reply, schedule: Schedule, running: dict[int, Running]) -> None:
        task = running[reply.key]
        if reply.answer is not None and not task.has_lied:
            task.has_lied = not schedule.hear(task, reply.answer)
            if task.has_lied:
                self._kill(reply.key, "lied")
        if not reply.is_last:
            return
        del running[reply.key]
        if task.has_lied or reply.fault == "lied":
            schedule.lose(task, "wrote into the channel of its worker")
        elif reply.fault == "timeout":
            seconds = self._forms[task.task.reward].seconds
            schedule.lose(task, f"gave no answer in {seconds:g} s", "timeout")
        elif reply.fault:
            schedule.lose(task, f"killed its worker ({reply.how})", may_try_again=reply.was_killed)

    def _cut_short(self, schedule: Schedule, running: dict[int, Running]) -> None:
        """End a request that takes too long: other ranks wait for its answer."""
        for key in running:
            self._kill(key, "cut")
        while running:
            for reply in self._receive(None):
                if reply.answer is not None:
                    schedule.hear(running[reply.key], reply.answer)
                if reply.is_last:
                    del running[reply.key]
        seconds = self._step_seconds
        schedule.cut_short(f"had no answer when all of them had taken {seconds:g} s (rewards.step_timeout_seconds)")
