"""What rank pools run for the tests of the gradient check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.errors import ModelError
from holdfast.models.check.forward import Sides
from holdfast.models.check.witness import follow_implementation, witness_of
from holdfast.models.layers.attention import packed_attention
from holdfast.models.setup.model import blueprint
from holdfast.parallel.copies import copies_of
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.training.setup.gradient_check import check_gradients
from holdfast.training.setup.model import build_policy
from tests.models.architectures import settings_of
from tests.settings import plain_setting
from tests.tiny import COMMON, EXTRA, tiny_model


def built(world: World, model: dict[str, Any], live: Any = None, **sections: Any) -> tuple[Sides, Any]:
    """Build a policy, which checks it; return what a further check compares, and the plan.

    Args:
        world: This rank.
        model: The section.
        live: A transformers model whose weights are taken.
        sections: Others.
    """
    tree = {"steps": 1, "model": model, "data": {"path": "rows", "batch_size": 4}}
    config = from_mapping(tree | sections, SFTConfig)
    origin = blueprint(config.model, Path.cwd(), seed=0, live=live, tokenizer=character_tokenizer())
    setting = plain_setting(config, world)
    sharded = build_policy(setting, origin)
    policy, plan = sharded.module, sharded.plan
    witness = witness_of(type(origin.skeleton), origin.original_config)
    follow_implementation(witness, policy.language_model)
    return Sides(policy, witness, getattr(torch, plan.compute_dtype), world.device), plan


def random_start(kind: str) -> dict[str, Any]:
    """Return a model section of a tiny model of an architecture."""
    name = kind.partition(":")[0]
    values = COMMON | EXTRA.get(name, {}) | settings_of(kind) | {"model_type": name}
    return {"config": values, "tokenizer": "builtin:characters"}


def every_kind(world: World, kinds: list[str], sections: dict[str, Any]) -> dict[str, str]:
    """Build a tiny model of each kind, which checks its gradients; return what was refused, by kind."""
    refused = {}
    for kind in kinds:
        config = from_mapping(
            {"steps": 1, "model": random_start(kind), "data": {"path": "rows", "batch_size": 4}} | sections, SFTConfig
        )
        live = tiny_model(kind, **settings_of(kind))
        origin = blueprint(config.model, Path.cwd(), seed=0, live=live, tokenizer=character_tokenizer())
        try:
            build_policy(plain_setting(config, world), origin)
        except ModelError as error:
            refused[kind] = str(error)
    return refused


class Louder(torch.autograd.Function):
    """Change nothing forwards, and multiply the gradient by 1.01."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:  # noqa: ARG004 - autograd's form
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004 - same
        return gradient * 1.01


def louder_queries(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as packed attention does, with the gradient of layer 1's queries too large by a hundredth."""
    loud = Louder.apply(query) if module.layer_idx == 1 else query  # type: ignore[no-untyped-call]
    return packed_attention(module, loud, key, value, mask, **options)


def one_matrix_off(world: World, model: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """Check a sound model and the same with one wrong gradient; say what was refused and what is left behind."""
    sides, plan = built(world, model, **sections)
    policy: Any = sides.policy
    before = {name: local_part(value).detach().clone() for name, value in sharded_parameters(policy).items()}
    drawn = torch.get_rng_state()
    sound = check_gradients(sides, plan, dropout=False)
    ALL_ATTENTION_FUNCTIONS.register(louder_queries.__name__, louder_queries)
    ALL_MASK_ATTENTION_FUNCTIONS.register(louder_queries.__name__, lambda *_, **__: None)
    policy.language_model.set_attn_implementation(louder_queries.__name__)
    refused = ""
    try:
        check_gradients(sides, plan, dropout=False)
    except ModelError as error:
        refused = str(error)
    after = sharded_parameters(policy)
    return {
        "sound": sound.worst,
        "parameters": sound.parameters,
        "refused": refused,
        "gradients": [name for name, value in after.items() if value.grad is not None],
        "same": all(torch.equal(before[name], local_part(value)) for name, value in after.items()),
        "same_draws": torch.equal(drawn, torch.get_rng_state()),
        "training": policy.training,
    }


CHANGES: dict[str, tuple[str, float]] = {
    "as drawn": ("", 1.0),
    "20 times as large": ("weight", 20.0),
    "100 times as large": ("weight", 100.0),
    "a tenth as large": ("weight", 0.1),
    "small head": ("lm_head", 1e-4),
    "no outputs": ("o_proj", 0.0),
}
"""Which matrices of a model are multiplied, and by what."""


def changed_model(kind: str, change: str, overrides: dict[str, Any]) -> Any:
    """Return a tiny model some of whose matrices are larger or smaller."""
    part, factor = CHANGES[change]
    model = tiny_model(kind, **settings_of(kind) | overrides)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim > 1 and part in name:
                value.mul_(factor)
    return model


def changed(
    world: World, kind: str, change: str, overrides: dict[str, Any], sections: dict[str, Any]
) -> tuple[Sides, Any]:
    """Build a policy of a changed model, unchecked backwards."""
    section = random_start(kind)
    model = section | {"config": section["config"] | overrides, "check_gradients": False}
    extra = dict(sections)
    return built(world, model | extra.pop("model", {}), changed_model(kind, change, overrides), **extra)


def refusal(sides: Sides, plan: Any) -> str:
    """Return why a model is refused, "" if it is not."""
    try:
        check_gradients(sides, plan, dropout=False)
    except ModelError as error:
        return str(error)
    return ""


def sound_models(world: World, cases: list[tuple[str, str, dict[str, Any]]], sections: dict[str, Any]) -> list[str]:
    """Return why changed models that are right are refused."""
    refused = [refusal(*changed(world, *case, sections)) for case in cases]
    return [words for words in refused if words]


def copy_of(copies: Any, parameter: Any) -> Any:
    pairs = [pair for unit in copies._units for pair in unit.pairs]
    return next(pair.copy for pair in pairs if pair.parameter is parameter)


def planted(policy: Any, name: str, factor: float, side: int) -> Any:
    """Multiply a parameter's gradient in one backward pass from now, the first or the second; return the handle.

    Where passes read copies of the parameters, which they have done before, it is the gradient of the copy.
    """
    calls: list[int] = []
    value: Any = sharded_parameters(policy)[name]
    copies = copies_of(policy)

    def multiplied(gradient: Any) -> Any:
        calls.append(len(calls))
        return gradient * factor if calls[-1] == side else gradient

    def multiply(parameter: Any) -> None:
        parameter.grad = multiplied(parameter.grad)

    if copies is None:
        return value.register_post_accumulate_grad_hook(multiply)
    return copy_of(copies, value).register_hook(multiplied)


def unnamed(
    world: World, kind: str, change: str, overrides: dict[str, Any], sections: dict[str, Any], factor: float
) -> dict[str, Any]:
    """Multiply the gradient of each parameter in turn; return which of these are not refused by name."""
    sides, plan = changed(world, kind, change, overrides, sections)
    missed = []
    sound = refusal(sides, plan)
    parameters = [name for name, value in sharded_parameters(sides.policy).items() if value.requires_grad]
    for name in parameters:
        handle = planted(sides.policy, name, factor, 0)
        if f"most of {name} (" not in refusal(sides, plan):
            missed.append(name)
        handle.remove()
    return {"sound": sound, "missed": missed, "parameters": len(parameters)}


def not_finite(world: World, side: int) -> str:
    """Return why a model is refused one of whose gradients is not finite on one side."""
    sides, plan = changed(world, "llama", "as drawn", {}, {})
    planted(sides.policy, "model.norm.weight", float("nan"), side)
    return refusal(sides, plan)


def nothing_trained(world: World) -> tuple[int, float]:
    """Check a model all of whose parameters are frozen; return what was compared."""
    sides, plan = changed(world, "llama", "as drawn", {}, {})
    sides.policy.requires_grad_(False)  # noqa: FBT003 - torch's own form
    gradients = check_gradients(sides, plan, dropout=False)
    return gradients.parameters, gradients.worst


def some_trained(world: World, sections: list[dict[str, Any]]) -> list[str]:
    """Return why models are refused of which a part is trained, or adapters that have learnt something."""
    refused = []
    for section in sections:
        sides, plan = changed(world, "qwen2", "as drawn", {}, section)
        with torch.no_grad():
            for name, value in sharded_parameters(sides.policy).items():
                if "lora_B" in name:
                    local_part(value).normal_(0, 0.05)
        refused.append(refusal(sides, plan))
    return refused
