"""A stored chunk that would unpack, or be read, to more than its own bytes."""

from __future__ import annotations

import io

import torch

from holdfast.checkpoint.format.stored_chunks import chunk_from


def test_a_view_that_repeats_its_bytes_is_no_chunk_of_any_size() -> None:
    stored = io.BytesIO()
    torch.save(torch.zeros(1).expand(2**40), stored)

    assert chunk_from(stored.getvalue(), "run/shard") is None


def test_a_chunk_as_a_save_writes_it_is_read() -> None:
    stored, tensor = io.BytesIO(), torch.arange(6.0).reshape(2, 3)
    torch.save(tensor, stored)

    read = chunk_from(stored.getvalue(), "run/shard")

    assert read is not None
    assert torch.equal(read, tensor)
