"""The `checkpoint` section: what is written while the run goes on and when it ends, and what a resume may change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from holdfast.config.base import (
    AtLeastTwo,
    Count,
    Mistake,
    Pattern,
    Positive,
    PositiveInt,
    PublicStr,
    Section,
    TextOrSection,
)
from holdfast.config.sections.measured import MetricConfig


class BestConfig(MetricConfig):
    """Keep the best checkpoints by a metric of their own step."""

    count: PositiveInt = 1
    """How many of the best checkpoints are kept."""


class RetentionConfig(Section):
    """What stays; the rest is deleted after the next verified save."""

    last: AtLeastTwo = 3
    """Newest checkpoints; at least 2, since the newest may be damaged on its way to the disk."""
    every: PositiveInt | None = None
    """Checkpoints of steps that are a multiple of this are never deleted."""
    best: list[BestConfig] = Field(default_factory=list)
    """Keep the checkpoints with the best values of a metric as well."""


CheckpointPath = Annotated[PublicStr, Field(min_length=1)]


class ResumeConfig(Section):
    """What may differ between a checkpoint and the run that continues it; anything else is refused.

    Patterns are regular expressions, searched in parameter names.
    """

    add: list[Pattern] = Field(default_factory=list)
    """Parameters that the model has and the checkpoint has not; they keep their initial values."""
    drop: list[Pattern] = Field(default_factory=list)
    """Tensors that the checkpoint has and the model has not; they are left out."""
    cast: list[Pattern] = Field(default_factory=list)
    """Tensors whose dtype differs between checkpoint and model; they are converted."""
    freeze: list[Pattern] = Field(default_factory=list)
    """Parameters that were trained and are frozen now, or that the optimizer no longer updates."""
    unfreeze: list[Pattern] = Field(default_factory=list)
    """Parameters that were frozen and are trained now, or that are new in the optimizer; they start without optimizer
    state.
    """
    changed: list[Literal["data", "files", "tokenizer", "model", "objective", "run"]] = Field(default_factory=list)
    """What may have changed besides parameters: rows, the user's Python files and templates, the tokenizer, the model's
    configuration (and the weights a reference policy is loaded from), the loss with all that belongs to it; `run`: what
    lies in `storage` was saved by a run of another name, and this one goes on from it and may delete it."""
    hyperparameters: Literal["config", "checkpoint"] = "config"
    """Where the optimizer's betas, eps, weight decay and the like come from; the rate always follows the schedule."""
    not_finite: bool = False
    """Also continue from a checkpoint with NaN or infinity in a tensor; off: such ones are put aside."""
    start: PositiveInt | CheckpointPath | None = Field(default=None, alias="from")
    """Where to continue once, instead of at the newest checkpoint: a step of this run, whose later ones are renamed, or
    another run's checkpoint, of which this run, under another `run.name`, is a branch."""


class InitConfig(Section):
    """The checkpoint that a new run starts from, and what of it comes along; `init_from: PATH` names its path alone."""

    path: PublicStr
    """A checkpoint of any run with a model of these shapes, at any number of ranks."""
    take: Literal["weights", "weights+moments", "weights+moments+schedule"] = "weights"
    """`weights+moments`: the optimizer goes on with its moments, and the schedule starts anew. With `+schedule` the
    learning rate goes on too, as if the steps before belonged to this run. The data always starts at its first row."""

    @property
    def moments(self) -> bool:
        """Whether the optimizer's moments come along."""
        return self.take != "weights"

    @property
    def schedule(self) -> bool:
        """Whether the learning rate goes on where the checkpoint left it."""
        return self.take.endswith("+schedule")


class CheckpointConfig(Section):
    """Checkpoints continue a run at any number of ranks; exports are directories that plain transformers loads."""

    every_steps: PositiveInt | None = None
    """Steps between checkpoints."""
    every_epochs: Positive | None = None
    """Passes over the data between checkpoints."""
    every_minutes: Positive | None = 30.0
    """Minutes between checkpoints; the rehearsal suggests a number. null: no checkpoint is saved by the clock."""
    at_end: bool = True
    """Save when the run ends, so that raising steps continues it."""
    frozen: Literal["auto", "save", "skip"] = "auto"
    """`skip` leaves out parameters that are not trained: a checkpoint of adapters alone is small, and a resume takes
    the rest from where the model came from, after making sure it is still the same. `auto`: `skip` under `model.lora`
    where `model.path` is a local directory, or `model.revision` the hash of a commit (40 hex digits); otherwise `save`,
    as for a directory that may not stay, docs/lora.md. A run that starts from a checkpoint does as that did."""
    contents: Literal["full", "weights"] = "full"
    """`weights`: no optimizer state; such a checkpoint can start another run (init_from) and not be resumed."""
    background: bool = True
    """Training waits for one copy of the state, and a thread writes it. Off: training waits for the disk."""
    read_back: bool = True
    """Read every file back after a save and compare hashes, before older checkpoints may be deleted."""
    storage: PublicStr | None = None
    """Where checkpoints are, such as s3://bucket/run; default: checkpoints in the run's directory."""
    keep: RetentionConfig = RetentionConfig()
    resume: ResumeConfig = ResumeConfig()
    init_from: Annotated[InitConfig | None, TextOrSection("path")] = None
    """A checkpoint whose weights the run starts from, at step 0; null: the run starts from `model.path`."""
    rehearsal: bool = True
    """Save, verify and load a checkpoint before step 1. With `false` the first save is the first to find out what
    cannot be saved."""
    grace_seconds: Positive = 30.0
    """Longest time from SIGTERM to a committed checkpoint that the run promises; it warns when saves take longer."""
    timeout_minutes: Positive = 30.0
    """Longest wait of a save for another rank, and longest time in which nothing of a save moves; a slow one may take
    longer."""
    max_failures: Count = 0
    """Saves in a row that may fail before the run stops; 0: the first failure stops it."""
    export_every: PositiveInt | None = None
    """Steps between exports while training."""
    export_best: MetricConfig | None = None
    """Export again to exports/best whenever an evaluation improves this metric."""
    export_at_end: bool = True
    """Write `exports/final` when the run ends."""
    export_dtype: Literal["same", "float32", "bfloat16"] = "same"
    """Dtype of exported floating-point tensors; `same`: as they are stored."""
    export_shard_bytes: PositiveInt = 5_000_000_000
    """Largest safetensors file, unless a single tensor is larger."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what contradicts itself."""
        if self.init_from is not None and isinstance(self.resume.start, str):
            yield "init_from", "resume.from names a checkpoint to begin with already; leave one of them out"
        if self.contents == "weights" and self.resume.hyperparameters == "checkpoint":
            yield "resume.hyperparameters", "a checkpoint of weights holds none; leave it at config"
