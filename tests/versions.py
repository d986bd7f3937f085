"""Marks for tests of what only some versions of a package do."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.requirements import Requirement


def skip_with(requirement: str, reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test beside these versions of a package, as `transformers==5.24.*`."""
    needed = Requirement(requirement)
    return pytest.mark.skipif(needed.specifier.contains(version(needed.name)), reason=f"{requirement}: {reason}")
