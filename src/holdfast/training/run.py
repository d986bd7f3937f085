"""The built parts of a run, side by side. Records, not actors: steps are functions that take them.

A `Setting` is where a run takes place and what it is asked for; nothing of it is trained. A `ShardedModel` lives in it,
a `Trained` one is what `train_step` updates, an `Evaluation` says what a model is measured on, and a `Run` has these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict
from torch import nn
from torch.optim import Optimizer

from holdfast.checkpoint.loading.companions import AheadOfStep, Companion
from holdfast.config.base import SavedCount, SavedNumber, Section
from holdfast.config.sections.optim import PlateauSchedule
from holdfast.config.verbs.training import TrainingConfig
from holdfast.data.batches.stream import BatchStream, SampleStream
from holdfast.metrics.throughput import ModelCost
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.setup.model import Blueprint
from holdfast.objectives.base import Objective
from holdfast.optim.averages import Averages
from holdfast.optim.reference_ema import FollowingModel
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.host_memory import HostOffload
from holdfast.parallel.mesh import World
from holdfast.parallel.plan import ShardPlan
from holdfast.parallel.shards import sharded_parameters
from holdfast.training.directory import run_directory
from holdfast.training.observe import Observer
from holdfast.training.phases import PhaseClock, PhasePeaks
from holdfast.types import Batch, Example


@dataclass(kw_only=True)
class Logbook:
    """What a run has to say: the journal writes it down, and empties the lists."""

    clock: PhaseClock = field(default_factory=PhaseClock)
    messages: list[str] = field(default_factory=list)
    """What a step or an evaluation has to tell the user; rank 0 prints it."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Completions of a step; rank 0 writes them to samples.jsonl."""
    batches: list[Batch] = field(default_factory=list)
    """What this rank trained on in this step, for the record of a spike."""
    resumed_metrics: dict[str, float] = field(default_factory=dict)
    """Of the checkpoint that the run continues from."""
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
class Setting(ConfiguredRun):
    """A run's file, the ranks that carry it out, and what they say of it."""

    world: World
    ranks: RankGroup
    log: Logbook = field(default_factory=Logbook)
    interrupted: Callable[[], bool] = lambda: False
    """Whether this rank was asked to stop; long work may be left for it."""
    without_numbers: Callable[[], AbstractContextManager[object]] | None = None
    """Within what a model gets its memory in a plan, where tensors hold no numbers: no weight is read, and nothing is
    compared with its files. None where they do."""

    @classmethod
    def of(cls, config: TrainingConfig, base: Path, world: World) -> Setting:
        """Return a setting with a group of its own; all ranks call this together."""
        return cls(config=config, base=base, world=world, ranks=RankGroup(config.launch.timeout_minutes))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time and memory towards a phase, and name the phase if this rank fails in it."""
        with self.log.clock.phase(name), self.log.peaks.phase(name), self.world.failure.phase(name):
            yield


@dataclass
class TrainState:
    """Progress of a run. Weights, optimizer state, random state and the data cursor are saved beside it."""

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
    """Steps since one had a completion that could be scored."""
    best_exported: SavedNumber | None = None
    """Value of checkpoint.export_best's metric in exports/best."""
    controllers: dict[str, SavedNumber] = field(default_factory=dict)
    """Coefficients that follow a target, by name."""
    watched: dict[str, SavedNumber] = field(default_factory=dict)
    """Where the metrics stand that end a run or lower a rate, as training/watched.py has it."""
    observers: dict[str, Any] = field(default_factory=dict)
    """Each observer's own state, by its path."""
    companions: dict[str, TrainState] = field(default_factory=dict)
    """Progress of models that are trained beside this one, by name."""

    def as_plain(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)


Identity = Mapping[str, Mapping[str, str]]
"""Kind (data, files, tokenizer) -> what -> hash or value"""

PLATEAU_FACTOR = "plateau/factor"
"""In a state's `watched`: by how much plateaus have lowered the rate."""

REFERENCE_POLICY = "reference"
"""Name of a reference policy among the models that checkpoints hold beside the run's own."""


class StepAbandoned(Exception):  # noqa: N818 - it says what happened; nothing went wrong
    """A step was left because the run shall stop: nothing of it is kept, and it is made again from its seeds."""


@dataclass(frozen=True)
class EvaluationSet:
    """Rows that are never trained on."""

    name: str
    open_stream: Callable[[], SampleStream]
    """A stream that passes over the rows once, from the start."""
    read_prompts: Callable[[int], Sequence[Example]]
    """This rank's share of the first rows, as sequences to complete; the argument is their number over all ranks."""


@dataclass(kw_only=True)
class ShardedModel:
    """A model on its ranks."""

    setting: Setting
    origin: Blueprint
    plan: ShardPlan
    model: PolicyModel
    temperature: float = 1.0
    """Divides the logits wherever log-probabilities are taken: the one that tokens were sampled at."""
    state: TrainState = field(default_factory=TrainState)
    holds_averages: bool = False
    """Whether averages stand in for the weights at the moment."""


@dataclass(kw_only=True)
class Trained(ShardedModel):
    """A model that is trained, with what an update of it touches."""

    optimizer: Optimizer
    averages: Averages | None
    """Of the trained weights, if the run keeps some."""
    parameters: Mapping[str, nn.Parameter]
    """Sharded, by canonical name."""
    total_steps: int | None
    """Updates of the whole run; None if a clock or the data's end stops it."""
    cost: ModelCost
    host_offload: HostOffload = field(default_factory=HostOffload)
    """What of this model, and of those trained beside it, is in host memory at the moment."""
    following: FollowingModel | None = None
    """The reference policy, where it follows the weights."""
    updating: bool = False
    """Whether a step's updates are being made, or were broken off: tensors are of two steps then."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the averages stand in for the weights within the block; every rank enters together."""
        assert self.averages is not None
        was_updating, self.updating = self.updating, True  # the model meanwhile holds the weights of no step
        self.holds_averages = True
        try:
            with self.averages.in_place(sharded_parameters(self.model)):
                yield
                sharded_parameters(self.model)  # units that the block gathered hold averages
        finally:
            self.updating, self.holds_averages = was_updating, False

    @property
    def rate_on_plateau(self) -> float:
        """The factor by which plateaus have lowered the rate so far."""
        schedule = self.setting.config.optim.schedule
        return self.state.watched.get(PLATEAU_FACTOR, 1.0) if isinstance(schedule, PlateauSchedule) else 1.0

    def restore(self, *names: str) -> None:
        """Bring parts of what is offloaded back, all where none is named."""
        if self.host_offload.parts.intersection(names or self.host_offload.parts):
            with self.setting.phase("from_host"):
                self.host_offload.restore(*names)


@dataclass(kw_only=True)
class Evaluation:
    """A model, its loss, and what it is measured on."""

    sharded: ShardedModel
    objective: Objective
    sets: Sequence[EvaluationSet] = ()


@dataclass(kw_only=True)
class Run:
    """What every run has: a model that is trained, what it is measured on, and where its batches come from."""

    trained: Trained
    evaluation: Evaluation
    """Of the trained model."""
    stream: BatchStream[Any, Any]
    source_names: tuple[str, ...]
    """Data sources that get a loss of their own in the metrics."""
    observers: Sequence[Observer]
    identity: Identity
    """Hashes of what a checkpoint relies on and does not hold."""
    companions: dict[str, Trained] = field(default_factory=dict)
    """Models that are trained beside the run's own, by what goes before the names of their tensors in checkpoints."""
    assets: dict[str, bytes] = field(default_factory=dict)
    """Small files of every checkpoint, filled at the first save."""
    ahead: AheadOfStep | None = None
    """What is made while a step updates; None where a step makes all of its own."""

    @property
    def setting(self) -> Setting:
        """Where the run takes place."""
        return self.trained.setting

    @property
    def saved_companions(self) -> dict[str, Companion]:
        """What checkpoints hold besides the run's own model, by name."""
        trained = self.trained
        companions = {
            name: Companion(companion.model, companion.optimizer) for name, companion in self.companions.items()
        }
        if trained.following is not None:
            names = {name for name, value in sharded_parameters(trained.model).items() if value.requires_grad}
            companions[REFERENCE_POLICY] = Companion(trained.following.model, None, names)
        return companions

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        total = self.trained.total_steps
        return total is not None and self.trained.state.step >= total

    @property
    def is_whole(self) -> bool:
        """Whether all tensors are of one step: no update is being made, here or of a companion in the same step."""
        step = self.trained.state.step
        return not (
            self.trained.updating
            or any(companion.updating and companion.state.step == step for companion in self.companions.values())
        )


def say(run: Run, *lines: str) -> None:
    """Print on rank 0."""
    if run.setting.world.is_first and lines:
        print(*lines, sep="\n", flush=True)
