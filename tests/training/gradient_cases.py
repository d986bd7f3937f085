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
from holdfast.data.tasks.characters import character_tokenizer
from holdfast.errors import ModelError
from holdfast.models.attention import packed_attention
from holdfast.models.build import blueprint
from holdfast.models.selfcheck import Sides
from holdfast.models.witness import follow_implementation, witness_of
from holdfast.parallel.collectives import ProcessExchange
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.training.build.gradient_check import check_gradients
from holdfast.training.build.model import build_policy
from tests.models.architectures import settings_of
from tests.tiny import COMMON, EXTRA, tiny_model


def built(world: World, model: dict[str, Any], **sections: Any) -> tuple[Sides, Any]:
    """Build a policy, which checks it; return what a further check compares, and the plan."""
    tree = {"steps": 1, "model": model, "data": {"path": "rows", "batch_size": 4}}
    config = from_mapping(tree | sections, SFTConfig)
    origin = blueprint(config.model, Path.cwd(), seed=0, tokenizer=character_tokenizer())
    policy, plan = build_policy(config, origin, world, ProcessExchange())
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
            build_policy(config, origin, world, ProcessExchange())
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
