"""A policy of each architecture samples, is scored, is packed with its prompt shared and updated, as by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.models.layers.family import reader_of
from holdfast.models.layers.llama4_output import give_image_outputs
from tests.distributed import grpo_cases
from tests.models.directories import BLIND, KINDS, write_directory

PROMPTS = grpo_cases.prompts_of(4)
QUICK = (*BLIND, "deepseek_v3", "recurrent_gemma")
"""What other suites do not sample from."""
LEFT_OUT = {"phimoe"}
"""Its routers draw experts while they train, so no update can be made again by hand."""
WALKED = [kind for kind in (*KINDS, "llama4_text", "gpt2") if kind not in LEFT_OUT]


@pytest.mark.cases(3)  # Gemma 4 is the one in the middle: its layers have heads of two sizes
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in WALKED]
)
def test_an_update_of_a_policy_is_that_of_plain_transformers(pools: Any, tmp_path: Path, kind: str) -> None:
    give_image_outputs()  # transformers' own forward pass of Llama 4 fails without
    model = write_directory(tmp_path, kind).double()
    model.set_experts_implementation("eager")
    model = reader_of(model)
    before = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    tree = grpo_cases.settings(str(tmp_path), optim={"lr": 0.05}, model={"router_loss": "off"})
    if kind == "gemma3":
        tree["data"] |= {"packing": "none"}
    if kind in ("phi3:longrope", "llama:dynamic"):
        tree["data"] |= {"max_length": 20}  # longer ones follow other angles, and are refused
        tree["rollout"] |= {"max_new_tokens": 4}

    (found,) = pools(1).run(grpo_cases.train, tree, PROMPTS, 1)

    expected = grpo_cases.by_hand(model, found["sampled"], 0.05)
    (line,) = found["lines"]
    assert line["loss"] == pytest.approx(expected["losses"][0], rel=1e-4, abs=1e-6)
    assert line["grad_norm"] == pytest.approx(expected["norms"][0], rel=1e-4)
    after = {name: value.detach().numpy() for name, value in model.named_parameters()}
    ours = {name.removeprefix("language_model.") if kind == "blip-2" else name for name in found["parameters"]}
    assert set(after) <= ours
    for name, value in after.items():
        own = found["parameters"][f"language_model.{name}" if kind == "blip-2" else name]
        np.testing.assert_allclose(own, value, rtol=0, atol=1e-4 * np.abs(value - before[name]).max() + 1e-7)
