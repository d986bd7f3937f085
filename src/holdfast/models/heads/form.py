"""Which form of the head's arithmetic a policy takes, and its record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from holdfast.models.chunks.kernel_form import kernel_tokens, why_no_kernels
from holdfast.models.chunks.logits import chunk_tokens, product_dtype
from holdfast.models.heads.policy import PolicyModel

FormRecord = dict[str, str | int]


def why_no_kernels_for(policy: PolicyModel, dtype: torch.dtype, device: torch.device) -> str:
    """Return why Triton kernels cannot sweep a policy's logits on this machine; "" if they can.

    Args:
        policy: Before its parameters are sharded.
        dtype: Of its forward pass.
        device: Where it runs.
    """
    return why_no_kernels(policy.head_spec, product_dtype(policy.head_spec, dtype), device)


def take_kernels(policy: PolicyModel, dtype: torch.dtype, device: torch.device) -> None:
    """Let Triton kernels sweep a policy's logits on a CUDA device; arguments as of `why_no_kernels_for`."""
    head: Any = policy.readable_head()
    memory = torch.cuda.mem_get_info(device)[1]
    dtype = product_dtype(policy.head_spec, dtype)
    tokens = kernel_tokens(policy.head_spec, head.weight.shape[0], dtype, memory)
    policy.head_spec = replace(policy.head_spec, kernel_tokens=tokens)


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
