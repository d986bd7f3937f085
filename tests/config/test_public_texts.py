"""Which part of an address may leave a run, in exports, checkpoints and fingerprints."""

from __future__ import annotations

import pytest

from holdfast.config.public import public_text, without_password

ADDRESSES = {
    "rows.jsonl": "rows.jsonl",
    "C:\\rows@2.jsonl": "C:\\rows@2.jsonl",
    "http://h:8000/v1": "http://h:8000/v1",
    "http://u:p@h:8000/x?key=1#a": "http://h:8000/x",
    "http://u:p@ss@h/x": "http://h/x",
    "http://u:p;w@h/x": "http://h/x",
    "https://h/a;key=sec": "https://h/a",
    "https://h/a?at=1:2@3": "https://h/a",
    "hf://org/rows@main": "hf://org/rows@main",
    "http://h:8000/rows@main": "http://h:8000/rows@main",
    "ssh://git@h/org/rows@v1": "ssh://h/org/rows@v1",
    "read http://h/x: mail me@h": "read http://h/x: mail me@h",
    "read http://h/x; is it http://h/y?": "read http://h/x; is it http://h/y?",
    "s3://AK:ab/cd@host/b": None,
    "http://u:p@ss/w@h/x": None,
    "http://u:p@ss?w@h/x": None,
    "http://u:p?w@h/x": None,
    "http://u:p/w@h/x is it": None,
    "http://u:p w@h/x": None,
    "ask http://u:p@h/x": None,
    "ask http://h/a;key=sec": None,
}


@pytest.mark.parametrize("text", ADDRESSES)
def test_no_part_of_a_password_is_public(text: str) -> None:
    assert without_password(text) == ADDRESSES[text]


def test_a_password_that_ends_no_user_part_is_no_host() -> None:
    assert public_text("http://u:p@ss/w@h/x") == "(text of 19 characters)"
