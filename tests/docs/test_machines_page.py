"""Every command of the page on several machines belongs to a test that runs it."""

from __future__ import annotations

from tests.features.cluster.page import ROOT, RUN_BY, commands, headings


def test_every_heading_with_commands_has_a_test_that_runs_them() -> None:
    assert set(headings()) == set(RUN_BY)
    for heading, file in RUN_BY.items():
        assert commands(heading)
        assert f'commands("{heading}")' in (ROOT / file).read_text(encoding="utf-8")
