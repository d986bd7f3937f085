"""Adapters that were merged twice, or are about to be, are named where the base is given, and never repaired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.features.rescue.reading.record import UnreadableForeign
from tests.features.rescue.reading import hash_of
from tests.features.rescue.test_readers import SIZES

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
WORDS = {0: "not at all", 1: "merged once", 2: "merged twice"}


def base_of(folder: Path, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES)).to(dtype)
    model.save_pretrained(folder)
    return model


def adapted(model: Any) -> Any:
    """Lay adapters around a model that are small beside its weights."""
    torch.manual_seed(1)
    wrapped: Any = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, value in wrapped.named_parameters():
            if "lora_B" in name:
                value.copy_(0.02 * torch.randn_like(value))
    return wrapped


def checked(path: Path, base: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", "check", str(path), "--base", str(base)])
    return result.exit_code, result.output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("times", WORDS)
def test_how_often_adapters_were_merged_is_said(times: int, dtype: torch.dtype, tmp_path: Path) -> None:
    model = base_of(tmp_path / "base", dtype)
    adapted(model).save_pretrained(tmp_path / "adapter")
    merged: Any = Qwen2ForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    for _ in range(times):
        merged = PeftModel.from_pretrained(merged, tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "out")
    (tmp_path / "adapter").rename(tmp_path / "out/lora_adapter")  # as verl's merger lays it
    before = hash_of(tmp_path)

    code, said = checked(tmp_path / "out", tmp_path / "base")

    assert WORDS[times] in said
    assert code == (1 if times == 2 else 0)
    assert hash_of(tmp_path) == before


@pytest.mark.parametrize("merged", [False, True])
def test_a_merged_base_beside_its_own_adapters_is_named(merged: bool, tmp_path: Path) -> None:
    model = adapted(base_of(tmp_path / "base", torch.float32))
    if merged:
        model.merge_adapter()  # keeps the adapters, as a save after a generation in merged form does
    actor = tmp_path / "global_step_1" / "actor"
    actor.mkdir(parents=True)
    torch.save(model.state_dict(), actor / "model_world_size_1_rank_0.pt")

    code, said = checked(actor, tmp_path / "base")

    assert ("merged already" in said) == merged
    assert code == int(merged)


def test_a_base_without_weights_is_refused(tmp_path: Path) -> None:
    adapted(base_of(tmp_path / "base", torch.float32)).save_pretrained(tmp_path / "base" / "lora_adapter")
    (tmp_path / "empty").mkdir()

    command = ["checkpoint", "check", str(tmp_path / "base"), "--base", str(tmp_path / "empty")]

    with pytest.raises(UnreadableForeign, match="--base names a model directory"):
        CliRunner().invoke(app, command, catch_exceptions=False, standalone_mode=False)


def test_weights_that_were_trained_on_are_not_taken_for_merged_ones(tmp_path: Path) -> None:
    model = base_of(tmp_path / "base", torch.float32)
    adapted(model).save_pretrained(tmp_path / "out" / "lora_adapter")
    other = base_of(tmp_path / "out", torch.float32)
    with torch.no_grad():
        for value in other.parameters():
            value.add_(torch.randn_like(value))
    other.save_pretrained(tmp_path / "out")

    code, said = checked(tmp_path / "out", tmp_path / "base")

    assert code == 0
    assert "by more than its adapters" in said or "not at all" in said
