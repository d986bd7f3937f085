"""The end of a stream of gathered tensors: who walks to it, and which error counts."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from holdfast.errors import RunStopped
from holdfast.files import NotRegular
from holdfast.parallel.stream import drained


def stream(walked: list[int], fails_at: int | None = None) -> Iterator[tuple[str, Tensor]]:
    for number in range(4):
        if number == fails_at:
            raise torch.OutOfMemoryError("a second error")
        walked.append(number)
        yield str(number), torch.zeros(1)


@pytest.mark.parametrize(
    ("error", "most"),
    [
        (RunStopped("the server has gone"), 4),
        (NotRegular(errno.EINVAL, "it is a pipe", "x"), 4),
        (torch.OutOfMemoryError("the first error"), 1),
        (ValueError("a mistake of the user's"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_only_an_error_that_all_ranks_raise_walks_to_the_end(error: BaseException, most: int) -> None:
    walked: list[int] = []

    with pytest.raises(type(error)) as raised, drained(stream(walked)) as tensors:
        next(tensors)
        raise error

    assert raised.value is error
    assert walked == list(range(most))


def test_the_first_error_counts_where_the_walk_fails_too() -> None:
    first = RunStopped("the server has gone")

    with pytest.raises(RunStopped) as raised, drained(stream([], fails_at=2)) as tensors:
        next(tensors)
        raise first

    assert raised.value is first


def test_a_block_that_ends_leaves_nothing() -> None:
    walked: list[int] = []

    with drained(stream(walked)) as tensors:
        next(tensors)

    assert walked == [0, 1, 2, 3]
