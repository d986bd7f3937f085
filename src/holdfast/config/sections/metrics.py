"""The `metrics` and `evaluation` sections: what is measured, when, and where it goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from holdfast.config.base import (
    ByKind,
    FunctionPath,
    Kwargs,
    Mistake,
    NonNegative,
    Positive,
    PositiveInt,
    PublicStr,
    Section,
)
from holdfast.config.sections.data import SourceConfig
from holdfast.config.sections.rollout import SamplingConfig


class TrackerConfig(Section):
    """A tracker that Holdfast knows; a library's own settings are its own environment variables."""

    kind: Literal["csv", "tensorboard", "wandb", "trackio", "mlflow", "swanlab"] = "csv"

    @property
    def label(self) -> str:
        """Name in messages, and of its folder."""
        return self.kind


class UserTrackerConfig(Section):
    """A class in one file of the user's own; see docs/looking.md for what it is given."""

    kind: Literal["path"] = "path"
    path: FunctionPath
    """`file.py:Class`; it has write(step, metrics) and close(status)."""
    kwargs: Kwargs = Field(default_factory=dict)
    """Further arguments of its constructor."""

    @property
    def label(self) -> str:
        """Name in messages, and of its folder."""
        return self.path.rpartition(":")[2]


Tracker = Annotated[TrackerConfig | UserTrackerConfig, ByKind("csv")]
Tracked = Literal["metrics", "configuration", "versions", "completions"]


class MetricsConfig(Section):
    """metrics.jsonl is always written; the rest is on request."""

    log_every: PositiveInt = 1
    """Steps between lines in metrics.jsonl and other sinks."""
    sinks: list[Tracker] = Field(default_factory=list)
    """Trackers that mirror metrics.jsonl, each in a process of its own."""
    track: list[Tracked] = ["metrics", "configuration", "versions", "completions"]
    """What is sent to trackers; nothing else is."""
    samples: Literal["jsonl", "parquet"] = "jsonl"
    """Where completions of training steps go: `jsonl` is samples.jsonl, `parquet` a file for each such step under
    samples/."""
    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    """`auto`: a bar on a terminal, lines elsewhere."""
    entropy: bool = False
    """Compute the mean entropy of the policy on trained tokens (one more pass over each logits chunk). Policies have an
    estimate from their samples without it, `entropy_estimate`."""
    peak_flops: Positive | None = None
    """Peak floating-point operations per second of one device, for MFU; default: looked up for known GPUs."""
    health: bool = True
    """Alarms on the screen and in events.jsonl when a run looks wrong; they change nothing in it."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield trackers that would share a folder."""
        labels = [tracker.label for tracker in self.sinks]
        for index, label in enumerate(labels):
            if label in labels[:index]:
                yield f"sinks.{index}", f"{label} is there already; every tracker has a name of its own"


def _check_steps(steps: list[int]) -> list[int]:
    if steps[1] < steps[0]:
        raise ValueError(f"{steps[1]} comes before {steps[0]}; give the first step, then the last")
    return steps


ProfiledSteps = Annotated[list[PositiveInt], Field(min_length=2, max_length=2), AfterValidator(_check_steps)]


class CompletionsConfig(Section):
    """Greedy completions of evaluation prompts, compared with the row's answer."""

    samples: PositiveInt = 64
    """Prompts per set, the first ones."""
    max_new_tokens: PositiveInt = 128
    """Tokens after which a completion is cut."""
    temperature: NonNegative = 0.0
    """Divides the logits; 0 takes the most probable token (greedy decoding)."""


class EvaluationConfig(Section):
    """When and on what the model is evaluated."""

    sets: dict[PublicStr, SourceConfig] = Field(default_factory=dict)
    """Named evaluation sets."""
    every_steps: PositiveInt | None = None
    """Steps between evaluations."""
    every_minutes: Positive | None = None
    """Minutes between evaluations."""
    every_epochs: Positive | None = None
    """Passes over the data between evaluations; 0.5 is twice per pass."""
    at_start: bool = False
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    limit_samples: PositiveInt | None = None
    """Evaluate only the first samples of each set."""
    completions: CompletionsConfig | None = None
    """Also generate: exact-match accuracy and a completions file."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a set whose name is taken."""
        if "validation" in self.sets:
            yield "sets.validation", "the name 'validation' belongs to data.validation_split; choose another"


class EvaluationSamplingConfig(SamplingConfig):
    """Sampling in evaluations: greedy, unless a temperature is set."""

    max_new_tokens: PositiveInt | None = None  # type: ignore[assignment]  # a default that lies elsewhere
    """Tokens after which a completion is cut; default: as in the rollout."""
    temperature: NonNegative = 0.0
    """0 takes the most probable token."""


class PolicyEvaluationConfig(EvaluationConfig):
    """When and on what a policy is evaluated: its completions are rewarded as in training."""

    at_start: bool = True
    """Evaluate before the first step."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()
    """How completions are sampled."""
    per_prompt: PositiveInt = 1
    """Completions per prompt, for avg@k and pass@k."""
    success: Positive = 1.0
    """A completion whose reward reaches it counts as solved in pass@k and accuracy."""
    completions: None = None
    """A key of supervised runs. A policy always completes its prompts."""
