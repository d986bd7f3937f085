"""Files as EasyR1 reads them, with expected values by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.features.rescue.configuration.convert import ConvertedConfig
from tests.features.rescue.systems.conftest import Case, Convert, check

LEAST = """
data: {train_files: rows.parquet, prompt_key: problem%s}
algorithm: {adv_estimator: %s%s}
worker:
  actor: {model: {model_path: Qwen/Qwen2.5-7B-Instruct}%s}
  rollout: {n: 5%s}
  reward: {reward_function: "math.py:compute_score"}
trainer: {total_epochs: 15%s}
"""


def least(
    data: str = "", estimator: str = "grpo", algorithm: str = "", actor: str = "", rollout: str = "", run: str = ""
) -> str:
    parts = (data, algorithm, actor, rollout, run)
    more_data, more_algorithm, more_actor, more_rollout, more_run = (f", {part}" if part else "" for part in parts)
    return LEAST % (more_data, estimator, more_algorithm, more_actor, more_rollout, more_run)


CASES: dict[str, Case] = {
    "the defaults": (least(), {  # 512 prompts a rollout, 256 an update; 4 sequences of 512 + 512 tokens
        "data.batch_size": 512, "updates.mini_batches": 2, "data.max_length": 1024, "rollout.max_new_tokens": 512,
        "data.tokens_per_micro_batch": 4096, "optim.lr": 1e-6, "optim.weight_decay": 0.01, "epochs": 15,
        "objective.low": 0.2, "objective.high": 0.3, "objective.dual_clip": 3.0, "kl.coefficient": 0.001,
        "kl.estimator": "k1", "kl.where": "reward", "launch.ranks": 8, "data.columns.instruction": "problem",
        "optim.schedule.kind": "constant", "reward": {"kind": "path", "path": "math.py:compute_score"},
        "rollout.group_size": 5, "data.average": "token_mean", "parallel.recompute": "full", "data.seed": 1,
    }),
    "the example of mathematics": (least(
        "answer_key: solution, max_prompt_length: 2048, max_response_length: 2048, rollout_batch_size: 512, "
        "val_files: hiyouga/math12k@test, format_prompt: math.jinja, shuffle: true, filter_overlong_prompts: true",
        algorithm="disable_kl: false, use_kl_loss: true, kl_penalty: low_var_kl, kl_coef: 1.0e-2",
        actor="global_batch_size: 128, micro_batch_size_per_device_for_update: 4, max_grad_norm: 1.0, "
        "offload: {offload_params: true, offload_optimizer: true}",
        rollout="top_p: 1.0, val_override_config: {temperature: 0.6, top_p: 0.95, n: 1}",
        run="val_freq: 5, save_freq: 5, save_limit: 3, n_gpus_per_node: 4",
    ), {  # 512 / 128; 4 x 4096 tokens
        "updates.mini_batches": 4, "data.max_length": 4096, "data.tokens_per_micro_batch": 16384,
        "kl.where": "loss", "kl.estimator": "k3", "kl.coefficient": 0.01, "evaluation.every_steps": 5,
        "evaluation.sets.val.path": "hiyouga/math12k@test", "evaluation.sampling.temperature": 0.6,
        "evaluation.sampling.top_p": 0.95, "evaluation.per_prompt": 1, "checkpoint.every_steps": 5,
        "checkpoint.keep.last": 3, "residency.parameters": "host", "residency.optimizer": "host",
        "data.columns.answer": "solution", "data.format": "math.jinja", "launch.ranks": 4, "data.overlong": "drop",
    }),
    "rows that ranks share": (least(actor="ulysses_size: 4, fsdp: {fsdp_size: 8}"), {
        "parallel.context": 4, "parallel.shard": 2, "launch.ranks": 8,
    }),
    "DAPO": (least(
        "rollout_batch_size: 256, mini_rollout_batch_size: 128, max_response_length: 8192",
        algorithm="disable_kl: true, online_filtering: true, filter_key: accuracy, filter_low: 0.01, filter_high: 0.99",
        actor="global_batch_size: 64, clip_ratio_high: 0.28, optim: {lr: 1.0e-6, lr_warmup_steps: 10}",
        run="max_try_make_batch: 10",
    ), {
        "groups.flat": "resample", "groups.between.reward": "compute_score/accuracy", "groups.between.low": 0.01,
        "groups.between.high": 0.99, "groups.max_rounds": 10, "kl.coefficient": 0.0, "kl.where": None,
        "objective.high": 0.28, "updates.mini_batches": 4, "data.max_length": 8704,
        "optim.schedule.warmup_steps": 10, "data.tokens_per_micro_batch": 34816,
    }),
    "GSPO": (least(actor="loss_type: gspo, clip_ratio_low: 3.0e-4, clip_ratio_high: 4.0e-4"), {
        "objective.kind": "gspo", "data.average": "sequence_mean", "objective.low": 3e-4, "objective.high": 4e-4,
        "objective.dual_clip": None,
    }),
    "SAPO by sequences": (least(actor="loss_type: sapo, tau_negative: 1.1, loss_avg_mode: seq"), {
        "objective.kind": "sapo", "objective.tau_negative": 1.1, "objective.low": None, "objective.high": None,
        "data.average": "sequence_mean",
    }),
    "PPO with a critic": ("""
data: {train_files: rows.parquet, rollout_batch_size: 128}
algorithm: {adv_estimator: gae, lam: 0.95, kl_type: adaptive, kl_target: 0.1, kl_horizon: 10000.0}
worker:
  actor: {global_batch_size: 128, model: {model_path: Qwen/Qwen2.5-1.5B}}
  critic: {model: {model_path: Qwen/Qwen2.5-0.5B}, optim: {lr: 1.0e-5}, cliprange_value: 0.4}
  reward: {reward_function: math.py}
trainer: {critic_warmup: 5, max_steps: 100}
""", {
        "advantage.kind": "gae", "advantage.lam": 0.95, "critic.path": "Qwen/Qwen2.5-0.5B", "critic.optim.lr": 1e-5,
        "critic.value_clip": 0.4, "critic.warmup_steps": 5, "kl.target": 0.1, "kl.horizon": 10000.0, "steps": 100,
        "epochs": None, "reward": {"kind": "path", "path": "math.py:main"}, "updates.mini_batches": 1,
        "critic.optim.weight_decay": 0.01,
    }),
    "images": (least(
        "image_key: images, image_dir: pictures, min_pixels: 262144, max_pixels: 1048576",
        actor="model: {model_path: Qwen/Qwen2.5-VL-7B-Instruct, freeze_vision_tower: true, trust_remote_code: false}",
        rollout="limit_images: 2",
    ).replace("model: {model_path: Qwen/Qwen2.5-7B-Instruct}, ", ""), {
        "data.image_dir": "pictures", "data.min_pixels": 262144, "data.max_pixels": 1048576, "data.max_images": 2,
        "model.freeze": ["vision_tower"], "data.columns.images": None, "model.path": "Qwen/Qwen2.5-VL-7B-Instruct",
    }),
    "LoRA in bfloat16": (least(
        actor="model: {model_path: m, lora: {rank: 32, alpha: 64, target_modules: 'q_proj, v_proj'}}, "
        "optim: {strategy: adamw_bf16}, fsdp: {torch_dtype: bf16}",
    ).replace("model: {model_path: Qwen/Qwen2.5-7B-Instruct}, ", ""), {
        "model.lora.rank": 32, "model.lora.alpha": 64, "model.lora.targets": ["q_proj", "v_proj"],
        "model.dtype": "bfloat16", "optim.kind": "adamw_bf16",
    }),
    "a cosine and several machines": (least(
        actor="optim: {lr: 5.0e-7, lr_scheduler_type: cosine, min_lr_ratio: 0.1, lr_warmup_ratio: 0.05, betas: "
        "[0.9, 0.99]}, ppo_epochs: 2",
        run="nnodes: 2, n_gpus_per_node: 8, logger: [console, tensorboard], save_freq: -1, save_model_only: true",
    ), {
        "optim.schedule.kind": "cosine", "optim.schedule.final_ratio": 0.1, "optim.schedule.warmup_ratio": 0.05,
        "optim.betas": [0.9, 0.99], "updates.passes": 2, "launch.ranks": None, "metrics.sinks": ["tensorboard"],
        "checkpoint.every_steps": None, "checkpoint.contents": "weights",
    }),
    "names of earlier versions": ("""
data: {train_files: rows.parquet}
algorithm: {adv_estimator: reinforce_plus_plus, disable_kl: true}
worker:
  actor: {ulysses_sequence_parallel_size: 1, model: {model_path: m}}
  rollout: {n: 4, top_p: 0.99, top_k: -1}
  reward: {reward_type: function, score_function: "./score.py:compute", reward_function_kwargs: {format_weight: 0.2}}
trainer: {total_episodes: 15, save_checkpoint_path: out/run-1}
""", {
        "advantage.kind": "reinforce_pp", "epochs": 15, "rollout.group_size": 4,
        "reward": {"kind": "path", "path": "./score.py:compute", "kwargs": {"format_weight": 0.2}},
        "rollout.top_p": 0.99, "rollout.top_k": None, "correction.kind": "truncate", "run.dir": "out",
        "run.name": "run-1",
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_a_file_of_easyr1_becomes_what_is_computed_by_hand(
    name: str, converted: Convert, loads: Callable[[ConvertedConfig], Any]
) -> None:
    check(CASES[name], "easyr1", 1, converted, loads)


def test_every_key_of_a_file_becomes_one_line(converted: Convert) -> None:
    conversion = converted(CASES["the example of mathematics"][0] + "foo: {bar: 1}\n", "easyr1")
    own = [line for line in conversion.lines if line.number]

    assert len({line.key for line in own}) == len(own) == 31
    assert [line.key for line in own if line.undecided] == ["foo.bar"]


def test_an_interpolation_takes_the_value_of_the_key_it_names(converted: Convert) -> None:
    text = least("max_prompt_length: 256, max_response_length: '${data.max_prompt_length}'")

    assert converted(text, "easyr1").settings["data.max_length"] == 512


@pytest.mark.parametrize("files", ["val.parquet", "[val.parquet, other.parquet]"])
def test_evaluation_sets_have_the_columns_of_the_training_rows(
    files: str, converted: Convert, loads: Callable[[ConvertedConfig], Any]
) -> None:
    config = loads(converted(least(f"answer_key: solution, val_files: {files}"), "easyr1"))

    columns = {"instruction": "problem", "answer": "solution"}
    assert config.data.columns == columns
    assert [section.columns for section in config.evaluation.sets.values()] == [columns] * (1 + files.count(","))


@pytest.mark.parametrize("model", ["actor", "critic"])
def test_no_steps_of_warm_up_are_no_warm_up(converted: Convert, model: str) -> None:
    options = "optim: {lr_warmup_steps: 0, lr_warmup_ratio: 0.1}"
    text = f"algorithm: {{adv_estimator: gae}}\nworker: {{{model}: {{{options}}}}}"

    settings = converted(text, "easyr1").settings

    ours = "optim.schedule" if model == "actor" else "critic.optim.schedule"
    assert f"{ours}.warmup_ratio" not in settings
    assert settings[f"{ours}.warmup_steps"] == 0


@pytest.mark.parametrize(("kind", "undecided"), [("gspo", True), ("gspo_token", True), ("default", False),
                                                 ("cispo", False)])  # fmt: skip
def test_the_dual_clip_of_sequences_is_left_to_a_person(converted: Convert, kind: str, undecided: bool) -> None:
    conversion = converted(f"worker: {{actor: {{loss_type: {kind}}}}}", "easyr1")

    dual = [line for line in conversion.lines if line.key == "worker.actor.clip_ratio_dual"]
    assert [line.undecided for line in dual] == ([] if kind == "cispo" else [undecided])


def test_long_prompts_are_dropped_unless_the_file_says_otherwise(converted: Convert) -> None:
    assert converted("data: {seed: 1}", "easyr1").settings["data.overlong"] == "drop"
    assert converted("data: {filter_overlong_prompts: false}", "easyr1").settings["data.overlong"] == "refuse"
