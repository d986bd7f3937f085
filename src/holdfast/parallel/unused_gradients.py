"""Reduces the gradients of trained parameters that a backward pass did not reach, as zeros.

torch 2.11 and 2.12 lack FSDP2's own `set_reduce_scatter_unused_params`. With torch 2.13 as the oldest, the call to it
stays, in `apply.py`, and this file goes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


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
