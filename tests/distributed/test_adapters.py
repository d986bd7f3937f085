"""Adapters of other kinds than plain LoRA, each against plain peft in one process."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from transformers import AutoModelForCausalLM

from holdfast.checkpoint.export.stored import export_stored
from holdfast.checkpoint.keep import find
from holdfast.config import quiet
from holdfast.models.names import canonical_name
from holdfast.parallel.mesh import World
from tests.distributed.cases import reference, rows_of, settings
from tests.distributed.grpo_cases import prompts_of
from tests.distributed.grpo_cases import settings as policy_settings
from tests.distributed.grpo_cases import train as train_policy
from tests.distributed.lora_cases import PROBE, learn
from tests.distributed.test_lora import examples
from tests.messages import lacks
from tests.tiny import tiny_directory, tiny_model
from tests.training.matrix import LARGEST_DIFFERENCE, walk
from tests.versions import skip_with

ROWS = rows_of(24)
LEARNING_RATE = 0.5
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("llama", {"rank": 4, "alpha": 8.0, "dora": True, "ranks": {"q_proj": 6}}),
    "stacks": ("mixtral", {"rank": 4, "alpha": 8.0, "experts": "all", "ranks": {"down_proj": 2}}),
    "transposed stacks": ("gpt_oss", {"rank": 4, "alpha": 8.0, "targets": [], "experts": "all"}),
}
"""Architecture, and section `model.lora`."""
TOLERANCE = {"transposed stacks": 1e-7}
"""Of gpt_oss transformers computes attention with sinks through a float32 softmax; of the others all is float64."""


def with_peft(model: Any, lora: dict[str, Any], start: dict[str, Any]) -> Any:
    """Lay peft's own adapters into a plain model, whose every parameter starts as ours did."""
    model.set_experts_implementation("eager")
    linear = [path for path, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and "layers" in path]
    stacks = [path for path, value in model.named_parameters() if ".experts." in path and value.ndim == 3]
    options = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=linear if lora.get("targets") is None else [],
        target_parameters=stacks if "experts" in lora else None,
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


@pytest.mark.cases("all")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_is_trained_as_peft_trains_it(
    pools: Any, directories: dict[str, Path], kind: str, ranks: int
) -> None:
    name, lora = KINDS[kind]
    tree = settings(str(directories[name]), optim={"lr": LEARNING_RATE}, data={"tokens_per_micro_batch": 96})
    tree["model"] |= {"lora": lora, "router_loss": "off"}
    tree["parallel"] = {"recompute": "full" if ranks == 2 else "none"}
    batches = [examples()[first : first + 8] for first in (0, 8, 16)]

    found = pools(ranks).run(learn, tree, ROWS)[0]

    expected = reference(
        with_peft(tiny_model(name).double(), lora, found["start"]),
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


def expanded(model: Any) -> Any:
    """Put bitsandbytes' own rounding of each row into a plain model's linear layers."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for path, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and "layers" in path:
            width = layer.in_features
            rows = torch.nn.functional.pad(layer.weight.data.float(), (0, -width % 64))
            whole = dequantize_4bit(*quantize_4bit(rows, blocksize=64, quant_type="nf4"))
            layer.weight.data = whole[:, :width].to(layer.weight.dtype)
    return model


FOUR_BIT = {"rank": 4, "alpha": 8.0, "quantize": "nf4"}


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=skip_with("torch==2.11.*", "it cannot shard tensors of bytes"))]
)
def test_adapters_beside_four_bits_are_trained_as_peft_trains_them_beside_the_expanded_matrices(
    pools: Any, tmp_path: Path, ranks: int
) -> None:
    pytest.importorskip("bitsandbytes")
    wide = {"hidden_size": 64, "intermediate_size": 128}
    tree = settings(str(tiny_directory(tmp_path, "qwen2", **wide)), optim={"lr": LEARNING_RATE})
    tree["model"]["lora"] = FOUR_BIT
    tree["parallel"] = {"recompute": "full" if ranks == 2 else "none"}
    base = expanded(tiny_model("qwen2", **wide)).double()
    frozen = {name: value.clone() for name, value in base.state_dict().items()}

    each = pools(ranks).run(learn, tree, ROWS)

    found = each[0]
    oracle = reference(
        with_peft(base, FOUR_BIT, found["start"]),
        [examples()[first : first + 8] for first in (0, 8, 16)],
        lambda batch: ([1.0] * len(batch), [float(e.loss_mask.sum()) for e in batch]),
        LEARNING_RATE,
    )
    np.testing.assert_allclose(found["losses"], oracle["losses"], rtol=1e-10)
    np.testing.assert_allclose(found["norms"], oracle["norms"], rtol=1e-9)
    for path, value in oracle["parameters"].items():
        if "lora_" in path:
            np.testing.assert_allclose(found["parameters"][canonical_name(path)], value, atol=1e-10, err_msg=path)
    assert torch.equal(found["before"], found["off"])
    torch.testing.assert_close(plain_logprobs("qwen2", frozen, **wide), found["off"], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(plain_logprobs("qwen2", found["merged"], **wide), found["after"], rtol=1e-9, atol=1e-9)
    # In each of two layers q and o are 64 x 64, k and v 32 x 64, and three matrices 64 x 128; half a byte each, and a
    # scale of 4 bytes for 64 of them.
    assert [part["packed"] for part in each] == [2 * 36_864 * 9 // 16 // ranks] * ranks
    assert [part["bytes"][0] for part in each] == [part["bytes"][1] for part in each]
    assert found["numbers"][0] == sum(value.numel() for value in base.parameters())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
@pytest.mark.slow
def test_a_run_in_four_bits_resumes_on_one_rank_and_exports_what_it_computes_with(pools: Any, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")

    walked = walk(pools, "llama", tmp_path, FOUR_BIT, frozen="save")  # rows of 32 numbers, which end within a block

    assert walked.difference < LARGEST_DIFFERENCE < walked.moved
    assert 1e-3 < walked.adapter_difference < 1.0, "the plain base is not what was trained beside"
    plain = expanded(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
    adapted = PeftModel.from_pretrained(plain, tmp_path / "r/exports/final-adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "r/exports/final")
    tokens = torch.as_tensor(PROBE)[None]
    with torch.no_grad():
        logits = [model(input_ids=tokens).logits for model in (adapted, merged)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)
    export_stored([find.one(str(tmp_path / "r"))], tmp_path / "again")
    again, first = (place / "model.safetensors" for place in (tmp_path / "again", tmp_path / "r/exports/final"))
    assert again.read_bytes() == first.read_bytes()
    stored = find.one(str(tmp_path / "r")).manifest.tensors["model.model.layers.0.mlp.down_proj.weight"]
    assert (stored.shape, stored.dtype) == ((32, 36), "uint8")


@pytest.mark.parametrize("kind", ["dora", "stacks", "four bits"])
@pytest.mark.cases(1)
def test_rollouts_follow_every_kind_and_the_policy_without_it_is_the_reference(
    pools: Any, directories: dict[str, Path], kind: str
) -> None:
    if kind == "four bits":
        pytest.importorskip("bitsandbytes")
    name, lora = ("llama", FOUR_BIT) if kind == "four bits" else KINDS[kind]
    tree = policy_settings(str(directories[name]), optim={"lr": 2.0}, kl={"coefficient": 0.1})
    tree["model"] |= {"lora": lora, "router_loss": "off"}

    lines = pools(2).run(train_policy, tree, prompts_of(12), 3)[0]["lines"]

    assert all(line["sampling/sampling_logp_difference/mean"] < 1e-5 for line in lines)
    assert lines[0]["kl"] == 0.0
    assert lines[2]["kl"] > 1e-4


@pytest.mark.parametrize(
    ("name", "lora", "words"),
    [
        ("llama", {"experts": "all"}, "model.lora.experts: llama has no matrices of experts in stacks"),
        (
            "mixtral",
            {"experts": ["w1"]},
            "model.lora.experts: 'w1' matches no stack of experts. They look like model.layers.0.mlp.experts.down",
        ),
    ],
)
def test_patterns_of_experts_that_match_nothing_are_one_sentence(
    pools: Any, directories: dict[str, Path], name: str, lora: dict[str, Any], words: str
) -> None:
    tree = settings(str(directories[name]))
    tree["model"]["lora"] = lora

    errors = pools(2).errors(learn, tree, ROWS)

    assert errors[0] == errors[1]
    assert errors[0][0] == "ModelError"
    assert errors[0][1].startswith(words)


def without_bitsandbytes(world: World, tree: dict[str, Any], rows: Any) -> None:
    """Learn in a process that cannot import it."""
    known = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "bitsandbytes"}
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # Python's own mark of what is not there
    try:
        learn(world, tree, rows)
    finally:
        sys.modules.pop("bitsandbytes")
        sys.modules.update(known)
        quiet._BROKEN.clear()


def test_a_missing_library_is_one_paragraph(pools: Any, directories: dict[str, Path]) -> None:
    tree = settings(str(directories["llama"]))
    tree["model"]["lora"] = FOUR_BIT

    errors = pools(2).errors(without_bitsandbytes, tree, ROWS)

    assert errors[0] == errors[1]
    assert errors[0][0] == "ModelError"
    assert lacks(errors[0][1], "model.lora.quantize: nf4 bitsandbytes ModuleNotFoundError 'holdfast[qlora]'") == []


def plain_logprobs(name: str, tensors: dict[str, torch.Tensor], **overrides: Any) -> torch.Tensor:
    """Return what a plain model of these tensors says of the tokens that `probe` scores."""
    plain = tiny_model(name, **overrides).double()
    plain.set_experts_implementation("eager")
    assert plain.load_state_dict(tensors, strict=False).unexpected_keys == []
    tokens = torch.as_tensor(PROBE)[None]
    with torch.no_grad():
        logprobs = plain(input_ids=tokens).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, tokens[0, 1:, None]).squeeze(1)
