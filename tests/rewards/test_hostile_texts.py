"""Texts that no screen or file should meet as they are, out of a reward's mouth in every way it can speak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, RunStopped
from holdfast.text.escaping import escaped, escaped_paragraph
from holdfast.training.observe import Observer, ObserverFailed
from holdfast.types import StepEvent
from tests.rewards.conftest import Start, samples

HOSTILE = (
    "\ud83d",
    "\ude00 before \ud83d",
    "\udcff\udc80 as bytes that are no UTF-8 decode",
    "\x1b[2J\x1b[31mRED",
    "\x1b]0;title\x07",
    "\x1b]8;;http://example.org\x1b\\link",
    "\x9b31m",
    "nothing \x00 behind",
    "bell \a back \b\b\b feed \f \v",
    "one\rtwo",
    "one\ntwo\r\nstep 99/99  loss 0.0",
    "\u202egnp.txt",
    "\u2066isolated\u2069",
    "\u200bzero\u200d\ufeff",
    "line\u2028paragraph\u2029",
    "\x85next",
    "\U000e0041tag",
    "\ue000private\uffff",
    "x" * 3_000_000,
    "\ud83d\x1b\n" * 50_000,
)
SPEAKS = """
    TEXTS = {texts}
    class Unprintable(Exception):
        def __str__(self): raise ValueError("no text")
    def reward(completion, sample_id):
        text, way = TEXTS[sample_id // 5], completion
        if way == "raise": raise ValueError(text)
        if way == "class": raise type(text[:9].replace("\\0", "") or "x", (Exception,), {{}})(text)
        if way == "return": return text
        if way == "names": return {{"reward": 1.0, text: 2.0, "metrics": {{text: 3.0}}}}
        print(text); import sys; print(text, file=sys.stderr); return 1.0
"""
WAYS = ("raise", "class", "return", "names", "print")


def shows(text: str) -> bool:
    """Say whether a text is one line that any screen and file takes, and of a length that a person reads."""
    text.encode()
    return text.isprintable() and len(text) < 13_000


def test_no_text_of_a_reward_ends_the_run_or_comes_out_as_it_is(start: Start) -> None:
    pool = start(SPEAKS.format(texts=ascii(HOSTILE)), batch_size=100)

    found = pool.score(samples(*[way for _ in HOSTILE for way in WAYS]))

    faults = [each.fault for each in found]
    assert faults == ["error", "error", "error", None, None] * len(HOSTILE)
    assert all(shows(each.message) for each in found)
    names = {name for each in found for name in (*each.parts, *each.metrics)}
    assert len(names) >= 20
    assert all(shows(name) and len(name) < 2500 for name in names)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_an_error_of_ours_that_cites_a_text_can_be_printed(text: str) -> None:
    for kind in (ConfigError, RunStopped):
        said = str(kind(f"what: {text}\nhow to mend it"))

        assert all(shows(line[:9000]) for line in said.replace("\t", "").split("\n"))


def test_escaping_twice_is_escaping_once_and_plain_text_stays() -> None:
    plain = "naïve œuvre 東京 😀 \\x1b is no escape"

    assert escaped(plain) == plain
    assert escaped("a\x1b\n\t\u202e\ud83d\U000e0041") == "a\\x1b\\n\\t\\u202e\\ud83d\\U000e0041"
    assert escaped_paragraph("a\x1b\n\tb\r") == "a\\x1b\n\tb\\r"
    assert all(escaped(escaped(text)) == escaped(text) for text in HOSTILE)


def test_an_observer_that_raises_such_a_text_is_told_in_print() -> None:
    def observe(event: StepEvent) -> None:
        raise ValueError("\ud83d\x1b[2J")

    with pytest.raises(ObserverFailed) as raised:
        Observer("mine", observe)(StepEvent(3, 0.5, {}), {})

    assert "\\ud83d\\x1b[2J" in str(raised.value)


def test_the_messages_of_a_run_reach_a_pipe_and_a_file(start: Start, tmp_path: Path) -> None:
    """What is printed is printed by a process whose output is strict about its encoding, as a launcher's pipe is."""
    found = start(SPEAKS.format(texts=ascii(HOSTILE[:6]))).score(samples(*["raise"] * 30))
    (tmp_path / "messages.json").write_text(json.dumps([each.message for each in found]))
    code = "import json, sys; [print(each) for each in json.load(open(sys.argv[1]))]"

    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "messages.json")], capture_output=True, check=True
    ).stdout

    assert said.count(b"\n") == len(found)
    assert b"\x1b" not in said
