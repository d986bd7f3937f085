"""Adapters that peft saved are read under every form that the names in such files have."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from holdfast.errors import ModelError
from holdfast.models.adapters.files import name_in_file
from holdfast.models.names import named_parameters
from tests.models.directories import filled, write_directory
from tests.training.matrix import LARGEST_DIFFERENCE, walk

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it

MAGNITUDE = "lora_magnitude_vector"
FORMS: dict[str, Callable[[str], str]] = {
    "as peft saves": lambda name: name,
    "with .weight behind the magnitude": lambda name: re.sub(f"{MAGNITUDE}$", f"{MAGNITUDE}.weight", name),
    "with the name of the adapter": lambda name: re.sub(
        f"(lora_[AB])\\.weight$|{MAGNITUDE}$", lambda found: f"{found[1] or MAGNITUDE}.house.weight", name
    ),
    "with the name and no .weight": lambda name: re.sub(f"{MAGNITUDE}$", f"{MAGNITUDE}.default", name),
    "without a prefix": lambda name: name.removeprefix("base_model.model."),
}


def saved_by_peft(place: Path) -> tuple[Any, Path, Path]:
    """Return peft's model with DoRA, every part of which matters, its base's directory and the adapter's."""
    base = write_directory(place / "base", "llama")
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", use_dora=True)).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(place / "adapter")
    return model, place / "base", place / "adapter"


def rename(adapter: Path, form: Callable[[str], str]) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file({form(name): value for name, value in load_file(file).items()}, file)


LORA = {"rank": 4, "alpha": 8.0, "dora": True}


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_an_adapter_are_those_that_peft_saved(tmp_path: Path, form: str) -> None:
    model, base, adapter = saved_by_peft(tmp_path)
    rename(adapter, FORMS[form])

    policy, _ = filled(base, lora=LORA | {"path": str(adapter)}, attention="sdpa")

    theirs = {name: value for name, value in model.named_parameters() if "lora_" in name}
    ours = {name: value for name, value in named_parameters(policy).items() if "lora_" in name}
    assert len(ours) == len(theirs) == 3 * 14
    for name, value in theirs.items():
        assert torch.equal(ours[name.removeprefix("base_model.model.").replace(".default.", ".")], value), name
    tokens = torch.arange(2, 22)[None]
    policy.language_model.eval()
    with torch.no_grad():
        torch.testing.assert_close(policy.language_model(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_peft_leaves_weight_out_of_the_name_of_a_magnitude(tmp_path: Path) -> None:
    _, _, adapter = saved_by_peft(tmp_path)

    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as file:
        names = set(file.keys())

    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector" in names
    assert not any(name.endswith(f"{MAGNITUDE}.weight") for name in names)


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("base_model.model.a.mlp.experts.base_layer.lora_A.weight", "a.mlp.experts.base_layer.lora_A.weight"),
        ("base_model.model.a.b.lora_B.house.weight", "a.b.lora_B.weight"),
        ("base_model.model.lm_head.weight", "lm_head.weight"),
        ("base_model.model.score.bias", "score.bias"),
    ],
)
def test_a_name_in_a_file_has_one_canonical_name(stored: str, canonical: str) -> None:
    assert name_in_file(stored) == canonical


def test_two_adapters_in_one_file_are_refused_by_name(tmp_path: Path) -> None:
    _, base, adapter = saved_by_peft(tmp_path)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    again = {name.replace("lora_A.weight", "lora_A.second.weight"): value.clone() for name, value in tensors.items()}
    save_file(tensors | again, file)

    with pytest.raises(ModelError, match=r"holds \S+lora_A.weight twice, as \S+ and as \S+. Save one adapter alone"):
        filled(base, lora=LORA | {"path": str(adapter)})


@pytest.mark.slow
def test_training_goes_on_from_an_adapter_of_peft_and_peft_reads_the_export(pools: Any, tmp_path: Path) -> None:
    """Longer than three seconds: two runs, on two ranks and on one."""
    _, _, adapter = saved_by_peft(tmp_path)

    walked = walk(pools, "llama", tmp_path, LORA | {"path": str(adapter)})

    exported = load_file(tmp_path / "r/exports/final-adapter/adapter_model.safetensors")
    by_name = {name_in_file(name): value for name, value in exported.items()}
    start = {name_in_file(name): value for name, value in load_file(adapter / "adapter_model.safetensors").items()}
    assert by_name.keys() == start.keys()
    moved = {name: float((by_name[name] - value).abs().max()) for name, value in start.items()}
    # Three steps of Adam at 2e-3 move a number by 6e-3 at most, and a new start would lie a tenth away.
    assert 0 < min(moved.values()) <= max(moved.values()) < 6.1e-3
    assert walked.adapter_difference < LARGEST_DIFFERENCE < walked.moved
    assert walked.difference < LARGEST_DIFFERENCE
