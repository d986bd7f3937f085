"""What the routers of a mixture of experts say in a forward pass, and the loss that keeps their loads even.

Hooks on the router modules hand over logits and choices while a forward pass is watched, and never else: a block that
is recomputed in the backward pass runs its router again, and must not count twice. The loss is transformers' (Switch
Transformers, arXiv:2101.03961, eq. 4-6), which takes the tokens of all layers together:

    E sum_e f_e P_e     f_e = choices of expert e / n     P_e = sum of its probabilities / n     n = layers x tokens

f has no gradient. The kinds differ in the tokens that the means are taken over: each sequence's own, weighted as the
main loss weighs it, so that parts add up over any split; or those of one forward pass, as in transformers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.config.sections.model import AutoRouterLoss, NoRouterLoss, RouterLossConfig
from holdfast.data.batches.packing import places
from holdfast.errors import ModelError
from holdfast.models.layers.exchange import RowExchange
from holdfast.types import Batch


@dataclass(frozen=True)
class RouterLoss:
    """Which router loss, and how much of it."""

    kind: Literal["sequence", "batch"]
    coefficient: float


class RouterOutput(NamedTuple):
    """Output of one router for T tokens."""

    logits: Tensor
    """[T, E]"""
    experts: Tensor | None
    """[T, k] int64, the experts it chose; None where it does not tell"""


class Routers:
    """The routers of a model, in the order they run.

    Args:
        model: A transformers model; hooks stay on it.
    """

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        self.name = str(config.model_type)
        self.top_k = int(getattr(config.get_text_config(), "num_experts_per_tok", None) or 1)
        self._outputs: list[RouterOutput] | None = None
        self._experts: list[Tensor] | None = None
        routers = routers_of(model)
        self.layers = len(routers)
        for router, index in routers:
            router.register_forward_hook(self._hook(index))

    def _hook(self, index: int) -> Any:
        # A closure, so that a model copied with its hooks reports nowhere else.
        def report(_: nn.Module, __: object, output: Any) -> None:
            if self._outputs is not None:
                self._outputs.append(_router_output(output, index))
            if self._experts is not None:
                self._experts.append(_expert_numbers(_router_output(output, index), self.name))

        return report

    @contextmanager
    def watched(self) -> Iterator[list[RouterOutput]]:
        """Collect what the routers say inside the block, one entry per layer."""
        outputs: list[RouterOutput] = []
        self._outputs = outputs
        try:
            yield outputs
        finally:
            self._outputs = None

    @contextmanager
    def choices(self) -> Iterator[list[Tensor]]:
        """Collect [T, k] int16 of each router that runs inside the block: the experts its tokens met, by index + 1."""
        experts: list[Tensor] = []
        self._experts = experts
        try:
            yield experts
        finally:
            self._experts = None

    def unused(self, name: str, shape: Sequence[int]) -> float:
        """Return how many elements of a parameter a token does not meet: those of experts it is not sent to.

        Adapters of a stack are multiplied out for all experts, whatever tokens are sent where.
        """
        if ".experts." not in name or ".lora_" in name or len(shape) < 2 or re.search(r"\.experts\.\d", name):
            return 0.0
        return prod(shape) * max(0.0, 1 - self.top_k / shape[0])

    def tally(self, outputs: Sequence[RouterOutput], batch: Batch) -> Tally:
        """Add up what was seen, sequence by sequence; padding belongs to none, and only a batch's span is seen.

        Raises:
            ModelError: The routers did not see the batch's tokens one by one.
        """
        positions, owner = _members(batch)
        start, end = batch.span or (0, batch.tokens.numel())
        if batch.span is not None:
            inside = (positions >= start) & (positions < end)
            positions, owner = positions[inside] - start, owner[inside]
        experts = {routed.logits.shape[-1] for routed in outputs}
        rows = {routed.logits.shape[:-1].numel() for routed in outputs}
        if len(experts) != 1 or rows != {end - start}:
            raise ModelError(
                f"The routers of {self.name} told of {sorted(rows)} tokens and {sorted(experts)} experts, where one "
                f"number of experts and {end - start} tokens were expected. Set model.router_loss: off."
            )
        wide = torch.float64 if outputs[0].logits.dtype == torch.float64 else torch.float32
        shape = (len(batch.sample_ids), experts.pop())
        probabilities, choices = (torch.zeros(shape, dtype=wide, device=owner.device) for _ in range(2))
        loads = []
        for routed in outputs:
            logits = routed.logits.reshape(-1, shape[1])
            share = logits.to(wide).softmax(-1)
            likely = _marks(share.detach().topk(self.top_k, -1).indices, share)
            taken = likely if routed.experts is None else _marks(routed.experts, share)
            probabilities = probabilities.index_add(0, owner, share.index_select(0, positions))
            choices.index_add_(0, owner, likely.index_select(0, positions))
            loads.append(taken.index_select(0, positions).sum(0, dtype=torch.float64))
        tokens = torch.zeros(shape[0], dtype=wide, device=owner.device).index_add_(
            0, owner, torch.ones_like(owner, dtype=wide)
        )
        return Tally(probabilities, choices, tokens * len(outputs), torch.stack(loads))


class Tally(NamedTuple):
    """Sums over the layers and tokens of each of S sequences."""

    probabilities: Tensor
    """[S, E] differentiable"""
    choices: Tensor
    """[S, E] how often an expert was among the most probable"""
    rows: Tensor
    """[S] layers x tokens"""
    loads: Tensor
    """[layers, E] float64, how many tokens were sent to each expert"""

    def of_row(self, batch: Batch, exchange: RowExchange | None) -> Tally:
        """Return what the loss reads, added over the ranks that share the batch's row; `loads` stay this rank's."""
        if batch.span is None:
            return self
        assert exchange is not None
        probabilities, choices, rows = map(exchange.add, (self.probabilities, self.choices, self.rows))
        return self._replace(probabilities=probabilities, choices=choices, rows=rows)

    def loss(self, kind: str, batch: Batch) -> Tensor:
        """Return the router loss summed with the sequences' counts, so that it is averaged like the main loss.

        Args:
            kind: As in `RouterLoss`.
            batch: What was tallied.
        """
        experts = self.probabilities.shape[1]
        if kind == "batch":
            rows = self.rows.sum().clamp(min=1.0)
            return experts * batch.count * ((self.choices.sum(0) / rows) * (self.probabilities.sum(0) / rows)).sum()
        rows = self.rows[:, None]
        of_sequence = experts * ((self.choices / rows) * (self.probabilities / rows)).sum(-1)
        return (of_sequence * torch.tensor(batch.counts, dtype=of_sequence.dtype, device=of_sequence.device)).sum()


def routers_of(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Return the modules that transformers records router logits of, and the place of the logits in their output."""
    routers: dict[int, tuple[nn.Module, int]] = {}
    for owner in model.modules():
        recorded = (getattr(type(owner), "_can_record_outputs", None) or {}).get("router_logits", ())
        for recorder in recorded if isinstance(recorded, list | tuple) else [recorded]:
            for module in owner.modules():
                if isinstance(module, recorder.target_class):
                    routers.setdefault(id(module), (module, recorder.index))
    return list(routers.values())


def choose_router_loss(section: RouterLossConfig, model: nn.Module) -> tuple[RouterLoss | None, str]:
    """Return the router loss a model is trained with, None for none, and a note for the user.

    Raises:
        ModelError: One is asked for, and the model has no routers, no loss of its own, or no coefficient.
    """
    config: Any = model.config
    name, routed = str(config.model_type), bool(routers_of(model))
    has_loss = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
    coefficient = getattr(config.get_text_config(), "router_aux_loss_coef", None) or 0.0
    if isinstance(section, NoRouterLoss):
        return None, ""
    if isinstance(section, AutoRouterLoss):
        if not routed:
            return None, ""
        if has_loss and coefficient > 0:
            return RouterLoss("sequence", coefficient), f"router loss: per sequence, coefficient {coefficient:g}"
        return None, f"router loss: off, since {'its coefficient is 0' if has_loss else f'{name} has none'}"
    setting = f"model.router_loss: {section.kind}"
    if not routed:
        raise ModelError(f"{setting}, but {name} is no mixture of experts: it has no routers to balance. Leave it out.")
    if not has_loss:
        raise ModelError(
            f"{setting}, but transformers has no router loss for {name}, so there is none to agree with. Its routers "
            "are balanced otherwise, if at all. Use router_loss: off."
        )
    coefficient = coefficient if section.coefficient is None else section.coefficient
    if coefficient <= 0:
        raise ModelError(
            f"{setting}, but the configuration of {name} has router_aux_loss_coef 0, which leaves the loss without "
            "effect. Set model.router_loss.coefficient, to 0.001 for example, or use router_loss: off."
        )
    return RouterLoss(section.kind, coefficient), f"router loss: {section.kind}, coefficient {coefficient:g}"


def _router_output(output: Any, index: int) -> RouterOutput:
    outputs = output if isinstance(output, tuple) else (output,)
    logits = outputs[index]
    experts = [
        tensor
        for tensor in outputs
        if isinstance(tensor, Tensor) and tensor.dtype == torch.int64 and tensor.shape[:-1] == logits.shape[:-1]
    ]
    return RouterOutput(logits, experts[0] if experts else None)


def _expert_numbers(routed: RouterOutput, name: str) -> Tensor:
    if routed.experts is None:
        raise ModelError(f"A router of {name} does not say which experts it chose.")
    return (routed.experts + 1).to(torch.int16)


def _marks(experts: Tensor, like: Tensor) -> Tensor:
    """Return [T, E], 1 where an expert was chosen."""
    return torch.zeros_like(like, requires_grad=False).scatter_(1, experts.reshape(like.shape[0], -1), 1.0)


def _members(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return [M] flat positions and [M] whose they are; a head that sequences share stands there once for each."""
    width = batch.tokens.shape[1]
    flat = np.arange(batch.tokens.numel()).reshape(-1, width)
    spans = [flat[row, columns] for row, columns in places(batch)]
    owner = np.repeat(np.arange(len(spans)), [span.size for span in spans])
    positions = np.concatenate(spans) if spans else np.zeros(0, np.int64)
    device = batch.tokens.device
    return tuple(torch.from_numpy(indices).to(device, non_blocking=True) for indices in (positions, owner))  # type: ignore[return-value]
