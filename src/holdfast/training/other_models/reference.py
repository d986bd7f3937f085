"""The reference policy: the model at the start of the run, in memory, as the policy without its adapters, or served.

Unless `reference.sync` lets it follow the policy (optim/reference_ema.py), it never changes. `build_frozen` places a
reference, a teacher or a reward model in memory. `scored` adds the log-probabilities of a model, wherever it is, to a
mini-batch as a column.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast import registry
from holdfast.config.sections.reference import ServerReferenceConfig, sync_of
from holdfast.config.sections.rollout import ReferenceConfig
from holdfast.data.batches.packing import places, to_device
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
from holdfast.training.rollout_memory import free_bytes
from holdfast.training.run import Model, Run
from holdfast.training.setup.begin import Live
from holdfast.training.setup.model import build_policy, probe_logprobs
from holdfast.types import Batch, LossSum, MiniBatch, Scores, host_value

_PROBE_TOKENS = 24
_ROUNDING = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.1}
"""Largest difference of log-probabilities by dtype, in nats, that counts as rounding."""

LocalReference = Callable[..., LossSum | Scores]
"""(batch, temperature=...) -> scores, without gradients"""


class ServedModel(ABC):
    """A model that tells log-probabilities of given tokens and nothing else (features/served_models)."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name under which the model is served."""

    @abstractmethod
    def told(self, texts: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float64]]:
        """Return the log-probabilities of the texts of this rank, [L] each, at temperature 1; NaN for the first token.

        Raises:
            RunStopped: It does not answer, or its answer cannot be used.
        """

    @abstractmethod
    def remembering(self) -> ServedModel:
        """Return the same model, which a rank asks for each text once."""


Reference = LocalReference | ServedModel


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
        served: ServedModel = registry.load(registry.SERVED_REFERENCE)(policy, section, why=why)
        return served
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
    reference = build_frozen(twin, origin, "reference policy", why=f", for {why}")
    reference.module.padded = policy.module.padded
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


def build_frozen(run: Run, origin: Blueprint, title: str, *, why: str = "") -> Model:
    """Return a model that is never trained, in the place that its run plans; all ranks call this together.

    Args:
        run: Of the run, with the sections that are the model's own.
        origin: The model.
        title: What messages call it.
        why: What needs it, for the user.

    Raises:
        ModelError: It is not frozen, or not where its plan puts it.
        PlanError: It cannot be sharded.
    """
    if run.world.is_first:
        offloaded = "parameters" in run.config.parallel.offloads
        location = "in host memory" if offloaded else "sharded like the policy"
        print(f"{title}: {location}{why}; its plan:", flush=True)
    frozen = build_policy(run, origin, trained=False)
    frozen.module.eval()
    run.ranks.on_all_ranks(lambda: check_place(frozen, title))
    return frozen


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


NO_IMAGES = LeftOutByRun("reference.kind: server sends tokens, and no images; use sharded")
"""Why no row may have images."""


@torch.no_grad()
def scored(policy: Model, model: Reference, mini_batch: MiniBatch, name: str, *, entropy: bool = False) -> MiniBatch:
    """Add a model's log-probabilities, or a critic's values, to every trained token; all ranks call this together.

    Args:
        sharded: Where the batch goes, and at which temperature it is scored.
        model: Scores a batch.
        mini_batch: What is scored.
        name: Of the column.
        entropy: Also add entropies.

    Raises:
        RunStopped: The model is served, and does not answer or cannot be used; the same on all ranks.
    """
    if isinstance(model, ServedModel):
        return _told(policy, model, mini_batch, name)
    batches = []
    for micro_batch in mini_batch.micro_batches:
        batch = to_device(micro_batch, policy.run.world.device)
        scores = model(batch, temperature=policy.temperature, entropy=entropy)
        assert isinstance(scores, Scores)
        added = {name: on_tokens(batch, scores.values)}
        if scores.entropy is not None:
            added["entropy"] = on_tokens(batch, scores.entropy)
        batches.append(replace(batch, per_token={**batch.per_token, **added}))
    return replace(mini_batch, micro_batches=tuple(batches))


def _told(policy: Model, model: ServedModel, mini_batch: MiniBatch, name: str) -> MiniBatch:
    """Add what a served model tells of this rank's trained tokens, 0 elsewhere."""
    batches = [to_device(batch, policy.run.world.device) for batch in mini_batch.micro_batches]
    columns = [torch.zeros(batch.tokens.shape, dtype=batch.weights.dtype) for batch in batches]
    texts, trained_places = [], []
    for batch, column in zip(batches, columns, strict=True):
        tokens, mask = (host_value(each, "tokens for a server") for each in (batch.tokens, batch.loss_mask))
        for row, span in places(batch):
            (trained,) = np.nonzero(mask[row, span])
            if trained.size:
                texts.append(tokens[row, span][: trained[-1] + 1])
                trained_places.append((column[row], np.arange(mask.shape[1])[span][trained], trained))
    logprobs = policy.run.ranks.on_all_ranks(lambda: model.told(texts))
    for (values, where, trained), told in zip(trained_places, logprobs, strict=True):
        values[torch.from_numpy(where)] = torch.from_numpy(told[trained]).to(values.dtype)
    added = (
        replace(batch, per_token={**batch.per_token, name: column.to(batch.tokens.device)})
        for batch, column in zip(batches, columns, strict=True)
    )
    return replace(mini_batch, micro_batches=tuple(added))


def on_tokens(batch: Batch, values: Tensor) -> Tensor:
    """Return [B, T] with [N] values at the scored tokens and 0 elsewhere."""
    spread = values.new_zeros(batch.tokens.numel())
    spread[batch.scored] = values.detach()
    return spread.view_as(batch.tokens)
