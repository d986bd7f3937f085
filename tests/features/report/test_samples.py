"""Which completions a page has, and which of them whole."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image

from holdfast.features.report.drawn import samples_data
from holdfast.features.report.samples import SHOWN_CHARACTERS, WHOLE, ShownSample, choose_full, read_samples
from holdfast.metrics.sink import SampleFiles
from tests.features.report.cases import RunFolder, killed_run


def sample(step: int, place: int, reward: float | None) -> ShownSample:
    return ShownSample(step, place, "p", "c", reward, {}, 0.0, "stop", True, -1)


def test_completions_are_those_of_the_effective_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.samples(10, "a", ["x", "y"])
    run.samples(20, "b", ["lost"])
    run.append("samples.jsonl", {"event": "rewind", "to": 15})
    run.samples(20, "b", ["again"])

    items = read_samples(run.place).items

    assert [(item.step, item.completion) for item in items] == [(10, "x"), (10, "y"), (20, "again")]


def test_long_texts_are_cut_and_whole_ones_are_read_again(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    text = "".join(chr(97 + place % 26) for place in range(5000))
    run.samples(1, "p", ["short", text])

    short, long = read_samples(run.place).items

    assert long.completion == text[: SHOWN_CHARACTERS - 3] + "..."
    assert long.full is not None
    assert long.full["completion"] == text
    assert short.full is not None


def test_an_episode_is_there_as_a_conversation(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": '<tool_call>{"name": "add"}</tool_call>'},
        {"role": "tool", "name": "add\x1b[2J", "content": "2" * 9000},
        {"role": "assistant", "content": "2"},
        "no message",
    ]
    line = {"step": 1, "sample_id": 0, "prompt": "1 + 1?", "completion": "2", "reward": 1.0, "rewards": {}}
    run.append("samples.jsonl", line | {"messages": messages, "tools": [{}]})
    run.samples(2, "p", ["alone"])

    samples = read_samples(run.place)

    whole = samples_data(samples)["whole"]
    turns = whole["0"]["turns"]
    assert [turn[:2] for turn in turns] == [["user", ""], ["assistant", ""], ["tool", "add\\x1b[2J"]]
    assert turns[2][2].endswith("characters more"), "what comes behind it is left out"
    assert "turns" not in whole["1"]


def test_the_best_and_the_worst_of_spread_steps_come_first_and_the_newest_fill_up() -> None:
    items = [sample(step, place, float(place)) for step in range(1, 1001) for place in range(8)]

    chosen = choose_full(items)

    assert len(chosen) == WHOLE
    steps = {item.step for item in chosen}
    assert {1, 1000} <= steps
    assert len({item.step for item in chosen if item.sample_id == 7}) >= WHOLE // 4
    newest = [(item.step, item.sample_id) for item in items[-100:]]
    assert set(newest) <= {(item.step, item.sample_id) for item in chosen}


def test_of_too_many_whole_steps_are_left_out_evenly(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in range(1, 401):
        run.samples(step, f"p{step}", ["a", "b", "c", "d"])

    samples = read_samples(run.place, most=200)

    steps = sorted({item.step for item in samples.items})
    assert samples.total == 1600
    assert 100 <= len(samples.items) <= 200
    assert {after - before for before, after in zip(steps, steps[1:], strict=False)} == {steps[1] - steps[0]}
    assert samples.rule.startswith("Of 1,600 completions those of ")


def test_tables_are_read_as_lines_are(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    line = {"step": 3, "sample_id": 5, "prompt": "p", "completion": "c" * 400, "reward": 1.0, "rewards": {"exact": 1.0}}
    SampleFiles(run.place / "samples", 0).write([line | {"advantage": 0.5, "finish": "stop", "trained": True}])

    (item,) = read_samples(run.place).items

    assert (item.step, item.sample_id, item.reward, item.function_rewards) == (3, 5, 1.0, {"exact": 1.0})
    assert item.full is not None
    assert item.full["completion"] == "c" * 400


def test_what_is_no_number_has_none_and_tokens_are_printable(tmp_path: Path) -> None:
    run = killed_run(tmp_path)
    run.samples(60, "x", ["bad"], reward=None, advantage=float("nan"), tokens=[["\x1b", -1.0, 0.0], ["torn"], 5])

    items = read_samples(run.place).items

    last = items[-1]
    assert (last.reward, last.advantage) == (None, None)
    assert last.full is not None
    assert last.full["tokens"] == [["\\x1b", -1.0, 0.0]]


def saved_image(run: RunFolder, number: int) -> str:
    """Write an image of a colour, and return the name of its file."""
    file = io.BytesIO()
    Image.new("RGB", (24, 16), (number, 0, 0)).save(file, "JPEG")
    (run.place / "sample_images").mkdir(exist_ok=True)
    (run.place / "sample_images" / f"{number:016x}.jpg").write_bytes(file.getvalue())
    return f"{number:016x}.jpg"


def test_prompts_of_the_same_text_and_other_images_are_two(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    one, other = saved_image(run, 1), saved_image(run, 2)
    run.samples(1, "see", ["a", "b"], images=f"{one} {other}")
    run.samples(1, "see", ["c"], images=other)
    run.samples(1, "see", ["d"])

    samples = read_samples(run.place)
    data = samples_data(samples)

    assert data["prompts"] == ["see", "see", "see"]
    assert [row[2] for row in data["rows"]] == [0, 0, 1, 2]
    assert data["images"] == {0: [one, other], 1: [other]}
    assert base64.b64decode(data["files"][one]) == (run.place / "sample_images" / one).read_bytes()


def test_images_that_are_gone_or_no_images_are_left_out(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    there = saved_image(run, 1)
    (run.place / "sample_images" / f"{2:016x}.jpg").write_bytes(b"<script>")
    (run.place / "sample_images" / f"{3:016x}.jpg").write_bytes(b"\xff\xd8" + bytes(1 << 20))
    names = [there, f"{2:016x}.jpg", f"{3:016x}.jpg", f"{4:016x}.jpg", "../../secret.jpg", "x.png"]
    run.samples(1, "see", ["a"], images=" ".join(names))
    run.samples(2, "see", ["a"], images=7)

    data = samples_data(read_samples(run.place))

    assert list(data["files"]) == [there]
    assert data["images"] == {0: [there]}
