"""Which form of the head's arithmetic a policy takes, and its record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from holdfast.models.chunks.kernel_form import kernel_tokens, why_no_kernels
from holdfast.models.chunks.logits import chunk_tokens
from holdfast.models.heads.policy import PolicyModel

FormRecord = dict[str, str | int]


def take_kernels(policy: PolicyModel, dtype: torch.dtype, device: torch.device, *, simulated: bool) -> str:
    """Let Triton kernels sweep a policy's logits on a CUDA device; return why they cannot, "" if they can.

    Args:
        policy: Before its parameters are sharded.
        dtype: Of its forward pass.
        device: Where it runs.
        simulated: Whether tensors hold no numbers; of the machine that is planned for, nothing is known then.
    """
    head: Any = policy.readable_head()
    spec = policy.head_spec
    assert head is not None
    dtype = torch.float32 if spec.float32_product and dtype == torch.bfloat16 else dtype
    if not simulated and (reason := why_no_kernels(spec, dtype, device)):
        return reason
    tokens = kernel_tokens(spec, head.weight.shape[0], dtype, torch.cuda.mem_get_info(device)[1])
    policy.head_spec = replace(spec, kernel_tokens=tokens)
    return ""


def use_kernels(policy: PolicyModel, tokens: int) -> None:
    """Let kernels sweep a policy's logits, so many tokens' at a time; for 0 torch's operations."""
    policy.head_spec = replace(policy.head_spec, kernel_tokens=tokens or None)


def form_record(policy: PolicyModel, device: torch.device) -> FormRecord | None:
    """Return which form sweeps a policy's logits and how many tokens' at once; None for a model that has no logits.

    Both decide in which order numbers are added up.
    """
    head: Any = policy.readable_head()
    spec = policy.head_spec
    if head is None:
        return None
    if spec.kernel_tokens is not None:
        return {"form": "kernels", "chunk_tokens": spec.kernel_tokens}
    return {"form": "torch", "chunk_tokens": chunk_tokens(spec, head.weight.shape[0], device)}


def described(record: FormRecord) -> str:
    """Return a record as a phrase."""
    form = "Triton kernels" if record["form"] == "kernels" else "torch's operations"
    return f"{form}, {record['chunk_tokens']:,} tokens at a time"
