"""A random start is transformers' own distribution, drawn alike whatever the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.model import ModelConfig
from holdfast.errors import ModelError
from holdfast.models.files.loading import RandomSource
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.setup.model import blueprint
from holdfast.parallel.shards import materialise
from tests.models.cases import whole_parameters
from tests.models.directories import KINDS, config_of
from tests.tiny import COMMON

VALUES: dict[str, Any] = COMMON | {"model_type": "llama", "tie_word_embeddings": True}


def drawn(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    origin = blueprint(config, Path.cwd(), seed=seed)
    policy = PolicyModel(origin.model, origin.family, origin.family.head_spec(float32_product=False, chunk_tokens=None))
    materialise(policy, origin.source, origin.buffers, torch.device("cpu"))
    return {name: value.detach() for name, value in origin.model.named_parameters()}


def builtin(values: dict[str, Any]) -> ModelConfig:
    return ModelConfig(config=values, tokenizer="builtin:characters")


@pytest.mark.parametrize("kind", [*KINDS, "gpt2"])
def test_every_tensor_has_the_distribution_transformers_gives_it(kind: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = config_of(kind)
    auto = (
        AutoModelForImageTextToText
        if type(config) in AutoModelForImageTextToText._model_mapping
        else AutoModelForCausalLM
    )
    expected = [dict(auto.from_config(config).named_parameters()) for _ in range(3)]
    with torch.device("meta"):
        source = RandomSource(auto.from_config(config), seed=1)

    found: dict[str, torch.Tensor] = {}
    for group in source.groups():
        found |= group.load(
            {name: slice(0, header.shape[0] if header.shape else 0) for name, header in group.targets.items()}
        )

    assert set(found) == set(expected[0])
    for name, value in found.items():
        examples = torch.stack([model[name].detach() for model in expected]).double()
        assert value.dtype == torch.float32
        if value.numel() < 64 or examples.std() < 1e-8:  # too small for statistics, or constant
            assert examples.min() - 3 * examples.std() <= value.mean() <= examples.max() + 3 * examples.std(), name
        else:
            assert value.double().std() == pytest.approx(float(examples.std()), rel=0.35), name
            assert value.double().mean() == pytest.approx(float(examples.mean()), abs=0.5 * float(examples.std())), name


def test_a_seed_draws_the_same_weights_again_and_another_seed_others() -> None:
    first, again, other = drawn(builtin(VALUES)), drawn(builtin(VALUES)), drawn(builtin(VALUES), seed=1)

    matrices = [name for name, value in first.items() if value.ndim > 1]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in matrices)


def test_tensors_of_equal_shape_differ_from_each_other() -> None:
    weights = drawn(builtin(VALUES))

    assert not torch.equal(weights["model.layers.0.mlp.up_proj.weight"], weights["model.layers.1.mlp.up_proj.weight"])
    assert not torch.equal(weights["model.layers.0.mlp.up_proj.weight"], weights["model.layers.0.mlp.gate_proj.weight"])


def test_drawing_leaves_the_random_state_of_the_process_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)

    torch.manual_seed(5)
    drawn(builtin(VALUES))

    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_one_rank_and_two_draw_the_same_model(pools: Any, kind: str) -> None:
    values = config_of(kind).to_diff_dict()
    model = {"config": values, "tokenizer": "builtin:characters"}
    expected = drawn(builtin(values), seed=3)

    for parameters, _ in pools(2).run(whole_parameters, model, 3):
        assert set(parameters) == set(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(parameters[name], value.double().numpy(), err_msg=name)


def test_an_architecture_that_leaves_a_tensor_undrawn_is_refused_by_name() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Forgetful(LlamaForCausalLM):  # type: ignore[misc]  # transformers is not typed
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.gain = torch.nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = Forgetful(LlamaConfig(**{name: value for name, value in VALUES.items() if name != "model_type"}))

    with pytest.raises(ModelError, match=r"Forgetful does not initialise gain; a random start is not possible"):
        for group in RandomSource(model, seed=0).groups():
            group.load({name: slice(0, header.shape[0]) for name, header in group.targets.items()})
