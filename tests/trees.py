"""Configurations of tests, as trees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.config.load import from_mapping
from holdfast.config.verbs.roots import ROOTS, verb_of
from holdfast.config.verbs.training import TrainingConfig


def run_from_mapping(values: Mapping[str, Any]) -> TrainingConfig:
    """Check a tree under the verb it is for."""
    return from_mapping(values, ROOTS[verb_of(values)])
