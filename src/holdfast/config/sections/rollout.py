"""The `rollout` section: how completions are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from holdfast.config.base import (
    AtLeastTwo,
    ByKind,
    Count,
    Fraction,
    Mistake,
    NonNegative,
    Positive,
    PositiveInt,
    PublicStr,
    Section,
    Seed,
)
from holdfast.config.sections.engine import (
    LocalEngineConfig,
    RecordedEngineConfig,
    UserEngineConfig,
    VLLMEngineConfig,
)

GraphsKind = Literal["auto", "off"]


EngineSection = Annotated[
    LocalEngineConfig | VLLMEngineConfig | RecordedEngineConfig | UserEngineConfig, ByKind("auto")
]

_COLDEST = 1e-4


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
    stop: list[PublicStr] = Field(default_factory=list)
    """Texts that end a completion; they belong to it."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what ends every completion at once, and a temperature that no precision holds."""
        if "" in self.stop:
            yield "stop", "every text holds the empty one, so each completion would end at its first token; remove it"
        if 0 < self.temperature < _COLDEST:
            yield (
                "temperature",
                f"{self.temperature:g} divides logits beyond the range of numbers; use 0 for the most probable token, "
                f"or at least {_COLDEST:g}",
            )

    def biases(self) -> list[str]:
        """Return the options that draw from another distribution than the policy's at this temperature."""
        neutral = {"top_k": None, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        return [name for name, value in neutral.items() if getattr(self, name) != value]


class EngineConfig(SamplingConfig):
    """What is sampled, and with which engine."""

    engine: EngineSection = LocalEngineConfig()
    """What samples completions; `vllm`: servers outside of this process."""
    rows: PositiveInt = 512
    """Most completions decoded together on one rank. Memory and speed only."""
    copy_gib: Positive | None = None
    """Most memory that a rank may take for the weights that it decodes over, in GiB: a copy of them where training has
    shards or another dtype, and on the CPU matrices laid out for decoding; default: what is free at the start. A run
    that would take more is refused."""
    graphs: GraphsKind = "auto"
    """Whether our own decoding records a step as a CUDA graph, once for each number of completions and room of tokens,
    both rounded up, and replays it for every token. `auto`: on CUDA; `off`: every operation is called for every token.
    Speed and memory only."""


class RolloutConfig(EngineConfig):
    """What a step samples, and with which engine."""

    group_size: PositiveInt = 8
    """Completions per prompt."""
    seed: Seed | None = None
    """Seed of the sampling; default: the run's seed."""
    max_staleness: Annotated[int, Field(ge=0, le=16)] = 0
    """Steps by which the weights that sample may be older than those that learn. 0: a step samples, then learns. Above:
    servers sample the completions of so many next steps while this one updates, so that one of many tokens delays no
    other step's."""
    renormalise: bool = False
    """Train on log-probabilities over the tokens that top_k, top_p and min_p leave, as the trainer's own logits have
    them, and not over the whole vocabulary: then these options bias no update."""
    shared_prefix: Literal["auto", "on", "off"] = "auto"
    """Train a group with its prompt forwarded once; `auto`: where the model's attention allows it and it saves work,
    which without the flash kernel is decided group by group: completions are as long as the longest there."""
    record: bool = False
    """Keep the batch of every step in rollouts/, for `holdfast replay`."""
    show_every: PositiveInt = 10
    """Steps between tables of sample completions; all completions of these steps are written to samples.jsonl."""
    show: Count = 3
    """Completions in such a table: the best, the worst, the newest; 0 shows none, and silences nothing but the
    terminal."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield sampling that has no distribution to learn from."""
        yield from super().mistakes()
        if self.temperature == 0:
            yield "temperature", "0 gives every completion of a group the same tokens; use 1.0"
        if self.renormalise and not set(self.biases()) & {"top_k", "top_p", "min_p"}:
            yield (
                "renormalise",
                "top_k, top_p and min_p leave no token out, so there is nothing to renormalise; leave it out",
            )
        if self.max_staleness and isinstance(self.engine, VLLMEngineConfig) and self.engine.shares_gpus:
            yield (
                "engine.start.share",
                "servers that share the ranks' GPUs sleep while the policy is updated, and max_staleness: "
                f"{self.max_staleness} samples then; leave out one of the two",
            )
        if self.max_staleness and not isinstance(self.engine, VLLMEngineConfig | RecordedEngineConfig):
            yield (
                "max_staleness",
                f"{self.max_staleness} samples while training goes on, and engine: {self.engine.kind} samples in the "
                "ranks' own processes; use 0, or servers (engine: {kind: vllm, ...})",
            )


class BetweenConfig(Section):
    """Which groups are worth training on, by the mean of one reward over the group."""

    reward: PublicStr = Field(min_length=1)
    """Name of a reward, or of its part as `name/part`."""
    low: float | None = None
    """Groups at or below it are left out."""
    high: float | None = None
    """Groups at or above it are left out."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a range that takes everything or nothing."""
        if self.low is None and self.high is None:
            yield "low", "neither low nor high is set, so nothing is left out; set one of them"
        if self.low is not None and self.high is not None and self.low >= self.high:
            yield "low", f"{self.low:g} is not below high={self.high:g}; no group lies between them"


class GroupsConfig(Section):
    """Which groups and completions of a rollout are trained on."""

    flat: Literal["keep", "drop", "resample"] = "keep"
    """Groups whose advantages are all 0, mostly since their rewards are alike: `keep` them in the average (their KL and
    entropy count), `drop` them from it, or `resample` prompts until the batch is full (DAPO, arXiv:2503.14476, section
    3.2)."""
    max_rounds: AtLeastTwo = 4
    """With `resample`: rollouts per step, the first included; then the step trains on what it has."""
    oversample: Annotated[float, Field(ge=1, le=16)] = 1.0
    """With `resample`: prompts drawn per prompt still missing, in the first rollout of a step as in those that follow.
    Groups in excess are sampled and not trained on."""
    between: BetweenConfig | None = None
    """Leave out groups that are too hard or too easy; with `resample`, others take their place."""
    truncated: Literal["keep", "mask", "drop"] = "keep"
    """Completions cut at max_new_tokens: train on them, `mask` them (their reward stays in the baseline; overlong
    filtering of DAPO, section 3.4), or `drop` them from baseline and average."""


class UpdatesConfig(Section):
    """How often a rollout batch is trained on."""

    mini_batches: PositiveInt = 1
    """Optimizer updates in one pass over the rollout batch, each on its own prompts."""
    passes: PositiveInt = 1
    """Passes over the rollout batch."""

    @property
    def count(self) -> int:
        """Updates per rollout batch."""
        return self.mini_batches * self.passes


class ResidencyConfig(Section):
    """Where training's memory is while completions are sampled and scored: on its device, or in host memory.

    Moves bytes and no number. On the CPU both are the same memory, so nothing is won there.
    """

    parameters: Literal["stay", "host"] = "stay"
    """Shards of the policy and of a critic; they come back when the rollout has ended."""
    optimizer: Literal["stay", "host"] = "stay"
    """The optimizer's state and averages of the weights; they come back for the update."""


class ReferenceSyncConfig(Section):
    """How a reference follows the policy: it becomes mix * policy + (1 - mix) * reference (arXiv:2404.09656)."""

    every_steps: PositiveInt
    """Steps between two updates of the reference."""
    mix: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of the policy in the updated reference; 1 copies the policy."""


class ReferenceConfig(Section):
    """Where the reference policy lives: the model at start, frozen. Only a loss that compares with it needs one."""

    kind: Literal["auto", "none", "adapter_off", "sharded", "offloaded"] = "auto"
    """`adapter_off`: the policy itself with its LoRA adapters switched off, at no memory; `sharded`: like the policy;
    `offloaded`: in host memory, gathered unit by unit; `auto`: if the loss needs one, adapter_off where there are
    adapters and nothing else is trained, else sharded, or offloaded where a GPU has no room for its shards."""
    sync: ReferenceSyncConfig | None = None
    """Let the reference follow the policy; null: it stays the model that the run starts from."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a reference that cannot follow."""
        yield from super().mistakes()
        if self.sync is not None and self.kind in {"none", "adapter_off"}:
            why = {"none": "there is no reference", "adapter_off": "the reference is the policy's own frozen weights"}
            reason = f"{why[self.kind]} (reference: {self.kind})"
            yield "sync", f"{reason}, so nothing can follow; use sharded, or leave sync out"
