"""Open the rewards of a run: reward functions in worker processes, reward models, or functions of a Python caller."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from holdfast.config.sections.reward import MathConfig, ModelRewardConfig, RewardPoolConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.models.heads.scorer import RewardFormat, TextScorer
from holdfast.parallel.mesh import World
from holdfast.processor import usable_cores
from holdfast.rewards.base import Sample, SampleOutcome, Scored, is_number, outcome_of_exception
from holdfast.rewards.combine import combine
from holdfast.rewards.in_process import InProcessRewards
from holdfast.rewards.pool import RewardPool
from holdfast.training.directory import LOGS, is_run
from holdfast.training.policy.reward_model import open_reward_model
from holdfast.training.policy.run import Score
from holdfast.training.run import ConfiguredRun, Run
from holdfast.training.setup.begin import Live

_MOST_WORKERS = 4
_SHARE_OF_WAIT = 0.75
"""Share of the time-out for other ranks that the rewards of a step may take."""


@dataclass(frozen=True)
class OpenRewards:
    """The opened rewards of a run."""

    score: Score
    columns: Mapping[str, Sequence[str]]
    """By name of the reward, the row columns that it requires."""
    answers: Mapping[str, str] = field(default_factory=dict)
    """By name of the reward, the column of reference answers, for rewards that may be unable to parse them."""
    unreadable: Callable[[str, Sequence[str]], list[str]] = lambda _, __: []
    """Returns the answers that a reward of `answers` cannot parse; it is not a collective."""
    try_out: Callable[[Sequence[Sample]], Mapping[str, Sequence[SampleOutcome]]] = lambda _: {}
    """Scores samples with the functions that are called with lists; it is not a collective."""


@contextmanager
def open_rewards(config: GRPOConfig, base: Path, world: World, live: Live | None = None) -> Iterator[OpenRewards]:
    """Load reward models and start this rank's reward workers, which end with the block; live rewards need neither.

    Raises:
        ConfigError: A reward cannot work; the same on all ranks.
        ModelError, PlanError: A reward model cannot be built; the same on all ranks.
    """
    section = config.rewards
    run = Run.of(config, base, world)
    ranks = run.ranks
    if live is not None and live.rewards:
        functions = tuple(live.rewards.values())
        here = ranks.on_all_ranks(lambda: InProcessRewards(functions, config.reward, section))
        ranks.close()
        yield OpenRewards(here.score, _of_rows(here.columns, config), try_out=here.try_out)
        return
    section = _limits(config, world)
    model_sections = [reward for reward in config.reward if isinstance(reward, ModelRewardConfig)]
    # One after the other and not within `together`: building a sharded one is a conversation of all ranks itself.
    models = {reward.label: open_reward_model(reward, run) for reward in model_sections}
    log = ranks.on_all_ranks(lambda: RewardLog(run.directory, run.world.failure.directory))
    pool: RewardPool | None = None
    try:
        scorer = ranks.on_all_ranks(lambda: RewardScorer(run, section, models, log.folder))
        pool = scorer.pool
        ranks.on_all_ranks(scorer.start)
        if all(reward.place == "whole" for reward in model_sections):
            ranks.close()
        answers = {reward.label: reward.column for reward in config.reward if isinstance(reward, MathConfig)}

        def score(samples: Sequence[Sample]) -> list[Scored]:
            log.settle(pool)
            return scorer.score(samples)

        yield OpenRewards(score, _of_rows(scorer.columns, config), answers, scorer.unreadable, scorer.try_out)
        ranks.close()
    finally:
        try:
            if pool is not None:
                pool.close()
        finally:
            log.close(pool)


def _of_rows(columns: Mapping[str, Sequence[str]], config: GRPOConfig) -> Mapping[str, Sequence[str]]:
    """Return the columns that rows must have: the messages of an episode are its own."""
    if config.environment is None:
        return columns
    return {label: [name for name in names if name != "messages"] for label, names in columns.items()}


def _limits(config: GRPOConfig, world: World) -> RewardPoolConfig:
    """Return how many processes this rank may have, and how long all other ranks may wait for them."""
    section = config.rewards
    if section.workers == "auto":
        cores = usable_cores() // (world.local_size or world.size)
        section = section.model_copy(update={"workers": min(_MOST_WORKERS, max(1, cores))})
    if section.step_timeout_seconds == "auto" and world.size > 1:
        longest = _SHARE_OF_WAIT * 60 * config.launch.timeout_minutes
        section = section.model_copy(update={"step_timeout_seconds": longest})
    return section


class RewardScorer:
    """Scores completions by reward functions in worker processes and by reward models in this process.

    Args:
        run_file: The run's configuration.
        config: The section `rewards`, for the worker processes and the handling of faults.
        models: The loaded reward models by label.
        logs: Folder for what functions print.
    """

    def __init__(
        self, run_file: ConfiguredRun, config: RewardPoolConfig, models: Mapping[str, TextScorer], logs: Path
    ) -> None:
        assert isinstance(run_file.config, GRPOConfig)
        rewards = run_file.config.reward
        functions = [reward for reward in rewards if not isinstance(reward, ModelRewardConfig)]
        self._models = models
        self.pool = RewardPool(functions, config, run_file.base, logs) if functions else None
        self._functions = [reward.label for reward in functions]
        self._rewards, self._config = tuple(rewards), config

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """As `OpenRewards` has them; known once started."""
        return {} if self.pool is None else self.pool.columns

    def start(self) -> None:
        """Start the processes.

        Raises:
            ConfigError: A function cannot work.
        """
        if self.pool is not None:
            self.pool.start()

    def close(self) -> None:
        """End the processes."""
        if self.pool is not None:
            self.pool.close()

    def unreadable(self, label: str, answers: Sequence[str]) -> list[str]:
        """Return the answers that a reward of `kind: math` cannot read, or not in time.

        Raises:
            RunStopped: As `score`.
        """
        (column,) = self.columns[label]
        samples = [Sample(index, "", "", [], [], "stop", {column: answer}) for index, answer in enumerate(answers)]
        outcomes = self.outcomes(label, samples)
        return [answer for answer, outcome in zip(answers, outcomes, strict=True) if outcome.fault is not None]

    def outcomes(self, label: str, samples: Sequence[Sample]) -> list[SampleOutcome]:
        """Return what one function says of samples; no conversation of ranks.

        Raises:
            RunStopped: As `score`.
        """
        assert self.pool is not None
        (outcomes,) = self.pool.outcomes(samples, only=[label])
        return outcomes

    def try_out(self, samples: Sequence[Sample]) -> dict[str, list[SampleOutcome]]:
        """Return what each function that is called with lists says of samples, by the reward's name.

        Raises:
            RunStopped: As `score`.
        """
        return {} if self.pool is None else self.pool.try_out(samples)

    def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """Return the reward of each sample, in their order; all ranks call this together, some without samples.

        Raises:
            RunStopped: The processes of this rank died, or hang.
        """
        # Models come first: all ranks run the passes of a sharded one, and one whose processes died would not.
        by_label = {label: _outcomes(model, samples) for label, model in self._models.items()}
        if self.pool is not None:
            by_label |= zip(self._functions, self.pool.outcomes(samples), strict=True)
        return [
            combine(sample, [by_label[reward.label][index] for reward in self._rewards], self._rewards, self._config)
            for index, sample in enumerate(samples)
        ]


def _outcomes(model: TextScorer, samples: Sequence[Sample]) -> list[SampleOutcome]:
    """Return what a model says of each sample; one that it cannot be shown is an error of its own."""
    rows = [_read(model.reading, sample) for sample in samples]
    scores = iter(model.scores([row for row in rows if not isinstance(row, SampleOutcome)]))
    return [row if isinstance(row, SampleOutcome) else _outcome(next(scores)) for row in rows]


def _read(reading: RewardFormat, sample: Sample) -> list[int] | SampleOutcome:
    try:
        tokens = reading.tokens(reading.text(sample.prompt, sample.completion, sample.row))
    except Exception as error:  # noqa: BLE001 - a template of somebody else's, over a row
        return outcome_of_exception(error)
    return tokens or SampleOutcome(fault="error", message="has no text to read")


def _outcome(score: float) -> SampleOutcome:
    if is_number(score):
        return SampleOutcome(score)
    return SampleOutcome(fault="nan", message=f"gave {score}")


class LoggingPool(Protocol):
    """Processes that print into a file."""

    log_path: Path
    log_is_named: bool

    def move_log(self, folder: Path) -> None:
        """Copy the log into another folder, and print there from now on."""


class RewardLog:
    """The log of what one rank's reward functions print: in the run's logs, or first in a temporary folder.

    A run that is refused before its first step must leave no files, so no run directory is created for a log. Under our
    launcher the log starts in the launch directory, whose logs the launcher moves. Elsewhere it is copied before the
    first request after the run directory was created, which may be on another file system.

    Args:
        run_directory: Directory of the run, which need not exist yet.
        launched: The launch directory, if our launcher started all ranks on this machine.
    """

    def __init__(self, run_directory: Path, launched: Path | None) -> None:
        self._run = run_directory.absolute()
        self._temporary: Path | None = None
        self._is_settled = (self._run / LOGS).is_dir()
        if self._is_settled:
            self.folder = self._run / LOGS
        elif launched is not None and (launched / LOGS).is_dir():
            self.folder = launched / LOGS
        else:
            self.folder = self._temporary = Path(tempfile.mkdtemp(prefix="holdfast-rewards-"))

    def settle(self, pool: LoggingPool | None) -> None:
        """Move the log into the run's as soon as there is a run directory."""
        logs = self._run / LOGS
        # Without a shared disk a machine may have the logs of its ranks and no more.
        if self._is_settled or pool is None or not (is_run(self._run) or logs.is_dir()):
            return
        with suppress(OSError):  # a full disk: it stays where it is
            if self._temporary is None:
                pool.log_path = logs / pool.log_path.name
            else:
                logs.mkdir(exist_ok=True)
                pool.move_log(logs)
            self._is_settled = True

    def close(self, pool: LoggingPool | None) -> None:
        """Remove the temporary folder; a log that a message names and that has no other place stays."""
        self.settle(pool)
        if self._temporary is not None and (self._is_settled or pool is None or not pool.log_is_named):
            shutil.rmtree(self._temporary, ignore_errors=True)
