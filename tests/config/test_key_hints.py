"""An unknown key that another system has: the key here, or what it concerns."""

from __future__ import annotations

import pytest

from tests.config.conftest import WHOLE, Mistakes
from tests.messages import assert_only


@pytest.mark.parametrize(
    ("line", "at", "named"),
    [
        (
            "per_device_train_batch_size: 4",
            "per_device_train_batch_size",
            "per_device_train_batch_size data.batch_size data.tokens_per_micro_batch",
        ),
        ("bf16: true", "bf16", "bf16 parallel.compute_dtype"),
        ("deepspeed: zero3.json", "deepspeed", "deepspeed speed"),
        ("learning_rate: 1e-5", "learning_rate", "optim.lr"),
        ("sequence_len: 8", "sequence_len", "data.max_length"),
        ("neftune_noise_alpha: 5", "neftune_noise_alpha", "neftune_alpha"),
        ("num_generations: 8", "num_generations", "rollout.group_size"),
        ("load_in_4bit: true", "load_in_4bit", "load_in_4bit model.lora.quantize"),
        ("report_to: wandb", "report_to", "report_to metrics.sinks"),
        ("val_set_size: 0.1", "val_set_size", "val_set_size data.validation_split"),
        ("micro_batch_size: 2", "micro_batch_size", "micro_batch_size data.batch_size data.tokens_per_micro_batch"),
        ("total_epochs: 3", "total_epochs", "epochs"),
        ("tensor_parallel_size: 2", "tensor_parallel_size", "tensor_parallel_size"),
        ("optim: {warmup: 3}", "optim.warmup", "optim.schedule.warmup_steps"),
        ("gradient_clip_val: 1.0", "gradient_clip_val", "optim.clip_norm"),
    ],
)
def test_a_key_of_another_system_is_explained(mistakes: Mistakes, line: str, at: str, named: str) -> None:
    assert_only(mistakes(WHOLE + line), f"run.yaml:4: {at}", named)


@pytest.mark.parametrize("line", ["lr: 1", "max_length: 3", "batch_size: 3"])
def test_a_key_of_ours_in_the_wrong_place_stays_ours(mistakes: Mistakes, line: str) -> None:
    key = line.partition(":")[0]

    assert_only(mistakes(WHOLE + line), f"run.yaml:4: {key}", f".{key}")
