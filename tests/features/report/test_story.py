"""Marks and sentences: which end belongs to which resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.features.report.reading import read_run
from holdfast.features.report.story import SILENT, public_sentence
from tests.features.report.cases import RunFolder, killed_run


def told(directory: Path, *kinds: str) -> list[tuple[str, int]]:
    return [(mark.kind, mark.step) for mark in read_run(directory).marks if mark.kind in kinds]


def test_every_kill_stands_before_its_resume(tmp_path: Path) -> None:
    run = killed_run(tmp_path)

    marks = told(run.place, "failed", "resumed")

    assert marks == [("failed", 14), ("resumed", 10), ("failed", 37), ("resumed", 30), ("failed", 52), ("resumed", 50)]
    sentences = [mark.text for mark in read_run(run.place).marks if mark.kind == "resumed"]
    assert sentences[0] == "continued from step 10 on 2 ranks; steps 11 to 14 were made again"


def test_an_end_that_nobody_noted_is_a_death_without_a_word(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.start(0)
    run.steps(1, 7)
    run.start(5)
    run.steps(6, 9)

    marks = read_run(run.place).marks

    assert [(mark.kind, mark.step) for mark in marks] == [("failed", 7), ("resumed", 5)]
    assert marks[0].text == SILENT


def test_the_launchers_words_count_before_those_of_a_rank_that_lost_its_peer(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.start(0)
    run.steps(1, 7)
    run.event("failed", 7, reason="RuntimeError: Connection reset by peer", time=1.0)
    run.event("failed", 7, reason="Rank 1 was killed by SIGKILL", time=2.0)
    run.start(5)
    run.steps(6, 100)

    assert [mark.text for mark in read_run(run.place).marks if mark.kind == "failed"] == [
        "Rank 1 was killed by SIGKILL"
    ]


def test_a_stop_and_a_resume_lose_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.start(0)
    run.steps(1, 8)
    run.event("stop", 8, reason="SIGTERM")
    run.start(8, ranks=4)
    run.steps(9, 100)

    assert [(mark.kind, mark.text) for mark in read_run(run.place).marks] == [
        ("stopped", "stopped: SIGTERM"),
        ("resumed", "continued from step 8 on 4 ranks; no step was lost"),
    ]


def test_a_start_that_found_nothing_to_do_is_no_news(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.start(0)
    run.steps(1, 8)
    run.event("done", 8)
    run.append("metrics.jsonl", {"event": "rewind", "to": 8})

    assert read_run(run.place).marks == []


def test_a_run_that_failed_last_ends_with_that(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.start(0)
    run.steps(1, 8)
    run.event("failed", 8, reason="OSError: the disk is full", time=1.0)

    assert told(run.place, "failed", "resumed") == [("failed", 8)]


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("https://me:word@host.example/v1?token=abc failed", "https://host.example/v1?… failed"),
        ("HF_TOKEN=hf_abc is wrong", "HF_TOKEN=… is wrong"),
        ("Authorization: Bearer abc", "Authorization: …"),
        ("api-key: xyz", "api-key: …"),
        ("tokens_per_micro_batch=5 is small", "tokens_per_micro_batch=5 is small"),
        ("\x1b[2J\u202e", "\\x1b[2J\\u202e"),
        ("why? because", "why? because"),
    ],
)
def test_sentences_carry_no_credentials(text: str, public: str) -> None:
    assert public_sentence(text) == public


def test_damaged_files_are_named_and_passed_over(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.steps(1, 3)
    run.write("run.json", "{")
    run.write("events.jsonl", "\xff\n[1]\n" + json.dumps({"event": "checkpoint", "saved": "x"}) + "\n")
    with (run.place / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')

    record = read_run(run.place)

    assert record.curves.last == 3
    assert any(note.startswith("run.json cannot be read") for note in record.notes)
    assert "The last line of metrics.jsonl is torn, as after a kill, and is left out." in record.notes
