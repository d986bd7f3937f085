"""Two checks for any script: whether a reference model is sharded, and whether activation checkpointing is exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class CheckResult:
    """The result of a check; it is true if the check found no problem."""

    well: bool
    """Whether the check found no problem."""
    message: str
    """The cause, and what to do."""

    def __bool__(self) -> bool:
        """Return whether all is well."""
        return self.well

    def __str__(self) -> str:
        """Return the message."""
        return self.message


def reference_is_sharded(model: nn.Module) -> CheckResult:
    """Check that a reference model is sharded, layer by layer, and frozen.

    accelerate's `prepare_model(evaluation_mode=True)` leaves FSDP out without a word: every rank then holds all of the
    model, on the CPU.

    Args:
        model: The reference model, under FSDP1 or FSDP2.

    Returns:
        A result that is true if the model is sharded and frozen.
    """
    parameters = dict(model.named_parameters())
    if not parameters:
        return CheckResult(False, "the model has no parameters")
    flat = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    local = [name for name, value in parameters.items() if not isinstance(value, DTensor)]
    if local and not flat:
        device = parameters[local[0]].device
        return CheckResult(
            False,
            f"{len(local)} of {len(parameters)} parameters are whole on every rank, on {device}, such as {local[0]}: "
            "the model was not sharded, as with accelerate's prepare_model(evaluation_mode=True). Call fully_shard on "
            "its layers and on itself, or TRL's prepare_fsdp.",
        )
    units = [
        name for name, module in model.named_modules() if isinstance(module, FSDPModule | FullyShardedDataParallel)
    ]
    if len(units) < 2 and len(list(model.modules())) > 3:
        return CheckResult(
            False,
            "only the root is sharded, so that a forward pass gathers the whole model on every rank. Call fully_shard "
            "on each layer first.",
        )
    trained = [name for name, value in parameters.items() if value.requires_grad]
    if trained:
        return CheckResult(
            False, f"{len(trained)} parameters would be trained, such as {trained[0]}: call requires_grad_(False)"
        )
    return CheckResult(True, f"sharded in {len(units)} units, and frozen")


def recomputation_is_exact(model: nn.Module, batch: Mapping[str, Any]) -> CheckResult:
    """Check that activation checkpointing changes no gradient: the backward pass recomputes the forward pass.

    Nothing in the model changes: its earlier gradients are restored. Every rank calls this function, with its own
    batch. If the backward pass of a sharded model fails, FSDP stays in the middle of it: mend the cause and build the
    model anew.

    Args:
        model: The model as it is trained, with activation checkpointing on; its output has a `loss`.
        batch: Keyword arguments of the model's forward pass, labels among them.

    Returns:
        A result that is true if gradients agree within 1e-5 of their norm.
    """
    before = {name: value.grad for name, value in model.named_parameters()}
    state = torch.get_rng_state()
    try:
        with_it = _gradients(model, batch, state)
        if isinstance(with_it, Exception):
            return CheckResult(False, _cause(model, with_it))
        with _without_recomputation(model):
            without = _gradients(model, batch, state)
        if isinstance(without, Exception):
            return CheckResult(False, f"the model fails without activation checkpointing too: {without}")
        return _compared(model, with_it, without)
    finally:
        torch.set_rng_state(state)
        for name, value in model.named_parameters():
            value.grad = before[name]


def _gradients(model: nn.Module, batch: Mapping[str, Any], state: Tensor) -> dict[str, Tensor] | Exception:
    torch.set_rng_state(state)
    for value in model.parameters():
        value.grad = None
    try:
        model(**batch).loss.backward()
    except Exception as error:  # noqa: BLE001 - torch says what went wrong in several classes
        return error
    return {name: value.grad.detach().clone() for name, value in model.named_parameters() if value.grad is not None}


@contextmanager
def _without_recomputation(model: nn.Module) -> Iterator[None]:
    """Let every layer keep what it computes, whether torch's wrappers or transformers' own layers recompute."""
    wrappers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    functions = [module.checkpoint_fn for module in wrappers]
    try:
        for module in wrappers:
            module.checkpoint_fn = partial(_called_once)
        for layer in layers:
            layer.gradient_checkpointing = False  # type: ignore[assignment]
        yield
    finally:
        for module, function in zip(wrappers, functions, strict=True):
            module.checkpoint_fn = function
        for layer in layers:
            layer.gradient_checkpointing = True  # type: ignore[assignment]


def _called_once(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **{key: value for key, value in kwargs.items() if key not in _OF_CHECKPOINT})


_OF_CHECKPOINT = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}
"""Arguments of torch's `checkpoint` itself."""


def _cause(model: nn.Module, error: Exception) -> str:
    """Return why a recomputation failed."""
    text = " ".join(str(error).split())[:160]
    if _caches(model) and ("different metadata" in text or "must match the size" in text or "must match" in text):
        return (
            "the recomputation appends keys and values to the cache a second time, so that they are twice as long "
            f"({text}). Set model.config.use_cache = False. use_reentrant=True hides the error and makes gradients "
            "wrong."
        )
    return f"the backward pass fails: {type(error).__name__}: {text}"


def _caches(model: nn.Module) -> bool:
    configs = [getattr(module, "config", None) for module in model.modules()]
    return any(getattr(config, "use_cache", False) for config in configs)


def _compared(model: nn.Module, with_it: Mapping[str, Tensor], without: Mapping[str, Tensor]) -> CheckResult:
    if missing := sorted(set(without) - set(with_it)):
        return CheckResult(
            False, f"{missing[0]} gets no gradient with activation checkpointing, and does without: {_advice(model)}"
        )
    wrong = [name for name, gradient in without.items() if not _close(with_it[name], gradient)]
    if not wrong:
        text = f"the gradients of {len(without)} parameters are the same with and without recomputation"
        return CheckResult(True, text)
    zero = [name for name in wrong if not _local(with_it[name]).any() and _local(without[name]).any()]
    names = ", ".join((zero or wrong)[:2])
    finding = f"are zero with it ({names})" if zero else f"differ ({names})"
    return CheckResult(False, f"the gradients of {len(wrong)} of {len(without)} parameters {finding}: {_advice(model)}")


def _advice(model: nn.Module) -> str:
    if _caches(model):
        return (
            "the layers write into a cache of keys and values, which the recomputation writes again. Set "
            "model.config.use_cache = False, and use_reentrant=False."
        )
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        return (
            "the routers' loss is taken from a pass without gradients, as use_reentrant=True makes it. Set "
            "use_reentrant=False."
        )
    return "dropout drew other numbers (preserve_rng_state=False), or a layer keeps something between its calls."


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _close(gradient: Tensor, expected: Tensor) -> bool:
    gradient, expected = _local(gradient).double(), _local(expected).double()
    return float((gradient - expected).norm()) <= 1e-5 * float(expected.norm()) + 1e-12
