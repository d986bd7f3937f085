"""Turn a plan into wrapped modules: the only file that shards, checkpoints activations or compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from holdfast.models.names import POLICY_PREFIX, canonical_name, named_parameters
from holdfast.parallel.activations import ActivationOffload, OffloadedBlock
from holdfast.parallel.copies import attach_copies
from holdfast.parallel.plan import ROOT, Recomputed, ShardPlan, ShardUnit

FORWARD_METHODS = (
    "upstream_values",
    "upstream_hidden",
    "upstream_head",
    "show_predictors",
    "predicting_states",
)
"""Methods of the root, besides forward, before which parameters must be gathered or cast; a root may lack some."""

_KEPT_OPERATIONS = [
    "mm",
    "addmm",
    "bmm",
    # Names of aten operations as `OpOverload.__name__` prints them. An unknown name is ignored: a torch that
    # renames one recomputes it, which costs time and changes no number.
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_varlen_attn",
    "documents_attention",
    "_grouped_mm",
]
"""What selective recomputation keeps: matrix products and attention cost the most to run again."""


def apply_plan(
    policy: nn.Module,
    plan: ShardPlan,
    mesh: DeviceMesh,
    compile_block: Callable[[nn.Module], object],
) -> None:
    """Wrap a policy in place: recompute, then compile, then offload activations, then shard.

    Args:
        policy: The root (`PolicyModel`), its parameters on any device.
        plan: Made for it.
        mesh: From `build_mesh`.
        compile_block: Compiles a block's calls in place.
    """
    for path, kind in plan.recompute.items():
        # The order that torch prescribes: what is compiled contains the checkpoint wrapper, and FSDP2 wraps both.
        _replace(policy, path, _recomputed(_module(policy, path), kind))
    if plan.compile_blocks:
        # Blocks with and without gradients, adapters and branches are programs of their own; beyond this number dynamo
        # runs a block uncompiled. Its default is 8.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for path in plan.compile_blocks:
        # `Module.compile` compiles the call in place; `torch.compile(module)` would insert a wrapper with
        # "_orig_mod" in the names of parameters.
        compile_block(_module(policy, path))
    offload = ActivationOffload(mesh.device_type)
    for path in plan.offload_blocks:
        # Around what is compiled: dynamo would trace streams and events. Inside of FSDP2's unit: while the hooks are
        # asked, its parameters are gathered and known by their storages.
        block = OffloadedBlock(_module(policy, path), offload, stays=path == plan.offload_blocks[-1])
        _replace(policy, path, block)
    methods = filter(partial(hasattr, policy), FORWARD_METHODS)
    if plan.copied:
        attach_copies(policy, getattr(torch, plan.compute_dtype), [unit.parameters for unit in plan.units], methods)
    if not plan.sharded:
        return
    options = _options(policy, plan, mesh)
    for unit in plan.units:
        _shard(policy, unit, options)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            _set_always_on(module)
    for method in methods:
        # FSDP2 gathers in hooks around `forward` alone; any other method would see shards.
        register_fsdp_forward_method(policy, method)


def _shard(policy: nn.Module, unit: ShardUnit, options: Mapping[str, Any]) -> None:
    modules = [policy] if unit.name == ROOT else [_module(policy, path) for path in unit.modules]
    fully_shard(modules if len(modules) > 1 else modules[0], reshard_after_forward=unit.reshard, **options)
    for module in modules:
        keep_recording(module)
    match unit.in_backward:
        case "gathered" if unit.name == ROOT and unit.reshard:
            _keep_for_backward(policy)
        case "not_read":
            modules[0].set_unshard_in_backward(unshard_in_backward=False)  # type: ignore[operator]  # FSDP2's
        case "as_the_loss_says":
            _gather_as_asked(modules[0])


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function compiled for every shape that it is called with, when it is called."""

    def call(*args: Any) -> None:
        # One program for each shape of a model's parameters: more than torch allows by default.
        with torch._dynamo.utils.disable_cache_limit():
            program(*args)

    # Inductor otherwise times reductions in each process and keeps the faster form.
    program = torch.compile(function, fullgraph=True, dynamic=False, options={"deterministic": True})
    return call


def keep_recording(module: nn.Module) -> None:
    """Keep `output_hidden_states=True` working for a transformers model that FSDP2 has wrapped, such as LLaVA's tower.

    transformers looks up what a model can record by the printed name of its class, and `fully_shard` replaces the class
    by a subclass with another name.
    """
    from transformers import PreTrainedModel
    from transformers.utils import output_capturing

    registry = getattr(output_capturing, "_CAN_RECORD_REGISTRY", None)
    if isinstance(module, PreTrainedModel) and registry is not None:
        # The registry's `get` reads by the printed class name, and its __setitem__ may key otherwise: write what `get`
        # reads.
        dict.__setitem__(registry, str(type(module)), module._can_record_outputs)  # noqa: SLF001 - it has no setter


def _options(policy: nn.Module, plan: ShardPlan, mesh: DeviceMesh) -> dict[str, Any]:
    parameters = named_parameters(policy)
    compute = getattr(torch, plan.compute_dtype)
    return {
        "mesh": mesh if plan.replicate > 1 else mesh["shard"],
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute,
            reduce_dtype=getattr(torch, plan.reduce_dtype),
            # FSDP2 would cast floating-point tensors inside our dataclasses too: advantages and weights, silently.
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if plan.cpu_offload
        else OffloadPolicy(),
        "ignored_params": {parameters[name] for name in plan.replicated},
    }


def _keep_for_backward(root: Any) -> None:
    """Keep the root's parameters gathered from the end of a forward pass to the end of its backward pass.

    A backward pass begins with the root and keeps it gathered to its end. Freeing the root in between would save no
    memory at the peak and would cost another all-gather. After a forward pass without gradients it is freed, since a
    copy that stays gathered would miss the next optimizer update.
    """

    def before(module: Any, _: object) -> None:
        module.set_reshard_after_forward(not torch.is_grad_enabled(), recurse=False)

    def after(module: Any, _: object, __: object) -> None:
        module.set_reshard_after_forward(True, recurse=False)

    root.register_forward_pre_hook(before)
    root.register_forward_hook(after, always_call=True)


def _gather_as_asked(head: Any) -> None:
    """Gather the head for the backward pass unless the call passes `again=False`: nothing will read it there.

    A loss that computes the gradients of the head in the forward pass does not need its matrix in the backward pass.
    """

    def before(module: Any, _: object, options: Mapping[str, Any]) -> None:
        module.set_unshard_in_backward(options.get("again", True))
        # `_comm_ctx` is FSDP2's record of streams and of the all-gather whose buffer is still alive; it has
        # no public reader.
        _free_gathering(module._get_fsdp_state()._comm_ctx)  # the names in every version

    head.register_forward_pre_hook(before, with_kwargs=True)


def _free_gathering(context: Any) -> None:
    """Free FSDP2's all-gather buffer once the gathered parameters have been copied out of it.

    FSDP2 frees it when it gathers the next unit. The head is the last unit of a forward pass, so the buffer, as large
    as the head, would stay allocated beside the logits.
    """
    if context.all_gather_state is not None:
        for stream in (context.all_gather_copy_in_stream, context.all_gather_stream):
            # Without the wait the caching allocator could give the memory to a kernel that runs before
            # the copy has read it.
            stream.wait_event(context.all_gather_state.event)
        context.all_gather_state = None


def _set_always_on(module: FSDPModule) -> None:
    # We normalise losses ourselves: gradients are summed over ranks, never averaged. Setting the divisor alone fails on
    # gloo, which has no pre-multiplied sum.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    reduce_unused(module)


def _module(policy: nn.Module, path: str) -> nn.Module:
    at_path: nn.Module = next(
        module for name, module in policy.named_modules() if name and canonical_name(name) == path
    )
    return at_path


def _replace(policy: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    policy.get_submodule(f"{POLICY_PREFIX}{parent}".rstrip(".")).register_module(name, module)


def _recomputed(block: nn.Module, kind: Recomputed) -> nn.Module:
    # Only the non-reentrant form sees gradients of captured tensors; the reentrant one gives zero key, value and router
    # gradients without an error.
    options: dict[str, Any] = {"checkpoint_impl": CheckpointImpl.NO_REENTRANT, "preserve_rng_state": True}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    wrapped: nn.Module = checkpoint_wrapper(block, **options)
    return wrapped


def _keep_products(_: object, operation: Any, *__: object, **___: object) -> CheckpointPolicy:
    name = getattr(operation, "__name__", str(operation)).split(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in _KEPT_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE


def reduce_unused(module: FSDPModule) -> None:
    """Let a unit reduce every trained parameter in each backward pass, so that all ranks reduce the same list."""
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
    else:
        give_unused_zero_gradients(module)


def give_unused_zero_gradients(module: FSDPModule) -> None:
    """Do what `set_reduce_scatter_unused_params` does.

    Before a unit reduces, each trained parameter that the backward pass did not reach gets a zero gradient, so that
    all ranks reduce the same list.
    """
    group = module._get_fsdp_state()._fsdp_param_group  # the name in every version; one group without per-param meshes
    if group is not None:
        patched = partial(_post_backward_with_zeros, group, group.post_backward)
        group.post_backward = patched  # type: ignore[method-assign]  # this unit's alone


def _post_backward_with_zeros(group: Any, post_backward: Any, *unused: Any) -> None:
    for parameter in group.fsdp_params:
        # `_unsharded_param` is the gathered parameter that autograd sees; FSDP2 creates it at the first
        # all-gather.
        live = getattr(parameter, "_unsharded_param", None)
        if live is None or not live.requires_grad or not group.reduce_grads:
            continue
        # FSDP2 moves `.grad` to `unsharded_accumulated_grad` when a reduction is postponed: then a gradient
        # exists already.
        if live.grad is None and parameter.unsharded_accumulated_grad is None:
            live.grad = torch.zeros_like(live)
    post_backward(*unused)
