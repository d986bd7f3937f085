"""The one way by which numbers of a device come to the host within a step.

Each such value makes the host wait until the device has done all that was queued, so a step has few, and each says what
it is for. Where tensors hold no numbers (`holdfast plan`, the lane of fake devices), whoever executes the step answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Answer = Callable[["Tensor", str], "NDArray[Any]"]
"""(a tensor without numbers, what its numbers are for) -> numbers of its shape"""

_answers: list[Answer] = []


def host_value(tensor: Tensor, reason: str) -> NDArray[Any]:
    """Return a tensor's numbers; on a GPU this waits for the device.

    Args:
        tensor: Of a dtype that NumPy has.
        reason: What the host needs the numbers for, a few words that name the place: plans list them.
    """
    if _answers:
        return _answers[-1](tensor, reason)
    values: NDArray[Any] = tensor.detach().cpu().numpy()
    return values


@contextmanager
def answered_by(answer: Answer) -> Iterator[None]:
    """Let somebody else answer within the block; for tensors that hold no numbers."""
    _answers.append(answer)
    try:
        yield
    finally:
        _answers.pop()
