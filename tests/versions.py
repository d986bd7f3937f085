"""Marks for tests of what only some versions of a package do."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import pytest
from packaging.requirements import Requirement


def skip_with(requirement: str, reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test beside these versions of a package, as `transformers==5.24.*`."""
    needed = Requirement(requirement)
    return pytest.mark.skipif(needed.specifier.contains(version(needed.name)), reason=f"{requirement}: {reason}")


LLAMA_4 = skip_with("transformers==5.24.*", "Llama 4's own forward pass reads image_outputs, which nothing sets")


def that_run(kinds: Iterable[str]) -> list[Any]:
    """Return kinds of models as parameters, those that this transformers cannot run marked."""
    return [pytest.param(kind, marks=[LLAMA_4] * (kind == "llama4")) for kind in kinds]
