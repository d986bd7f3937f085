"""Compilers are looked for where a GPU is used; what lacks is named, and is no reason not to run."""

from __future__ import annotations

from holdfast.config.sections.launch import LaunchConfig
from holdfast.features.plan.checks.compilers import graded, look_at_compilers
from holdfast.features.plan.checks.findings import Grade
from tests.messages import lacks


def test_where_no_gpu_is_used_nothing_is_looked_for() -> None:
    assert list(look_at_compilers(LaunchConfig(device="cpu"))) == []


def test_what_lacks_is_named() -> None:
    whole, lacking = graded({"gcc": True, "g++": True}), graded({"gcc": True, "g++": False, "Python.h": False})

    assert (whole.grade, lacking.grade) == (Grade.ok, Grade.warn)
    assert lacks(lacking.text, "g++ Python.h") == []
    assert "gcc" not in lacking.text
