"""How the fixtures were written: by each system's own code, on CPU ranks over gloo, in an environment that has it.

    torchrun --nproc-per-node 2 tests/features/rescue/recipes.py verl-fsdp2 OUT          (tools/test_rescue.sh runs all)

Each writes its checkpoint of step 2 into OUT, and beside it truth.pt: the weights, the state of the optimizer by name
and the losses of steps 3 and 4 after the system's own resume, of fixed batches. EasyR1 has no wheel: its fixtures were
written once with a clone of commit b44b311 by the same steps, and are not written again.

Shims, for hosts that refuse FSDP on a CPU: accelerate is told that it has several processes of FSDP; FSDP1 is given the
CPU as its device; verl's `ray` is an empty module.
"""

from __future__ import annotations

import copy
import importlib.abc
import importlib.machinery
import json
import os
import shutil
import sys
import types
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SIZES = {
    "vocab_size": 19,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "use_cache": False,
}
LAYER = {"moe": "Qwen3MoeDecoderLayer"} | dict.fromkeys(("full", "frozen", "tied", "lora"), "Qwen2DecoderLayer")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4}
FULL = StateDictOptions(full_state_dict=True)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 19, (2, 7), generator=torch.Generator().manual_seed(100 * step + rank))


def model_of(form: str = "full") -> Any:
    """Return a small model: full, frozen (its first layer), tied, lora (peft's own, around it) or moe."""
    torch.manual_seed(0)
    model: Any
    if form == "moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=form == "tied"))
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * torch.randn_like(value))
    if form == "frozen":
        model.model.layers[0].requires_grad_(False)
    if form == "lora":
        model = adapted(model)
    return model


def adapted(model: Any) -> Any:
    """Lay peft's adapters around a model; none of them is zero."""
    from peft import LoraConfig, get_peft_model

    wrapped: Any = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, value in wrapped.named_parameters():
            if "lora_B" in name:
                value.add_(0.1 * torch.randn_like(value))
    return wrapped


def layers_of(model: Any) -> Any:
    """Return the layers, whatever stands around the model."""
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).model.layers


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [value for value in model.parameters() if value.requires_grad]


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(trained_parameters(model), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def take(step: int, model: Any, *optimizers: Any) -> float:
    """Make a step; return the loss, averaged over ranks."""
    ids = batch(step, dist.get_rank())
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    for each in optimizers:
        each.step()
    for each in optimizers:
        if hasattr(each, "zero_grad"):
            each.zero_grad()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def full(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return weights and optimizer state by name, gathered by torch from live FSDP2 tensors."""
    state = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
    return copy.deepcopy(
        {"model": get_model_state_dict(model, options=FULL), "optim": {k: v for k, v in state.items() if v}}
    )


def by_shards(model: Any, optimizer: Any) -> dict[str, Any]:
    """The same of FSDP1: from its sharded state, since its full gather returns one moment for the other on a CPU."""
    from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

    config = ShardedStateDictConfig(), ShardedOptimStateDictConfig(offload_to_cpu=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *config):
        weights, state = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]

    def whole(value: Any) -> Any:
        if type(value).__name__ == "ShardedTensor":
            target = torch.empty(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
            value.gather(0, target)
            return target if target is not None else torch.zeros(())
        return value.full_tensor() if hasattr(value, "full_tensor") else value

    moments = {name: {key: whole(value) for key, value in slots.items()} for name, slots in state.items() if slots}
    return copy.deepcopy({"model": {name: whole(value) for name, value in weights.items()}, "optim": moments})


def finish(out: Path, truth: dict[str, Any], losses: list[float]) -> None:
    if dist.get_rank() == 0:
        torch.save({**truth, "next": losses}, out / "truth.pt")
        print("wrote", out, losses, flush=True)
    dist.barrier()
    os._exit(0)


def plain_dcp(out: Path, form: str = "full", *, flat: bool = False) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def build() -> tuple[Any, Any]:
        model = sharded(model_of(form))
        return model, optimizer_of(model)

    model, optimizer = build()
    for step in range(2):
        take(step, model, optimizer)
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optim": state, "step": 2}, checkpoint_id=str(out / "checkpoint"))
    truth = full(model, optimizer)
    model, optimizer = build()
    weights, state = get_state_dict(model, optimizer, options=options)
    content = {"model": weights, "optim": state}
    dcp.load(content, checkpoint_id=str(out / "checkpoint"))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    finish(out, truth, [take(step, model, optimizer) for step in (2, 3)])


class _Ray(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An empty `ray`, which verl imports and this does not use."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_ray = name.split(".", maxsplit=1)[0] == "ray"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ray else None

    def create_module(self, spec: Any) -> Any:
        from unittest.mock import MagicMock

        class Empty(types.ModuleType):
            def __getattr__(self, key: str) -> Any:
                if key.startswith("__"):
                    raise AttributeError(key)
                return MagicMock()

        module: Any = Empty(spec.name)
        module.__path__, module.__version__ = [], "2.50.0"
        return module

    def exec_module(self, module: Any) -> None:
        pass


def verl(out: Path, kind: str, form: str = "frozen") -> None:
    """verl's own checkpoint manager, wrapping and schedule; its engine is left out.

    kind: fsdp2, fsdp2-bf16 (weights and states), fsdp2-poison (after its own offloading), fsdp1-flat, fsdp1-orig,
    fsdp1-nomesh.
    """
    sys.meta_path.insert(0, _Ray())
    from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy, offload_fsdp_optimizer
    from verl.utils.torch_functional import get_constant_schedule_with_warmup

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))

    def build() -> tuple[Any, Any, Any]:
        model: Any = model_of(form).to(torch.bfloat16 if kind == "fsdp2-bf16" else torch.float32)
        if kind.startswith("fsdp2"):
            apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, {})
        else:
            policy = get_fsdp_wrap_policy(model)
            named = {} if kind == "fsdp1-nomesh" else {"device_mesh": mesh}
            model = FullyShardedDataParallel(
                model,
                auto_wrap_policy=policy,
                device_id=torch.device("cpu"),
                use_orig_params=kind != "fsdp1-flat",
                **named,
            )
            FullyShardedDataParallel.set_state_dict_type(
                model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
            )
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1
        )  # verl does not filter
        return model, optimizer, get_constant_schedule_with_warmup(optimizer, num_warmup_steps=3)

    model, optimizer, schedule = build()
    for step in range(2):
        take(step, model, optimizer, schedule)
    truth = full(model, optimizer) if kind.startswith("fsdp2") else by_shards(model, optimizer)
    if kind == "fsdp2-poison":
        offload_fsdp_optimizer(optimizer)
    place = str(out / "checkpoint" / "global_step_2" / "actor")
    FSDPCheckpointManager(model, optimizer, schedule, processing_class=None).save_checkpoint(place, global_step=2)
    if dist.get_rank() == 0:
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(list(range(40)), batch_size=4, shuffle=True)
        rows = iter(loader)
        next(rows), next(rows)
        torch.save(loader.state_dict(), Path(place).parent / "data.pt")
        (out / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("2")
    dist.barrier()
    if kind not in {"fsdp2-poison"}:
        model, optimizer, schedule = build()
        FSDPCheckpointManager(model, optimizer, schedule, processing_class=None).load_checkpoint(place)
    finish(out, truth, [take(step, model, optimizer, schedule) for step in (2, 3)])


def accelerate(out: Path, version: int, way: str, form: str = "frozen") -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        state_dict_type=way,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=[LAYER[form]],
        use_orig_params=True if version == 1 else None,
    )
    accelerator = Accelerator(cpu=True)
    shared = AcceleratorState._shared_state
    shared["distributed_type"] = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    shared["fsdp_plugin"] = plugin
    shared["device"] = PartialState._shared_state["device"] = torch.device("cpu")

    def build() -> tuple[Any, Any, Any]:
        model = model_of(form)
        optimizer = optimizer_of(model)
        return accelerator.prepare(
            model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))
        )

    model, optimizer, schedule = build()
    for step in range(2):
        take(step, model, optimizer, schedule)
    accelerator.save_state(str(out / "checkpoint"))
    truth = full(model, optimizer.optimizer) if version == 2 else by_shards(model, optimizer.optimizer)
    if version == 1:  # its own resume leaves the optimizer without a state, and says nothing: compare with no resume
        finish(out, truth, [take(step, model, optimizer, schedule) for step in (2, 3)])
    for each in (accelerator._models, accelerator._optimizers, accelerator._schedulers):
        each.clear()
    model, optimizer, schedule = build()
    accelerator.load_state(str(out / "checkpoint"))
    finish(out, truth, [take(step, model, optimizer, schedule) for step in (2, 3)])


def trainer(out: Path, way: str, form: str = "full", *, trl: bool = False) -> None:
    """transformers' Trainer, or TRL's SFTTrainer around it."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState
    from transformers import Trainer, TrainerCallback, TrainingArguments

    kind: Any = Trainer
    settings: Any = TrainingArguments
    if trl:
        from trl import SFTConfig, SFTTrainer

        kind, settings = SFTTrainer, SFTConfig

    first = AcceleratorState.__init__

    def on_cpu(self: Any, *given: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        first(self, *given, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = on_cpu  # type: ignore[method-assign]
    truth: dict[str, Any] = {}

    class Watch(TrainerCallback):
        def on_step_end(
            self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
        ) -> None:
            if state.global_step == 2 and not truth:
                truth.update(full(model, optimizer.optimizer))

    rows = [{"input_ids": batch(row, 0)[0].tolist(), "labels": batch(row, 0)[0].tolist()} for row in range(32)]

    class Seeing(kind):  # type: ignore[misc]
        """Remembers what each step saw."""

        def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
            loss = super().compute_loss(model, inputs, *given, **named)
            ids = inputs["input_ids"]
            own = model(input_ids=ids, labels=ids).loss.detach()  # it divides its own by all tokens of the ranks
            self.seen = [*getattr(self, "seen", []), (ids.clone(), float(own))]
            return loss

    def build(steps: int, schedule: str) -> Any:
        arguments = settings(
            output_dir=str(out / "run"),
            max_steps=steps,
            save_steps=2,
            max_grad_norm=0.0,
            per_device_train_batch_size=2,
            use_cpu=True,
            learning_rate=1e-2,
            report_to=[],
            disable_tqdm=True,
            lr_scheduler_type=schedule,
            fsdp=True,
            fsdp_config={
                "version": 2,
                "state_dict_type": way,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_layer_cls_to_wrap": [LAYER[form]],
            },
        )
        named = {"train_dataset": rows}
        if trl:
            from datasets import Dataset

            from holdfast.data.tasks.synthetic import character_tokenizer

            named = {"train_dataset": Dataset.from_list(rows), "processing_class": character_tokenizer()}
        return Seeing(model=model_of(form), args=arguments, callbacks=[Watch()], **named)

    build(2, "constant").train()
    if dist.get_rank() == 0:
        (out / "run" / "checkpoint-2").rename(out / "checkpoint-2")
        (out / "checkpoint-2" / "training_args.bin").unlink(missing_ok=True)
        shutil.rmtree(out / "run")
    dist.barrier()
    again = build(4, "constant")
    again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, again.seen)
    truth["batches"] = [torch.cat([share[step][0] for share in shares]) for step in (0, 1)]
    shutil.rmtree(out / "run", ignore_errors=True)
    finish(out, truth, [sum(share[step][1] for share in shares) / len(shares) for step in (0, 1)])


def lightning(out: Path, kind: str, way: str, form: str = "full", *, weights: bool = False) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

    first = FullyShardedDataParallel.__init__

    def on_cpu(self: Any, *given: Any, device_id: Any = None, **named: Any) -> None:
        first(self, *given, device_id=torch.device("cpu") if device_id is None else device_id, **named)

    FullyShardedDataParallel.__init__ = on_cpu  # type: ignore[method-assign]
    truth: dict[str, Any] = {}

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = None
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if self.model is None:
                model = model_of(form)
                self.model = sharded(model) if kind == "mp" else model

        def training_step(self, rows: Any, index: int) -> Any:
            ids = batch(self.global_step, self.global_rank)
            loss = self.model(input_ids=ids, labels=ids).loss
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            self.losses.append(float(mean) / dist.get_world_size())
            return loss

        def on_train_epoch_end(self) -> None:
            if self.global_step == 2 and not truth:
                optimizer = self.trainer.strategy.optimizers[0]
                if kind == "mp":
                    truth.update(full(self.model, optimizer))
                else:
                    gathered = by_shards(self.trainer.strategy.model, optimizer)
                    plain = {
                        key: {name.removeprefix("model."): value for name, value in part.items()}
                        for key, part in gathered.items()
                    }
                    truth.update(plain)

        def configure_optimizers(self) -> Any:
            return optimizer_of(self)

    class OnCpu(FSDPStrategy):
        """The check for a GPU asks for the class itself."""

    layer = type(layers_of(model_of(form))[0])
    ranks = dist.get_world_size()
    loader = torch.utils.data.DataLoader(torch.zeros(ranks, 1), batch_size=1)

    def fit(steps: int, resume: Path | None) -> Module:
        strategy = (
            ModelParallelStrategy(ranks, 1, save_distributed_checkpoint=way == "sharded")
            if kind == "mp"
            else OnCpu(state_dict_type=way, auto_wrap_policy={layer})
        )
        saves = ModelCheckpoint(dirpath=out, filename="checkpoint", every_n_train_steps=2, save_weights_only=weights)
        module = Module()
        pl.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=strategy,
            max_epochs=steps,
            callbacks=[saves] if resume is None else [],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=resume is None,
        ).fit(module, loader, ckpt_path=None if resume is None else str(resume))
        return module

    fit(2, None)
    losses = [] if weights else fit(4, out / "checkpoint.ckpt").losses
    finish(out, truth, losses)


def titan(out: Path, form: str = "full") -> None:
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

    class Progress:
        step = 0

        def state_dict(self) -> dict[str, Any]:
            return {"step": torch.tensor(self.step, dtype=torch.int32)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.step = state["step"].item()

    class Rows(torch.utils.data.IterableDataset):
        at = 0

        def __iter__(self) -> Any:
            while True:
                self.at += 1
                yield batch(self.at, dist.get_rank())

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]

    def build() -> tuple[Any, Any, Any, Any, Any]:
        model = sharded(model_of(form))
        settings = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
        group = ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs=settings)
        optimizers = OptimizersContainer(
            OptimizersContainer.Config(implementation="for-loop", param_groups=[group]), model_parts=[model]
        )
        schedules = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=1000)
        progress = Progress()
        manager = CheckpointManager(
            CheckpointManager.Config(enable=True, interval=2),
            dataloader=ParallelAwareDataloader(Rows(), dist.get_rank(), dist.get_world_size(), batch_size=1),
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=schedules,
            states={"train_state": progress},
            sd_adapter=None,
            base_folder=str(out),
        )
        return model, optimizers, schedules, progress, manager

    model, optimizers, schedules, progress, manager = build()
    for step in range(2):
        take(step, model, optimizers, schedules)
        progress.step += 1
    manager.save(2)
    truth = full(model, next(iter(optimizers)))
    model, optimizers, schedules, progress, manager = build()
    manager.load()
    finish(out, truth, [take(step, model, optimizers, schedules) for step in (2, 3)])


SHARDED, WHOLE = "SHARDED_STATE_DICT", "FULL_STATE_DICT"
RECIPES: dict[str, Callable[[Path], None]] = {
    "dcp": plain_dcp,
    "dcp-flat-tied": lambda out: plain_dcp(out, "tied", flat=True),
    "dcp-lora": lambda out: plain_dcp(out, "lora"),
    "dcp-moe": lambda out: plain_dcp(out, "moe"),
    "verl-fsdp2": lambda out: verl(out, "fsdp2"),
    "verl-fsdp2-tied": lambda out: verl(out, "fsdp2", "tied"),
    "verl-fsdp2-lora": lambda out: verl(out, "fsdp2", "lora"),
    "verl-fsdp2-moe": lambda out: verl(out, "fsdp2", "moe"),
    "verl-fsdp2-bf16": lambda out: verl(out, "fsdp2-bf16"),
    "verl-fsdp2-poison": lambda out: verl(out, "fsdp2-poison"),
    "verl-fsdp1-flat": lambda out: verl(out, "fsdp1-flat", "full"),
    "verl-fsdp1-orig": lambda out: verl(out, "fsdp1-orig"),
    "verl-fsdp1-nomesh": lambda out: verl(out, "fsdp1-nomesh"),
    "accelerate-v1-sharded": lambda out: accelerate(out, 1, SHARDED),
    "accelerate-v2-sharded": lambda out: accelerate(out, 2, SHARDED),
    "accelerate-v2-moe": lambda out: accelerate(out, 2, SHARDED, "moe"),
    "accelerate-v2-full": lambda out: accelerate(out, 2, WHOLE),
    "trainer-sharded": lambda out: trainer(out, SHARDED),
    "trainer-sharded-lora": lambda out: trainer(out, SHARDED, "lora"),
    "trainer-full": lambda out: trainer(out, WHOLE),
    "trainer-full-tied": lambda out: trainer(out, WHOLE, "tied"),
    "trl-sharded": lambda out: trainer(out, SHARDED, trl=True),
    "trl-full": lambda out: trainer(out, WHOLE, trl=True),
    "lightning-mp-sharded": lambda out: lightning(out, "mp", "sharded"),
    "lightning-mp-frozen": lambda out: lightning(out, "mp", "sharded", "frozen"),
    "lightning-mp-lora": lambda out: lightning(out, "mp", "sharded", "lora"),
    "lightning-mp-full": lambda out: lightning(out, "mp", "full"),
    "lightning-mp-weights": lambda out: lightning(out, "mp", "sharded", weights=True),
    "lightning-fsdp-sharded": lambda out: lightning(out, "fsdp", "sharded"),
    "titan": titan,
    "titan-frozen": lambda out: titan(out, "frozen"),
}
"""By fixture. A name with -1 or -4 behind it is the same on so many ranks."""
RANKS = {
    1: ("verl-fsdp2", "accelerate-v2-sharded", "trainer-sharded", "titan"),
    4: ("verl-fsdp2", "verl-fsdp1-orig", "accelerate-v2-full", "trainer-sharded", "lightning-mp-sharded",
        "lightning-fsdp-sharded", "titan", "dcp"),
}  # fmt: skip
"""Which fixtures there are of other numbers of ranks than two."""


def commands() -> list[str]:
    """Return a line for each fixture: its name, its recipe and how many ranks write it."""
    lines = [f"{name} {name} 2" for name in RECIPES]
    return lines + [f"{name}-{ranks} {name} {ranks}" for ranks, names in RANKS.items() for name in names]


PACKAGES = {
    "dcp": "torch",
    "verl": "verl",
    "accelerate": "accelerate",
    "trainer": "transformers",
    "trl": "trl",
    "lightning": "lightning",
    "titan": "torchtitan",
}


def write_manifest(folder: Path) -> None:
    """Write what wrote each fixture below a folder, and the hash of every file of it."""
    entries = {}
    for fixture in sorted(each for each in folder.iterdir() if each.is_dir()):
        package = PACKAGES.get(fixture.name.partition("-")[0])
        files = sorted(each for each in fixture.rglob("*") if each.is_file())
        entries[fixture.name] = {
            "package": package or "EasyR1, a clone of commit b44b311",
            "version": version(package) if package else None,
            "torch": version("torch"),
            "files": {str(each.relative_to(fixture)): sha256(each.read_bytes()).hexdigest() for each in files},
        }
    (folder / "manifest.json").write_text(json.dumps(entries, indent=1, sort_keys=True))


if __name__ == "__main__":
    if sys.argv[1] == "manifest":
        write_manifest(Path(sys.argv[2]))
        sys.exit()
    destination = Path(sys.argv[2])
    destination.mkdir(parents=True, exist_ok=True)
    if not sys.argv[1].startswith(("trainer", "trl", "accelerate")):
        dist.init_process_group("gloo")
    RECIPES[sys.argv[1]](destination)
