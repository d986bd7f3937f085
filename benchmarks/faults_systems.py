"""Ways to save and load, behind one face, for faults.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

WIDTH, LAYERS = 256, 4


def ranks_environment(rank: int, port: int, size: int = 2) -> dict[str, str]:
    """Return what torchrun would set."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "faults",
        "GROUP_RANK": "0",
    }


def network(change: str) -> nn.Sequential:
    """Return a few layers; `change` drops one, adds one, widens the last, casts or freezes."""
    count = LAYERS + {"dropped": -1, "added": 1}.get(change, 0)
    widths = [WIDTH] * (count - 1) + [WIDTH + 2 * (change == "shape")]
    model = nn.Sequential(*(nn.Linear(WIDTH, width) for width in widths))
    if change == "dtype":
        model.to(torch.bfloat16)
    if change == "frozen":
        model[0].requires_grad_(False)
    return model


def optimizer_of(model: nn.Module, change: str) -> torch.optim.Optimizer:
    """Return AdamW over what is trained, or SGD where the optimizer is what changes."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = torch.optim.SGD if change == "optimizer" else torch.optim.AdamW
    return kind(trained, lr=0.1)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part."""
    return getattr(tensor, "_local_tensor", tensor)


class System:
    """DCP as torch's tutorial shows it: get_state_dict, dcp.save into a directory, dcp.load, set_state_dict."""

    distribution: ClassVar[str] = "torch"
    data_pattern: ClassVar[str] = "*.distcp"
    without: ClassVar[frozenset[str]] = frozenset()
    """Changes that mean nothing to it."""
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @staticmethod
    def preload() -> None:
        """Import what forked ranks need."""
        import torch.distributed.checkpoint
        import torch.distributed.checkpoint.state_dict
        import torch.distributed.fsdp

        assert torch.distributed.fsdp

    def join(self) -> None:
        """Join the other rank."""
        from datetime import timedelta

        dist.init_process_group("gloo", timeout=timedelta(seconds=15))

    def build(self, change: str = "") -> None:
        """Make model and optimizer, with state as after a step."""
        self.join()
        self.model = self.sharded(network(change))
        self.optimizer = optimizer_of(self.model, change)
        self.warm_up(change)

    def warm_up(self, change: str) -> None:
        """Make the optimizer's state by a step, or only gradients, as in a loop that loads late."""
        if change == "gradients":
            self.loss().backward()
        else:
            self.one_step()

    def sharded(self, model: nn.Sequential) -> nn.Module:
        """Return the model on its ranks."""
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    def loss(self) -> torch.Tensor:
        """Return a loss of fixed inputs."""
        inputs = torch.ones(2, WIDTH, dtype=next(self.model.parameters()).dtype)
        return self.model(inputs).float().square().mean()

    def one_step(self) -> None:
        """Make the optimizer's state."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        """Return this rank's parameters and moments."""
        state = [
            values[key]
            for values in self.optimizer.state.values()
            for key in ("exp_avg", "exp_avg_sq")
            if key in values
        ]
        return [local(tensor.detach()) for tensor in [*self.model.parameters(), *state]]

    def fill(self, value: float) -> None:
        """Give every element one value."""
        for tensor in self.tensors():
            tensor.fill_(value)

    def values(self) -> list[float]:
        """Return the distinct values over all tensors of this rank, and -1 for an optimizer without its state."""
        parts = [tensor.double().flatten() for tensor in self.tensors() if tensor.numel()]
        found = {float(value) for part in parts for value in part.unique()}
        return sorted(found | set(self.absent()), key=repr)

    def absent(self) -> list[float]:
        """Return -1 for each trained parameter that has no moments."""
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [-1.0 for parameter in trained if "exp_avg" not in self.optimizer.state.get(parameter, {})]

    def barrier(self) -> None:
        """Wait for the other rank."""
        dist.barrier()

    def gather(self, word: str) -> list[str]:
        """Return both ranks' words."""
        words = [word] * dist.get_world_size()
        dist.all_gather_object(words, word)
        return words

    def save(self, place: str, *, step: int, own: Any = None) -> None:  # noqa: ARG002 - others save by step
        """Save into one directory, as a loop that keeps one checkpoint does."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optim": optimizer, **({"own": own} if own else {})}, checkpoint_id=place)

    def load(self, place: str, *, own: bool = False) -> Any:
        """Load from it; return what this rank saved of its own."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optim": optimizer, **({"own": {"position": 0}} if own else {})}
        dcp.load(state, checkpoint_id=place)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        return state.get("own")

    def data_files(self, place: str) -> list[Path]:
        """Return the files that hold tensors."""
        return sorted(Path(place).rglob(self.data_pattern))

    def pickles(self, place: str) -> list[Path]:
        """Return the files that are pickles."""
        return sorted(Path(place).rglob(".metadata"))

    def index_files(self, place: str) -> list[Path]:
        """Return the files that say which tensor is where."""
        names = {".metadata", "model.safetensors.index.json", "manifest.json"}
        return sorted(path for path in Path(place).rglob("*") if path.name in names)

    def trains_alike(self, place: str) -> bool:
        """Return whether a save before the first step leaves training bit for bit as it is."""
        found = []
        self.join()
        for saving in (False, True):
            torch.manual_seed(0)
            self.model = self.sharded(network(""))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
            if saving:
                self.save(place, step=0)
            for _ in range(2):
                self.one_step()
            found.append([tensor.clone() for tensor in self.tensors()])
        return all(torch.equal(one, two) for one, two in zip(*found, strict=True))


class Holdfast(System):
    """Ours: a directory for each step; a load takes the newest verified one."""

    distribution = "holdfast"
    data_pattern = "*.safetensors"

    @staticmethod
    def preload() -> None:
        """Import what forked ranks need."""
        System.preload()
        __import__("holdfast.checkpoint.keep.choose")

    def save(self, place: str, *, step: int, own: Any = None) -> None:
        """Save a step."""
        from holdfast import checkpoint

        checkpoint.save(f"{place}/step-{step:08d}", self.model, self.optimizer, extra=own, timeout_minutes=0.25)

    def load(self, place: str, *, own: bool = False) -> Any:
        """Load the newest verified step."""
        from holdfast import checkpoint
        from holdfast.checkpoint.format.verification import verified_manifest
        from holdfast.checkpoint.keep.choose import newest_verified
        from holdfast.checkpoint.place.storage import open_storage
        from holdfast.errors import RankFailed
        from holdfast.parallel.joint_calls import joint_call

        with joint_call("checkpoint.load", 0.25, RankFailed) as (ranks, _):
            storage, use = open_storage(place), lambda name, _: verified_manifest(storage, name, ranks)
            choice = newest_verified(storage, ranks, quarantine=False, use=use)
        assert choice is not None, "there is no checkpoint"
        restored = checkpoint.load(f"{place}/{choice.name}", self.model, self.optimizer, timeout_minutes=0.25)
        return restored.extra if own else None


class Accelerate(System):
    """accelerate's save_state and load_state of a data-parallel model, as its Trainer-like loops use them."""

    distribution = "accelerate"
    accelerator: Any

    @staticmethod
    def preload() -> None:
        """Import what forked ranks need."""
        __import__("accelerate")

    def join(self) -> None:
        """Let accelerate join."""
        from accelerate import Accelerator

        os.environ |= {"ACCELERATE_USE_CPU": "true"}
        self.accelerator = Accelerator(cpu=True)

    def build(self, change: str = "") -> None:
        """Make and prepare."""
        self.join()
        model = network(change)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer_of(model, change))
        self.warm_up(change)

    def sharded(self, model: nn.Sequential) -> nn.Module:
        """Return the model on its ranks."""
        return self.accelerator.prepare(model)  # type: ignore[no-any-return]

    def save(self, place: str, *, step: int, own: Any = None) -> None:  # noqa: ARG002 - as above
        """Save into one directory."""
        if own is not None:
            raise NotImplementedError
        self.accelerator.save_state(place)

    def load(self, place: str, *, own: bool = False) -> Any:  # noqa: ARG002 - as above
        """Load from it."""
        self.accelerator.load_state(place)

    def data_files(self, place: str) -> list[Path]:
        """Return the files that hold tensors."""
        return [path for path in sorted(Path(place).iterdir()) if path.name in {"model.safetensors", "optimizer.bin"}]

    def pickles(self, place: str) -> list[Path]:
        """Return the files that are pickles."""
        return sorted([*Path(place).glob("random_states_*.pkl"), *Path(place).glob("optimizer.bin")])


class Transformers(System):
    """save_pretrained in shards and from_pretrained: weights only, rank 0 writes, every rank reads."""

    distribution = "transformers"
    data_pattern = "*.safetensors"
    without = frozenset({"frozen", "gradients", "optimizer", "own"})

    @staticmethod
    def preload() -> None:
        """Import what forked ranks need."""
        from transformers import LlamaConfig, LlamaForCausalLM

        assert LlamaConfig
        assert LlamaForCausalLM

    def build(self, change: str = "") -> None:
        """Make a tiny Llama."""
        from transformers import LlamaConfig, LlamaForCausalLM

        self.join()
        self.change = change
        layers = 2 + {"dropped": -1, "added": 1}.get(change, 0)
        inner = 64 + 2 * (change == "shape")
        self.config = LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=2
        )
        self.model = LlamaForCausalLM(self.config)
        if change == "dtype":
            self.model.bfloat16()

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters; there is no optimizer in it."""
        return [parameter.detach() for parameter in self.model.parameters()]

    def absent(self) -> list[float]:
        """Return nothing: weights alone."""
        return []

    def save(self, place: str, *, step: int, own: Any = None) -> None:  # noqa: ARG002 - as above
        """Save into one directory."""
        if own is not None:
            raise NotImplementedError
        if self.rank == 0:
            self.model.save_pretrained(place, max_shard_size="60KB")  # type: ignore[operator]
        dist.barrier()

    def load(self, place: str, *, own: bool = False) -> Any:  # noqa: ARG002 - as above
        """Load into a model of this configuration."""
        dtype = torch.bfloat16 if self.change == "dtype" else torch.float32
        self.model = type(self.model).from_pretrained(place, config=self.config, dtype=dtype)  # type: ignore[attr-defined]

    def pickles(self, place: str) -> list[Path]:  # noqa: ARG002 - as above
        """Return none."""
        return []

    def trains_alike(self, place: str) -> bool:
        """Say that there is nothing to compare: weights alone."""
        raise NotImplementedError(place)


class Lightning(System):
    """Fabric's sharded save and load with ModelParallelStrategy, which is DCP and a pickle of the rest."""

    distribution = "lightning-fabric"
    fabric: Any

    @staticmethod
    def preload() -> None:
        """Import what forked ranks need."""
        System.preload()
        __import__("lightning_fabric.strategies")

    def join(self) -> None:
        """Let Fabric join."""
        from lightning_fabric import Fabric
        from lightning_fabric.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(
            parallelize_fn=lambda model, _: System.sharded(self, model),
            data_parallel_size=int(os.environ["WORLD_SIZE"]),
            tensor_parallel_size=1,
        )
        self.fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
        self.fabric.launch()

    def build(self, change: str = "") -> None:
        """Make and set up."""
        self.join()
        self.model = self.fabric.setup_module(network(change))
        self.optimizer = self.fabric.setup_optimizers(optimizer_of(self.model, change))
        self.warm_up(change)

    def sharded(self, model: nn.Sequential) -> nn.Module:
        """Return the model on its ranks."""
        return self.fabric.setup_module(model)  # type: ignore[no-any-return]

    def save(self, place: str, *, step: int, own: Any = None) -> None:
        """Save a step into a directory of its own: Fabric refuses one that is not empty."""
        state = {"model": self.model, "optimizer": self.optimizer, **({"own": own} if own else {})}
        self.fabric.save(f"{place}/step-{step}", state)

    def load(self, place: str, *, own: bool = False) -> Any:
        """Load the newest step."""
        newest = max(Path(place).iterdir(), key=lambda path: path.name)
        state = {"model": self.model, "optimizer": self.optimizer, **({"own": {}} if own else {})}
        self.fabric.load(str(newest), state)
        return state.get("own")

    def pickles(self, place: str) -> list[Path]:
        """Return the files that are pickles."""
        return sorted([*Path(place).rglob(".metadata"), *Path(place).rglob("meta.pt")])


SYSTEMS: dict[str, type[System]] = {
    "holdfast": Holdfast,
    "DCP": System,
    "accelerate": Accelerate,
    "transformers": Transformers,
    "lightning-fabric": Lightning,
}
