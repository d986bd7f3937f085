"""Read weights files once for their mark: on rank 0, which tells the others."""

from __future__ import annotations

from pathlib import Path

from holdfast.config.dpo import DPOConfig
from holdfast.config.grpo import GRPOConfig
from holdfast.config.runs import TrainingConfig
from holdfast.models.origin import files_mark, locate, same_files, tell_mark
from holdfast.parallel.collectives import ProcessExchange
from holdfast.training.identity import Identity
from holdfast.training.reward_files import reward_models
from holdfast.training.together import first_rank_first, together


def mark_once(directory: Path | None, exchange: ProcessExchange) -> None:
    """Have `files_mark` answer at once on every rank; all ranks call this together."""
    if directory is None:
        return
    first = exchange.rank == 0
    with exchange.together():
        mark = files_mark(directory) if first else ""
    mark = exchange.agree(mark)
    if not first:
        tell_mark(directory, mark)


def mark_base_of_adapters(config: TrainingConfig, base: Path, exchange: ProcessExchange) -> None:
    """Mark the weights that adapters of a file will be laid beside, before every rank compares their marks.

    Raises:
        ModelError: There is no such model.
    """
    section = config.model
    if section.path is None or section.lora is None or section.lora.path is None or section.lora.any_base:
        return
    name = section.path
    mark_once(first_rank_first(exchange, lambda: locate(name, section, base, weights=True)), exchange)


def mark_reward_models(config: TrainingConfig, base: Path, exchange: ProcessExchange) -> None:
    """Mark the models that score; all ranks call this together."""
    for directory in together(exchange, lambda: reward_models(config, base)).values():
        mark_once(directory, exchange)


def is_marked(config: TrainingConfig) -> bool:
    """Return whether checkpoints or exports of a run keep the mark of the weights it began with."""
    compares = isinstance(config, DPOConfig) or (isinstance(config, GRPOConfig) and config.kl.coefficient > 0)
    return config.model.lora is not None or config.checkpoint.frozen == "skip" or compares


def with_marks_of_now(then: Identity, now: Identity) -> Identity:
    """Return a checkpoint's identity with marks of an earlier version written as new ones, where they fit those."""
    return {
        kind: {
            what: now[kind][what] if what in now.get(kind, {}) and same_files(value, now[kind][what]) else value
            for what, value in values.items()
        }
        for kind, values in then.items()
    }
