"""Routing replay: in training, send each token to the experts that it was sent to in sampling.

A router near a tie may send a token to other experts in training than in sampling; the importance ratio then compares
two different networks. With replay, the choice of experts is fixed, while the weights that mix their outputs are still
computed by the trained router, so that it receives gradients (R3, arXiv:2510.11370, section 4).

Routers of transformers choose by a single `topk` over their experts, whose result is replaced by the recorded choices.
The replacement is installed by hooks on the routers and not around the forward pass, since a block that is recomputed
in the backward pass runs its router again and must choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from holdfast.errors import ModelError

CHOICES_COLUMN = "expert_choices"
"""Per token, [L, layers, k] int16: the experts to send it to, each by its index + 1; 0 lets the router choose."""

_TOPK: tuple[Any, ...] = (torch.topk, Tensor.topk)
_MASKING: tuple[Any, ...] = (torch.masked_fill, Tensor.masked_fill)


class TopK(NamedTuple):
    """What `torch.topk` returns."""

    values: Tensor
    indices: Tensor


class ChoicesToFollow:
    """Makes routers choose recorded experts, by hooks that stay on them.

    Args:
        routers: In the order they run; hooks stay on them.
        name: Of the model, for errors.
    """

    def __init__(self, routers: Sequence[nn.Module], name: str) -> None:
        self._name = name
        self._choices: Tensor | None = None
        self._differing: list[Tensor] | None = None
        self._places = torch.zeros(0, dtype=torch.int64)
        for layer, router in enumerate(routers):
            before, after = self._hooks(layer, _experts(router))
            router.register_forward_pre_hook(before)
            router.register_forward_hook(after, always_call=True)

    def follow(self, choices: Tensor | None) -> None:
        """Choose so until told otherwise, in recomputed blocks too.

        Args:
            choices: [..., layers, k] as in `CHOICES_COLUMN`, a token after the other; None lets routers choose.
        """
        self._choices = None if choices is None else choices.flatten(0, -3)

    @contextmanager
    def counted(self, positions: Tensor) -> Iterator[list[Tensor]]:
        """Collect [2] of each router that runs inside the block: tokens it would have sent elsewhere, and all told.

        Args:
            positions: [N] int64, the tokens that are counted.
        """
        differing: list[Tensor] = []
        self._differing, self._places = differing, positions
        try:
            yield differing
        finally:
            self._differing = None  # a recomputed block runs its router again, and must not count twice

    def _hooks(self, layer: int, experts: int) -> tuple[Callable[..., None], Callable[..., None]]:
        entered: list[tuple[_ForcedTopK, ExitStack]] = []

        def before(_: nn.Module, __: object) -> None:
            if self._choices is not None:
                mode, stack = _ForcedTopK(self._choices[:, layer].long(), experts), ExitStack()
                stack.enter_context(mode)
                entered.append((mode, stack))

        def after(_: nn.Module, __: object, output: object) -> None:
            if not entered:
                return
            mode, stack = entered.pop()
            stack.close()
            if output is None:  # it was broken off: by an error, or where recomputing has what it needs
                return
            if mode.differing is None:
                raise ModelError(
                    f"rollout.replay_routing: router {layer} of {self._name} did not choose among {experts} experts "
                    f"for {len(mode.choices)} tokens, so it cannot be told what to choose. Leave replay_routing out."
                )
            if self._differing is not None:
                self._differing.append(mode.differing[self._places].sum(0))

        return before, after


class _ForcedTopK(TorchFunctionMode):
    """A torch function mode that replaces the result of the `topk` over experts."""

    def __init__(self, choices: Tensor, experts: int) -> None:
        super().__init__()
        self.choices, self._experts = choices, experts
        self._unmasked: tuple[Tensor, Tensor] | None = None
        self.differing: Tensor | None = None
        """[T, 2]: whether the router would have sent a token elsewhere, and whether it was told."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002 - torch's form
        output = func(*args, **(kwargs or {}))
        if func in _MASKING:
            self._unmasked = (output, args[0])
        if func not in _TOPK or output[1].shape != self.choices.shape:
            return output
        scores: Tensor = args[0] if args else kwargs["input"]
        if scores.shape[-1] != self._experts:
            return output
        if self._unmasked is not None and scores is self._unmasked[0]:
            scores = self._unmasked[1]  # a group that the router would leave out now has the weight that it has
        with torch.no_grad():
            has_choice = self.choices > 0
            indices = torch.where(has_choice, self.choices - 1, output[1])
            differs = (indices.sort(-1).values != output[1].sort(-1).values).any(-1)
            self.differing = torch.stack([differs, has_choice.any(-1)], -1).double()
        return TopK(scores.gather(-1, indices), indices)


def why_not_replayed(routers: Sequence[nn.Module], width: int) -> str | None:
    """Say why a model's routers cannot be told what to choose; None if they can.

    Args:
        routers: On the meta device, where nothing is computed.
        width: Of the hidden states.
    """
    if not routers:
        return "it is no mixture of experts"
    for layer, router in enumerate(routers):
        counter, weight = _TopKCounter(_experts(router)), next(router.parameters())
        try:
            with torch.no_grad(), counter:
                output = router(torch.zeros(2, width, dtype=weight.dtype, device=weight.device))
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            return f"router {layer} ({type(router).__name__}) does not run on hidden states alone: {error}"
        outputs = output if isinstance(output, tuple) else (output,)
        if counter.answers != 1 or not any(
            isinstance(tensor, Tensor) and tensor.dtype == torch.int64 for tensor in outputs
        ):
            return (
                f"router {layer} ({type(router).__name__}) does not choose by one topk over its experts, and say which"
            )
    return None


class _TopKCounter(TorchFunctionMode):
    """Counts the calls for the best of all experts, for two tokens."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self._experts, self.answers = experts, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002 - torch's form
        if func in _TOPK:
            scores: Tensor = args[0] if args else kwargs["input"]
            self.answers += scores.shape == (2, self._experts)
        return func(*args, **(kwargs or {}))


def column(prompt: NDArray[np.int16], drawn: Sequence[NDArray[np.int16]], length: int) -> NDArray[np.int16]:
    """Return [L, layers, k]: what was chosen for a prompt and what it drew; 0 for what was never read, like the last.

    Args:
        prompt: [P, layers, k]
        drawn: [layers, k] of each drawn token that was read, in their order; perhaps of some behind the end.
        length: L
    """
    choices = np.zeros((length, *prompt.shape[1:]), np.int16)
    choices[: len(prompt)] = prompt
    read = drawn[: max(0, length - len(prompt) - 1)]
    if read:
        choices[len(prompt) : len(prompt) + len(read)] = np.stack(read)
    return choices


def _experts(router: nn.Module) -> int:
    """Return among how many experts a router chooses: the rows of its matrix."""
    return int(next(router.parameters()).shape[0])
