"""A real `Trainer.fit` of Lightning on CPU ranks: `lightning_script.py OUT mp|fsdp [own|weights|last|odd|resume=]...`.

Prints one JSON line: the loss of every step of rank 0, and what lies in OUT.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

_INIT = FullyShardedDataParallel.__init__


def _on_cpu(self, *arguments, device_id=None, **named):
    """Name the CPU: without a device FSDP1 asks for an accelerator, and Lightning names none on a CPU."""
    _INIT(self, *arguments, device_id=torch.device("cpu") if device_id is None else device_id, **named)


FullyShardedDataParallel.__init__ = _on_cpu


class Module(pl.LightningModule):
    def __init__(self, kind: str, width: int, *, frozen: bool = False, odd: bool = False) -> None:
        super().__init__()
        self.kind, self.width, self.frozen, self.odd = kind, width, frozen, odd
        self.model = None
        self.seen: list[tuple[int, float]] = []

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.manual_seed(0)
        self.model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=67,
                hidden_size=self.width,
                intermediate_size=2 * self.width,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                use_cache=False,
                attention_dropout=0.1,
            )
        )
        if self.frozen:
            self.model.model.layers[0].requires_grad_(False)
        if self.kind == "mp":
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, batch, index):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.seen.append((self.global_step, float(loss.detach())))
        if self.global_rank == 0:
            print(f"at {self.global_step + 1}", flush=True)
        return loss

    def on_save_checkpoint(self, checkpoint):
        if self.odd:
            checkpoint["odd"] = object()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW([value for value in self.parameters() if value.requires_grad], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def strategy(kind: str, ranks: int, *, own: bool = False):
    if own:  # Lightning's, to see what it does
        return pl.strategies.ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    if kind == "mp":
        from holdfast.features.trainers.lightning import ModelParallelStrategy

        return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    from holdfast.features.trainers.lightning import FSDPStrategy

    layer = type(
        Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=7,
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
            )
        ).model.layers[0]
    )
    return FSDPStrategy(auto_wrap_policy={layer}, state_dict_type="sharded")


def rows():
    data = torch.stack(
        [torch.randint(0, 67, (9,), generator=torch.Generator().manual_seed(row)) for row in range(4)]
    )  # one step an epoch
    return torch.utils.data.DataLoader(data, batch_size=2)


def main() -> None:
    out, kind, flags = Path(sys.argv[1]), sys.argv[2], set(sys.argv[3:])
    ranks = int(os.environ["WORLD_SIZE"])
    module = Module(kind, 512 if "wide" in flags else 24, frozen="frozen" in flags, odd="odd" in flags)
    saves = ModelCheckpoint(
        dirpath=out,
        filename="s{step}",
        every_n_train_steps=2,
        save_top_k=2 if "top2" in flags else -1,
        monitor="step" if "top2" in flags else None,
        mode="max",
        save_weights_only="weights" in flags,
        save_last="last" in flags or None,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy(kind, ranks, own="own" in flags),
        max_epochs=6,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    resume = next((flag.removeprefix("resume=") for flag in flags if flag.startswith("resume=")), None)
    try:
        trainer.fit(module, rows(), ckpt_path=resume)
    except BaseException as error:  # noqa: BLE001 - the test reads what it is; torch has some that are no Exception
        print(json.dumps({"error": type(error).__name__, "words": str(error)[-600:]}), flush=True)
        os._exit(3)
    if trainer.is_global_zero:
        there = sorted(each.name for each in out.iterdir())
        print(json.dumps({"lines": module.seen, "there": there}), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
