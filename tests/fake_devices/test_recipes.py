"""The recipes for GPUs: planned, with their tables beside them, and not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_devices.conftest import child, needs_guard
from tests.fake_devices.expected import RECIPES, command_of, table_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__), pytest.mark.timeout(1800)]


@pytest.mark.cases("all")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_table_beside_a_recipe_is_what_its_plan_prints(recipe: Path) -> None:
    needs_guard()

    done = child("holdfast.cli.main", *command_of(recipe))

    assert done.returncode == 0, done.stderr
    assert done.stdout == table_of(recipe).read_text(encoding="utf-8")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_that_it_was_planned_and_not_run(recipe: Path) -> None:
    text = recipe.read_text(encoding="utf-8")

    assert "PLANNED AND NOT RUN" in text
    assert len(text.splitlines()) <= 40
