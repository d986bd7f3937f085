"""Files as users of each system write them; what the built configuration must say is computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.config.base import leaves
from holdfast.config.load import from_mapping
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.yaml12 import parse_file
from holdfast.features.rescue.configuration.convert import convert

FILES = Path(__file__).with_name("files")


class Answer(NamedTuple):
    """What a file asks for."""

    ranks: int
    verb: str
    undecided: set[str]
    keys: dict[str, Any]


def servers(count: int, size: int, share: float) -> dict[str, Any]:
    return {
        "rollout.engine.kind": "vllm",
        "rollout.engine.url": [f"http://127.0.0.1:{8700 + server}" for server in range(count)],
        "rollout.engine.start.share": True,
        "rollout.engine.start.tensor_parallel_size": size,
        "rollout.engine.start.gpu_memory_utilization": share,
    }


def rates(lr: float, kind: str, *, ratio: float = 0.0, steps: int = 0, decay: float = 0.0) -> dict[str, Any]:
    return {
        "optim.lr": lr,
        "optim.weight_decay": decay,
        "optim.schedule.kind": kind,
        "optim.schedule.warmup_ratio": ratio,
        "optim.schedule.warmup_steps": steps,
    }


ANSWERS: dict[str, Answer] = {
    # 512 prompts a rollout in updates of 128; one sequence of 2048 + 2048 tokens; 8 GPUs are 4 servers of 2
    "easyr1_math": Answer(1, "grpo", set(), {
        "epochs": 15.0, "steps": None, "data.batch_size": 512, "updates.mini_batches": 4, "updates.passes": 1,
        "data.max_length": 4096, "rollout.max_new_tokens": 2048, "data.tokens_per_micro_batch": 4096,
        "rollout.group_size": 5, "advantage.kind": "grpo", "objective.kind": "clip", "objective.low": 0.2,
        "objective.high": 0.3, "objective.dual_clip": 3.0, "data.average": "token_mean", "kl.coefficient": 0.01,
        "kl.where": "loss", "kl.estimator": "k3", "reference.kind": "offloaded", "residency.parameters": "host",
        "evaluation.every_steps": 5, "evaluation.sampling.temperature": 0.6, "evaluation.sampling.top_p": 0.95,
        "evaluation.per_prompt": 1, "evaluation.sets.val.path": "hiyouga/math12k@test", "checkpoint.keep.last": 3,
        "optim.clip_norm": 1.0, **rates(1e-6, "constant", decay=0.01), **servers(4, 2, 0.6),
    }),
    # 512 / 32 updates; 2048 + 20480 tokens; 8 GPUs are 2 servers of 4; sampling of evaluations is text, not keys
    "easyr1_dapo": Answer(1, "grpo", {"worker.rollout.val_override_config"}, {
        "epochs": 10.0, "data.batch_size": 512, "updates.mini_batches": 16, "data.max_length": 22528,
        "data.tokens_per_micro_batch": 22528, "rollout.group_size": 16, "objective.high": 0.28,
        "kl.coefficient": 0.0, "groups.flat": "resample", "groups.max_rounds": 10, "groups.between.low": 0.01,
        "groups.between.reward": "compute_score/accuracy_normalized", "groups.between.high": 0.99,
        "model.dtype": "bfloat16", "optim.kind": "adamw_bf16", **rates(1e-6, "constant", steps=10, decay=0.1),
        **servers(2, 4, 0.6),
    }),
    # 1024 / 256 updates; 32 x (512 + 1024) tokens
    "verl_grpo": Answer(1, "grpo", set(), {
        "epochs": 15.0, "data.batch_size": 1024, "updates.mini_batches": 4, "data.tokens_per_micro_batch": 49152,
        "data.overlong": "drop", "rollout.group_size": 5, "objective.kind": "clip", "objective.low": 0.2,
        "objective.high": 0.2, "objective.dual_clip": 3.0, "kl.coefficient": 0.001, "kl.where": "loss",
        "kl.estimator": "k3", "entropy.coefficient": 0.0, "reference.kind": "offloaded", "checkpoint.every_steps": 20,
        "evaluation.every_steps": 5, **rates(1e-6, "constant", decay=0.01), **servers(4, 2, 0.6),
    }),
    # PPO with verl's own lambda, gamma and KL coefficient; nothing here samples by SGLang
    "verl_ppo": Answer(1, "grpo", {
        "actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
    }, {
        "steps": 435, "epochs": None, "data.batch_size": 256, "updates.mini_batches": 4, "parallel.context": 2,
        "data.tokens_per_micro_batch": 16384, "rollout.group_size": 1, "rollout.engine.kind": "auto",
        "advantage.kind": "gae", "advantage.gamma": 1.0, "advantage.lam": 1.0, "critic.optim.lr": 1e-5,
        "critic.value_clip": 0.5, "critic.warmup_steps": 5, "kl.coefficient": 0.001, "kl.where": "reward",
        "kl.estimator": "k1", **rates(1e-6, "cosine", ratio=0.285, decay=0.01),
    }),
    # 2 x 8 x 4 ranks
    "trl_sft_lora": Answer(4, "sft", {
        "per_device_train_batch_size", "gradient_accumulation_steps", "lora_target_modules",
    }, {
        "epochs": 1.0, "data.batch_size": 64, "data.tokens_per_micro_batch": 2048, "data.packing": "best_fit",
        "data.overlong": "truncate", "objective.kind": "nll", "model.lora.rank": 32, "model.lora.alpha": 16.0,
        "model.lora.dropout": 0.05, "evaluation.every_steps": 100, "metrics.log_every": 10,
        "evaluation.sets.test.path": "trl-lib/Capybara@test", "parallel.compute_dtype": "bfloat16",
        "run.dir": "data", "run.name": "Qwen2-0.5B-SFT", **rates(2e-4, "cosine", ratio=0.1),
    }),
    # 2 x 8 x 2 ranks; 2 pairs of two sequences of 1024 tokens; TRL averages the log-probabilities of ipo
    "trl_dpo": Answer(2, "dpo", set(), {
        "steps": 1000, "epochs": None, "data.batch_size": 32, "data.tokens_per_micro_batch": 4096,
        "preference.loss": [{"weight": 1.0, "kind": "ipo", "beta": 0.05, "lengths": "mean"}], "preference.sft": 0.0,
        "parallel.recompute.kind": "full", "metrics.sinks": [], **rates(5e-7, "linear", ratio=0.1, decay=0.01),
    }),
    # 16 x 4 x 8 ranks = 512 completions, of 16 a prompt; 400 updates / 2 a rollout; 8 GPUs are 4 servers of 2
    "trl_grpo": Answer(8, "grpo", set(), {
        "steps": 200, "data.batch_size": 32, "updates.mini_batches": 1, "updates.passes": 2, "seed": 7,
        "checkpoint.every_steps": 50, "rollout.group_size": 16, "rollout.max_new_tokens": 2048,
        "data.max_length": 3072, "data.tokens_per_micro_batch": 49152, "objective.kind": "clip",
        "objective.low": 0.2, "objective.high": 0.28, "data.average": "constant_length", "advantage.kind": "dr_grpo",
        "kl.coefficient": 0.0, "correction.kind": "truncate", "correction.cap": 2.0, "model.dtype": "bfloat16",
        "optim.kind": "adamw_bf16", "optim.schedule.final_ratio": 0.1,
        **rates(1e-6, "cosine", ratio=0.1), **servers(4, 2, 0.4),
    }),
    # 2 x 2 rows, and two windows of 2048 tokens
    "axolotl_lora": Answer(1, "sft", {
        "loss_watchdog_threshold", "loss_watchdog_patience", "special_tokens.pad_token", "micro_batch_size",
        "gradient_accumulation_steps",
    }, {
        "epochs": 1.0, "data.batch_size": 4, "data.tokens_per_micro_batch": 4096, "data.rows": "alpaca",
        "data.validation_split": 0.1, "model.lora.rank": 16, "optim.kind": "adamw_8bit",
        "evaluation.every_epochs": 0.25, "checkpoint.every_epochs": 1.0, "run.dir": "outputs", "run.name": "lora-out",
        **rates(2e-4, "cosine", ratio=0.1),
    }),
    # four neighbouring ranks share a row: 1 x 4 x 8 / 4
    "axolotl_long": Answer(8, "sft", {"micro_batch_size", "gradient_accumulation_steps"}, {
        "steps": 600, "data.batch_size": 8, "parallel.context": 4, "parallel.shard": 2,
        "data.tokens_per_micro_batch": 65536, "data.columns.messages": "conversations", "optim.kind": "adamw",
        "optim.clip_norm": 0.5, "checkpoint.every_steps": 100, **rates(1e-5, "constant", steps=20),
    }),
    # 2 x 4 pairs; 2 pairs of two sequences of 4096 tokens
    "axolotl_dpo": Answer(1, "dpo", {"datasets", "load_in_8bit"}, {
        "epochs": 4.0, "data.batch_size": 8, "data.tokens_per_micro_batch": 16384, "model.lora.rank": 32,
        "preference.loss": [{"weight": 1.0, "kind": "dpo", "beta": 0.1, "label_smoothing": 0.0, "lengths": "sum"}],
        "model.lora.targets": "all-linear", "optim.kind": "adamw_8bit", **rates(2e-4, "cosine", steps=10),
    }),
    # 1 x 8 rows; alpha is twice the rank
    "llamafactory_lora": Answer(1, "sft", {"dataset", "template"}, {
        "epochs": 3.0, "data.batch_size": 8, "data.tokens_per_micro_batch": 2048, "data.max_samples": 1000,
        "model.lora.rank": 8, "model.lora.alpha": 16.0, "objective.kind": "nll", "checkpoint.every_steps": 500,
        "launch.timeout_minutes": 3000000.0, **rates(1e-4, "cosine", ratio=0.1),
    }),
    # 1 x 4 x 4 ranks; one pair of two sequences of 4096 tokens; LLaMA-Factory's own gamma
    "llamafactory_dpo": Answer(4, "dpo", {"dataset", "template"}, {
        "steps": 900, "data.batch_size": 16, "data.tokens_per_micro_batch": 8192, "model.lora": None,
        "preference.loss": [{"weight": 1.0, "kind": "simpo", "beta": 0.1, "gamma": 0.5}], "model.dtype": "bfloat16",
        "optim.kind": "adamw_bf16", "evaluation.every_steps": 300, "data.validation_split": 0.1,
        **rates(5e-7, "cosine", ratio=0.1),
    }),
}  # fmt: skip


def test_every_file_has_an_answer() -> None:
    assert {path.stem for path in FILES.iterdir()} == set(ANSWERS)


@pytest.mark.parametrize("name", list(ANSWERS))
def test_a_file_of_a_user_becomes_what_is_computed_by_hand(name: str) -> None:
    answer = ANSWERS[name]

    conversion = convert(parse_file(FILES / f"{name}.yaml"), name.partition("_")[0], None, answer.ranks)
    values = conversion.values()
    if "dataset" in answer.undecided:
        values["data"]["path"] = "rows"
    built = from_mapping(values, ROOTS[conversion.verb])

    assert conversion.verb == answer.verb
    assert {line.key for line in conversion.lines if line.undecided} == answer.undecided
    shown = built.model_dump()
    flat = dict(leaves(shown)) | {key: at(shown, key) for key in answer.keys}
    assert {key: flat[key] for key in answer.keys} == answer.keys


def at(values: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values
