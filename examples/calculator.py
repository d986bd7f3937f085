"""The tool of examples/grpo_calculator.yaml."""

from __future__ import annotations


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
