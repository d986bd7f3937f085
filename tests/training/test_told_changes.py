"""What a resume tells of the configuration: keys of every verb that move numbers, and no others."""

from __future__ import annotations

from holdfast.config.base import leaves
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.verbs.training import as_plain
from holdfast.training.saving.resume import MOVES_NUMBERS
from tests.trees import run_from_mapping

SILENT = {
    "checkpoint", "determinism", "dry_run", "evaluation", "launch", "limit_batches", "max_minutes", "metrics",
    "min_steps", "observers", "overfit_batches", "profile", "residency", "run", "stop_when",
}  # fmt: skip
"""Sections whose changes are not told: they move no number, or end the run elsewhere."""


def test_every_section_of_a_policys_run_is_told_or_known_to_be_silent() -> None:
    values = {
        "model": {"path": "m"}, "data": {"synthetic": {"task": "sort"}}, "steps": 1,
        "reward": "exact", "rollout": {"max_new_tokens": 8},
    }  # fmt: skip
    keys = [key for key, _ in leaves(as_plain(run_from_mapping(values)))]

    untold = {key.partition(".")[0] for key in keys if not key.startswith(MOVES_NUMBERS)}

    assert untold == SILENT


def test_every_verb_has_its_sections_told() -> None:
    sections = {name for root in ROOTS.values() for name in root.model_fields}

    assert {name for name in sections if not f"{name}.".startswith(MOVES_NUMBERS)} == SILENT
