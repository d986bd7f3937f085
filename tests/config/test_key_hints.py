"""An unknown key that another system has: what it is here, and what differs, so that nobody is misled."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.config.conftest import WHOLE

Mistakes = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "per_device_train_batch_size: 4",
            "per_device_train_batch_size: unknown key; transformers' per_device_train_batch_size differs "
            "from data.batch_size and data.tokens_per_micro_batch and updates.mini_batches here: counts what"
            " one device passes forward at once; data.batch_size counts rows of one update over all ranks, "
            "and memory is set by data.tokens_per_micro_batch",
        ),
        (
            "bf16: true",
            "bf16: unknown key; transformers' bf16 differs from parallel.compute_dtype here: the precision "
            "of forward and backward passes; model.dtype is how weights are stored, and stays float32",
        ),
        (
            "deepspeed: zero3.json",
            "deepspeed: unknown key; transformers' deepspeed has no counterpart here: ranks share sharded "
            "weights by FSDP2, which is ZeRO stage 3; parallel.offload is its offloading",
        ),
        (
            "learning_rate: 1e-5",
            "learning_rate: unknown key; it is called optim.lr here",
        ),
        (
            "sequence_len: 8",
            "sequence_len: unknown key; it is called data.max_length here",
        ),
        (
            "neftune_noise_alpha: 5",
            "neftune_noise_alpha: unknown key; it is called neftune_alpha here",
        ),
        (
            "num_generations: 8",
            "num_generations: unknown key; it is called rollout.group_size here, in files of another command",
        ),
        (
            "load_in_4bit: true",
            "load_in_4bit: unknown key; TRL's load_in_4bit differs from model.lora.quantize here: needs "
            "adapters, whose frozen layers alone are kept in 4 bits; nf4 or fp4",
        ),
        (
            "report_to: wandb",
            "report_to: unknown key; transformers' report_to differs from metrics.sinks here: metrics.jsonl "
            "is always written; csv, tensorboard, wandb, trackio, mlflow and swanlab mirror it, each offline unless "
            "its variables say otherwise",
        ),
        (
            "val_set_size: 0.1",
            "val_set_size: unknown key; Axolotl's val_set_size differs from data.validation_split here: a "
            "share; rows are chosen by a hash of their index, and a number of rows is not offered",
        ),
        (
            "micro_batch_size: 2",
            "micro_batch_size: unknown key; Axolotl's micro_batch_size differs from data.batch_size and "
            "data.tokens_per_micro_batch here: counts what one device passes forward at once; "
            "data.batch_size counts rows of one update over all ranks, and memory is set by "
            "data.tokens_per_micro_batch",
        ),
        (
            "total_epochs: 3",
            "total_epochs: unknown key; it is called epochs here",
        ),
        (
            "optim: {warmup: 3}",
            "optim.warmup: unknown key; it is called optim.schedule.warmup_steps here",
        ),
        (
            "gradient_clip_val: 1.0",
            "gradient_clip_val: unknown key; it is called optim.clip_norm here",
        ),
    ],
)
def test_a_key_of_another_system_is_explained(mistakes: Mistakes, line: str, said: str) -> None:
    assert mistakes(WHOLE + line) == [f"run.yaml:4: {said}"]


@pytest.mark.parametrize("line", ["lr: 1", "max_length: 3", "batch_size: 3"])
def test_a_key_of_ours_in_the_wrong_place_stays_ours(mistakes: Mistakes, line: str) -> None:
    assert "it belongs elsewhere: did you mean" in mistakes(WHOLE + line)[0]
