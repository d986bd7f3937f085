"""The records that make up a run. They hold data and do little; steps are functions that take them as arguments.

A `Run` has the configuration, the folder, the ranks and the log. A `Model` adds a module with its plan and counters,
and an optimizer where `train_step` updates it. An `Evaluation` has a model, its loss and its evaluation sets. A
`Training` has the evaluation of a trained model, and a stream of batches.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from pydantic import ConfigDict
from torch import nn
from torch.optim import Optimizer

from holdfast.checkpoint.loading.parts import Companion
from holdfast.config.base import SavedCount, SavedNumber, Section
from holdfast.config.sections.optim import PlateauSchedule
from holdfast.config.verbs.training import TrainingConfig
from holdfast.data.batches.ahead import StreamAhead
from holdfast.data.batches.stream import SampleStream
from holdfast.metrics.throughput import ModelCost
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.setup.model import Blueprint
from holdfast.objectives.base import Objective
from holdfast.optim.averages import Averages
from holdfast.optim.host_steps import HostSteps
from holdfast.optim.reference_ema import FollowingModel
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.forms import Forms
from holdfast.parallel.host_memory import HostOffload
from holdfast.parallel.mesh import World
from holdfast.parallel.plan import ShardPlan
from holdfast.parallel.shards import sharded_parameters
from holdfast.training.directory import run_directory
from holdfast.training.observe import Observer
from holdfast.training.phases import PhaseClock, PhasePeaks
from holdfast.types import Batch, Example

T = TypeVar("T")


@dataclass(kw_only=True)
class Logbook:
    """Messages and samples that steps leave for the journal, which writes them and empties the lists."""

    clock: PhaseClock = field(default_factory=PhaseClock)
    messages: list[str] = field(default_factory=list)
    """Messages for the user, printed by rank 0."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Completions of a step; rank 0 writes them to samples.jsonl."""
    sample_images: dict[str, bytes] = field(default_factory=dict)
    """Small files of their prompts' images, by name."""
    batches: list[Batch] = field(default_factory=list)
    """Batches that this rank trained on in this step, to be recorded if it is a spike."""
    resumed_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the checkpoint that the run continues from."""
    peaks: PhasePeaks = field(default_factory=PhasePeaks)


@dataclass(kw_only=True)
class ConfiguredRun:
    """A configuration, and the folder that its paths begin at."""

    config: TrainingConfig
    base: Path
    """Directory of the run's YAML, where its files are looked up."""

    @property
    def directory(self) -> Path:
        """Where the run writes."""
        return run_directory(self.config)

    def with_sections(self, **sections: Section) -> Self:
        """Return a copy with some sections of the configuration replaced."""
        return replace(self, config=self.config.model_copy(update=sections))


@dataclass(kw_only=True)
class Run(ConfiguredRun):
    """The configuration of a run, its process and ranks, and its log."""

    world: World
    ranks: RankGroup
    log: Logbook = field(default_factory=Logbook)
    interrupted: Callable[[], bool] = lambda: False
    """Returns whether this rank was asked to stop; rollouts and evaluations are then abandoned."""
    trains: bool = True
    """Whether steps follow; False where a model is only evaluated."""
    chose_threads: bool = False
    """Whether the number of CPU threads is settled, as it is with the first model."""

    @classmethod
    def of(cls, config: TrainingConfig, base: Path, world: World) -> Run:
        """Return a run with a group of its own; all ranks call this together."""
        return cls(config=config, base=base, world=world, ranks=RankGroup(config.launch.timeout_minutes))

    def gather_once(self, item: T) -> list[T]:
        """Return the items of those ranks that have different batches: of a context group, its first rank's."""
        return self.ranks.gather(item)[:: self.config.parallel.context]

    def whether_all_raise(self) -> Callable[[], bool]:
        """Return what tells a rank within an error whether all ranks raise; all ranks call this together beforehand.

        Between two collectives no rank can agree on anything: one that raises alone there must leave.
        """
        return partial(self.world.failure.all_ranks_raise, self.ranks.agree(uuid.uuid4().hex[:8]))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time and memory towards a phase, and name the phase if this rank fails in it."""
        with self.log.clock.phase(name), self.log.peaks.phase(name), self.world.failure.phase(name):
            yield


@dataclass
class TrainState:
    """Counters of a model's training, saved in trainer.json next to weights, optimizer and the position in the data."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: SavedCount = 0
    """Steps done, those whose updates were skipped included."""
    updates: SavedCount = 0
    """Optimizer updates done or skipped: one per step, or several on one rollout."""
    tokens: SavedCount = 0
    """Tokens trained on, padding not counted."""
    samples: SavedCount = 0
    skipped_steps: SavedCount = 0
    """Updates skipped for a non-finite gradient norm."""
    skipped_in_a_row: SavedCount = 0
    unscored_in_a_row: SavedCount = 0
    """Number of latest steps in which no completion could be scored."""
    best_exported: SavedNumber | None = None
    """Value of checkpoint.export_best's metric in exports/best."""
    controllers: dict[str, SavedNumber] = field(default_factory=dict)
    """Coefficients that follow a target, by name."""
    watched: dict[str, SavedNumber] = field(default_factory=dict)
    """Best values and counts of the metrics that end a run or lower its rate; see training/watched.py."""
    cache_blocks: SavedCount = 0
    """Most blocks of keys and values that our own decoding has on a rank, since they decide which completions are
    decoded together. Set when that engine first has weights; 0 before, and where another engine samples."""
    forms: dict[str, SavedCount] | None = None
    """Optional forms by name, 0 where the plain form is used; see parallel/forms.py. None in a new run."""
    schedule_start: SavedCount = 0
    """Steps of the schedule before this run's first, where it goes on with another's (`checkpoint.init_from`)."""
    observers: dict[str, Any] = field(default_factory=dict)
    """Each observer's own state, by its path."""
    companions: dict[str, TrainState] = field(default_factory=dict)
    """States of companions, such as a critic, by name."""

    def as_plain(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)


Identity = Mapping[str, Mapping[str, str]]
"""Fingerprints: kind (data, files, tokenizer) -> name -> hash or value"""

PLATEAU_FACTOR = "plateau/factor"
"""Key in `TrainState.watched`: the factor by which plateaus have lowered the learning rate."""

REFERENCE_POLICY = "reference"
"""Name of a reference policy that follows the weights, among a run's companions."""


class StepAbandoned(Exception):  # noqa: N818 - it says what happened; nothing went wrong
    """A step was abandoned because the run was asked to stop; nothing of it is kept, and its seeds reproduce it."""


@dataclass(frozen=True)
class EvaluationSet:
    """A named set of rows that are only evaluated on."""

    name: str
    open_stream: Callable[[], SampleStream]
    """A stream that passes over the rows once, from the start."""
    read_prompts: Callable[[int], Sequence[Example]]
    """This rank's share of the first rows, as sequences to complete; the argument is their number over all ranks."""


@dataclass(kw_only=True)
class Model:
    """A model on its ranks: module, plan, blueprint and counters, and what updates it where it is trained.

    `give_optimizer` sets the optimizer and the fields behind it; a frozen model has the defaults.
    """

    run: Run
    blueprint: Blueprint
    plan: ShardPlan
    module: PolicyModel
    temperature: float = 1.0
    """Sampling temperature, by which logits are divided before log-probabilities are computed."""
    state: TrainState = field(default_factory=TrainState)
    forms: Forms = field(default_factory=Forms)
    """Optional forms of its computations."""
    holds_averages: bool = False
    """Whether the parameters hold the averaged weights at the moment."""
    optimizer: Optimizer | None = None
    """None where the model is frozen."""
    averages: Averages | None = None
    """Averages of the trained weights (`optim.ema`), if the run keeps some."""
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """Sharded parameters of a trained model, by canonical name."""
    total_steps: int | None = None
    """Updates of the whole run; None if a clock or the data's end stops it."""
    cost: ModelCost | None = None
    """Operations of a token, where they are counted."""
    host_offload: HostOffload = field(default_factory=HostOffload)
    """Tensors of this model and of its companions that are offloaded to host memory."""
    host_steps: HostSteps | None = None
    """Steps of the optimizer in host memory, where its state is offloaded without the parameters."""
    following: FollowingModel | None = None
    """The reference policy, where it follows the weights."""
    updating: bool = False
    """Whether an update is in progress or was interrupted, so that tensors may belong to two different steps."""

    @property
    def updater(self) -> Optimizer:
        """The optimizer of a model that is trained."""
        assert self.optimizer is not None
        return self.optimizer

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the averages stand in for the weights within the block; every rank enters together."""
        assert self.averages is not None
        was_updating, self.updating = self.updating, True  # the model meanwhile holds the weights of no step
        self.holds_averages = True
        try:
            with self.averages.in_place(sharded_parameters(self.module)):
                yield
                sharded_parameters(self.module)  # units that the block gathered hold averages
        finally:
            self.updating, self.holds_averages = was_updating, False

    @property
    def rate_on_plateau(self) -> float:
        """The factor by which plateaus have lowered the rate so far."""
        schedule = self.run.config.optim.schedule
        return self.state.watched.get(PLATEAU_FACTOR, 1.0) if isinstance(schedule, PlateauSchedule) else 1.0

    def restore(self, *names: str) -> None:
        """Bring parts of what is offloaded back, all where none is named."""
        if self.host_offload.parts.intersection(names or self.host_offload.parts):
            with self.run.phase("from_host"):
                self.host_offload.restore(*names)


@dataclass(kw_only=True)
class Evaluation:
    """A model, its loss, and its evaluation sets."""

    model: Model
    objective: Objective
    sets: Sequence[EvaluationSet] = ()


class AheadOfStep(Protocol):
    """Results for the next step that a run has computed ahead, such as rollouts; a checkpoint stores them as JSON."""

    def finished(self) -> Callable[[], list[dict[str, Any]]]:
        """Return a function that yields this rank's results; it may be called later, from any thread."""

    def check(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError where the results of a checkpoint are not what `finished` yields."""

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take over the results of all ranks from a checkpoint."""

    def largest(self) -> list[dict[str, Any]]:
        """Return results of the largest size that a checkpoint may hold, of all ranks, for the rehearsal."""


@dataclass(kw_only=True)
class Training:
    """The parts of every training: an evaluation of the trained model, and the stream of its batches."""

    evaluation: Evaluation
    """Of the model that is trained."""
    stream: StreamAhead[Any]
    source_names: tuple[str, ...]
    """Data sources that get a loss of their own in the metrics."""
    observers: Sequence[Observer]
    identity: Identity
    """Hashes of what a checkpoint relies on and does not hold."""
    image_rules: Mapping[str, Any] = field(default_factory=dict)
    """What the model's processor was found to make of images; empty where no row may have one."""
    companions: dict[str, Model] = field(default_factory=dict)
    """Further trained models by name, which is also the prefix of their tensors in checkpoints."""
    assets: dict[str, bytes] = field(default_factory=dict)
    """Small files of every checkpoint, filled at the first save."""
    ahead: AheadOfStep | None = None
    """Results for the next step that are computed while a step updates; None if there are none."""

    @property
    def model(self) -> Model:
        """The model that is trained."""
        return self.evaluation.model

    @property
    def run(self) -> Run:
        """The run's configuration, folder, ranks and log."""
        return self.model.run

    def continued(self) -> None:
        """Follow the counters of the checkpoint that the run goes on from; also called where there is none."""

    @property
    def saved_companions(self) -> dict[str, Companion]:
        """What checkpoints hold besides the run's own model, by name."""
        model = self.model
        companions = {
            name: Companion(companion.module, companion.optimizer) for name, companion in self.companions.items()
        }
        if model.following is not None:
            names = {name for name, value in sharded_parameters(model.module).items() if value.requires_grad}
            companions[REFERENCE_POLICY] = Companion(model.following.model, None, names)
        return companions

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        total = self.model.total_steps
        return total is not None and self.model.state.step >= total

    @property
    def is_whole(self) -> bool:
        """Whether all tensors are of one step: no update is being made, here or of a companion in the same step."""
        step = self.model.state.step
        return not (
            self.model.updating
            or any(companion.updating and companion.state.step == step for companion in self.companions.values())
        )


def say(training: Training, *lines: str) -> None:
    """Print on rank 0."""
    if training.run.world.is_first and lines:
        print(*lines, sep="\n", flush=True)
