"""The reference policy: a frozen copy of the model at the start of the run, sharded like the policy.

Unless `reference.sync` lets it follow the policy (optim/reference_ema.py), it never changes. It may be served by an
endpoint, whose numbers are then compared with the policy's before step 1. `scored` adds its log-probabilities, or those
of another model, to a mini-batch as a column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.config.sections.reference import ServerReferenceConfig, sync_of
from holdfast.config.sections.rollout import ReferenceConfig
from holdfast.data.batches.packing import to_device
from holdfast.data.content.images import LeftOutByRun
from holdfast.errors import ModelError
from holdfast.files import size_words
from holdfast.models.adapters.live import adapters_of, adapters_off
from holdfast.models.heads.policy import PolicyModel, without_dropout
from holdfast.models.setup.model import Blueprint, blueprint
from holdfast.optim.reference_ema import FollowingModel
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.plan import ShardPlan
from holdfast.parallel.shards import sharded_parameters
from holdfast.training.other_models.server import Role, ScoringServer, meet
from holdfast.training.rollout_memory import free_bytes
from holdfast.training.run import Model, Run
from holdfast.training.setup.begin import Live
from holdfast.training.setup.model import build_policy, probe_logprobs
from holdfast.types import Batch, LossSum, MiniBatch, Scores

_PROBE_TOKENS = 24
_ROUNDING = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.1}
"""Largest difference of log-probabilities by dtype, in nats, that counts as rounding."""

LocalReference = Callable[..., LossSum | Scores]
"""(batch, temperature=...) -> scores, without gradients"""
Reference = LocalReference | ScoringServer


@dataclass(frozen=True)
class AdapterOff:
    """A reference policy that is the policy itself with adapters and dropout switched off."""

    policy: PolicyModel

    def __call__(self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False) -> LossSum | Scores:
        """Score a batch."""
        with adapters_off(self.policy), without_dropout(self.policy):
            scores: LossSum | Scores = self.policy(batch, temperature=temperature, entropy=entropy)
        return scores


def build_reference(
    policy: Model, live: Live, section: ReferenceConfig | ServerReferenceConfig, *, why: str
) -> Reference:
    """Return the reference policy.

    Args:
        policy: Freshly built: both hold the same numbers.
        live: Objects in the place of what the configuration names.
        section: Where it lives; of auto, see `training/other_models/reference.py`.
        why: What needs it, for the user.

    Raises:
        ConfigError: Its server cannot be used.
        ModelError: The reference is not frozen, or device, sharding or numbers are not the policy's.
    """
    if isinstance(section, ServerReferenceConfig):
        return connect_reference(policy, section, why=why)
    world, ranks = policy.run.world, policy.run.ranks
    kind, note = decide_place(policy, section)
    if world.is_first and note:
        print(note, flush=True)
    if kind == "adapter_off":
        if world.is_first:
            print(f"reference policy: the policy with its adapters off, for {why}; it takes no memory", flush=True)
        _check_off(policy, ranks)
        return AdapterOff(policy.module)
    twin, origin = reference_twin(policy, live, kind)
    if world.is_first:
        location = "in host memory" if "parameters" in twin.config.parallel.offloads else "sharded like the policy"
        print(f"reference policy: {location}, for {why}; its plan:", flush=True)
    reference = build_policy(twin, origin, trained=False)
    reference.module.padded = policy.module.padded
    reference.module.eval()
    ranks.on_all_ranks(lambda: check_place(reference, "reference policy"))
    _check_numbers(reference.module, policy, ranks)
    return reference.module


def reference_twin(policy: Model, live: Live, kind: str) -> tuple[Run, Blueprint]:
    """Return the run and the blueprint of a reference with weights of its own; all ranks call this together.

    Args:
        policy: The policy.
        live: Objects in the place of what the configuration names.
        kind: From `decide_place`: "offloaded" or "sharded".
    """
    config = policy.run.config
    offload = "parameters" in config.parallel.offloads or kind == "offloaded"
    twin = policy.run.with_sections(parallel=config.parallel.of_frozen(in_host_memory=offload))
    origin = policy.run.ranks.first_rank_first(
        lambda: blueprint(
            config.model, twin.base, seed=config.seed, live=live.model, tokenizer=policy.blueprint.tokenizer
        ),
    )
    return twin, origin


def following_of(
    reference: Reference | None, section: ReferenceConfig | ServerReferenceConfig
) -> FollowingModel | None:
    """Return what lets a reference follow the policy; None of one that stays."""
    sync = sync_of(section)
    if reference is None or sync is None:
        return None
    assert isinstance(reference, PolicyModel), "one without weights of its own was refused, or not chosen"
    return FollowingModel(reference, sync.every_steps, sync.mix)


@torch.no_grad()
def _check_off(policy: Model, ranks: RankGroup) -> None:
    """See that adapters can be switched off, and begin as nothing: both ways every bit is the same.

    But for DoRA's: lengths of rows come from the CPU at start, and are rounded otherwise where the model computes.
    """
    adapted = _probe(policy.module, policy)
    with adapters_off(policy.module):
        plain = _probe(policy.module, policy)
    rescaled = any(adapter.magnitude is not None for adapter in adapters_of(policy.module).values())
    allowed = _ROUNDING[policy.plan.compute_dtype] if rescaled else 0.0
    if any(ranks.gather(not bool(((adapted - plain).abs() <= allowed).all()))):
        raise ModelError(
            "The policy gives other log-probabilities with its adapters off, although they begin as zero. Use "
            "reference: {kind: sharded}, and please report the architecture."
        )


def check_place(model: Model, title: str) -> None:
    """See that a frozen model is frozen, and lies where its plan puts it.

    Args:
        model: Built.
        title: What messages call it.

    Raises:
        ModelError: A parameter is trained, or lies on another device or split otherwise than planned.
    """
    plan = model.plan
    expected = "cpu" if plan.cpu_offload else model.run.world.device.type
    for name, parameter in sharded_parameters(model.module).items():
        if parameter.requires_grad:
            raise ModelError(f"The {title} would be trained: {name} requires a gradient. Please report this.")
        if parameter.device.type != expected:
            raise ModelError(f"{name} of the {title} is on {parameter.device.type}, not on {expected}.")
        if plan.sharded and parameter.ndim and not isinstance(parameter, DTensor):
            raise ModelError(
                f"{name} of the {title} is not sharded, although its plan says so. Please report the architecture."
            )


@torch.no_grad()
def _check_numbers(reference: PolicyModel, policy: Model, ranks: RankGroup) -> None:
    """Compare both on one sequence: they hold the same weights, so every bit is the same."""
    logprobs = [_probe(model, policy) for model in (policy.module, reference)]
    differ = not torch.equal(logprobs[0], logprobs[1])
    if any(ranks.gather(differ)):
        gap = float((logprobs[0] - logprobs[1]).abs().max())
        raise ModelError(
            f"The reference policy gives other log-probabilities than the policy it was copied from (by {gap:.1e}), so "
            "what is compared with it would be wrong from the first step. Please report the architecture."
        )


def _probe(model: PolicyModel, policy: Model) -> Tensor:
    vocabulary = int(policy.blueprint.skeleton.config.get_text_config().vocab_size)
    tokens = torch.arange(_PROBE_TOKENS).mul(7919).remainder(vocabulary).numpy()
    return probe_logprobs(model, tokens, policy.run.world.device)


ReferencePlace = Literal["none", "adapter_off", "sharded", "offloaded"]


def decide_place(policy: Model, section: ReferenceConfig) -> tuple[ReferencePlace, str]:
    """Return where the reference lives, and for auto what a user should read of the choice; on all ranks the same."""
    if section.kind != "auto":
        return section.kind, ""
    adapters_stay = why_not_adapter_off(policy, section)
    free = (
        min(policy.run.ranks.gather(free_bytes(policy.run.world))) if policy.run.world.device.type == "cuda" else None
    )
    kind, why = choose_place(policy.plan, adapters_stay, free)
    return kind, f"reference: auto is {kind}, since {why}. {alternatives(policy.plan, adapters_stay)}"


def why_not_adapter_off(policy: Model, section: ReferenceConfig) -> str:
    """Return why the policy without its adapters is not the reference; "" where it is."""
    lora = policy.run.config.model.lora
    if lora is None:
        return "model.lora is not set"
    if lora.train:
        return "model.lora.train names more than adapters"
    if lora.path is not None:
        return "the adapters of model.lora.path start trained"
    return "" if section.sync is None else "it follows the policy (reference.sync)"


def choose_place(plan: ShardPlan, why_not_off: str, free: int | None) -> tuple[ReferencePlace, str]:
    """Return a place, and why it is taken.

    Args:
        plan: Of the policy; the reference is stored like it.
        why_not_off: Why it cannot be the policy without its adapters.
        free: Least that a rank has free on its GPU, with the policy on it; None on the CPU.
    """
    if not why_not_off:
        return "adapter_off", "nothing but adapters is trained, and without them the policy is the model at start"
    if plan.cpu_offload:
        return "offloaded", f"parallel.offload keeps the policy in host memory too, and {why_not_off}"
    if free is None:
        return "sharded", f"device and host have one memory, and {why_not_off}"
    room = f"{size_words(plan.shard_bytes)} per rank, and {size_words(free)} are free on the device beside the policy"
    if plan.shard_bytes > free:
        return "offloaded", f"its shards take {room}"
    return "sharded", f"its shards take {room}; {why_not_off}"


def alternatives(plan: ShardPlan, why_not_off: str) -> str:
    """Return what each place takes, per rank."""
    shards = size_words(plan.shard_bytes)
    gathered = size_words(max(unit.bytes_ for unit in plan.units))
    off = f" (not here: {why_not_off})" if why_not_off else ""
    return (
        f"Each rank would hold 0 bytes with adapter_off{off}, {shards} on the device with sharded, {shards} in host "
        f"memory with offloaded, which brings up to {gathered} at a time to the device"
    )


_ROLE = Role("reference", "reference policy", "policy")
NO_IMAGES = LeftOutByRun("reference.kind: server sends tokens, and no images; use sharded")
"""Why no row may have images."""


def connect_reference(policy: Model, section: ServerReferenceConfig, *, why: str) -> ScoringServer:
    """Return the reference policy behind an endpoint, compared with the policy; all ranks call this together.

    Args:
        policy: Freshly built: as it is at the start of the run.
        section: Where the endpoint is.
        why: What needs it, for the user.

    Raises:
        ConfigError: It cannot be reached, or does not serve what is asked for; the same on all ranks.
        ModelError: Its tokenizer, its vocabulary or its weights are not the policy's.
    """
    scoring_server, compared = meet(policy, section, _ROLE, samples=policy.run.config.samples, drift=section.bound)
    probe, model = scoring_server.probe, scoring_server.server.model
    difference = max(policy.run.ranks.gather(float(np.abs(probe.told_by(policy) - probe.logprobs).max())))
    if section.bound is not None and not difference <= section.bound:
        raise ModelError(
            f"reference: {model} at {section.url} is not the model at start: of one text their log-probabilities "
            f"differ by {difference:.2g} nats, and reference.bound is {section.bound:g}. Serve the weights of "
            "model.path; or set reference.bound: null if another reference is what you want, or a larger bound if its "
            "precision is lower."
        )
    if policy.run.world.is_first:
        note = "" if compared else "; its tokenizer could not be compared, since it named no tokens"
        print(
            f"reference policy: {model} at {section.url}, for {why}; of one text its log-probabilities differ "
            f"from the policy's by at most {difference:.1e} nats{note}",
            flush=True,
        )
    return scoring_server


@torch.no_grad()
def scored(sharded: Model, model: Reference, mini_batch: MiniBatch, name: str, *, entropy: bool = False) -> MiniBatch:
    """Add a model's log-probabilities, and perhaps `entropy`, to every trained token; all ranks call this together.

    Args:
        sharded: Where the batch goes, and at which temperature it is scored.
        model: Scores a batch.
        mini_batch: What is scored.
        name: Of the column.
        entropy: Also add entropies.
    """
    if isinstance(model, ScoringServer):
        return model.scored(mini_batch, name)
    batches = []
    for micro_batch in mini_batch.micro_batches:
        batch = to_device(micro_batch, sharded.run.world.device)
        scores = model(batch, temperature=sharded.temperature, entropy=entropy)
        assert isinstance(scores, Scores)
        added = {name: on_tokens(batch, scores.logprobs)}
        if scores.entropy is not None:
            added["entropy"] = on_tokens(batch, scores.entropy)
        batches.append(replace(batch, per_token={**batch.per_token, **added}))
    return replace(mini_batch, micro_batches=tuple(batches))


def on_tokens(batch: Batch, values: Tensor) -> Tensor:
    """Return [B, T] with [N] values at the scored tokens and 0 elsewhere."""
    spread = values.new_zeros(batch.tokens.numel())
    spread[batch.scored] = values.detach()
    return spread.view_as(batch.tokens)
