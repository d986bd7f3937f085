"""A real Trainer, or TRL's SFTTrainer, under FSDP2 on CPU ranks: `trainer_script.py OUT [trl] [plain] [resume]`.

Run by tests in processes of their own. accelerate makes FSDP of several GPUs only,
so its state is told that there is one: the shim of the next lines. Prints one JSON line: losses and gradient norms by
step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, PartialState
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

_INIT = AcceleratorState.__init__


def _on_cpu(self, *arguments, fsdp_plugin=None, **named):
    _INIT(self, *arguments, fsdp_plugin=fsdp_plugin, **named)
    if fsdp_plugin is not None:
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


AcceleratorState.__init__ = _on_cpu


class Watch(TrainerCallback):
    """Remembers what each step was."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, float, float]] = []

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in (logs or {}):
            self.lines.append((state.global_step, logs["loss"], logs["grad_norm"]))
            if dist.get_rank() == 0:
                print(f"at {state.global_step}", flush=True)


def trainer_of(out: Path, flags: set[str], width: int, watch: TrainerCallback) -> Trainer:
    """Return a trainer whose state is sharded over all ranks."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=67,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )
    rows = [torch.randint(0, 67, (9,), generator=torch.Generator().manual_seed(row)).tolist() for row in range(64)]
    common: dict[str, Any] = dict(  # noqa: C408 - as they stand in a call
        output_dir=str(out),
        max_steps=6,
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        save_total_limit=2,
        load_best_model_at_end="best" in flags,
        eval_strategy="steps" if "best" in flags else "no",
        eval_steps=2,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
        },
    )
    if "trl" in flags:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        from holdfast.data.tasks.synthetic import character_tokenizer

        return SFTTrainer(
            model=model,
            args=SFTConfig(**common, max_length=16),
            callbacks=[watch],
            train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
            processing_class=character_tokenizer(),
        )
    data = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(
        model=model, args=TrainingArguments(**common), train_dataset=data, eval_dataset=data[:4], callbacks=[watch]
    )


def main() -> None:
    out, flags = Path(sys.argv[1]), set(sys.argv[2:])
    watch = Watch()
    trainer = trainer_of(out, flags, 512 if "wide" in flags else 24, watch)
    if "plain" not in flags:
        from holdfast.features.trainers.trl import protect

        protect(trainer)
    trainer.train(resume_from_checkpoint=True if "resume" in flags else None)
    if dist.get_rank() == 0:
        print(json.dumps({"lines": watch.lines, "there": sorted(each.name for each in out.iterdir())}), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
