"""Files as verl reads them, with expected values by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.features.rescue.configuration.convert import ConvertedConfig
from tests.features.rescue.systems.conftest import Case, Convert, check

REWARD = "custom_reward_function: {path: score.py, name: compute_score}\n"
MODEL = "model: {path: Qwen/Qwen2.5-7B-Instruct}"

CASES: dict[str, Case] = {
    "GRPO with the defaults": (REWARD + """
data: {train_files: train.parquet}
algorithm: {adv_estimator: grpo}
actor_rollout_ref: {model: {path: Qwen/Qwen2.5-7B-Instruct}, rollout: {n: 5}}
""", {  # 1024 prompts a rollout, 256 an update; 512 + 512 tokens
        "data.batch_size": 1024, "updates.mini_batches": 4, "data.max_length": 1024, "rollout.max_new_tokens": 512,
        "data.tokens_per_micro_batch": 4096, "optim.lr": 1e-6, "optim.weight_decay": 0.01, "epochs": 30,
        "objective.kind": "clip", "objective.low": 0.2, "objective.high": 0.2, "objective.dual_clip": 3.0,
        "kl.coefficient": None, "launch.ranks": 8, "advantage.kind": "grpo", "data.path": "train.parquet",
        "reward": {"kind": "path", "path": "score.py:compute_score"}, "data.columns.prompt": None,
    }),
    "the example of gsm8k": (REWARD + """
data:
  train_files: gsm8k/train.parquet
  val_files: gsm8k/test.parquet
  train_batch_size: 1024
  max_prompt_length: 512
  max_response_length: 1024
  filter_overlong_prompts: True
  truncation: error
algorithm: {adv_estimator: grpo, use_kl_in_reward: False}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B, use_remove_padding: True, enable_gradient_checkpointing: True}
  actor:
    optim: {lr: 1.0e-6}
    ppo_mini_batch_size: 256
    ppo_micro_batch_size_per_gpu: 32
    use_kl_loss: True
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    entropy_coeff: 0
    fsdp_config: {param_offload: False, optimizer_offload: False}
  rollout: {name: vllm, n: 5, gpu_memory_utilization: 0.6, tensor_model_parallel_size: 2}
trainer: {critic_warmup: 0, logger: [console, wandb], save_freq: 20, test_freq: 5, total_epochs: 15}
""", {  # 32 x (512 + 1024) tokens
        "data.tokens_per_micro_batch": 49152, "updates.mini_batches": 4, "kl.coefficient": 0.001,
        "kl.where": "loss", "kl.estimator": "k3", "entropy.coefficient": 0, "checkpoint.every_steps": 20,
        "evaluation.every_steps": 5, "evaluation.sets.val.path": "gsm8k/test.parquet", "epochs": 15,
        "residency.parameters": "stay", "data.packing": "best_fit", "rollout.engine.kind": "vllm",
        "rollout.engine.start.tensor_parallel_size": 2,
    }),
    "dynamic batches": (REWARD + """
data: {train_files: train.parquet, train_batch_size: 128, max_prompt_length: 1024, max_response_length: 7168}
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false}
actor_rollout_ref:
  model: {path: m}
  actor: {use_dynamic_bsz: true, ppo_max_token_len_per_gpu: 16384, ppo_micro_batch_size_per_gpu: 2,
          ppo_mini_batch_size: 64, loss_agg_mode: seq-mean-token-sum-norm}
  rollout: {n: 8, temperature: 0.8}
""", {
        "data.tokens_per_micro_batch": 16384, "updates.mini_batches": 2, "advantage.kind": "dr_grpo",
        "data.average": "constant_length", "rollout.temperature": 0.8, "data.max_length": 8192,
    }),
    "DAPO": (REWARD + """
data: {train_files: train.parquet, train_batch_size: 512, max_prompt_length: 2048, max_response_length: 20480}
algorithm: {adv_estimator: grpo, filter_groups: {enable: true, metric: acc, max_num_gen_batches: 10}}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-32B}
  actor: {ppo_mini_batch_size: 32, clip_ratio_low: 0.2, clip_ratio_high: 0.28, clip_ratio_c: 10.0, grad_clip: 1.0,
          optim: {lr: 1.0e-6, lr_warmup_steps: 10, weight_decay: 0.1}}
  rollout: {n: 16, val_kwargs: {temperature: 1.0, top_p: 0.7, n: 32}}
trainer: {nnodes: 16, total_training_steps: 200}
""", {
        "groups.flat": "resample", "groups.max_rounds": 10, "objective.high": 0.28, "objective.dual_clip": 10.0,
        "updates.mini_batches": 16, "optim.schedule.warmup_steps": 10, "optim.weight_decay": 0.1, "steps": 200,
        "epochs": None, "launch.ranks": None, "data.max_length": 22528, "data.tokens_per_micro_batch": 22528,
        "evaluation.per_prompt": None,
    }),
    "one number for both bounds": (REWARD + """
data: {train_files: train.parquet}
algorithm: {adv_estimator: rloo}
actor_rollout_ref:
  model: {path: m}
  actor: {clip_ratio: 0.3, clip_ratio_low: null, clip_ratio_high: null, ppo_epochs: 2}
  rollout: {n: 4}
""", {"objective.low": 0.3, "objective.high": 0.3, "advantage.kind": "rloo", "updates.passes": 2}),
    "bounds of their own win": (REWARD + """
data: {train_files: train.parquet}
algorithm: {adv_estimator: remax}
actor_rollout_ref: {model: {path: m}, actor: {clip_ratio: 0.3}, rollout: {n: 2}}
""", {"objective.low": 0.2, "objective.high": 0.2, "advantage.kind": "remax"}),
    "PPO with a critic": ("""
reward: {custom_reward_function: {path: score.py, name: judge}}
data: {train_files: [a.parquet, b.parquet], train_batch_size: 256}
algorithm: {adv_estimator: gae, lam: 0.95, gamma: 0.99, use_kl_in_reward: true, kl_penalty: kl,
            kl_ctrl: {kl_coef: 0.002}}
actor_rollout_ref: {model: {path: m}, actor: {ppo_mini_batch_size: 64}}
critic: {model: {path: small}, optim: {lr: 2.0e-5}}
trainer: {critic_warmup: 3, n_gpus_per_node: 2}
""", {
        "advantage.kind": "gae", "advantage.lam": 0.95, "advantage.gamma": 0.99, "critic.path": "small",
        "critic.optim.lr": 2e-5, "critic.value_clip": 0.5, "critic.warmup_steps": 3, "kl.where": "reward",
        "kl.coefficient": 0.002, "kl.estimator": "k1", "data.sources": [{"path": "a.parquet"}, {"path": "b.parquet"}],
        "reward": {"kind": "path", "path": "score.py:judge"}, "launch.ranks": 2,
    }),
    "GSPO": (REWARD + """
data: {train_files: train.parquet}
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  model: {path: m}
  actor: {policy_loss: {loss_mode: gspo}, loss_agg_mode: seq-mean-token-mean, clip_ratio_low: 3.0e-4,
          clip_ratio_high: 4.0e-4}
  rollout: {n: 16, top_p: 0.9}
""", {
        "objective.kind": "gspo", "data.average": "sequence_mean", "objective.low": 3e-4, "objective.high": 4e-4,
        "objective.dual_clip": None, "rollout.top_p": 0.9, "correction.kind": "truncate",
    }),
    "LoRA with fields of the model": (REWARD + """
data: {train_files: train.parquet, prompt_key: question, apply_chat_template_kwargs: {enable_thinking: false}, seed: 7}
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  model: {path: m, tokenizer_path: t, lora_rank: 64, lora_alpha: 32, target_modules: all-linear,
          override_config: {model_config: {max_position_embeddings: 4096}}}
  rollout: {n: 4}
""", {
        "model.lora.rank": 64, "model.lora.alpha": 32, "model.lora.targets": "all-linear", "model.tokenizer": "t",
        "model.config_override": {"max_position_embeddings": 4096}, "data.columns.prompt": "question",
        "data.template_kwargs": {"enable_thinking": False}, "data.seed": 7,
    }),
    "offloading, a cosine and a folder": (REWARD + """
data: {train_files: train.parquet, train_max_samples: -1}
algorithm: {adv_estimator: reinforce_plus_plus}
actor_rollout_ref:
  model: {path: m}
  actor:
    fsdp_config: {param_offload: true, optimizer_offload: true, fsdp_size: -1, reshard_after_forward: false}
    optim: {lr: 5.0e-7, lr_scheduler_type: cosine, min_lr_ratio: 0.1, lr_warmup_steps: -1, lr_warmup_steps_ratio: 0.1}
  rollout: {n: 2, top_k: -1, enforce_eager: false}
trainer: {default_local_dir: out/gsm8k, max_actor_ckpt_to_keep: 1, save_freq: -1, resume_mode: auto, device: cpu}
""", {
        "residency.parameters": "host", "residency.optimizer": "host", "parallel.reshard": False,
        "parallel.shard": None, "optim.schedule.kind": "cosine", "optim.schedule.final_ratio": 0.1,
        "optim.schedule.warmup_ratio": 0.1, "optim.schedule.warmup_steps": None, "run.dir": "out",
        "run.name": "gsm8k", "checkpoint.keep.last": 2, "checkpoint.every_steps": None, "launch.device": "cpu",
        "data.max_samples": None, "rollout.top_k": None, "advantage.kind": "reinforce_pp",
    }),
    "tokens left out by covariance": (REWARD + """
data: {train_files: train.parquet}
algorithm: {adv_estimator: opo}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-7B-Instruct}
  actor:
    policy_loss: {loss_mode: clip_cov, clip_cov_ratio: 0.001, clip_cov_lb: 0.5, clip_cov_ub: 4.0}
    clip_ratio_low: 0.1
  rollout: {n: 4}
""", {
        "advantage.kind": "opo", "objective.kind": "clip_cov", "objective.share": 0.001, "objective.low": 0.1,
        "objective.covariance_low": 0.5, "objective.covariance_high": 4.0, "objective.coefficient": None,
    }),
    "trust in divergence": (REWARD + """
data: {train_files: train.parquet}
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-7B-Instruct}
  actor: {policy_loss: {loss_mode: dppo_kl}, clip_ratio_low: 0.05, clip_ratio_high: 0.05}
  rollout: {n: 4}
""", {
        "objective.kind": "dppo", "objective.divergence": "kl", "objective.low": 0.05, "objective.high": 0.05,
        "objective.dual_clip": None,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_a_file_of_verl_becomes_what_is_computed_by_hand(
    name: str, converted: Convert, loads: Callable[[ConvertedConfig], Any]
) -> None:
    check(CASES[name], "verl", 1, converted, loads)


def test_prompts_that_no_update_divides_are_left_to_a_person(converted: Convert) -> None:
    text = "data: {train_batch_size: 100}\nactor_rollout_ref: {actor: {ppo_mini_batch_size: 64}}"

    lines = {line.key: line for line in converted(text, "verl").lines}

    assert lines["actor_rollout_ref.actor.ppo_mini_batch_size"].remark == (
        "100 prompts of a rollout are no multiple of 64"
    )


@pytest.mark.parametrize("files", ["{a: 1}", "[{a: 1}]", "[a.parquet, 3]", "['']", "7"])
def test_files_of_other_than_texts_are_left_to_a_person(converted: Convert, files: str) -> None:
    lines = {line.key: line for line in converted(f"data: {{train_files: {files}, val_files: {files}}}", "verl").lines}

    assert [lines[f"data.{name}_files"].undecided for name in ("train", "val")] == [True, True]
    assert [lines[f"data.{name}_files"].settings for name in ("train", "val")] == [{}, {}]


@pytest.mark.parametrize(("mode", "expected"), [
    ("kl_cov", {"objective.coefficient": 0.1, "objective.cap": None}),
    ("kl_cov, ppo_kl_coef: 0.5", {"objective.coefficient": 0.5}),
    ("dppo_tv", {"objective.cap": 3.0, "objective.dual_clip": None}),
    ("dppo_kl", {"objective.cap": 3.0, "objective.dual_clip": None}),
    ("vanilla", {"objective.dual_clip": 3.0, "objective.cap": None, "objective.coefficient": None}),
])  # fmt: skip
def test_options_of_an_objective_have_verls_own_defaults(
    converted: Convert, mode: str, expected: dict[str, Any]
) -> None:
    text = f"actor_rollout_ref: {{actor: {{policy_loss: {{loss_mode: {mode}}}}}}}"

    settings = converted(text, "verl").settings

    assert {key: settings.get(key) for key in expected} == expected
