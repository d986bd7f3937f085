"""The `rollout` section: how completions are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from holdfast.config.base import (
    AtLeastTwo,
    Count,
    Fraction,
    Mistake,
    NonNegative,
    Positive,
    PositiveInt,
    Section,
)

EngineKind = Literal["auto", "inprocess", "transformers"]


class SamplingConfig(Section):
    """The distribution a token is drawn from, and where a completion ends."""

    max_new_tokens: PositiveInt = 128
    """Tokens after which a completion is cut."""
    temperature: NonNegative = 1.0
    """Divides the logits, here and wherever these tokens are scored; 0 takes the most probable token."""
    top_k: PositiveInt | None = None
    """Draw among the k most probable tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw among the fewest tokens whose probabilities reach this sum (Holtzman et al., arXiv:1904.09751)."""
    min_p: Fraction = 0.0
    """Draw among tokens at least this probable, relative to the most probable one (arXiv:2407.01082)."""
    repetition_penalty: Positive = 1.0
    """Divides positive logits of tokens seen before and multiplies negative ones (arXiv:1909.05858, section 4.1)."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a completion; they belong to it."""

    def biases(self) -> list[str]:
        """Return the options that draw from another distribution than the policy's at this temperature."""
        neutral = {"top_k": None, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        return [name for name, value in neutral.items() if getattr(self, name) != value]


class RolloutConfig(SamplingConfig):
    """What a step samples, and with which engine."""

    group_size: AtLeastTwo = 8
    """Completions per prompt. An advantage compares them, so one alone has none."""
    engine: EngineKind = "auto"
    """`inprocess` decodes over the training weights; `transformers` calls `generate`, slower and for any architecture;
    `auto` takes the first where the model's attention allows it."""
    rows: PositiveInt = 512
    """Most completions decoded together on one rank. Memory and speed only."""
    seed: Count | None = None
    """Seed of the sampling; default: the run's seed."""
    shared_prefix: Literal["auto", "on", "off"] = "auto"
    """Train a group with its prompt forwarded once; `auto`: where the model's attention allows it and it saves work."""
    record: bool = False
    """Keep the batch of every step in rollouts/, for `holdfast replay`."""
    show_every: PositiveInt = 10
    """Steps between tables of sample completions."""
    show: Count = 3
    """Completions in such a table: the best, the worst, the newest; 0 shows none."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield sampling that has no distribution to learn from."""
        if self.temperature == 0:
            yield "temperature", "0 gives every completion of a group the same tokens; use 1.0"
