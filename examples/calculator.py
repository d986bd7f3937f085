"""The tool of examples/grpo_calculator.yaml."""

from __future__ import annotations


# The type that a tool returns would be told to the policy too; a model as small as the example's learns from less.
def add(a: int, b: int):  # type: ignore[no-untyped-def]
    """Add two numbers."""
    return a + b
