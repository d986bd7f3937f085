"""What to turn where a run does not fit: a closed list, the cheapest first, each tried by executing it.

None of these changes what a run computes beyond rounding: a turn that would, such as a shorter `data.max_length`, is
the user's to think of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.config.sections.optim import AdamW8bitConfig, AdamWConfig
from holdfast.config.sections.parallel import FullRecompute
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.config.verbs.training import TrainingConfig


@dataclass(frozen=True)
class Turn:
    """One key that takes less memory."""

    key: str
    value: str
    cost: str
    config: TrainingConfig
    """With it, and with those before."""


def turns(config: TrainingConfig, ranks: int) -> Iterator[Turn]:
    """Yield what can be turned, each on top of those before it."""
    for key, cost, change in _LIST:
        changed = change(config, ranks)
        if changed is not None:
            value, config = changed
            yield Turn(key, value, cost, config)


Change = Callable[[TrainingConfig, int], tuple[str, Any] | None]


def _fewer_tokens(config: TrainingConfig, _: int) -> tuple[str, TrainingConfig] | None:
    least = config.data.max_length * (2 if isinstance(config, DPOConfig) else 1)
    if config.data.tokens_per_micro_batch <= least:
        return None
    return str(least), _with(config, "data", tokens_per_micro_batch=least)


def _recompute(config: TrainingConfig, _: int) -> tuple[str, TrainingConfig] | None:
    if isinstance(config.parallel.recompute, FullRecompute):
        return None
    return "full", _with(config, "parallel", recompute=FullRecompute())


def _shard(config: TrainingConfig, ranks: int) -> tuple[str, TrainingConfig] | None:
    if config.parallel.replicate == 1 or ranks == 1:
        return None
    return "1", _with(config, "parallel", replicate=1, shard="auto")


def _small_states(config: TrainingConfig, _: int) -> tuple[str, TrainingConfig] | None:
    section = config.optim
    if not isinstance(section, AdamWConfig):
        return None
    shared = {
        name: getattr(section, name) for name in AdamW8bitConfig.model_fields if name in type(section).model_fields
    }
    made = AdamW8bitConfig(**{name: value for name, value in shared.items() if name != "kind"})
    return made.kind, config.model_copy(update={"optim": made})


def _offload(config: TrainingConfig, _: int) -> tuple[str, TrainingConfig] | None:
    if config.parallel.cpu_offload or config.optim.kind == "muon":
        return None
    return "true", _with(config, "parallel", cpu_offload=True)


def _with(config: TrainingConfig, section: str, **values: Any) -> TrainingConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


_LIST: tuple[tuple[str, str, Change], ...] = (
    ("data.tokens_per_micro_batch", "more and shorter passes", _fewer_tokens),
    ("parallel.recompute", "about a third more work", _recompute),
    ("parallel.replicate", "messages between more ranks", _shard),
    ("optim.kind", "its states are rounded; needs torchao", _small_states),
    ("parallel.cpu_offload", "states travel to the host in every update, where the optimizer runs", _offload),
)
