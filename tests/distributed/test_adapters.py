"""Adapters of other kinds than plain LoRA, each against plain peft in one process."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from holdfast.models.names import canonical_name
from tests.distributed.cases import reference, rows_of, settings
from tests.distributed.lora_cases import PROBE, learn
from tests.distributed.test_lora import examples
from tests.tiny import tiny_directory, tiny_model

ROWS = rows_of(24)
LEARNING_RATE = 0.5
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dora": ("llama", {"rank": 4, "alpha": 8.0, "dora": True, "ranks": {"q_proj": 6}}, {}),
    "stacks": ("mixtral", {"rank": 4, "alpha": 8.0, "experts": "all", "ranks": {"down_proj": 2}}, {}),
    "transposed stacks": ("gpt_oss", {"rank": 4, "alpha": 8.0, "targets": [], "experts": "all"}, {}),
}
"""Architecture, section `model.lora`, and what the architecture needs beside."""
TOLERANCE = {"transposed stacks": 1e-7}
"""Of gpt_oss transformers computes attention with sinks through a float32 softmax; of the others all is float64."""


def plain_peft(kind: str, start: dict[str, Any]) -> Any:
    """Return a plain model with peft's own adapters, whose every parameter starts as ours did."""
    name, lora, _ = KINDS[kind]
    model = tiny_model(name).double()
    model.set_experts_implementation("eager")
    linear = [path for path, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and "layers" in path]
    stacks = [path for path, value in model.named_parameters() if ".experts." in path and value.ndim == 3]
    options = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=linear if lora.get("targets") is None else [],
        target_parameters=stacks or None,
        use_dora=bool(lora.get("dora")),
        rank_pattern={f".*{re.escape(path)}": rank for path, rank in lora.get("ranks", {}).items()},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        inject_adapter_in_model(options, model)
    with torch.no_grad():
        for path, value in model.named_parameters():
            if "lora_" in path:
                value.data = torch.tensor(start[canonical_name(path)], dtype=torch.float64)
    return model


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny_directory(tmp_path_factory.mktemp(name), name) for name in ("llama", "mixtral", "gpt_oss")}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_is_trained_as_peft_trains_it(
    pools: Any, directories: dict[str, Path], kind: str, ranks: int
) -> None:
    name, lora, needs = KINDS[kind]
    tree = settings(str(directories[name]), optim={"lr": LEARNING_RATE}, data={"tokens_per_micro_batch": 96})
    tree["model"] |= {"lora": lora, "router_loss": "off", **needs}
    batches = [examples()[first : first + 8] for first in (0, 8, 16)]

    found = pools(ranks).run(learn, tree, ROWS)[0]

    expected = reference(
        plain_peft(kind, found["start"]),
        batches,
        lambda batch: ([1.0] * len(batch), [float(e.loss_mask.sum()) for e in batch]),
        LEARNING_RATE,
    )
    tolerance = TOLERANCE.get(kind, 1e-10)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=tolerance)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=10 * tolerance)
    assert found["losses"][2] < found["losses"][0] - 0.05, "three steps must move something"
    assert {canonical_name(path) for path in expected["parameters"]} == set(found["parameters"])
    for path, value in expected["parameters"].items():
        np.testing.assert_allclose(
            found["parameters"][canonical_name(path)], value, atol=tolerance, rtol=tolerance, err_msg=path
        )
    assert torch.equal(found["before"], found["off"]), "adapters begin as nothing, and can be switched off"
    torch.testing.assert_close(plain_logprobs(name, found["merged"]), found["after"], rtol=100 * tolerance, atol=1e-9)
    assert float((found["after"] - found["off"]).abs().max()) > 1e-2
    for path, value in found["start"].items():
        if path.endswith("lora_magnitude_vector.weight"):
            rows = found["start"][path.replace("lora_magnitude_vector.", "")]
            np.testing.assert_allclose(value, np.sqrt((rows**2).sum(1)), rtol=1e-12)
            assert np.abs(found["parameters"][path] - value).max() > 1e-3


def plain_logprobs(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what a plain model of these tensors says of the tokens that `probe` scores."""
    plain = tiny_model(name).double()
    plain.set_experts_implementation("eager")
    assert plain.load_state_dict(tensors, strict=False).unexpected_keys == []
    tokens = torch.as_tensor(PROBE)[None]
    with torch.no_grad():
        logprobs = plain(input_ids=tokens).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, tokens[0, 1:, None]).squeeze(1)
