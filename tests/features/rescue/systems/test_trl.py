"""Files as TRL's command line reads them, with expected values by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.features.rescue.configuration.convert import ConvertedConfig
from tests.features.rescue.systems.conftest import Case, Convert, check

CASES: dict[str, tuple[int, Case]] = {
    "SFT of all weights on eight devices": (8, ("""
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-5
num_train_epochs: 1
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
max_length: 4096
bf16: true
""", {  # 2 x 8 x 8 devices; two sequences of 4096 tokens in a forward pass
        "data.batch_size": 128, "data.tokens_per_micro_batch": 8192, "data.max_length": 4096, "epochs": 1,
        "optim.lr": 2e-5, "optim.schedule.kind": "linear", "parallel.compute_dtype": "bfloat16", "seed": 42,
        "model.path": "Qwen/Qwen3-0.6B", "data.path": "trl-lib/Capybara", "parallel.recompute": "full",
    })),
    "SFT with LoRA and packing": (1, ("""
model_name_or_path: Qwen/Qwen2-0.5B
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-4
packing: yes
use_peft: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
output_dir: Qwen2-0.5B-SFT
report_to: [wandb, tensorboard]
""", {  # TRL's defaults: 8 rows a device, 3 epochs, 1024 tokens
        "data.batch_size": 8, "data.tokens_per_micro_batch": 8192, "epochs": 3.0, "model.lora.rank": 32,
        "model.lora.alpha": 16, "model.lora.dropout": 0.05, "model.lora.targets": ["q_proj", "v_proj"],
        "data.packing": "best_fit", "run.dir": ".", "run.name": "Qwen2-0.5B-SFT",
        "metrics.sinks": ["wandb", "tensorboard"],
    })),
    "SFT in windows by steps": (4, ("""
model_name_or_path: HuggingFaceTB/SmolLM2-135M
dataset_name: roneneldan/TinyStories
max_steps: 1000
num_train_epochs: 5
packing: true
packing_strategy: wrapped
per_device_train_batch_size: 16
warmup_steps: 0.1
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
save_steps: 250
save_total_limit: 1
adam_beta2: 0.95
max_grad_norm: 0
""", {  # a number of steps ends the run, so epochs are not read
        "steps": 1000, "epochs": None, "data.packing": "wrapped", "data.batch_size": 64,
        "optim.schedule.kind": "cosine", "optim.schedule.warmup_ratio": 0.1, "optim.schedule.final_ratio": 0.1,
        "checkpoint.every_steps": 250, "checkpoint.keep.last": 2, "optim.betas": [0.9, 0.95], "optim.clip_norm": None,
    })),
    "SFT with an evaluation": (2, ("""
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: HuggingFaceH4/ultrachat_200k
dataset_train_split: train_sft
dataset_test_split: test_sft
eval_strategy: steps
eval_steps: 200
eval_on_start: true
logging_steps: 25
loss_type: dft
neftune_noise_alpha: 5
ddp_timeout: 3600
""", {
        "data.path": "HuggingFaceH4/ultrachat_200k@train_sft", "metrics.log_every": 25, "objective.kind": "dft",
        "evaluation.sets.test.path": "HuggingFaceH4/ultrachat_200k@test_sft", "evaluation.every_steps": 200,
        "evaluation.at_start": True, "neftune_alpha": 5, "launch.timeout_minutes": 60.0, "data.batch_size": 16,
    })),
    "QLoRA": (1, ("""
model_name_or_path: meta-llama/Llama-3.1-8B
datasets:
  - path: tatsu-lab/alpaca
    split: train[:90%]
test_split_size: 0.05
use_peft: true
load_in_4bit: true
bnb_4bit_quant_type: nf4
optim: adamw_bnb_8bit
gradient_accumulation_steps: 4
per_device_train_batch_size: 1
max_length: 2048
""", {
        "model.lora.quantize": "nf4", "optim.kind": "adamw_8bit", "data.batch_size": 4,
        "data.tokens_per_micro_batch": 2048, "data.path": "tatsu-lab/alpaca@train[:90%]",
        "data.validation_split": 0.05,
    })),
    "DPO": (8, ("""
model_name_or_path: Qwen/Qwen2-0.5B-Instruct
dataset_name: trl-lib/ultrafeedback_binarized
precompute_ref_log_probs: true
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
beta: 0.05
label_smoothing: 0.1
""", {  # 4 x 4 x 8 pairs; eight sequences of 1024 tokens in a forward pass
        "data.batch_size": 128, "data.tokens_per_micro_batch": 8192, "optim.lr": 1e-6,
        "preference.loss": {"kind": "dpo", "beta": 0.05, "label_smoothing": 0.1}, "reference.precompute": True,
    })),
    "DPO with several losses and a reference that follows": (1, ("""
model_name_or_path: Qwen/Qwen2-0.5B-Instruct
dataset_name: trl-lib/ultrafeedback_binarized
loss_type: [sigmoid, ipo, sft]
loss_weights: [0.8, 0.2, 1.0]
beta: 0.2
sync_ref_model: true
ref_model_sync_steps: 64
""", {
        "preference.loss": [{"kind": "dpo", "beta": 0.2, "weight": 0.8},
                            {"kind": "ipo", "lengths": "mean", "beta": 0.2, "weight": 0.2}],
        "preference.sft": 1.0, "reference.sync.every_steps": 64, "reference.sync.mix": 0.6, "epochs": 3.0,
    })),
    "GRPO with one update a rollout": (8, ("""
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [rewards.py:accuracy, rewards.py:short]
reward_weights: [1.0, 0.2]
num_generations: 8
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
max_completion_length: 1024
max_steps: 500
""", {  # 8 x 4 x 8 completions an update, 32 prompts of 8; 8 sequences of 1024 + 1024 tokens
        "data.batch_size": 32, "updates.mini_batches": 1, "rollout.group_size": 8, "steps": 500,
        "rollout.max_new_tokens": 1024, "data.max_length": 2048, "data.tokens_per_micro_batch": 16384,
        "reward": [{"kind": "path", "path": "rewards.py:accuracy"},
                   {"kind": "path", "path": "rewards.py:short", "weight": 0.2}],
        "objective.kind": "clip", "objective.low": 0.2, "objective.high": 0.2, "data.average": "token_mean",
        "advantage.kind": "grpo", "kl.coefficient": None,
    })),
    "GRPO with four updates a rollout, each twice": (4, ("""
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: trl-lib/DeepMath-103K
reward_funcs: own_rewards.math.accuracy
num_generations: 4
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
steps_per_generation: 8
num_iterations: 2
max_steps: 800
save_steps: 80
epsilon: 0.2
epsilon_high: 0.28
beta: 0.04
use_bias_correction_kl: false
loss_type: dr_grpo
scale_rewards: none
""", {  # 4 x 2 x 4 = 32 an update, 4 x 8 x 4 = 128 a rollout: 32 prompts, 4 updates, twice; 800 / 8 rollouts
        "data.batch_size": 32, "updates.mini_batches": 4, "updates.passes": 2, "steps": 100,
        "checkpoint.every_steps": 10, "objective.low": 0.2, "objective.high": 0.28, "kl.coefficient": 0.04,
        "kl.importance_weighted": False, "data.average": "constant_length", "advantage.kind": "dr_grpo",
        "reward": {"kind": "path", "path": "own_rewards.math:accuracy"},
    })),
    "GSPO with a cut of the distribution": (1, ("""
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: trl-lib/DeepMath-103K
reward_model_name_or_path: Skywork/reward
importance_sampling_level: sequence
loss_type: grpo
epsilon: 3.0e-4
epsilon_high: 4.0e-4
top_p: 0.95
mask_truncated_completions: true
vllm_max_model_length: 3072
max_completion_length: 2048
use_adaptive_entropy: true
entropy_coef: 0.01
entropy_target: 0.5
""", {  # 8 completions a rollout of TRL's defaults are one prompt
        "objective.kind": "gspo", "data.average": "sequence_mean", "objective.low": 3e-4, "objective.high": 4e-4,
        "rollout.top_p": 0.95, "correction.kind": "truncate", "groups.truncated": "mask", "data.max_length": 3072,
        "data.batch_size": 1, "data.tokens_per_micro_batch": 24576, "entropy.target": 0.5,
        "entropy.coefficient": 0.01, "reward": {"kind": "model", "path": "Skywork/reward"},
    })),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_a_file_of_trl_becomes_what_is_computed_by_hand(
    name: str, converted: Convert, loads: Callable[[ConvertedConfig], Any]
) -> None:
    ranks, case = CASES[name]

    check(case, "trl", ranks, converted, loads)


@pytest.mark.parametrize(("text", "verb"), [
    ("learning_rate: 1.0e-5", "sft"), ("beta: 0.1\nlearning_rate: 1.0e-5\nmax_length: 5", "dpo"),
    ("num_generations: 4\nbeta: 0.1", "grpo"),
])  # fmt: skip
def test_the_command_follows_from_keys_that_no_other_command_has(converted: Convert, text: str, verb: str) -> None:
    assert converted(text, "trl").verb == verb


def test_batches_that_do_not_divide_are_left_to_a_person(converted: Convert) -> None:
    conversion = converted("num_generations: 7\nper_device_train_batch_size: 4", "trl")

    assert "data.batch_size" not in conversion.settings
    assert [line.remark for line in conversion.lines if line.key == "per_device_train_batch_size"] == [
        "4 completions of a rollout in groups of 7 and updates of 4 do not divide"
    ]


def test_a_loss_without_counterpart_is_left_to_a_person(converted: Convert) -> None:
    conversion = converted("loss_type: vespo\nnum_generations: 8", "trl")

    assert [(line.undecided, line.remark) for line in conversion.lines if line.key == "loss_type"] == [
        (True, "vespo has no counterpart")
    ]


def test_no_bound_on_rows_is_left_to_a_person(converted: Convert) -> None:
    conversion = converted("max_length: null\npacking: true", "trl")

    assert "data.max_length" not in conversion.settings
    assert [line.undecided for line in conversion.lines if line.key == "max_length"] == [True]


def test_the_order_of_the_file_changes_nothing(converted: Convert) -> None:
    lines = ["lr_scheduler_type: cosine_with_restarts", "lr_scheduler_kwargs: {num_cycles: 3}", "dtype: bfloat16",
             "optim: adamw_torch", "dataset_name: rows"]  # fmt: skip

    there, back = converted("\n".join(lines), "trl"), converted("\n".join(reversed(lines)), "trl")

    assert there.values() == back.values()
    assert (there.settings["optim.schedule.cycles"], there.settings["optim.kind"]) == (3, "adamw_bf16")


def test_adapters_have_trls_own_defaults(converted: Convert) -> None:
    settings = converted("use_peft: true\ndataset_name: rows", "trl").settings

    assert (settings["model.lora.rank"], settings["model.lora.dropout"]) == (16, 0.05)


def test_an_option_of_another_schedule_is_left_to_a_person(converted: Convert) -> None:
    conversion = converted("lr_scheduler_type: cosine\nlr_scheduler_kwargs: {num_cycles: 0.5}", "trl")

    assert [line.undecided for line in conversion.lines if line.key == "lr_scheduler_kwargs"] == [True]


def test_a_beta_of_zero_is_written_as_zero(converted: Convert) -> None:
    conversion = converted("dataset_name: rows\nlabel_smoothing: 0.1\nbeta: 0.0", "trl")

    assert (conversion.verb, conversion.settings["preference.loss"]["beta"]) == ("dpo", 0.0)


def test_a_reference_that_follows_by_zero_is_written_as_zero_and_needs_steps(converted: Convert) -> None:
    text = "dataset_name: rows\nbeta: 0.1\nsync_ref_model: true\nref_model_mixup_alpha: 0.0\nref_model_sync_steps: 0"

    conversion = converted(text, "trl")

    assert conversion.settings["reference.sync.mix"] == 0.0
    assert [line.undecided for line in conversion.lines if line.key == "ref_model_sync_steps"] == [True]
    assert "reference.sync.every_steps" not in conversion.settings


def test_the_default_number_of_updates_between_syncs_is_turned_into_rollouts_too(converted: Convert) -> None:
    text = "num_generations: 4\nper_device_train_batch_size: 4\nsteps_per_generation: 8\nsync_ref_model: true"

    settings = converted(text, "trl").settings  # 8 updates a rollout, and 512 updates are TRL's default

    assert (settings["reference.sync.every_steps"], settings["reference.sync.mix"]) == (64, 0.6)


@pytest.mark.parametrize("text", [
    "dataset_name: {a: 1}", "dataset_name: [rows]", "dataset_name: rows\ndataset_train_split: [train]",
])  # fmt: skip
def test_a_data_set_of_other_than_texts_is_left_to_a_person(converted: Convert, text: str) -> None:
    conversion = converted(text, "trl")

    assert "data.path" not in conversion.settings
    assert [line.undecided for line in conversion.lines if line.key == "dataset_name"] == [True]


@pytest.mark.parametrize("verb", ["sft", "dpo", "grpo"])
@pytest.mark.parametrize("named", ["", "lora_target_modules: null"])
def test_layers_that_peft_would_choose_are_left_to_a_person(converted: Convert, verb: str, named: str) -> None:
    conversion = converted(f"use_peft: true\ndataset_name: rows\n{named}", "trl", verb=verb)

    assert [line.undecided for line in conversion.lines if line.key == "lora_target_modules"] == [True]
    assert conversion.settings["model.lora.dropout"] == 0.05


def test_layers_of_no_adapters_are_nobodys_decision(converted: Convert) -> None:
    conversion = converted("dataset_name: rows", "trl")

    assert [line for line in conversion.lines if line.key in {"lora_target_modules", "lora_dropout"}] == []


def test_warm_up_counts_rollouts_as_steps_do(converted: Convert) -> None:
    text = "num_generations: 4\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n" \
           "steps_per_generation: 8\nmax_steps: 1000\nwarmup_steps: 100"  # fmt: skip

    settings = converted(text, "trl", 2).settings  # 4 updates a rollout

    assert (settings["steps"], settings["optim.schedule.warmup_steps"]) == (250, 25)


@pytest.mark.parametrize(("steps", "share", "updates"), [("0", 0.1, 0), ("0.0", 0.1, 0), ("50", None, 50)])
@pytest.mark.parametrize("system", ["trl", "llamafactory"])
def test_steps_of_warm_up_decide_above_zero_alone(
    converted: Convert, system: str, steps: str, share: float | None, updates: int
) -> None:
    settings = converted(f"model_name_or_path: m\nwarmup_steps: {steps}\nwarmup_ratio: 0.1", system).settings

    assert settings.get("optim.schedule.warmup_ratio") == share
    assert settings["optim.schedule.warmup_steps"] == updates


@pytest.mark.parametrize(("packing", "undecided"), [
    ("packing: true", True), ("packing: true\npacking_strategy: wrapped", False), ("packing: false", False),
    ("padding_free: true", False),
])  # fmt: skip
def test_a_batch_of_packs_is_left_to_a_person(converted: Convert, packing: str, undecided: bool) -> None:
    conversion = converted(f"dataset_name: rows\nper_device_train_batch_size: 4\n{packing}", "trl")

    assert [line.undecided for line in conversion.lines if line.key == "per_device_train_batch_size"] == [undecided]
    assert conversion.settings["data.batch_size"] == 4


def test_a_reward_model_has_trls_own_defaults(converted: Convert, loads: Callable[[ConvertedConfig], Any]) -> None:
    conversion = converted("model_name_or_path: m\ndataset_name: rows", "trl", verb="reward")
    config = loads(conversion)

    assert (config.optim.lr, config.data.max_length, config.data.overlong) == (1e-4, 1024, "drop")
    assert [loss.kind for loss in config.preference.loss] == ["bradley_terry"]
    assert [line.key for line in conversion.lines if line.undecided] == []


def test_scores_near_zero_are_a_key_of_reward_models(
    converted: Convert, loads: Callable[[ConvertedConfig], Any]
) -> None:
    text = "model_name_or_path: m\ndataset_name: rows\nmax_length: 512\ncenter_rewards_coefficient: 0.01"

    conversion = converted(text, "trl")
    config = loads(conversion)

    assert (conversion.verb, config.data.max_length, config.preference.loss[0].center) == ("reward", 512, 0.01)
