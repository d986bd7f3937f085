"""Strategies for Lightning that save and resume through Holdfast; each has the name of the strategy that it replaces.

    from holdfast.features.trainers.lightning import ModelParallelStrategy
    trainer = Trainer(strategy=ModelParallelStrategy(), callbacks=[ModelCheckpoint(...)])

ModelCheckpoint decides when and where, as before; a checkpoint is a directory of Holdfast's. With save_weights_only it
has no optimizer, and a resume that needs one is refused before anything is touched. Random state is saved too, which
Lightning does not do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import strategies
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.optim import Optimizer

from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointMismatch
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.features.trainers.saves import UnsuitableTrainer, save_again
from holdfast.optim.state_template import twin_of
from holdfast.parallel.collectives import RankGroup

_APART = ("state_dict", "optimizer_states")
_WRAPPER = "_fsdp_wrapped_module."


class _CheckpointMixin:
    """The methods of Lightning's strategies that both strategies here override."""

    _rehearse = True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Gather nothing: `save_checkpoint` looks at the live tensors."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:  # noqa: ARG002 - Lightning's own signature
        """Gather nothing: `save_checkpoint` reads the live optimizer."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:  # noqa: ARG002
        """Write a checkpoint, whole or not at all; `last` and the like take the place of what had their name.

        Raises:
            SaveFailed: On all ranks; what had the name still has it.
        """
        _save(self, checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Read a checkpoint; nothing live is touched before everything was verified.

        Raises:
            CheckpointMismatch: It was saved with save_weights_only, and a fit needs an optimizer's state.
        """
        return _load(self, checkpoint_path)

    def on_train_start(self) -> None:
        """Rehearse a save of all that will be saved, when everything is set up or resumed and no step was made.

        Raises:
            RehearsalFailed: A checkpoint could not be made; nothing was trained.
        """
        super().on_train_start()  # type: ignore[misc]  # of Lightning's strategy beside this
        if self._rehearse:
            _rehearse(self)


class ModelParallelStrategy(_CheckpointMixin, strategies.ModelParallelStrategy):  # type: ignore[misc]  # Lightning is untyped here
    """FSDP2, with saves that are verified."""

    def __init__(self, *args: Any, rehearse: bool = True, **kwargs: Any) -> None:
        """Take the arguments of Lightning's own strategy.

        Args:
            args, kwargs: Its own.
            rehearse: Save, verify and load once before the first step, and leave nothing behind.
        """
        super().__init__(*args, **kwargs)
        self._rehearse = rehearse


class FSDPStrategy(_CheckpointMixin, strategies.FSDPStrategy):  # type: ignore[misc]  # as above
    """FSDP1, with saves that are verified."""

    def __init__(self, *args: Any, rehearse: bool = True, **kwargs: Any) -> None:
        """Take the arguments of Lightning's own strategy, and `rehearse` as `ModelParallelStrategy` does."""
        super().__init__(*args, **kwargs)
        self._rehearse = rehearse

    def setup_environment(self) -> None:
        """Join the other ranks, and give FSDP1 the mesh without which its shards cannot be saved by name."""
        super().setup_environment()
        if self.kwargs.get("device_mesh") is None:
            mesh = init_device_mesh(self.root_device.type, (self.world_size,), mesh_dim_names=("shard",))
            self.kwargs["device_mesh"] = mesh


def _optimizer(strategy: Any) -> Optimizer:
    if len(strategy.optimizers) != 1:
        raise UnsuitableTrainer(
            f"This module has {len(strategy.optimizers)} optimizers, and one is saved. Give configure_optimizers one, "
            "with a param group for each part."
        )
    optimizer: Optimizer = getattr(strategy.optimizers[0], "_optimizer", strategy.optimizers[0])
    return optimizer


def _parts(model: nn.Module, optimizer: Optimizer | None) -> _StandIn:
    """Return what is saved: the live model and optimizer, or what stands for them where FSDP1 has them."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return _stand_in(model, optimizer)
    return _StandIn(model, optimizer, {})


def _rehearse(strategy: Any) -> None:
    trainer = strategy.lightning_module.trainer
    path = strategy.broadcast(str(Path(trainer.default_root_dir) / ".holdfast-rehearsal"))
    extra = _extra(strategy, trainer._checkpoint_connector.dump_checkpoint(weights_only=False))
    stand_in = _parts(strategy.model, _optimizer(strategy))
    checkpoint.rehearse(path, stand_in.model, stand_in.optimizer, extra)
    RankGroup().on_first_rank(lambda: Path(path).rmdir() if Path(path).is_dir() else None)


def _extra(strategy: Any, content: dict[str, Any]) -> Any:
    """Return what Lightning saves besides weights and optimizer, which is rank 0's."""
    has_optimizer = "optimizer_states" in content  # save_weights_only leaves it out
    extra = {key: value for key, value in content.items() if key not in _APART} | {"weights_only": not has_optimizer}
    return strategy.broadcast(extra)


def _save(strategy: Any, content: dict[str, Any], filepath: Any) -> None:
    extra = _extra(strategy, content)
    stand_in = _parts(strategy.model, None if extra["weights_only"] else _optimizer(strategy))
    save_again(Path(strategy.broadcast(filepath)), stand_in.model, stand_in.optimizer, extra)
    strategy.barrier()


def _load(strategy: Any, checkpoint_path: Any) -> dict[str, Any]:
    path = strategy.broadcast(str(checkpoint_path))
    fitting = strategy.lightning_module.trainer.state.fn == TrainerFn.FITTING and strategy.optimizers
    optimizer = _optimizer(strategy) if fitting else None
    manifest: Manifest = RankGroup().on_first_rank(lambda: checkpoint.verify(path, "names"))
    if fitting and "optimizer" not in manifest.contents:
        raise CheckpointMismatch(
            f"{path} was saved with save_weights_only, and going on needs the state of an optimizer. Nothing was "
            "changed. To begin anew from its weights, leave ckpt_path out and call holdfast.checkpoint.load(path, "
            "module) at the end of configure_model."
        )
    stand_in = _parts(strategy.model, optimizer)
    restored = checkpoint.load(path, stand_in.model, stand_in.optimizer, hyperparameters="checkpoint")
    if stand_in.names:
        _hand_back(strategy.model, optimizer, stand_in)
    content: dict[str, Any] = dict(restored.extra)
    # The connector looks for the key, and restores nothing from an empty list: the state is where it belongs already.
    return content if content.pop("weights_only") else content | {"optimizer_states": []}


# FSDP1 keeps parameters in flat ones of its own; its sharded state is by name. It is laid into empty modules of the
# same names, with an optimizer of the same class over them, and after a load it is handed back to FSDP1.


@dataclass(frozen=True)
class _StandIn:
    """A model and its optimizer with the interface that Holdfast's snapshots expect."""

    model: nn.Module
    optimizer: Optimizer | None
    names: dict[str, Tensor]
    """The tensors of the model's state."""


def _stand_in(model: nn.Module, optimizer: Optimizer | None) -> _StandIn:
    """Return modules with the shards of a model, and an optimizer with those of its state; all ranks call this.

    Raises:
        UnsuitableTrainer: FSDP1 was given no mesh, without which its shards are of a class that cannot be saved.
    """
    trained = {name.replace(_WRAPPER, "") for name, value in model.named_parameters() if value.requires_grad}
    frozen = {name.replace(_WRAPPER, "") for name, value in model.named_parameters() if not value.requires_grad}
    with _sharded(model):
        state: dict[str, Tensor] = model.state_dict()
        optimizer_state = None if optimizer is None else FullyShardedDataParallel.optim_state_dict(model, optimizer)
    odd = [name for name, value in state.items() if type(value).__name__ == "ShardedTensor"]
    if odd:
        raise UnsuitableTrainer(
            f"FSDP1 gives {odd[0]} as a ShardedTensor, since it was made without a mesh. Give it device_mesh, or use "
            "FSDP2."
        )
    root = nn.Module()
    parameters: dict[str, nn.Parameter] = {}
    for name, value in state.items():
        *path, last = name.split(".")
        module = root
        for layer in path:
            if layer not in module._modules:  # noqa: SLF001 - names of layers may be those of methods
                module.add_module(layer, nn.Module())
            module = module._modules[layer]  # type: ignore[assignment]  # noqa: SLF001 - as above
        if name in trained | frozen:
            parameters[name] = nn.Parameter(value, requires_grad=name in trained)
            module.register_parameter(last, parameters[name])
        else:
            module.register_buffer(last, value)
    return _StandIn(
        root, None if optimizer is None else _laid_optimizer(optimizer, optimizer_state or {}, parameters), state
    )


def _laid_optimizer(optimizer: Optimizer, state: dict[str, Any], parameters: dict[str, nn.Parameter]) -> Optimizer:
    groups = [
        {**group, "params": [parameters[name] for name in saved["params"] if parameters[name].requires_grad]}
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)
    ]
    twin = twin_of(optimizer, groups)
    for name, slots in state["state"].items():
        if slots:
            twin.state[parameters[name]] = dict(slots)
    return twin


def _hand_back(model: nn.Module, optimizer: Optimizer | None, loaded: _StandIn) -> None:
    """Give FSDP1 what was loaded; all ranks call this together."""
    names = {id(value): name for name, value in loaded.model.named_parameters()}
    with _sharded(model):
        model.load_state_dict(loaded.model.state_dict())
        if optimizer is None or loaded.optimizer is None:
            return
        groups = [
            {**group, "params": [names[id(value)] for value in group["params"]]}
            for group in loaded.optimizer.param_groups
        ]
        state = {names[id(value)]: dict(slots) for value, slots in loaded.optimizer.state.items()}
        flat = FullyShardedDataParallel.optim_state_dict_to_load(
            model, optimizer, {"state": state, "param_groups": groups}
        )
    optimizer.load_state_dict(flat)


@contextmanager
def _sharded(model: nn.Module) -> Iterator[None]:
    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    ):
        yield
