"""What these tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint.store import serving


@pytest.fixture(scope="session")
def server() -> Iterator[dict[str, str]]:
    """Start an S3 server with one bucket and return the environment that leads to it.

    One for all modules: fsspec remembers a client, and the address it was made for, in this process and in every rank.
    """
    with serving() as (variables, _):
        yield variables
