"""Runs on films: they train as on lists of the same frames, go on after a save, and leave out what does not decode."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from holdfast.cli.commands.data.preview import preview
from tests.cli.fixtures import write_rows, write_run
from tests.cli.warm import run as run_program
from tests.films import film, noise
from tests.training.cases import run
from tests.videos import video_directory

KINDS = ["qwen2_5_vl", "qwen3_vl"]
RATE = 12
ONE_KIND = pytest.mark.parametrize("place", KINDS[:1], indirect=True, scope="module")


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model, 12 rows with films, and the same rows with lists of the frames they give."""
    place = tmp_path_factory.mktemp("place")
    video_directory(place / "model", request.param)
    films: list[dict[str, Any]] = []
    lists: list[dict[str, Any]] = []
    for number in range(12):
        # 18 to 40 frames at 12 a second: of two seconds and more, the frames 0, 6, 12, ... are two a second.
        written = noise(18 + 2 * number, 12 + number, 20, seed=number)
        (place / f"{number}.mkv").write_bytes(film(written, rate=RATE))
        seconds = len(written) / RATE
        count = max(4, round(2 * seconds))
        rate = 2.0 if 2 * seconds > 3.5 else 4 / seconds
        names = []
        for index in range(count):
            names.append(f"{number}-{index}.png")
            Image.fromarray(written[int(index * RATE / rate + 1e-6)]).save(place / names[-1])
        row = {"prompt": "see <video> now=", "completion": "abcdefgh"[: 2 + number % 6]}
        films.append({**row, "videos": [f"{number}.mkv"]})
        lists.append({**row, "videos": [{"frames": names, "fps": rate}]})
    write_rows(place / "films.jsonl", films)
    write_rows(place / "lists.jsonl", lists)
    return place


def tree(place: Path, runs: Path, steps: int, rows: str = "films.jsonl", **data: Any) -> dict[str, Any]:
    return {
        "steps": steps,
        "run": {"dir": str(runs), "name": "r"},
        "model": {"path": str(place / "model")},
        "data": {"path": rows, "batch_size": 4, "max_length": 256, "tokens_per_micro_batch": 512} | data,
        "optim": {"lr": 0.01, "schedule": "constant"},
        "metrics": {"progress": "off"},
        "checkpoint": {"every_steps": 2, "rehearsal": False},
    }


def losses_of(runs: Path) -> dict[int, float]:
    """Return the loss of every step."""
    lines = [json.loads(line) for line in (runs / "r/metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.cases(1)
def test_films_train_as_lists_of_their_frames_do_and_go_on_after_a_save(
    place: Path, pools: Any, tmp_path: Path
) -> None:
    pools(2).run(run, tree(place, tmp_path / "lists", 4, "lists.jsonl"), str(place))
    pools(2).run(run, tree(place, tmp_path / "films", 2), str(place))
    pools(2).run(run, tree(place, tmp_path / "films", 4), str(place))

    expected = losses_of(tmp_path / "lists")
    assert losses_of(tmp_path / "films") == expected
    assert list(expected) == [1, 2, 3, 4]


@pytest.mark.slow
@ONE_KIND
def test_a_film_that_does_not_decode_ends_the_run_by_its_row_or_is_skipped_and_counted(
    place: Path, pools: Any, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (place / "films.jsonl").read_text().splitlines()]
    (place / "cut.mkv").write_bytes((place / "7.mkv").read_bytes()[:5000])
    rows[7]["videos"] = ["cut.mkv"]
    write_rows(place / "broken.jsonl", rows)

    stopped = pools(2).errors(run, tree(place, tmp_path / "stop", 3, "broken.jsonl"), str(place))
    pools(2).run(run, tree(place, tmp_path, 3, "broken.jsonl", on_bad_row="skip"), str(place))

    assert len(set(stopped)) == 1
    assert stopped[0][0] == "DataError"
    assert stopped[0][1].startswith(f"broken row 7, video 0 ({place}/cut.mkv) cannot be read as a film: it ends before")
    assert not (tmp_path / "stop").exists()
    lines = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("data/bad_rows", 0) for line in lines) == 1


@ONE_KIND
def test_another_bound_of_frames_is_another_run_and_so_is_another_film(place: Path, pools: Any, tmp_path: Path) -> None:
    pools(1).run(run, tree(place, tmp_path, 2), str(place))

    ((_, bounded),) = pools(1).errors(run, tree(place, tmp_path, 4, max_frames=3), str(place))
    before = (place / "3.mkv").read_bytes()
    (place / "3.mkv").write_bytes(film(noise(24, seed=99), rate=RATE))
    ((_, changed),) = pools(1).errors(run, tree(place, tmp_path, 4), str(place))
    (place / "3.mkv").write_bytes(before)

    assert "data.max_frames" in bounded
    assert "(data: images of source 0)" in changed


@pytest.mark.slow
@ONE_KIND
def test_without_a_decoder_the_run_is_refused_before_step_1_though_bad_rows_are_skipped(
    place: Path, tmp_path: Path
) -> None:
    """A process without PyAV: seconds, since nothing is imported there yet."""
    (tmp_path / "av.py").write_text("raise ImportError('no such thing here')\n")
    text = [{"prompt": f"add {number}=", "completion": "1"} for number in range(8)]
    rows = [json.loads(line) for line in (place / "films.jsonl").read_text().splitlines()]
    write_rows(tmp_path / "rows.jsonl", [*text, {**rows[0], "videos": [str(place / "0.mkv")]}])
    told = tree(place, tmp_path / "runs", 2, "rows.jsonl", on_bad_row="skip", shuffle=False, allow_partial=True)
    write_run(tmp_path / "run.yaml", {**told, "epochs": 1, "steps": None})

    words = ["env", f"PYTHONPATH={tmp_path}:{':'.join(sys.path)}", sys.executable, "-m", "holdfast.cli.main"]
    done = run_program([*words, "sft", "run.yaml"], cwd=tmp_path)

    assert done.code == 2, done.err
    assert "decoding them needs a package: pip install 'holdfast[video]'" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "runs").exists()


@ONE_KIND
def test_a_preview_names_a_film_s_frames_and_shows_its_tokens(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "run.yaml", tree(place, tmp_path, 2, str(place / "films.jsonl"), image_dir=str(place)))

    preview(path, [], 0)

    printed = capsys.readouterr().out
    tokens = printed.count("<|video_pad|>")
    assert tokens > 1
    assert f"films row 0, video 0: 4 frames of 20x12 pixels, {tokens} tokens\n" in printed
