"""An unsharded copy of the policy for decoding, so that weights are gathered once per rollout and not per token."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.data.content.model_inputs import tensor_arguments
from holdfast.models.files.vision import set_attention
from holdfast.models.layers.attention import upstream_attention
from holdfast.models.layers.rotary import keep_short_angles
from holdfast.models.names import named_parameters
from holdfast.models.setup.model import Blueprint
from holdfast.rollout.engine import Request
from holdfast.rollout.sampling import Stops


def merged_inputs(requests: Iterable[Request], device: torch.device) -> dict[str, Tensor]:
    """Return the model inputs of requests side by side, in their order."""
    arrays: dict[str, list[Any]] = {}
    for request in requests:
        for name, values in request.model_inputs.items():
            arrays.setdefault(name, []).append(values)
    return tensor_arguments(
        {name: torch.from_numpy(np.concatenate(values)).to(device) for name, values in arrays.items()}
    )


def for_few_rows(weight: Tensor) -> Tensor:
    """Return a matrix [out, in] as it is multiplied fastest by few rows: on the CPU, transposed in memory.

    MKL then takes 0.6 to 0.8 of the time for 1 to 64 rows. The copy costs as much as 5 to 30 tokens.
    """
    return weight.t().contiguous().t() if weight.device.type == "cpu" else weight


class Replica:
    """A plain transformers model on this rank's device.

    Args:
        origin: What the policy was built from.
        device: Where it decodes.
        dtype: Its dtype; decoding in the policy's compute dtype keeps sampler and trainer close.
        attention: Name of its attention; default: transformers' own that is exact for the model.
    """

    def __init__(
        self, origin: Blueprint, device: torch.device, dtype: torch.dtype, attention: str | None = None
    ) -> None:
        from transformers import GenerationConfig

        config = copy.deepcopy(origin.skeleton.config)
        for model_config in (config, config.get_text_config()):
            model_config.use_cache = True
            model_config.output_router_logits = False  # with them comes a loss, which fails on what `generate` gives it
        with torch.device("meta"):
            self.model: Any = type(origin.skeleton)._from_config(config)  # noqa: SLF001 - no public form takes a class
        set_attention(self.model, attention or upstream_attention(self.model))
        keep_short_angles(self.model)  # a policy whose completions may be longer is refused
        self.model.generation_config = GenerationConfig()  # the model's own would change what is drawn
        if dtype is torch.float64:  # torch's grouped products of experts exist for 32 and 16 bits only
            self.model.set_experts_implementation("eager")
        self.model.eval()
        self.family = origin.family
        self.device, self._dtype = device, dtype
        self._buffers = origin.buffers
        self._filled = False
        self._own: set[str] = set()
        """Weights whose memory is not that of a tensor that was taken over."""

    @torch.no_grad()
    def refresh(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take over whole tensors by canonical name; all ranks call this together if they are gathered on the way.

        A tensor that has the right dtype and device is taken as it is, not copied: one that lives in the policy is
        shared with it, and follows it. Others are written into the memory that the weights have.
        """
        if not self._filled:
            self._leave_meta()
            self._filled = True
        parameters = named_parameters(self.model)
        buffers = dict(self.model.named_buffers())
        waiting = set(parameters)
        for name, tensor in tensors:
            if name in parameters:
                self._take(name, parameters[name], tensor.detach())
                waiting.discard(name)
            else:
                buffers[name].copy_(tensor)
        assert not waiting, f"no weights came for {sorted(waiting)[:3]}"

    @property
    def owned(self) -> set[int]:
        """Identities of the parameters that share their memory with no tensor that was taken over."""
        parameters = named_parameters(self.model)
        return {id(parameters[name]) for name in self._own}

    def places(self) -> list[tuple[object, ...]]:
        """Return where each weight lies."""
        return [(value.data_ptr(), value.shape, value.stride(), value.dtype) for value in self.model.parameters()]

    def _take(self, name: str, parameter: nn.Parameter, tensor: Tensor) -> None:
        """Let a weight be what a tensor is."""
        if (tensor.dtype, tensor.device) != (self._dtype, parameter.device):
            if name in self._own and parameter.shape == tensor.shape:
                parameter.data.copy_(tensor)
                return
            self._own.add(name)
            tensor = tensor.to(self.device, self._dtype)
        else:
            self._own.discard(name)
        parameter.data = tensor  # the parameter object stays, which tied modules share

    def _leave_meta(self) -> None:
        """Fill the buffers, and give parameters a device and a dtype but no memory: they take that of what arrives."""
        # `to_empty` would allocate all weights in float32 before the first one is replaced, and part tied ones.
        empty: dict[int, nn.Parameter] = {}
        for module in self.model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if id(parameter) not in empty:
                    data = torch.empty(0, dtype=self._dtype, device=self.device)
                    empty[id(parameter)] = nn.Parameter(data, requires_grad=False)
                setattr(module, name, empty[id(parameter)])
        for path, buffer in list(self.model.named_buffers(remove_duplicate=False)):
            owner, _, name = path.rpartition(".")
            filled = torch.empty_like(buffer, device=self.device).copy_(self._buffers[path])
            setattr(self.model.get_submodule(owner), name, filled)

    @contextmanager
    def for_few_rows(self) -> Iterator[None]:
        """Lay the weights of linear layers down for products with few rows, within the block; see `for_few_rows`."""
        weights = [module.weight for module in self.model.modules() if type(module) is nn.Linear]
        shared = [weight.data for weight in weights]
        embeddings = self.model.get_input_embeddings().weight
        for weight in weights:
            if weight is not embeddings:
                weight.data = for_few_rows(weight.data)
        try:
            yield
        finally:
            for weight, data in zip(weights, shared, strict=True):
                weight.data = data

    def release(self) -> None:
        """Give the weights' memory back until the next refresh."""
        self._own.clear()
        for parameter in self.model.parameters() if self._filled else ():
            # Tied modules and hooks hold the parameter object, so only its storage is given up.
            parameter.data = torch.empty(0, dtype=self._dtype, device=self.device)


class ReplicaEngine:
    """Base class of engines that sample in this process from a replica; it queues requests.

    Args:
        replica: The unsharded copy.
        stops: Tokens and texts that end a completion.
        rows: Largest number of completions decoded together.
    """

    def __init__(self, replica: Replica, stops: Stops, rows: int) -> None:
        self._replica, self._stops, self._rows = replica, stops, rows
        self._waiting: deque[Request] = deque()
        self._sampling = SamplingConfig()
        self._version = -1

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over whole tensors; no keys or values outlive a `collect`, so none are of older weights."""
        self._replica.refresh(tensors)
        self._version = version

    def submit(self, requests: Sequence[Request], sampling: SamplingConfig) -> None:
        """Accept requests; all that wait together are sampled alike."""
        self._waiting.extend(requests)
        self._sampling = sampling

    def sleep(self) -> bool:
        """Give the weights' memory back."""
        self._replica.release()
        return True

    def close(self) -> None:
        """Give everything back."""
        self._replica.release()
