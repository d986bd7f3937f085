"""An unsharded copy of the policy for decoding: weights are gathered once, never per token."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from holdfast.models.attention import upstream_attention
from holdfast.models.build import Blueprint
from holdfast.parallel.stream import full_tensor, held_tensors


class Replica:
    """A plain transformers model on this rank's device.

    Args:
        origin: What the policy was built from.
        device: Where it decodes.
        dtype: Its dtype; decoding in the policy's compute dtype keeps sampler and trainer close.
    """

    def __init__(self, origin: Blueprint, device: torch.device, dtype: torch.dtype) -> None:
        config = copy.deepcopy(origin.skeleton.config)
        for part in (config, config.get_text_config()):
            part.use_cache = True
        with torch.device("meta"):
            self.model: Any = type(origin.skeleton)._from_config(config)  # noqa: SLF001 - no public form takes a class
        self.model.set_attn_implementation(upstream_attention(self.model))
        self.model.generation_config = copy.deepcopy(origin.skeleton.generation_config)
        self._device, self._dtype = device, dtype
        self._buffers = origin.buffers
        self._filled = False

    @torch.no_grad()
    def refresh(self, policy: nn.Module) -> None:
        """Take over the policy's weights; all ranks call this together."""
        if not self._filled:
            self.model.to_empty(device=self._device)
            self.model.tie_weights()
            self.model.eval()
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
            for parameter in self.model.parameters():
                parameter.requires_grad_(False)
                parameter.data = parameter.data.to(self._dtype)
            self._filled = True
        state = self.model.state_dict()
        for name, tensor in held_tensors(policy).items():
            state[name].copy_(full_tensor(tensor))
