"""The warm Python of the command line's tests, for whole runs that are killed."""

from __future__ import annotations

from tests.cli.conftest import warm

__all__ = ["warm"]
