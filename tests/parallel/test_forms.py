"""The rule by which optional forms are chosen, on one rank and on several that disagree."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast.parallel.forms import BEGAN_SO, ROUNDS, Candidate, Forms, Standing, timed_rounds


class Switch:
    """A form that notes what is put in place."""

    def __init__(
        self, reason: str = "", rounds: list[tuple[float, float]] | None = None, value: int = 1, name: str = "blocks"
    ) -> None:
        self._name = name
        self.placed: list[int] = []
        self.compared = self.timed = 0
        self._reason, self._rounds, self._value = reason, rounds, value

    def candidate(self) -> Candidate:
        return Candidate(self._name, self.placed.append, self._compare, self._time, self._value)

    def _compare(self) -> str:
        self.compared += 1
        return self._reason

    def _time(self) -> list[tuple[float, float]]:
        self.timed += 1
        assert self._rounds is not None
        return self._rounds


WINS = [(1.0, 2.0), (1.0, 1.5), (1.0, 1.1)]


@pytest.mark.parametrize(
    ("reason", "rounds", "timed", "value", "speedups"),
    [
        ("", WINS, True, 7, (2.0, 1.5, 1.1)),
        ("", [(1.0, 2.0), (1.0, 0.9), (1.0, 2.0)], True, 0, (2.0, 0.9, 2.0)),
        ("", [(1.0, 2.0), (1.0, 1.0), (1.0, 2.0)], True, 0, (2.0, 1.0, 2.0)),
        ("", None, False, 7, ()),
        ("", [], True, 7, ()),
        ("differs", None, True, 0, ()),
    ],
    ids=["wins all", "loses one", "ties one", "not timed", "no room to time", "differs"],
)
def test_a_form_is_used_if_it_agrees_and_wins_every_round(
    reason: str, rounds: Any, timed: bool, value: int, speedups: tuple[float, ...]
) -> None:
    forms, switch = Forms(timed=timed), Switch(reason, rounds, 7)

    standing = forms.choose(switch.candidate())

    assert (standing.value, standing.speedups) == (value, speedups)
    assert bool(standing.reason) is (value == 0)
    assert switch.placed[-1] == value
    assert forms.record == {"blocks": value}


@pytest.mark.parametrize(
    ("others", "value"),
    [(("", WINS), 1), (("another rank's compiler fails", WINS), 0), (("", [(1.0, 0.5)] * 3), 0), (("", []), 1)],
)
def test_ranks_use_a_form_together_or_none_does(others: tuple[str, Any], value: int) -> None:
    answers = iter(others)
    forms, switch = Forms(lambda item: [item, next(answers)], timed=True), Switch("", WINS)

    standing = forms.choose(switch.candidate())

    assert standing.value == switch.placed[-1] == value
    if value and others[1]:
        assert standing.speedups == (2.0, 1.5, 1.1)


CONTINUED = {
    "was plain": (0, "", WINS, 0, 1),
    "was used and is slower here": (1, "", [(2.0, 1.0)] * 3, 1, 1),
    "was used and is used": (1, "", WINS, 1, 0),
    "was used and differs here": (1, "differs", None, 0, 1),
    "is new": (None, "", WINS, 1, 1),
}
"""What the checkpoint recorded, and what this start finds -> the form that is used, and lines that tell of a change."""


@pytest.mark.parametrize(("before", "reason", "rounds", "value", "changes"), CONTINUED.values(), ids=CONTINUED)
def test_a_resume_uses_what_was_recorded_though_its_model_was_built_before(
    before: int | None, reason: str, rounds: Any, value: int, changes: int
) -> None:
    forms, switch = Forms(timed=True), Switch(reason, rounds)
    forms.choose(switch.candidate())

    lines = forms.resume({"steps": 1} | ({} if before is None else {"blocks": before}))

    assert switch.placed[-1] == forms.record["blocks"] == value
    assert len(lines) == changes
    assert [one.value for one in forms.news] == [value]


@pytest.mark.parametrize(("before", "reason", "rounds", "value", "_"), CONTINUED.values(), ids=CONTINUED)
def test_an_engine_that_is_opened_later_uses_what_was_recorded(
    before: int | None, reason: str, rounds: Any, value: int, _: int
) -> None:
    forms, switch = Forms(timed=True), Switch(reason, rounds, name="steps")
    forms.resume({"head": 1} if before is None else {"steps": before})

    standing = forms.choose(switch.candidate())

    assert switch.placed[-1] == forms.record["steps"] == standing.value == value
    assert switch.compared == int(before != 0)
    assert switch.timed == int(before is None)
    assert (standing.reason == BEGAN_SO) is (before == 0)


def test_a_run_without_a_record_keeps_what_was_chosen() -> None:
    forms, switch = Forms(timed=True), Switch("", WINS)
    forms.choose(switch.candidate())

    assert forms.resume(None) == []
    assert forms.record == {"blocks": 1}


def test_a_form_that_a_key_names_is_used_whatever_was_recorded_or_is_faster() -> None:
    forms, switch = Forms(timed=True), Switch("", [(2.0, 1.0)] * 3)

    forms.choose(switch.candidate()._replace(is_asked=True))
    (line,) = forms.resume({"blocks": 0})

    assert (switch.placed[-1], switch.timed, forms.record) == (1, 0, {"blocks": 1})
    assert line.startswith("note: blocks")


def test_copies_whose_sums_are_the_same_are_no_change_worth_a_line() -> None:
    one_rank, several = Forms(), Forms()
    one_rank.note("copies", 1)

    assert one_rank.resume({"copies": 0}) == []
    assert several.resume({"copies": 1}) == []


def test_a_form_that_one_rank_gives_up_at_the_start_is_given_up_by_all() -> None:
    forms, switch = Forms(lambda item: [item, "rank 1's memory"]), Switch()
    forms.standings["blocks"] = Standing("blocks", 1)
    forms._candidates["blocks"] = switch.candidate()

    forms.give_up("blocks", "")

    assert (switch.placed, forms.record) == ([0], {"blocks": 0})


def test_a_resume_tells_once_of_a_form_that_its_configuration_leaves_out() -> None:
    first, second = Forms(), Forms()

    told = first.resume({"blocks": 1, "steps": 1})
    again = second.resume(first.record)

    assert [line.split(":")[:2] for line in told] == [["note", " blocks"]]
    assert again == []
    assert second.record == {"steps": 1}, "an engine chooses its forms later"


def test_a_form_that_is_given_up_is_printed_and_kept_for_the_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    forms = Forms()

    forms.lose("layers", "no kernel for this")

    forms.lose("layers", "no kernel for that")

    assert capsys.readouterr().out.count("no kernel for") == 1
    assert forms.lost == [("layers", "no kernel for this")], "once, however many parts of it are given up"


def sleeping(seconds: float, runs: list[str], name: str) -> Callable[[], None]:
    def act() -> None:
        runs.append(name)
        time.sleep(seconds)

    return act


def test_rounds_alternate_after_a_run_that_is_not_counted() -> None:
    runs: list[str] = []

    rounds = timed_rounds(sleeping(0.001, runs, "form"), sleeping(0.02, runs, "plain"), torch.device("cpu"))

    assert runs == ["form", "plain"] * (1 + ROUNDS)
    assert len(rounds) == ROUNDS
    assert all(ours >= 0.001 and plain >= 0.02 for ours, plain in rounds)
