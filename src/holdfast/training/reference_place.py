"""Where a reference policy lives, chosen for `reference: auto` and told with what each place would take."""

from __future__ import annotations

from typing import Literal

from holdfast.config.rollout import ReferenceConfig
from holdfast.files import size_words
from holdfast.parallel.plan import ShardPlan
from holdfast.training.copies import free_bytes
from holdfast.training.run import Evaluation

Place = Literal["none", "adapter_off", "sharded", "offloaded"]


def chosen_place(policy: Evaluation, section: ReferenceConfig) -> tuple[Place, str]:
    """Return where the reference lives, and for auto what a user should read of the choice; on all ranks the same."""
    if section.kind != "auto":
        return section.kind, ""
    adapters_stay = why_not_adapter_off(policy, section)
    free = min(policy.exchange.gather(free_bytes(policy.world))) if policy.world.device.type == "cuda" else None
    place, why = choose(policy.plan, adapters_stay, free)
    return place, f"reference: auto is {place}, since {why}. {alternatives(policy.plan, adapters_stay)}"


def why_not_adapter_off(policy: Evaluation, section: ReferenceConfig) -> str:
    """Return why the policy without its adapters is not the reference; "" where it is."""
    lora = policy.config.model.lora
    if lora is None:
        return "model.lora is not set"
    if lora.train:
        return "model.lora.train names more than adapters"
    if lora.path is not None:
        return "the adapters of model.lora.path start trained"
    return "" if section.sync is None else "it follows the policy (reference.sync)"


def choose(plan: ShardPlan, why_not_off: str, free: int | None) -> tuple[Place, str]:
    """Return a place, and why it is taken.

    Args:
        plan: Of the policy; the reference is stored like it.
        why_not_off: Why it cannot be the policy without its adapters.
        free: Least that a rank has free on its GPU, with the policy on it; None on the CPU.
    """
    if not why_not_off:
        return "adapter_off", "nothing but adapters is trained, and without them the policy is the model at start"
    if plan.cpu_offload:
        return "offloaded", f"parallel.cpu_offload keeps the policy in host memory too, and {why_not_off}"
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
