"""The page without a browser: what is in it, what is not, and what happens when it cannot be written."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from holdfast.errors import UserError
from holdfast.features.report.page import write_page
from holdfast.features.report.run_page import _giving_up_after, _PageTimeout
from holdfast.metrics.sink import read_metrics
from tests.cli.in_process import cli_in_process
from tests.features.report.cases import HOSTILE, RunFolder, data_of, killed_run, run_that_goes_back, steps_of


class Elements(HTMLParser):
    """Names of elements with their attributes, and the text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data


def page_of(*directories: Path, place: Path) -> str:
    return write_page(directories, place).read_text()


def test_curves_are_the_effective_log_and_marks_its_events(tmp_path: Path) -> None:
    run = killed_run(tmp_path)

    (drawn,) = data_of(page_of(run.place, place=tmp_path / "x.html"))["runs"]

    lines = read_metrics(run.place / "metrics.jsonl")
    for name, (axis, values) in drawn["curves"].items():
        points = list(zip(steps_of(drawn, axis), values, strict=True))
        expected = [(line["step"], line[name]) for line in lines if name in line]
        assert [step for step, _ in points] == [step for step, _ in expected]
        assert [value for _, value in points] == [
            None if value is None else pytest.approx(value, rel=1e-6) for _, value in expected
        ]
    assert drawn["rewinds"] == [[10, 14], [30, 37], [50, 52]]
    assert {kind: len(marks) for kind, marks in drawn["marks"].items() if marks} == {
        "failed": 3, "resumed": 3, "saved": 6, "evaluated": 2, "alarm": 1, "exported": 1
    }  # fmt: skip


def test_scripts_are_allowed_by_their_hash_and_nothing_else_is(tmp_path: Path) -> None:
    page = page_of(killed_run(tmp_path).place, place=tmp_path / "x.html")

    parsed = Elements(page)
    policy = next(
        values["content"] or ""
        for tag, values in parsed.elements
        if values.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    data, *_ = [script for script in parsed.scripts if script.startswith("{")]
    for script in parsed.scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert script is data or f"'sha256-{digest}'" in policy
    addresses = [values[name] for _, values in parsed.elements for name in ("src", "href", "action") if name in values]
    assert {address for address in addresses if address is not None and not address.startswith("#")} == {"data:,"}
    assert not any(name.startswith("on") for _, values in parsed.elements for name in values)


def test_hostile_completions_are_text(tmp_path: Path) -> None:
    run = killed_run(tmp_path, "a<b>&\"' run")
    run.event("health", 50, alarm="x", text=HOSTILE[0])

    page = page_of(run.place, place=tmp_path / "x.html")

    parsed = Elements(page)
    assert len(parsed.scripts) == 2, "data, and what draws them"
    assert not any(tag == "img" for tag, _ in parsed.elements)
    assert HOSTILE[0] in parsed.text
    rest = page.replace(max(parsed.scripts, key=len), "")
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\u2028\u2029]", rest)
    rows = data_of(page)["runs"][0]["samples"]["rows"]
    assert "\\x1b[2J\\x07 bell \\x00 null" in {row[3] for row in rows}


def test_several_runs_are_compared(tmp_path: Path) -> None:
    one, two = killed_run(tmp_path, "one"), RunFolder(tmp_path, "two", optim={"lr": 0.5})
    two.steps(1, 30, grad_norm=1.0)

    page = page_of(one.place, two.place, place=tmp_path / "x.html")

    assert [run["name"] for run in data_of(page)["runs"]] == ["one", "two"]
    text = Elements(page).text
    assert "Where the runs differ" in text
    assert "optim.lr" in text
    assert "0.001" in text
    assert "Gradient norm" in text, "a metric that one of them has"


@pytest.mark.parametrize("damage", ["nothing", "no metrics", "no run.json", "no events", "old", "pipe"])
def test_half_written_runs_have_a_page(tmp_path: Path, damage: str) -> None:
    run = RunFolder(tmp_path)
    if damage != "no metrics":
        run.steps(1, 3)
    if damage == "no run.json":
        (run.place / "run.json").unlink()
    if damage == "old":
        run.write("config.resolved.yaml", "some_key_of_long_ago: {nested: [1, {a: b}]}\nsteps: many\n")
    if damage == "pipe":
        os.mkfifo(run.place / "samples.jsonl")

    text = Elements(page_of(run.place, place=tmp_path / "x.html")).text

    words = {
        "no metrics": "metrics.jsonl has no line of a step yet.",
        "no run.json": "run.json is missing.",
        "old": "some_key_of_long_ago",
        "pipe": "samples.jsonl cannot be read",
    }
    assert words.get(damage, "Nothing failed") in text


def test_numbers_that_are_none_are_named(tmp_path: Path) -> None:
    text = Elements(page_of(killed_run(tmp_path).place, place=tmp_path / "x.html")).text

    assert "loss was no finite number at 2 steps: 20, 21." in text


def test_numbers_and_names_of_any_size_have_a_page(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    odd = "half \ud83d an emoji"
    run.steps(1, 3)
    values = {"loss": 1e308, "reward": -1e308, odd: 1, "constructor": 2.0, "step_time": float("inf")}
    run.append("metrics.jsonl", {"step": 4, **values, "timing/rollout": 1e308})
    run.append("metrics.jsonl", {"step": 5, **values, "grad_norm": 10**400, "timing/rollout": 1e308})
    run.append("events.jsonl", {"event": "failed", "step": 5, "time": 10**400, "reason": "enough"})

    data = data_of(page_of(run.place, place=tmp_path / "x.html"))

    shown = {*data["others"]}
    assert {"half \\ud83d an emoji", "constructor", "grad_norm"} <= shown == {*data["runs"][0]["curves"]}
    assert data["runs"][0]["curves"]["grad_norm"][1] == [None]


@pytest.mark.parametrize(
    "manifest",
    [
        {"files": {"a": 1}},
        {"files": {"a": {"size": 10**400}}},
        {"contents": ["optimizer", "rank"], "mesh": {"shard": "x"}},
    ],
)
def test_facts_of_any_size_have_a_page_and_a_frame(tmp_path: Path, manifest: object) -> None:
    run, huge = RunFolder(tmp_path), 10**400
    run.steps(1, 3)
    run.save(2)
    for path in run.place.glob("checkpoints/*/manifest.json"):
        path.write_text(json.dumps({"manifest": manifest}))
    run.append("events.jsonl", {"event": "start", "step": huge, "time": huge, "ranks": huge, "device": "cpu"})
    for saved in (2, 3, huge):
        run.event("checkpoint", huge, saved=saved, bytes=huge if saved == 3 else None, seconds=huge)
    run.samples(huge, "p", ["late"])
    run.event("health", huge, alarm=huge, text=None)

    page = page_of(run.place, place=tmp_path / "x.html")
    watched = cli_in_process("watch", run.place, cwd=tmp_path)

    assert str(huge) not in page.partition('id="environment"')[0]
    assert data_of(page)["runs"][0]["marks"]["saved"][-1][0] == 3
    assert watched.code == 0
    assert "step 2" in watched.out


def test_marks_are_in_the_order_of_steps_after_a_rewind(tmp_path: Path) -> None:
    run = run_that_goes_back(tmp_path)

    marks = data_of(page_of(run.place, place=tmp_path / "x.html"))["runs"][0]["marks"]

    assert [step for step, _ in marks["failed"]] == [20, 35, 50]
    assert [step for step, _ in marks["resumed"]] == [10, 15, 40]


def test_what_is_no_run_or_would_be_overwritten_is_refused(tmp_path: Path) -> None:
    run, other = killed_run(tmp_path), tmp_path / "notes.html"
    other.write_text("<p>mine</p>")

    with pytest.raises(UserError, match="is not the directory of a run: there is no such directory"):
        write_page([tmp_path / "absent"], None)
    with pytest.raises(UserError, match="it holds no run.json and no metrics.jsonl"):
        write_page([tmp_path], None)
    with pytest.raises(UserError, match=r"is not a page of `holdfast report`, so it is not replaced"):
        write_page([run.place], other)
    with pytest.raises(UserError, match="cannot be written"):
        write_page([run.place], tmp_path / "absent" / "x.html")
    assert other.read_text() == "<p>mine</p>"


def test_a_page_is_written_anew_whole_or_not_at_all(tmp_path: Path) -> None:
    run = killed_run(tmp_path)
    place = write_page([run.place], None)
    before = place.read_text()

    run.steps(61, 62)
    with pytest.raises(_PageTimeout), _giving_up_after(0.002):
        write_page([run.place], None)

    assert place == run.place / "report.html"
    assert place.read_text() == before
    assert [path.name for path in run.place.iterdir() if path.name.startswith(".")] == []
    write_page([run.place], None)
    assert place.read_text() != before


def test_a_disk_that_is_full_leaves_no_part_of_a_page(tmp_path: Path) -> None:
    run = killed_run(tmp_path)
    script = (
        "import resource, signal, sys; from pathlib import Path; from holdfast.features.report.page import write_page\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, 1 << 15))\n"
        "write_page([Path(sys.argv[1])], None)\n"
    )

    done = subprocess.run([sys.executable, "-c", script, run.place], capture_output=True, text=True, check=False)

    assert "UserError" in done.stderr
    assert "report.html cannot be written: File too large" in done.stderr
    assert [path.name for path in run.place.iterdir() if "report" in path.name] == []


def test_the_difference_to_the_parent_run_is_shown(tmp_path: Path) -> None:
    parent, child = RunFolder(tmp_path, "parent", optim={"lr": 0.25}), RunFolder(tmp_path, "child", optim={"lr": 0.75})
    export = {"run_id": parent.identity["run_id"], "run": "parent", "step": 5, "weights": "x"}
    child.write("run.json", json.dumps(child.identity | {"parent": {"model": "exports/final", "export": export}}))
    child.steps(1, 3)

    text = Elements(page_of(child.place, place=tmp_path / "x.html")).text

    assert "It started from step 5 of the run parent." in text
    assert "0.25" in text


def plan_of(peak: int, device: str | None = "h100", **phases: int) -> str:
    return json.dumps({"format": 1, "device": device, "peak_bytes": peak, "clock_phases": phases})


def test_plan_and_measured_memory_stand_beside_each_other(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.steps(1, 3)
    run.write("plan.json", plan_of(2**30))

    text = Elements(page_of(run.place, place=tmp_path / "x.html")).text

    assert "planned 1 GiB of memory a rank, measured 512 MiB on rank 0 (50% of the plan)" in text
    assert "Plan against measured" not in text


def test_phases_that_plan_and_run_both_know_stand_beside_each_other(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.steps(1, 3)
    run.write("plan.json", plan_of(2**30, forward_backward=2**30, optimizer=2**29, save=2**20))
    for peaks in ({"forward_backward": 2**20}, {"forward_backward": 3 * 2**28, "optimizer": 2**30, "data": 2**10}):
        run.append("events.jsonl", {"event": "memory", "step": 1, "device": "cuda", "peaks": peaks})

    page = page_of(run.place, place=tmp_path / "x.html")

    words = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    assert "Plan against measured" in words
    assert "forward_backward 1 GiB 768 MiB 75% 75% optimizer 512 MiB 1 GiB 200% 200%" in words
    assert page.count("<meter ") == 2


def test_devices_of_two_kinds_are_not_compared_by_phase(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.steps(1, 3)
    run.write("plan.json", plan_of(2**30, forward_backward=2**30))
    run.append("events.jsonl", {"event": "memory", "step": 1, "device": "cpu", "peaks": {"forward_backward": 2**30}})

    assert "Plan against measured" not in page_of(run.place, place=tmp_path / "x.html")


@pytest.mark.parametrize("text", ["", "[]", '{"peak_bytes": "much"}', '{"peak_bytes": 1, "device": "h100"}', "{nan"])
def test_a_plan_that_is_none_is_left_out(tmp_path: Path, text: str) -> None:
    run = RunFolder(tmp_path)
    run.steps(1, 3)
    run.write("plan.json", text)

    assert "there is no plan to compare it with" in page_of(run.place, place=tmp_path / "x.html")


def test_a_run_by_epochs_says_of_how_many_steps(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, steps=None, epochs=2)
    for step in range(1, 6):
        run.steps(step, step, epoch=step / 4)

    page = page_of(run.place, place=tmp_path / "page.html")

    assert "at step 5 of 8" in page


def test_seconds_by_phase_are_shares_of_steps_and_evaluations(tmp_path: Path) -> None:
    """100 s of steps in two phases, 25 s of one evaluation."""
    run = RunFolder(tmp_path)
    for step in range(1, 11):
        evaluated = {"timing/evaluation": 25.0} if step == 10 else {}
        run.steps(step, step, **{"timing/rollout": 6.0, "timing/forward_backward": 4.0, "step_time": 10.0}, **evaluated)

    page = page_of(run.place, place=tmp_path / "page.html")

    rows = re.findall(r"<tr><td[^>]*>([a-z_ ]+)</td><td[^>]*>[\d,.]+</td><td[^>]*>([\d.]+)%", page)
    assert rows == [("rollout", "48.0"), ("forward_backward", "32.0"), ("evaluation", "20.0")]
