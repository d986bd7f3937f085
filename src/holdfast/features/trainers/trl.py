"""Verified saves and resumes for transformers' Trainer, and so for TRL's trainers.

    from holdfast.features.trainers.trl import protect
    protect(trainer)
    trainer.train(resume_from_checkpoint=True)

A callback alone cannot do this: `on_save` comes after older checkpoints were deleted. So methods of this one trainer
are replaced; its arguments, its retention, its logs and its model files stay its own. Weights, optimizer, schedule and
random state of checkpoint-N lie in checkpoint-N/holdfast, the progress in trainer_state.json as always.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState

from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.checkpoint.format.snapshot import RandomState, random_state, random_state_as_json, set_random_state
from holdfast.features.trainers.saves import UnsuitableTrainer, clear_leftovers, is_whole, save_again
from holdfast.parallel.collectives import RankGroup

OUTPUT_FOLDER = "holdfast"
"""Within checkpoint-N."""
_STEP = re.compile(r"^checkpoint-(\d+)$")
_PROGRESS = "trainer_state.json"


def protect(trainer: Trainer, *, rehearse: bool = True) -> Trainer:
    """Make a trainer save and resume by Holdfast.

    Args:
        trainer: A trainer of transformers or TRL, on one process, with DDP or under FSDP2. It is changed in place.
        rehearse: Whether a trial checkpoint is saved, verified, loaded and deleted before the first step. Default:
            True.

    Returns:
        The same trainer.

    Raises:
        UnsuitableTrainer: The trainer uses DeepSpeed or FSDP1, has `save_only_model` set, or has
            `load_best_model_at_end` set under FSDP. A `UserError`; nothing was changed.
    """
    if trainer.is_deepspeed_enabled:
        raise UnsuitableTrainer(
            "This trainer uses DeepSpeed, which keeps the state of its optimizer to itself. Use FSDP2."
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 2) == 1:
        raise UnsuitableTrainer(
            "This trainer uses FSDP1, whose modules keep parts of their state flat. Set fsdp_config: {version: 2}."
        )
    if trainer.args.save_only_model:
        raise UnsuitableTrainer(
            "This trainer saves weights alone (save_only_model), from which nothing can be resumed. Leave "
            "save_only_model out, or leave protect out."
        )
    if plugin is not None and trainer.args.load_best_model_at_end:
        raise UnsuitableTrainer(
            "This trainer is to load its best model after the last step (load_best_model_at_end), out of files of "
            "FSDP that are not written here: it would fail when all steps are done. Leave load_best_model_at_end out, "
            "and load checkpoint-N/holdfast of the best step with holdfast.checkpoint.load."
        )
    saves = _Saves(trainer, trainer.train)
    trainer.train = saves.train
    trainer._save_optimizer_and_scheduler = saves.save
    trainer._load_from_checkpoint = saves.load_model
    trainer._load_optimizer_and_scheduler = saves.load
    trainer._load_rng_state = saves.load_random_state
    if rehearse:
        trainer.add_callback(_Rehearsal(saves))
    return trainer


class _Rehearsal(TrainerCallback):  # type: ignore[misc]  # transformers is untyped at our border
    """Rehearses a save before the first step."""

    def __init__(self, saves: _Saves) -> None:
        self._saves = saves

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - its signature
        """Save, verify and load once."""
        self._saves.rehearse()


class _Saves:
    """The methods that replace those of a trainer."""

    def __init__(self, trainer: Trainer, train: Any) -> None:
        self._trainer, self._train = trainer, train
        self._own = {name: getattr(trainer, name) for name in ("_load_from_checkpoint", "_load_optimizer_and_scheduler",
                                                               "_load_rng_state")}  # fmt: skip
        self._random: RandomState | None = None

    @property
    def _optimizer(self) -> Any:
        optimizer = self._trainer.optimizer
        return getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it

    @property
    def _extra(self) -> dict[str, Any]:
        scheduler = self._trainer.lr_scheduler
        return {"scheduler": scheduler.state_dict(), "step": self._trainer.state.global_step}

    def rehearse(self) -> None:
        """Save, verify and load once.

        Raises:
            RehearsalFailed: A checkpoint could not be made; nothing was trained.
        """
        model = self._trainer.model
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise UnsuitableTrainer("This model is sharded by FSDP1. Set fsdp_config: {version: 2}.")
        checkpoint.rehearse(str(Path(self._trainer.args.output_dir)), model, self._optimizer, self._extra)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; `True` resumes from the newest whole checkpoint, and begins anew where none was ever finished.

        Raises:
            CheckpointCorrupt, NoCheckpoint: The checkpoint that was named is not whole, or none is; nothing changed.
            UnsuitableTrainer: The trainer's own newest checkpoint has no optimizer.
        """
        folder, ranks = Path(self._trainer.args.output_dir), RankGroup()
        if resume_from_checkpoint is True:
            resume_from_checkpoint, message = ranks.on_first_rank(lambda: newest_whole(folder))
            if ranks.rank == 0:
                print(message, flush=True)
        elif resume_from_checkpoint and (Path(resume_from_checkpoint) / OUTPUT_FOLDER).is_dir():
            path = str(Path(resume_from_checkpoint) / OUTPUT_FOLDER)
            ranks.on_first_rank(lambda: checkpoint.verify(path, "files"))
        return self._train(resume_from_checkpoint, *args, **kwargs)

    def save(self, output_dir: str) -> None:
        """Write weights, optimizer, schedule and random state of all ranks.

        Raises:
            SaveFailed: On all ranks; older checkpoints are untouched.
        """
        save_again(Path(output_dir) / OUTPUT_FOLDER, self._trainer.model, self._optimizer, self._extra)

    def load_model(self, path: str, model: Any = None) -> None:
        """Do nothing for a checkpoint of ours: `load` reads everything at once, when it was verified."""
        if not (Path(path) / OUTPUT_FOLDER).is_dir():
            self._own["_load_from_checkpoint"](path, model)

    def load(self, path: str | None) -> None:
        """Read weights, optimizer and schedule; nothing live is touched before everything was verified."""
        if path is None or not (Path(path) / OUTPUT_FOLDER).is_dir():
            self._own["_load_optimizer_and_scheduler"](path)
            return
        before = random_state()
        restored = checkpoint.load(
            str(Path(path) / OUTPUT_FOLDER), self._trainer.model, self._optimizer, hyperparameters="checkpoint"
        )
        self._trainer.lr_scheduler.load_state_dict(restored.extra["scheduler"])
        if restored.exact:
            self._random = random_state()
            set_random_state(random_state_as_json(before))  # the trainer asks for it at its first new batch

    def load_random_state(self, path: str | None) -> None:
        """Put random state back, where the trainer asks for it: behind the batches that it skips."""
        if self._random is None:
            self._own["_load_rng_state"](path if path is None or not (Path(path) / OUTPUT_FOLDER).is_dir() else None)
            return
        set_random_state(random_state_as_json(self._random))
        self._random = None


def newest_whole(folder: Path) -> tuple[str | None, str]:
    """Return the newest checkpoint-N of a directory that is whole, and words about it; None where none was finished.

    One that the trainer wrote without the plug-in is taken as the trainer itself would. What a killed save left
    is not whole and stays: a later save of the same step takes its place.

    Raises:
        CheckpointCorrupt: All that were finished are damaged; beginning anew would write over them.
        UnsuitableTrainer: The trainer's own checkpoint has no optimizer.
    """
    steps = {int(match[1]): entry for entry in folder.glob("checkpoint-*") if (match := _STEP.match(entry.name))}
    skipped: list[str] = []
    damaged: list[Path] = []
    for step, path in sorted(steps.items(), reverse=True):
        ours = path / OUTPUT_FOLDER
        clear_leftovers(path, ours.name)
        if _progress(path) != step:
            skipped.append(f"{path.name}, which was never finished")
            continue
        if not ours.is_dir():
            return str(path), _words(f"resuming from {_own_whole(path)}, which the trainer itself wrote", skipped)
        if is_whole(ours):
            return str(path), _words(f"resuming from {path}", skipped)
        skipped.append(f"{path.name}, which is damaged")
        damaged.append(ours)
    if damaged:
        raise CheckpointCorrupt(
            f"No checkpoint in {folder} is whole: {'; '.join(skipped)}. Beginning anew would write over them, so "
            f"nothing was begun. `holdfast checkpoint verify {damaged[0]}` names what is damaged; move them away to "
            "begin anew."
        )
    return None, _words(f"nothing in {folder} to resume from: beginning at step 0", skipped)


def _words(sentence: str, skipped: list[str]) -> str:
    return f"{sentence} (skipped: {'; '.join(skipped)})" if skipped else sentence


def _own_whole(path: Path) -> Path:
    """Return a checkpoint of the trainer itself, which wrote its progress last.

    Raises:
        UnsuitableTrainer: It has no optimizer.
    """
    if not any(path.glob("optimizer*")):
        raise UnsuitableTrainer(
            f"{path} was saved without an optimizer (save_only_model), and is newer than every whole checkpoint: "
            "nothing can be resumed from it, and beginning anew would write over it. Name another checkpoint in "
            "resume_from_checkpoint, or another output_dir."
        )
    return path


def _progress(folder: Path) -> int | None:
    try:
        return int(TrainerState.load_from_json(str(folder / _PROGRESS)).global_step)
    except (OSError, ValueError, TypeError, KeyError):
        return None
