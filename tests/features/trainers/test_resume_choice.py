"""Which checkpoint a protected trainer goes on from: never from nothing where a finished one lies."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.features.trainers.saves import UnsuitableTrainer
from holdfast.features.trainers.trl import protect
from tests.features.rescue.test_readers import SIZES


class First(TrainerCallback):
    """Remembers the step that a fit began at."""

    step: int | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - its signature
        self.step = state.global_step if self.step is None else self.step


def trainer_of(out: Path, steps: int, first: First | None = None, **others: Any) -> Trainer:
    torch.manual_seed(0)
    rows = [{"input_ids": list(range(9)), "labels": list(range(9))} for _ in range(16)]
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, save_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        disable_tqdm=True, **others,
    )  # fmt: skip
    callbacks: Any = [] if first is None else [first]
    return Trainer(Qwen2ForCausalLM(Qwen2Config(**SIZES)), arguments, train_dataset=rows, callbacks=callbacks)


def begun_at(out: Path, steps: int) -> int | None:
    """Resume under protection; return the step of the first update."""
    first = First()
    protect(trainer_of(out, steps, first, save_total_limit=2)).train(resume_from_checkpoint=True)
    return first.step


def test_checkpoints_that_the_trainer_wrote_alone_are_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer_of(tmp_path, 4).train()

    assert begun_at(tmp_path, 6) == 4
    assert f"resuming from {tmp_path}/checkpoint-4, which the trainer itself wrote" in capsys.readouterr().out


def test_a_damaged_newest_is_skipped_and_named_and_all_damaged_are_never_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    protect(trainer_of(tmp_path, 4)).train()
    kept_aside = tmp_path / "checkpoint-2" / "mine.new"
    kept_aside.mkdir()
    (tmp_path / "checkpoint-4/holdfast/manifest.json").write_bytes(b"{}")

    assert begun_at(tmp_path, 4) == 2
    assert "checkpoint-2 (skipped: checkpoint-4, which is damaged)" in capsys.readouterr().out
    assert kept_aside.is_dir()
    for each in ("checkpoint-2", "checkpoint-4"):
        (tmp_path / each / "holdfast/manifest.json").write_bytes(b"{}")
    with pytest.raises(CheckpointCorrupt, match="checkpoint-4, which is damaged; checkpoint-2, which is damaged"):
        begun_at(tmp_path, 6)


def test_weights_alone_are_refused_when_they_are_resumed_and_when_they_would_be_saved(tmp_path: Path) -> None:
    trainer_of(tmp_path, 2, save_only_model=True).train()

    with pytest.raises(UnsuitableTrainer, match="checkpoint-2 was saved without an optimizer"):
        begun_at(tmp_path, 4)
    with pytest.raises(UnsuitableTrainer, match="save_only_model"):
        protect(trainer_of(tmp_path, 2, save_only_model=True))


def test_a_save_that_was_never_finished_is_no_reason_to_stop(tmp_path: Path) -> None:
    protect(trainer_of(tmp_path, 2)).train()
    (tmp_path / "checkpoint-2/trainer_state.json").unlink()
    shutil.rmtree(tmp_path / "checkpoint-2/holdfast")

    assert begun_at(tmp_path, 2) == 0
