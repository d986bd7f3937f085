"""Files as Axolotl reads them, with expected values by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.features.rescue.config_import import run_yaml
from holdfast.features.rescue.configuration.convert import ConvertedConfig
from tests.features.rescue.systems.conftest import Case, Convert, check

ROWS = "datasets: [{path: tatsu-lab/alpaca, type: alpaca}]\n"
MODEL = "base_model: NousResearch/Llama-3.2-1B\nlearning_rate: 0.0002\n"

CASES: dict[str, tuple[int, Case]] = {
    "LoRA with packing": (1, (MODEL + """
datasets: [{path: teknium/GPT4-LLM-Cleaned, type: alpaca}]
val_set_size: 0.1
output_dir: ./outputs/lora-out
adapter: lora
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
pad_to_sequence_len: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [gate_proj, down_proj]
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
""", {  # 2 x 2 rows; two windows of 2048 tokens; four evaluations a pass
        "data.batch_size": 4, "data.tokens_per_micro_batch": 4096, "data.max_length": 2048,
        "data.validation_split": 0.1, "run.dir": "outputs", "run.name": "lora-out", "model.lora.rank": 16,
        "model.lora.alpha": 32, "model.lora.targets": ["gate_proj", "down_proj"], "optim.kind": "adamw_8bit",
        "optim.schedule.warmup_ratio": 0.1, "evaluation.every_epochs": 0.25, "checkpoint.every_epochs": 1.0,
        "data.rows": "alpaca", "data.path": "teknium/GPT4-LLM-Cleaned", "model.attention": "auto", "epochs": 1,
        "parallel.recompute": "full", "seed": 42,
    })),
    "all weights on eight devices": (8, (MODEL + ROWS + """
sequence_len: 8192
micro_batch_size: 1
gradient_accumulation_steps: 8
num_epochs: 3
optimizer: adamw_torch_fused
lr_scheduler: linear
warmup_steps: 100
bf16: true
fsdp_version: 2
max_grad_norm: 1.0
adam_beta2: 0.95
""", {  # 1 x 8 x 8 rows
        "data.batch_size": 64, "data.tokens_per_micro_batch": 8192, "optim.kind": "adamw", "epochs": 3,
        "optim.schedule.kind": "linear", "optim.schedule.warmup_steps": 100, "optim.schedule.warmup_ratio": None,
        "parallel.compute_dtype": "bfloat16", "optim.clip_norm": 1.0, "optim.betas": [0.9, 0.95],
    })),
    "QLoRA": (2, (MODEL + ROWS + """
adapter: qlora
load_in_4bit: true
load_in_8bit: false
lora_r: 32
lora_alpha: 16
lora_target_linear: true
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: paged_adamw_32bit
""", {  # 2 x 4 x 2 rows; 0.03 of the steps is Axolotl's own warm-up
        "model.lora.quantize": "nf4", "model.lora.targets": "all-linear", "data.batch_size": 16,
        "data.tokens_per_micro_batch": 8192, "optim.kind": "adamw", "optim.schedule.warmup_ratio": 0.03,
        "optim.schedule.kind": "cosine",
    })),
    "several sets of conversations": (1, (MODEL + """
datasets:
  - path: mlabonne/FineTome-100k
    type: chat_template
    split: train[:20%]
    field_messages: conversations
  - path: rows.jsonl
    type: chat_template
chat_template: tokenizer_default
train_on_inputs: false
max_steps: 500
sequence_len: 1024
""", {
        "data.sources": [{"path": "mlabonne/FineTome-100k@train[:20%]", "columns": {"messages": "conversations"}},
                         {"path": "rows.jsonl"}],
        "data.chat_template": None, "data.train_on_prompt": False, "steps": 500, "epochs": None,
        "data.max_length": 1024,
    })),
    "DPO": (4, ("""
base_model: Qwen/Qwen2.5-0.5B
rl: dpo
rl_beta: 0.05
datasets: [{path: argilla/distilabel-intel-orca-dpo-pairs, split: train, type: chatml.intel}]
learning_rate: 5.0e-6
micro_batch_size: 2
gradient_accumulation_steps: 4
sequence_len: 2048
num_epochs: 1
""", {  # 2 x 4 x 4 pairs; 2 pairs of two sequences
        "preference.loss.kind": "dpo", "preference.loss.beta": 0.05, "data.batch_size": 32,
        "data.tokens_per_micro_batch": 8192, "data.path": "argilla/distilabel-intel-orca-dpo-pairs@train",
        "data.rows": None,
    })),
    "ORPO": (1, ("""
base_model: m
rl: orpo
orpo_alpha: 0.1
datasets: [{path: argilla/ultrafeedback-binarized, type: chat_template.argilla}]
learning_rate: 8.0e-6
warmup_steps: 0.05
""", {"preference.loss.kind": "orpo", "preference.loss.beta": 0.1, "optim.schedule.warmup_ratio": 0.05,
      "data.batch_size": 1, "data.tokens_per_micro_batch": 1024})),
    "KTO": (1, ("""
base_model: m
rl: kto
rl_beta: 0.2
kto_desirable_weight: 0.2
micro_batch_size: 4
datasets: [{path: rows.jsonl}]
learning_rate: 1.0e-6
""", {"preference.loss.kind": "kto", "preference.loss.beta": 0.2, "preference.loss.desirable_weight": 0.2,
      "data.batch_size": 4})),
    "a reward model": (2, ("""
base_model: google/gemma-2-2b
reward_model: true
datasets: [{path: argilla/distilabel-intel-orca-dpo-pairs}]
learning_rate: 1.0e-5
micro_batch_size: 8
gradient_accumulation_steps: 2
""", {"preference.loss.kind": "bradley_terry", "data.batch_size": 32, "data.tokens_per_micro_batch": 8192})),
    "storage in bfloat16 and neftune": (1, (MODEL + ROWS + """
bf16: full
optimizer: adamw_torch
neftune_noise_alpha: 5
cosine_min_lr_ratio: 0.1
lr_scheduler: cosine
deepspeed: deepspeed_configs/zero3.json
wandb_project: mine
wandb_name: first
val_set_size: 0
eval_steps: 100
""", {  # there is nothing to evaluate on
        "model.dtype": "bfloat16", "optim.kind": "adamw_bf16", "neftune_alpha": 5,
        "optim.schedule.final_ratio": 0.1, "run.name": "first", "evaluation.every_steps": None,
        "data.validation_split": None,
    })),
    "test sets and shares": (1, (MODEL + ROWS + """
test_datasets: [{path: test.jsonl}]
eval_steps: 50
save_steps: 0.25
save_total_limit: 5
dp_shard_size: 4
dp_replicate_size: 2
torch_compile: true
special_tokens: {pad_token: <|end|>}
""", {  # a share of all steps is left to a person
        "evaluation.sets": {"test": {"path": "test.jsonl"}}, "evaluation.every_steps": 50,
        "checkpoint.every_steps": None, "checkpoint.keep.last": 5, "parallel.shard": 4, "parallel.replicate": 2,
        "parallel.compile": "blocks",
    })),
    "rows that ranks share": (8, (MODEL + ROWS + """
sequence_len: 8192
micro_batch_size: 1
gradient_accumulation_steps: 4
context_parallel_size: 2
""", {  # two neighbouring ranks have the same rows: 1 x 4 x 8 / 2
        "parallel.context": 2, "data.batch_size": 16,
    })),
    "rows that ranks share, by its earlier name, with tensors in parts": (8, (MODEL + ROWS + """
micro_batch_size: 2
sequence_parallel_degree: 2
tensor_parallel_size: 2
""", {  # 2 x 1 x 8 / 4
        "parallel.context": 2, "data.batch_size": 4,
    })),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_a_file_of_axolotl_becomes_what_is_computed_by_hand(
    name: str, converted: Convert, loads: Callable[[ConvertedConfig], Any]
) -> None:
    ranks, case = CASES[name]

    check(case, "axolotl", ranks, converted, loads)


def test_ranks_that_cannot_share_rows_evenly_are_left_to_a_person(converted: Convert) -> None:
    conversion = converted(MODEL + ROWS + "micro_batch_size: 2\ncontext_parallel_size: 3\n", "axolotl", 8)

    assert "data.batch_size" not in conversion.settings
    assert [line.undecided for line in conversion.lines if line.key == "micro_batch_size"] == [True]


@pytest.mark.parametrize(("source", "said"), [
    ("{path: r, type: chat_template, roles_to_train: [user], train_on_eos: all}", "roles_to_train, train_on_eos"),
    ("{path: r, type: chat_template, message_property_mappings: {role: from}}", "message_property_mappings"),
    ("{path: r, type: completion}", "type completion"),
    ("{path: r, type: {field_instruction: q, field_output: a}}",
     "type {'field_instruction': 'q', 'field_output': 'a'}"),
    ("{path: r, type: sharegpt.load_role}", "type sharegpt.load_role"),
])  # fmt: skip
@pytest.mark.parametrize("key", ["datasets", "test_datasets"])
def test_what_else_a_source_says_of_its_rows_is_left_to_a_person(
    converted: Convert, key: str, source: str, said: str
) -> None:
    lines = {line.key: line for line in converted(f"base_model: m\n{key}: [{source}]\n", "axolotl").lines}

    assert (lines[key].undecided, lines[key].remark) == (True, f"not converted: {said}")
    assert lines[key].settings


@pytest.mark.parametrize("source", [
    "{path: r, type: chat_template, train_on_eos: ~}", "{path: r, type: alpaca}", "{path: r}", "r",
])  # fmt: skip
def test_a_source_that_says_nothing_else_is_written(converted: Convert, source: str) -> None:
    lines = {line.key: line for line in converted(f"base_model: m\ndatasets: [{source}]\n", "axolotl").lines}

    assert (lines["datasets"].undecided, lines["datasets"].settings["data.path"]) == (False, "r")


@pytest.mark.parametrize("source", [
    "{path: ~}", "{path: 3}", "{path: ''}", "{path: {a: 1}}", "{path: r, split: 1}", "{path: r, name: [a]}",
    "{path: r, revision: 2}", "{path: r, field_messages: {a: b}}", "{path: r, split: ''}",
])  # fmt: skip
def test_a_source_of_other_than_texts_is_left_to_a_person(converted: Convert, source: str) -> None:
    lines = {line.key: line for line in converted(f"base_model: m\ndatasets: [{source}]\n", "axolotl").lines}

    assert (lines["datasets"].undecided, lines["datasets"].settings) == (True, {})
    assert lines["datasets"].remark.endswith(" is no text")


def test_no_steps_of_warm_up_are_no_warm_up(converted: Convert) -> None:
    settings = converted("base_model: m\nwarmup_steps: 0\nwarmup_ratio: 0.1\n", "axolotl").settings

    assert "optim.schedule.warmup_ratio" not in settings
    assert settings["optim.schedule.warmup_steps"] == 0


def test_a_batch_of_packs_is_written_and_left_to_a_person(converted: Convert) -> None:
    conversion = converted(MODEL + ROWS + "warmup_steps: 1\nmicro_batch_size: 4\nsample_packing: true\n", "axolotl")

    line = next(line for line in conversion.lines if line.key == "micro_batch_size")
    said = " ".join(run_yaml(conversion, "theirs.yaml").replace("#", " ").split())
    assert (line.undecided, conversion.settings["data.batch_size"]) == (True, 4)
    assert "5 written, 0 without effect, 1 undecided, and 1 of Axolotl's defaults." in said
    assert "Undecided: Axolotl's default of gradient_accumulation_steps: 1 -> data.batch_size" in said
    assert "line 5, micro_batch_size: 4 -> data.batch_size" in said


@pytest.mark.parametrize(("steps", "expected", "undecided"), [
    ("max_steps: 500", {"warmup_steps": 15}, False),
    ("max_steps: 10000", {"warmup_steps": 100}, False),
    ("num_epochs: 3", {"warmup_ratio": 0.03}, True),
    ("max_steps: 10000\nwarmup_ratio: 0.03", {"warmup_ratio": 0.03}, False),
    ("max_steps: 10000\nwarmup_steps: 7", {"warmup_steps": 7}, False),
])  # fmt: skip
def test_axolotls_own_warm_up_is_at_most_100_steps(
    converted: Convert, steps: str, expected: dict[str, Any], undecided: bool
) -> None:
    conversion = converted(MODEL + ROWS + steps, "axolotl")

    schedule = {key: value for key, value in conversion.settings.items() if ".warmup_" in key}
    assert schedule == {f"optim.schedule.{key}": value for key, value in expected.items()}
    assert any(line.undecided for line in conversion.lines) == undecided
