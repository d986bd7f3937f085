"""Lightning: strategies that save and resume through Holdfast, under the names of those that they replace.

    from holdfast.integrations.lightning import ModelParallelStrategy
    trainer = Trainer(strategy=ModelParallelStrategy(), callbacks=[ModelCheckpoint(...)])

ModelCheckpoint decides when and where, as before; a checkpoint is a directory of Holdfast's. With save_weights_only it has
no optimizer, and a resume that needs one is refused before anything is touched. Random state is saved too, which
Lightning does not do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import strategies
from lightning.pytorch.trainer.states import TrainerFn

from holdfast import checkpoint
from holdfast.integrations.saves import UnsuitableTrainer, save_again
from holdfast.parallel.collectives import RankGroup

_APART = ("state_dict", "optimizer_states")


class ModelParallelStrategy(strategies.ModelParallelStrategy):  # type: ignore[misc]  # Lightning is untyped at our border
    """FSDP2, with saves that are verified."""

    def __init__(self, *others: Any, rehearse: bool = True, **named: Any) -> None:
        """Take the arguments of Lightning's own strategy.

        Args:
            others, named: Its own.
            rehearse: Save, verify and load once before the first step, and leave nothing behind.
        """
        super().__init__(*others, **named)
        self._rehearse = rehearse

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Gather nothing: `save_checkpoint` looks at the live tensors."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Gather nothing, as above."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, whole or not at all; `last` and the like take the place of what had their name.

        Raises:
            SaveFailed: On all ranks; what had the name still has it.
        """
        _save(self, checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; nothing live is touched before everything was verified.

        Raises:
            CheckpointMismatch: It was saved with save_weights_only, and a fit needs an optimizer's state.
        """
        return _load(self, checkpoint_path)

    def setup(self, trainer: Any) -> None:
        """Set up, then rehearse a save."""
        super().setup(trainer)
        if self._rehearse and trainer.state.fn == TrainerFn.FITTING and self.optimizers:
            rehearse(self, Path(trainer.default_root_dir))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint; `save_top_k` asks for it when a better one is on the disk."""
        super().remove_checkpoint(filepath)


def rehearse(strategy: Any, folder: Path) -> None:
    """Save, verify and load once.

    Raises:
        RehearsalFailed: A checkpoint could not be made; nothing was trained.
    """
    place = strategy.broadcast(str(folder / ".holdfast-rehearsal"))
    checkpoint.rehearse(place, strategy.model, _optimizer(strategy), {"weights_only": False})
    RankGroup().on_first_rank(lambda: Path(place).rmdir() if Path(place).is_dir() else None)


def _optimizer(strategy: Any) -> Any:
    if len(strategy.optimizers) != 1:
        raise UnsuitableTrainer(
            f"This module has {len(strategy.optimizers)} optimizers, and one is saved. Give configure_optimizers one, with a "
            "param group for each part."
        )
    return getattr(strategy.optimizers[0], "_optimizer", strategy.optimizers[0])


def _save(strategy: Any, content: dict[str, Any], filepath: Any) -> None:
    path = Path(strategy.broadcast(filepath))
    whole = "optimizer_states" in content  # save_weights_only leaves it out
    extra = {key: value for key, value in content.items() if key not in _APART} | {"weights_only": not whole}
    save_again(path, strategy.model, _optimizer(strategy) if whole else None, strategy.broadcast(extra))
    strategy.barrier()


def _load(strategy: Any, checkpoint_path: Any) -> dict[str, Any]:
    path = strategy.broadcast(str(checkpoint_path))
    fitting = strategy.lightning_module.trainer.state.fn == TrainerFn.FITTING and strategy.optimizers
    restored = checkpoint.load(
        path, strategy.model, _optimizer(strategy) if fitting else None, hyperparameters="checkpoint"
    )
    content: dict[str, Any] = dict(restored.extra)
    # The connector looks for the key, and restores nothing from an empty list: the state is where it belongs already.
    return content if content.pop("weights_only") else content | {"optimizer_states": []}
