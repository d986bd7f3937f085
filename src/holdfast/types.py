"""The values that flow between layers.

Shapes: B rows of a micro-batch, T positions of a row, A position axes (1 for text, 3 or 4 for multi-axis rotary
embeddings), L tokens of one sequence, N scored tokens of a micro-batch.

One index rule: position t speaks of token t. `predictor_index` says which position's hidden state predicts it; only
packing writes it, and everything else gathers by it.

Numbers of a device come to the host within a step by `host_value` and `HostCopy` alone. Reading one makes the host wait
until the device has done all that was queued before it, so a step has few, and each says what it is for. Where tensors
hold no numbers (`holdfast plan`, the lane of fake devices), whoever executes the step answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.cuda import Event


@dataclass(frozen=True)
class Example:
    """One sequence to train on."""

    sample_id: int
    """Global sample index: the same sample has the same id for every number of ranks."""
    prompt_id: int
    """Sequences that share it count as one prompt in `prompt_mean`; sequences cut from one row share the row's."""
    tokens: NDArray[np.int64]
    """[L]"""
    loss_mask: NDArray[np.bool_]
    """[L], True where the token is trained; never True for the first token, which nothing predicts."""
    source: str = ""
    """Name of the data source, for metrics."""
    per_token: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """[L, ...] each; carried by pack, split and unpack without knowing what they mean."""
    model_inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Inputs only the model understands, such as image patches; a micro-batch joins them along dimension 0."""
    positions: NDArray[np.int64] | None = None
    """[A, L] position of each token on each axis of the rotary embedding; None where all are 0, 1, 2, ..."""

    @property
    def trained_tokens(self) -> int:
        """Number of tokens the loss counts."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class PromptImages:
    """The images of a prompt before the model's processor has read them, for servers that have a processor."""

    tokens: NDArray[np.int64]
    """[P] of the prompt as the processor reads it: its own mark for each image"""
    sources: tuple[Any, ...]
    """What the row has of each, in their order: a path, the bytes of a file, or a PIL image."""
    digests: tuple[str, ...]
    """Of the pixels of each; "" for a video."""


@dataclass(frozen=True)
class Prompt:
    """What a policy is asked to continue."""

    prompt_id: int
    """Global draw of its row: the same prompt of the same step has the same id for every number of ranks."""
    tokens: NDArray[np.int64]
    """[L]"""
    text: str
    """The tokens as text, special tokens included; an image is its one placeholder there."""
    row: Mapping[str, Any]
    """Every column of its row, for rewards."""
    source: str = ""
    """Name of the data source, for metrics."""
    model_inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Same meaning as `Example.model_inputs`; all completions of the prompt share them."""
    positions: NDArray[np.int64] | None = None
    """[A, L], same meaning as `Example.positions`."""
    images: PromptImages | None = None
    """None where it has none."""

    @property
    def trained_tokens(self) -> int:
        """Return 0: a prompt is not trained."""
        return 0


class Finish(Enum):
    """The reason why a completion ended."""

    STOP = "stop"
    """A stop token or stop string."""
    LENGTH = "length"
    """The completion reached the largest allowed length and was cut there."""
    ABORT = "abort"
    """The caller cancelled the request."""
    ERROR = "error"
    """The engine failed while it sampled."""


@dataclass(frozen=True)
class EpisodeSummary:
    """What several turns in an environment came to."""

    messages: tuple[Mapping[str, Any], ...]
    """The whole conversation, its prompt included."""
    prompt_messages: int
    """Of these, those that the episode began with."""
    turns: int
    ended: str
    """By what: done, turns, room, seconds, cut, failed_calls, fault."""
    reward: float
    """The environment's, summed."""
    turn_rewards: tuple[float, ...]
    """The same by turn."""
    turn_lengths: tuple[int, ...]
    """Tokens that the policy chose in each turn."""
    called: Mapping[str, int]
    """Calls by tool."""
    failed_calls: int
    cut_turns: int
    """Turns that were cut at their length."""
    waited_seconds: float
    """For the environment."""
    info: Mapping[str, float]
    """What the environment told beside."""
    fault: str = ""
    """Of an environment that failed, a clause."""
    samples: tuple[tuple[int, int], ...] = ()
    """(tokens, those that the policy chose) of each sequence that it is trained as; empty: it is one."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of what the policy may call."""


@dataclass(frozen=True)
class Trajectory:
    """One completion of a prompt, from sampling to training. L counts prompt and completion."""

    prompt_id: int
    sample_id: int
    """Global: prompt_id * 2^20 + place in the group."""
    seed: int
    """Seed of its sampling: with the same logits, the same seed gives the same tokens in any batch."""
    temperature: float
    tokens: NDArray[np.int64]
    """[L], as the engine returned them; they are never decoded and encoded again"""
    loss_mask: NDArray[np.bool_]
    """[L], True where the policy chose the token"""
    sampler_logprobs: NDArray[np.float32]
    """[L], log-probabilities that the engine reported, at the temperature used; 0 where the policy did not choose"""
    weights_versions: NDArray[np.int32]
    """[L], version of the weights that chose the token; -1 where the policy did not choose"""
    finish: Finish
    completion: str = ""
    """The chosen tokens as text, special tokens left out."""
    reward: float | None = None
    """Weighted sum of the rewards, from which advantages are computed; None if the completion could not be scored."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """Unweighted values by name of the reward, and by name of each component that a reward reports."""
    advantages: NDArray[np.floating[Any]] | None = None
    """[L]; None before they are known"""
    per_token: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """[L, ...] each; carried by pack, split and unpack without knowing what they mean."""
    model_inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    episode: EpisodeSummary | None = None
    """Of several turns; None of one answer."""

    @property
    def completion_length(self) -> int:
        """Number of tokens the policy chose."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class Group:
    """All completions of one prompt in one step."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True)
class Batch:
    """One micro-batch: what a single forward pass sees."""

    tokens: Tensor
    """[B, T] int64"""
    position_ids: Tensor
    """[A, B, T] int64, restarting at 0 with every sequence"""
    sequence_ids: Tensor
    """[B, T] int64, index into `sample_ids`; -1 on padding"""
    predictor_index: Tensor
    """[B, T] int64, position in the same row whose hidden state predicts this token; -1 where none does"""
    loss_mask: Tensor
    """[B, T] bool: the tokens the policy chose. Not the same thing as `weights`."""
    weights: Tensor
    """[B, T] float: how the loss of a token enters the average; see docs/developers/averages.md"""
    scored: Tensor
    """[N] int64, flat positions (row * T + t) of the tokens in `loss_mask`, ascending"""
    lengths: tuple[tuple[int, ...], ...]
    """Per row, the lengths of its documents from left to right; padding is a document of its own at the end."""
    branches: tuple[tuple[int, ...], ...]
    """Per document of a packed row, the lengths of its branches, or empty where it is a single sequence. The sequences
    of a branched document share its first P tokens, the head: a head of P tokens and branches of 3 and 2 tokens make
    one document of P + 5 tokens. Each branch attends to the head and to itself."""
    sample_ids: tuple[int, ...]
    """Sample id of each sequence, in the order of `sequence_ids`."""
    prompt_ids: tuple[int, ...]
    sources: tuple[str, ...]
    counts: tuple[float, ...]
    """What each sequence adds to the denominator of the loss, in the order of `sequence_ids`."""
    count: float
    """What this rank adds to the denominator: the sum of `counts`, or 0 on all ranks of a context group but the
    first."""
    per_token: Mapping[str, Tensor] = field(default_factory=dict)
    """[B, T, ...] each"""
    model_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Joined along dimension 0, in the order of the sequences."""
    model_input_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By input, how many of its rows belong to each sequence; where sequences share a head, the first one owns the rows
    of all. If no row belongs to a sequence, the inputs are placeholders: another rank has real ones, and all ranks must
    run the same FSDP units. Nothing may depend on the values of placeholders."""
    span: tuple[int, int] | None = None
    """Under context parallelism, start and end of the positions whose hidden states this rank computes; the ranks of a
    context group have the same batch but for it. None: all positions."""
    scored_in_span: Tensor | None = None
    """[n] int64, indices into `scored` of the tokens whose predictor lies in `span`"""

    @property
    def stands_in(self) -> bool:
        """Whether the model inputs are placeholders that belong to no sequence."""
        return bool(self.model_inputs) and not any(any(rows) for rows in self.model_input_rows.values())

    @property
    def is_padded(self) -> bool:
        """Whether each row holds one sequence followed by padding."""
        return self.tokens.shape[0] > 1


@dataclass(frozen=True)
class MiniBatch:
    """The samples of one optimizer update, as the micro-batches of this rank."""

    micro_batches: tuple[Batch, ...]
    """As many on every rank; idle ones hold a single untrained token."""
    count: float
    """Sum of counts over all ranks and micro-batches: the one denominator of the loss."""
    samples: int
    """Sequences over all ranks."""
    tokens: int
    """Tokens over all ranks, padding not counted."""
    trained_tokens: int
    """Trained tokens over all ranks."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the data pipeline counted over all ranks, such as truncated rows, dropped rows and the fill of packs."""


class Scores(NamedTuple):
    """The scores of the scored tokens in a forward pass. A named tuple, so that FSDP2 sees the tensors in it."""

    values: Tensor
    """[N] a number for each scored token, float32 or float64: of a policy its log-probability, of a reward model the
    score of the text, of a critic its value"""
    accuracy: Tensor
    """[N] float32, 1/n of a token among n whose logits are all the largest, 0 of any other: what a fair draw among the
    most probable tokens would score"""
    entropy: Tensor | None
    """[N] entropy in nats of the distribution each scored token stands in; None unless asked for"""

    @property
    def logprobs(self) -> Tensor:
        """Return the values of a policy: [N] log-probabilities."""
        return self.values


class LossSum(NamedTuple):
    """A loss as a sum, never divided: `sum(token loss * weight)` of one micro-batch on one rank."""

    loss: Tensor
    """[] differentiable"""
    scores: Scores
    """Detached."""
    sums: dict[str, Tensor]
    """Detached metrics as [2] tensors: total and denominator."""
    router_loads: Tensor | None = None
    """[layers, experts] how many tokens each router sent to each expert; None without experts."""


@dataclass(frozen=True)
class StepEvent:
    """An optimizer update, as observers receive it on rank 0."""

    step: int
    """Number of updates done, this one included."""
    epoch: float
    """Number of passes over the rows so far."""
    metrics: Mapping[str, float]
    """Metrics of the update by name, as in metrics.jsonl."""


HostValues = Callable[["Tensor", str], "NDArray[Any]"]
"""(a tensor without numbers, what its numbers are for) -> numbers of its shape"""

_host_values: list[HostValues] = []


def host_value(tensor: Tensor, reason: str) -> NDArray[Any]:
    """Return a tensor's numbers; on a GPU this waits for the device.

    Args:
        tensor: Of a dtype that NumPy has.
        reason: What the host needs the numbers for, a few words that name the place: plans list them.
    """
    if _host_values:
        return _host_values[-1](tensor, reason)
    # A copy on the CPU too: torch never again resizes a storage that NumPy has seen, and what rests in host memory is.
    values: NDArray[Any] = tensor.detach().to("cpu", copy=True).numpy()
    return values


class HostCopy:
    """The numbers of a tensor that the host reads later; a GPU copies them while host and device go on.

    Args:
        tensor: As that of `host_value`; nobody writes into it any more.
        reason: As that of `host_value`.
    """

    def __init__(self, tensor: Tensor, reason: str) -> None:
        self._reason, self._tensor = reason, tensor.detach()
        self._arrived: Event | None = None
        self._values: NDArray[Any] | None = None
        if tensor.is_cuda and not _host_values:
            from torch import empty_like  # configurations are read without torch
            from torch.cuda import current_stream

            # Memory of its own, into which no later copy writes. From unpinned memory `copy_` would wait.
            self._tensor = empty_like(self._tensor, device="cpu", pin_memory=True)
            self._tensor.copy_(tensor.detach(), non_blocking=True)
            self._arrived = current_stream(tensor.device).record_event()

    @property
    def is_read(self) -> bool:
        """Whether the host has the numbers."""
        return self._values is not None

    def read(self) -> NDArray[Any]:
        """Return the numbers; on a GPU this waits until the device has come to the copy."""
        if self._values is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._values = host_value(self._tensor, self._reason)
        return self._values


@contextmanager
def host_values_from(source: HostValues) -> Iterator[None]:
    """Let `source` supply the numbers of `host_value` within the block, for tensors that hold none."""
    _host_values.append(source)
    try:
        yield
    finally:
        _host_values.pop()
