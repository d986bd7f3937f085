"""The warm Python of the command line's tests, for scripts of the pages."""

from __future__ import annotations

from tests.cli.conftest import warm

__all__ = ["warm"]
