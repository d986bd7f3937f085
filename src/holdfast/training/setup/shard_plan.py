"""Plan the shards of a policy on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import PlanError
from holdfast.models.files.four_bit import four_bit_layers
from holdfast.models.files.vision import towers_of
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.layers.family import blocks_of
from holdfast.models.names import canonical_name, named_parameters, tied_names
from holdfast.parallel.plan import ModelEnds, ParameterInfo, ShardPlan, plan_shards

_SHARDS_OF_BYTES = (2, 13)
"""The first torch that was seen to shard frozen tensors of bytes; 2.11 fails."""


def make_plan(
    config: TrainingConfig, policy: PolicyModel, shard: int, device: str, *, compiled: bool = False
) -> ShardPlan:
    """Plan the shards of a policy on the meta device, and whether its blocks are compiled."""
    ties = tied_names(policy)
    packs = {name: layer.in_features * layer.out_features for name, layer in four_bit_layers(policy)}
    parameters = [
        ParameterInfo(
            name,
            tuple(value.shape),
            str(value.dtype).removeprefix("torch."),
            value.requires_grad,
            ties.get(name, ()),
            packs.get(name, 0),
        )
        for name, value in named_parameters(policy).items()
    ]
    model: Any = policy.language_model
    # A list of modules has no forward pass of its own, around which FSDP2 could gather it.
    runs = [(name, module) for name, module in model.named_modules() if type(module).forward is not nn.Module.forward]
    blocks = blocks_of(policy.language_model)
    if not blocks and not config.parallel.units:
        raise PlanError(f"{policy.family.name} has no list of blocks. Name the units in parallel.units.")
    if not blocks and "activations" in config.parallel.offloads:
        raise PlanError(
            f"parallel.offload: activations are offloaded block by block, and {policy.family.name} has no list of "
            "blocks. Leave activations out."
        )
    plan = plan_shards(
        parameters,
        [canonical_name(name) for name, _ in runs],
        blocks,
        config.parallel,
        shard=shard,
        device=device,
        towers=towers_of(model),
        ends=_ends(policy, {id(module): canonical_name(name) for name, module in runs}),
        compiled=compiled,
    )
    if packs and plan.sharded and Version(torch.__version__).release < _SHARDS_OF_BYTES:
        raise PlanError(
            f"model.lora.quantize: torch {torch.__version__} cannot shard tensors of bytes. Install a newer one "
            "(pip install -U 'torch>=2.13'), or use one rank."
        )
    return plan


def _ends(policy: PolicyModel, paths: Mapping[int, str]) -> ModelEnds:
    """Return what of a model's ends is read at one place alone; `paths` are those of modules, by identity."""
    model: Any = policy.language_model
    embedding, scores = model.get_input_embeddings(), getattr(model, "score", None)
    # Models that see read the table besides: its dtype, the row of a token for images, on ranks that have some.
    looked_up = isinstance(embedding, nn.Embedding) and not towers_of(model) and _has_only(embedding, {"weight"})
    head = policy.readable_head()
    return ModelEnds(
        embedding=paths.get(id(embedding)) if looked_up else None,
        head=None if head is None or not _has_only(head, {"weight", "bias"}) else paths.get(id(head)),
        read_by_root=None if scores is None else paths.get(id(scores)),
    )


def _has_only(module: nn.Module, names: set[str]) -> bool:
    return {name for name, _ in module.named_parameters()} <= names
