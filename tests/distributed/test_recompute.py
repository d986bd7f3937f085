"""Recomputed activations give the gradients of kept ones, whatever the model's configuration says about caches."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from holdfast.config.sections.parallel import ParallelConfig
from holdfast.models.names import POLICY_MODULE
from holdfast.parallel.apply import _KEPT_OPERATIONS, _keep_products, apply_plan
from holdfast.parallel.mesh import World, build_mesh
from holdfast.parallel.plan import plan_shards
from tests.distributed.cases import rows_of, settings, train
from tests.distributed.toys import Toy
from tests.models.architectures import settings_of
from tests.tiny import tiny_directory, tiny_model

ROWS = rows_of(8)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind in ("llama", "qwen2", "qwen3", "mixtral"):
        path = tiny_directory(tmp_path_factory.mktemp(kind), kind)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"use_cache": True}))
        made[kind] = path
    return made


KINDS = ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2", "qwen3")), "mixtral"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["packed", "sdpa", "eager"])
def test_gradients_with_recomputation_equal_those_without(
    pools: Any, directories: dict[str, Path], kind: str, attention: str
) -> None:
    def run(recompute: Any) -> dict[str, Any]:
        tree = settings(str(directories[kind]), model={"attention": attention}, parallel={"recompute": recompute})
        found: dict[str, Any] = pools(2).run(train, tree, ROWS, 1)[0]
        return found

    kept = run("none")
    assert kept["padded"] == (attention != "packed")
    for recompute in ("full", {"kind": "every_k", "k": 2}, "selective"):
        again = run(recompute)

        assert again["losses"] == kept["losses"]
        for name, gradient in kept["gradients"][0].items():
            np.testing.assert_allclose(again["gradients"][0][name], gradient, rtol=1e-9, atol=1e-12, err_msg=name)
    assert all(np.abs(g).max() > 0 for name, g in kept["gradients"][0].items() if "k_proj" in name or "v_proj" in name)


@pytest.mark.parametrize("kind", ["gpt_oss", "glm4_moe", "deepseek_v3"])
def test_experts_and_their_routers_have_the_same_gradients_when_recomputed(
    pools: Any, tmp_path: Path, kind: str
) -> None:
    tiny_directory(tmp_path, kind, **settings_of(kind))

    def run(recompute: str) -> dict[str, Any]:
        found: dict[str, Any] = pools(2).run(
            train, settings(str(tmp_path), parallel={"recompute": recompute}), ROWS, 1
        )[0]
        return found

    kept = run("none")
    for recompute in ("full", "selective"):
        again = run(recompute)

        assert again["losses"] == kept["losses"]
        assert again["metrics"][0].get("router/loss") == kept["metrics"][0].get("router/loss")
        assert set(again["gradients"][0]) == set(kept["gradients"][0])
        for name, gradient in kept["gradients"][0].items():
            np.testing.assert_allclose(again["gradients"][0][name], gradient, rtol=1e-9, atol=1e-12, err_msg=name)
    assert ("router/loss" in kept["metrics"][0]) == (kind == "gpt_oss")
    routers = [name for name in kept["gradients"][0] if re.search(r"(router|gate)\.weight$", name)]
    assert routers
    assert all(np.abs(kept["gradients"][0][name]).max() > 0 for name in routers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradients_with_recomputation_equal_those_without_where_no_row_needs_padding(
    pools: Any, directories: dict[str, Path], kind: str, attention: str
) -> None:
    """Rows of one length: transformers may leave the mask out, and takes another path through attention."""
    rows = [{"prompt": f"copy {letter}=", "completion": letter * 5} for letter in "abcdefgh"]

    def run(recompute: str) -> dict[str, Any]:
        tree = settings(str(directories[kind]), model={"attention": attention}, parallel={"recompute": recompute})
        found: dict[str, Any] = pools(2).run(train, tree, rows, 1)[0]
        return found

    kept, again = run("none"), run("full")

    assert kept["padded"]
    assert kept["metrics"][0]["data/mean_length"] == 13.0
    assert again["losses"] == kept["losses"]
    for name, gradient in kept["gradients"][0].items():
        np.testing.assert_allclose(again["gradients"][0][name], gradient, rtol=1e-9, atol=1e-12, err_msg=name)
    assert all(np.abs(g).max() > 0 for name, g in kept["gradients"][0].items() if "k_proj" in name or "v_proj" in name)


def router_gradients(world: World, attention: str, padded: bool, recompute: str) -> dict[str, np.ndarray]:
    """Return gradients of transformers' own loss with its router loss, through blocks that we wrapped."""
    model = tiny_model("mixtral", use_cache=True).double()
    model.set_attn_implementation(attention)
    model.set_experts_implementation("eager")
    toy = Toy()
    toy.add_module(POLICY_MODULE, model)
    blocks = [f"model.layers.{index}" for index in range(2)]
    config = ParallelConfig(recompute=recompute)
    mesh = build_mesh(config, world)
    plan = replace(plan_shards([], ["", *blocks], blocks, config, shard=1, device="cpu"), sharded=False)
    apply_plan(toy, plan, mesh, torch.nn.Module.compile)
    tokens = torch.arange(2, 34).reshape(2, 16)
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, 10:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    out = model(
        input_ids=tokens,
        attention_mask=mask if padded else None,
        labels=labels,
        output_router_logits=True,
        use_cache=False,
    )
    assert out.aux_loss is not None
    out.loss.backward()
    return {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad.numpy()
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_router_loss_keeps_its_gradient_under_recomputation(pools: Any, attention: str, padded: bool) -> None:
    kept, again = (pools(1).run(router_gradients, attention, padded, how)[0] for how in ("none", "full"))

    for name, gradient in kept.items():
        np.testing.assert_allclose(again[name], gradient, rtol=1e-9, atol=1e-12, err_msg=name)
    gates = [name for name in kept if name.endswith("gate.weight")]
    assert gates
    assert all(np.abs(kept[name]).max() > 0 for name in gates)


def dropout_gradients(world: World, directory: str, recompute: str) -> dict[str, Any]:
    tree = settings(
        directory,
        model={"dtype": "float64", "dropout": True, "config_override": {"attention_dropout": 0.3}},
        parallel={"recompute": recompute},
    )
    torch.manual_seed(7)
    return train(world, tree, ROWS, 1)


def test_dropout_draws_the_same_numbers_again(pools: Any, directories: dict[str, Path]) -> None:
    path = str(directories["llama"])

    kept, again = (pools(2).run(dropout_gradients, path, how)[0] for how in ("none", "full"))
    plain = pools(2).run(train, settings(path), ROWS, 1)[0]

    assert kept["losses"] == again["losses"] != plain["losses"]
    for name, gradient in kept["gradients"][0].items():
        np.testing.assert_allclose(again["gradients"][0][name], gradient, rtol=1e-9, atol=1e-12, err_msg=name)


def test_selective_recomputation_names_operations_that_there_are() -> None:
    """A name of another version would keep nothing, and no gradient would tell."""
    import torch.nn.attention.varlen  # registers its operation

    import holdfast.models.layers.document_attention  # noqa: F401 - registers ours

    there = {*dir(torch.ops.aten), *dir(torch.ops.torch_attn), *dir(torch.ops.holdfast)}

    assert set(_KEPT_OPERATIONS) <= there
    for operation in (torch.ops.aten._grouped_mm.default, torch.ops.torch_attn._varlen_attn.default):
        assert _keep_products(None, operation) is CheckpointPolicy.MUST_SAVE
    assert _keep_products(None, torch.ops.aten.silu.default) is CheckpointPolicy.PREFER_RECOMPUTE
