"""Files as LLaMA-Factory reads them, with expected values by hand.

Names of data sets stand in a file of its own there, so every one of these needs a path before it loads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.errors import ConfigError
from holdfast.features.rescue.configuration.convert import ConvertedConfig
from tests.features.rescue.systems.conftest import Case, Convert

HEAD = "model_name_or_path: Qwen/Qwen2.5-7B-Instruct\ndataset: alpaca_en_demo\ntemplate: qwen\n"

CASES: dict[str, tuple[int, Case]] = {
    "the defaults": (1, (HEAD, {  # 8 rows of 2048 tokens, rate 5e-5, adapters of rank 8
        "data.batch_size": 8, "data.max_length": 2048, "data.tokens_per_micro_batch": 16384, "optim.lr": 5e-5,
        "epochs": 3.0, "model.lora.rank": 8, "model.lora.alpha": 16,
        "optim.schedule.kind": "linear", "parallel.recompute": "full",
    })),
    "LoRA": (4, (HEAD + """
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_alpha: 32
lora_target: all
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
output_dir: saves/qwen/lora
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
val_size: 0.1
eval_strategy: steps
eval_steps: 500
""", {  # 1 x 8 x 4 rows
        "data.batch_size": 32, "data.tokens_per_micro_batch": 2048, "model.lora.rank": 16,
        "model.lora.alpha": 32, "model.lora.targets": "all-linear", "data.max_samples": 1000,
        "run.dir": "saves/qwen", "run.name": "lora",
        "optim.schedule.kind": "cosine", "optim.schedule.warmup_ratio": 0.1, "data.validation_split": 0.1,
        "evaluation.every_steps": 500, "checkpoint.every_steps": 500, "launch.timeout_minutes": 3000000.0,
        "metrics.log_every": 10,
    })),
    "all weights": (8, (HEAD + """
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
cutoff_len: 8192
pure_bf16: true
""", {
        "model.lora": None, "model.lora.rank": None, "data.batch_size": 16, "data.tokens_per_micro_batch": 8192,
        "model.dtype": "bfloat16", "optim.kind": "adamw_bf16",
    })),
    "QLoRA": (1, (HEAD + """
quantization_bit: 4
quantization_method: bnb
double_quantization: false
lora_target: q_proj,v_proj
use_rslora: true
optim: adamw_8bit
""", {"model.lora.quantize": "nf4", "model.lora.targets": ["q_proj", "v_proj"], "model.lora.rank_stabilised": True,
      "optim.kind": "adamw_8bit"})),
    "pretraining": (2, (HEAD + """
stage: pt
finetuning_type: full
packing: true
streaming: true
buffer_size: 4096
max_steps: 2000
per_device_train_batch_size: 4
""", {"data.packing": "best_fit", "data.streaming": True, "data.shuffle_buffer": 4096, "steps": 2000, "epochs": None,
      "data.batch_size": 8, "preference.loss": None})),
    "DPO": (2, (HEAD + """
stage: dpo
pref_beta: 0.2
pref_loss: sigmoid
pref_ftx: 0.1
dpo_label_smoothing: 0.05
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
""", {  # 2 x 4 x 2 pairs of two sequences
        "preference.loss.kind": "dpo", "preference.loss.beta": 0.2, "preference.sft": 0.1,
        "preference.loss.label_smoothing": 0.05, "data.batch_size": 16, "data.tokens_per_micro_batch": 8192,
    })),
    "SimPO": (1, (HEAD + "stage: dpo\npref_loss: simpo\npref_beta: 2.0\nsimpo_gamma: 1.4\n", {
        "preference.loss.kind": "simpo", "preference.loss.beta": 2.0, "preference.loss.gamma": 1.4,
    })),
    "KTO": (1, (HEAD + "stage: kto\npref_beta: 0.1\nkto_chosen_weight: 1.33\n", {
        "preference.loss.kind": "kto", "preference.loss.desirable_weight": 1.33, "preference.loss.beta": 0.1,
    })),
    "a reward model": (1, (HEAD + "stage: rm\nlearning_rate: 1.0e-4\nper_device_train_batch_size: 3\n", {
        "preference.loss.kind": "bradley_terry", "data.batch_size": 3, "data.tokens_per_micro_batch": 12288,
    })),
    "images and a template's variable": (1, (HEAD + """
image_max_pixels: 262144
finetuning_type: full
freeze_vision_tower: true
enable_thinking: false
default_system: You are kind.
mask_history: true
train_on_prompt: false
disable_shuffling: true
flash_attn: fa2
neftune_noise_alpha: 5
disable_gradient_checkpointing: true
""", {
        "data.max_pixels": 262144, "model.freeze": ["vision_tower"], "data.system": "You are kind.",
        "data.template_kwargs": {"enable_thinking": False}, "data.train_on": "last_turn", "data.shuffle": False,
        "model.attention": "auto", "neftune_alpha": 5, "parallel.recompute": "none",
    })),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_a_file_of_llamafactory_becomes_what_is_computed_by_hand(
    name: str, converted: Convert, loads: Callable[[ConvertedConfig], Any]
) -> None:
    ranks, (text, expected) = CASES[name]

    conversion = converted(text, "llamafactory", ranks)

    assert {key: conversion.settings.get(key) for key in expected} == expected
    with pytest.raises(
        ConfigError, match=r"^[^\n]*data\.path: no rows are named; set one of path, synthetic(, sources)?$"
    ):
        loads(conversion)
