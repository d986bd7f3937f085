"""Checkpoints of transformers' Trainer in one process, which its own code writes here: weights and optimizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

from holdfast.features.rescue.reading.examine import examine
from holdfast.features.rescue.reading.recognise import open_foreign
from holdfast.features.rescue.reading.record import ForeignCheckpoint
from tests.features.rescue.damages import state_of
from tests.features.rescue.test_import import imported, run_file, stored_at, tokens
from tests.features.rescue.test_readers import SIZES, batch

__all__ = ["tokens"]  # a fixture of these tests, too


class Watch(TrainerCallback):
    """Keeps a copy of the optimizer's live state by parameter name at the end of step 2."""

    def __init__(self) -> None:
        self.states: dict[str, dict[str, torch.Tensor]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        optimizer, model = named["optimizer"], named["model"]
        if state.global_step == 2:
            live = getattr(optimizer, "optimizer", optimizer).state
            self.states = {
                name: {slot: torch.as_tensor(value).clone() for slot, value in live[parameter].items()}
                for name, parameter in model.named_parameters()
            }


def written(folder: Path, **settings: Any) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    """Let a Trainer take two steps; return its checkpoint and the live state of its optimizer."""
    torch.manual_seed(0)
    ids = [batch(row, 0)[0].tolist() for row in range(8)]
    rows: Any = [{"input_ids": row, "labels": row} for row in ids]
    watch = Watch()
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=2, save_steps=2, per_device_train_batch_size=2, use_cpu=True,
        learning_rate=1e-2, weight_decay=0.1, report_to=[], disable_tqdm=True, lr_scheduler_type="constant", **settings,
    )  # fmt: skip
    Trainer(Qwen2ForCausalLM(Qwen2Config(**SIZES)), arguments, train_dataset=rows, callbacks=[watch]).train()
    return folder / "checkpoint-2", watch.states


@pytest.fixture(scope="module")
def of_adamw(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    return written(tmp_path_factory.mktemp("trainer"))


def examined(path: Path) -> ForeignCheckpoint:
    checkpoint = open_foreign(path)
    examine(checkpoint)
    return checkpoint


def test_the_optimizer_is_bitwise_that_of_the_trainer(of_adamw: Any) -> None:
    path, states = of_adamw

    checkpoint = examined(path)

    assert [len(group.names) for group in checkpoint.groups] == [16, 11]
    assert [group.settings["weight_decay"] for group in checkpoint.groups] == [0.1, 0.0]
    assert set(checkpoint.states) == set(states)
    for name, slots in states.items():
        assert set(checkpoint.states[name]) == set(slots)
        for slot, value in slots.items():
            assert torch.equal(checkpoint.states[name][slot].read(), value), (name, slot)
    assert checkpoint.verdict == "cannot be told"
    assert [each.text for each in checkpoint.of_kind("unverified")] == [
        "model.safetensors has no checksums: nothing but NaN and infinity would show in what was read"
    ]


def test_a_run_continues_with_the_optimizer(of_adamw: Any, tokens: Path, tmp_path: Path) -> None:
    path, states = of_adamw

    imported(path, "--as", run_file(tmp_path, tokens, model__freeze=[], optim__no_decay=["bias", "norm"]))

    stored = stored_at(tmp_path / "runs/rescued/checkpoints/step-00000002")
    for name, slots in states.items():
        assert torch.equal(stored.read(f"optim.{name}.exp_avg_sq"), slots["exp_avg_sq"]), name


@pytest.mark.parametrize("change", ["sizes", "shapes", "no configuration", "another optimizer"])
def test_an_optimizer_whose_numbers_nobody_can_name_is_said_to_be_lost(
    of_adamw: Any, change: str, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint-2"
    if change == "another optimizer":
        path, _ = written(tmp_path, optim="adafactor")
    else:
        shutil.copytree(of_adamw[0], path)

    def moved(content: Any) -> None:
        first, second = content["param_groups"]
        second["params"].insert(0, first["params"].pop())

    def swapped(content: Any) -> None:
        one, other = content["param_groups"][0]["params"][:2]
        content["state"][one], content["state"][other] = content["state"][other], content["state"][one]

    match change:
        case "sizes":
            state_of(path / "optimizer.pt", moved)
        case "shapes":
            state_of(path / "optimizer.pt", swapped)
        case "no configuration":
            (path / "config.json").unlink()

    checkpoint = examined(path)

    assert not checkpoint.of_kind("damage")
    assert not checkpoint.has_optimizer
    assert any("which is which" in each.text for each in checkpoint.of_kind("loss"))


def test_groups_of_a_system_that_chooses_none_are_said_to_be_lost(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    biases = [value for name, value in model.named_parameters() if "bias" in name]
    optimizer = torch.optim.AdamW([{"params": [model[0].weight, model[1].weight]}, {"params": biases}])
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    content = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 1}
    torch.save(content, tmp_path / "two.ckpt")

    checkpoint = examined(tmp_path / "two.ckpt")

    assert not checkpoint.of_kind("damage")
    assert not checkpoint.has_optimizer
    assert any("2 groups of 2 and 2" in each.text for each in checkpoint.of_kind("loss"))
