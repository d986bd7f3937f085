"""`holdfast data check`: all rows of a run, counted as a run would read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cli.fixtures import write_rows, write_run
from tests.cli.in_process import cli_in_process
from tests.cli.warm import Done, WarmPython
from tests.films import film, noise
from tests.videos import video_directory
from tests.vision import vision_directory


def check(folder: Path, *arguments: str) -> Done:
    return cli_in_process("data", "check", "run.yaml", *arguments, cwd=folder)


def checked(folder: Path) -> tuple[int, list[dict[str, Any]]]:
    done = check(folder, "--json")
    assert done.err == "", done.err
    return done.code, json.loads(done.out)["sets"]


def test_rows_without_a_mistake_are_counted(tmp_path: Path, tree: dict[str, Any]) -> None:
    """Each row is `add N=`, its number and the end: 6 + 1 + 1 characters, two more for 10 and 11."""
    write_run(tmp_path / "run.yaml", tree)

    done = check(tmp_path)

    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "training, rows: 12 rows, 12 sequences of 100 tokens, 26 of them trained",
        "  tokens: median 8, 90 % 10, 99 % 10, longest 10",
        "   8  ########################################  10",
        "   9                                            0",
        "  10  ########                                  2",
    ]


def test_one_of_each_mistake_is_named_with_its_row(tmp_path: Path, tree: dict[str, Any]) -> None:
    good = {"prompt": "add 1=", "completion": "1"}
    write_rows(tmp_path / "rows.jsonl", [
        good, {"prompt": "add 2="}, {"prompt": None, "completion": "3"}, good, {"prompt": "a" * 40, "completion": "4"},
        {"prompt": "add 5=", "completion": "5" * 40}, {"prompt": "add 6=", "completion": "6", "x": 1},
    ])  # fmt: skip
    tree["data"]["overlong"] = "truncate"
    write_run(tmp_path / "run.yaml", tree)

    code, (training,) = checked(tmp_path)

    assert code == 1
    assert training["mistaken_rows"] == 2
    assert [text[:10] for text in training["mistakes"]] == ["rows row 1", "rows row 2"]
    assert training["counts"] == {"truncated": 2, "untrained": 1}
    assert (training["rows"], training["sequences"], training["cut"], training["duplicates"]) == (7, 4, 2, 1)
    assert training["lengths"] == {"median": 8, "90 %": 47, "99 %": 47, "longest": 47}
    assert (training["length_for_99_percent"], training["length_for_all"]) == (64, 64)
    assert training["tokens"] == 8 + 8 + 32 + 8
    assert training["trained_tokens"] == 2 + 2 + 26 + 2


def test_a_run_that_refuses_long_rows_is_shown_how_long_they_are(tmp_path: Path, tree: dict[str, Any]) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a" * length, "completion": "b"} for length in (5, 70, 200)])
    tree["data"]["overlong"] = "refuse"
    write_run(tmp_path / "run.yaml", tree)

    done = check(tmp_path)

    assert done.code == 1
    assert "    rows row 1 has 72 tokens, more than 32, and data.overlong is refuse." in done.out.splitlines()
    assert "  data.max_length: 256 fits 99 % of them, 256 all" in done.out.splitlines()


def test_a_set_split_off_is_named_by_rows_of_the_file(tmp_path: Path, tree: dict[str, Any]) -> None:
    rows = [{"prompt": f"add {n}=", "completion": str(n)} for n in range(11)]
    write_rows(tmp_path / "rows.jsonl", [*rows, {"prompt": "no answer"}])
    tree["data"]["validation_split"] = 0.5
    write_run(tmp_path / "run.yaml", tree)

    code, sets = checked(tmp_path)

    assert code == 1
    assert [each["set"] for each in sets] == ["training", "evaluation validation"]
    assert sum(each["rows"] for each in sets) == 12
    (mistake,) = [text for each in sets for text in each["mistakes"]]
    assert mistake.startswith("rows row 11")


@pytest.mark.parametrize("kind", ["dpo", "kto", "bradley_terry"])
def test_pairs_and_labels_are_measured_before_they_are_cut(tmp_path: Path, tree: dict[str, Any], kind: str) -> None:
    pair = {"prompt": "ab", "chosen": "c" * 50, "rejected": "d"}
    label = {"prompt": "ab", "completion": "c" * 50, "label": True}
    write_rows(tmp_path / "rows.jsonl", [label if kind == "kto" else pair] * 3)
    tree["preference"] = {"loss": kind}
    tree["data"]["overlong"] = "truncate"
    write_run(tmp_path / "run.yaml", tree)

    code, (training,) = checked(tmp_path)

    assert code == 0
    assert training["counts"] == {"truncated": 3}
    assert training["lengths"]["longest"] == 53
    assert training["lengths"]["median"] == (53 if kind == "kto" else 4)
    assert training["duplicates"] == 2


def test_rows_left_out_before_they_are_measured_are_a_share_of_all_rows(tmp_path: Path, tree: dict[str, Any]) -> None:
    alike = {"prompt": "ab", "chosen": "c", "rejected": "c"}
    long = {"prompt": "ab", "chosen": "c" * 50, "rejected": "d" * 50}
    write_rows(tmp_path / "rows.jsonl", [alike, long, {"prompt": "ab", "chosen": "c", "rejected": "d"}, alike] * 3)
    tree["preference"] = {"loss": "dpo"}
    tree["data"] |= {"overlong": "truncate", "unusable": "drop"}
    write_run(tmp_path / "run.yaml", tree)

    done = check(tmp_path)

    assert (done.code, done.err) == (0, "")
    shares = [line for line in done.out.splitlines() if "%" in line and ":" in line and "tokens:" not in line]
    assert shares == [
        "  6 (50.0% of rows): rows left out since their two answers are the same",
        "  3 (25.0% of rows): longer than 32 tokens and lose their end",
        "  data.max_length: 64 fits 99 % of them, 64 all",
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_a_run_skips_are_no_mistake_of_the_file(
    streaming: bool, tmp_path: Path, tree: dict[str, Any]
) -> None:
    good = json.dumps({"prompt": "add 1=", "completion": "1"})
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt":\n{good}\n{{"prompt": "a", "completion": null}}\n{good}\n')
    tree["data"] |= {"on_bad_row": "skip", "rows": "prompt_completion", "streaming": streaming}
    write_run(tmp_path / "run.yaml", tree)

    done = check(tmp_path)

    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == "training, rows: 4 rows, 2 sequences of 16 tokens, 4 of them trained"
    assert "  2 rows that a run skips:" in done.out.splitlines()


def test_a_run_says_at_its_first_step_which_rows_it_cuts(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    rows = [{"prompt": "add 1=", "completion": "1"} for _ in range(24)]
    write_rows(tmp_path / "rows.jsonl", [*rows, {"prompt": "a", "completion": "1" * 40}])
    tree["data"] |= {"batch_size": 25}
    write_run(tmp_path / "run.yaml", tree)

    done = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", cwd=tmp_path)

    assert done.code == 0, done.err
    said = [line for line in done.out.splitlines() if "lose their end" in line]
    assert said == [
        "note: of the 25 rows of this step, 1 are longer than data.max_length and lose their end. `holdfast data "
        "check` counts all rows and suggests lengths."
    ]


def test_prompts_have_a_limit_apart_from_that_of_completions(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    """Prompts of 2 to 13 tokens: 24 would fit beside 8 of 32, and 10 are allowed, so 11, 12 and 13 are too long."""
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a" * n, "answer": "1"} for n in range(2, 14)])
    tree["data"] |= {"max_prompt_length": 10}
    policy = tree | {"reward": "exact", "rollout": {"max_new_tokens": 8, "group_size": 2}}
    write_run(tmp_path / "run.yaml", policy)

    done = check(tmp_path)
    shown = cli_in_process("data", "preview", "run.yaml", "--row", "11", cwd=tmp_path)
    trained = warm.run("-m", "holdfast.cli.main", "grpo", "run.yaml", "data.shuffle=false", "steps=3", cwd=tmp_path)
    wide = check(tmp_path, "data.max_prompt_length=25")
    refused = check(tmp_path, "data.overlong=refuse")

    assert "  3 (25.0% of rows): longer than 10 tokens and are left out" in done.out.splitlines()
    assert "  data.max_prompt_length: 64 fits 99 % of them, 64 all" in done.out.splitlines()
    assert shown.out == "the prompt has 13 tokens and is left out: data.max_prompt_length is 10\n"
    assert trained.code == 0, trained.err
    lines = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert [line.get("data/overlong_dropped", 0) for line in lines if "reward" in line] == [0, 0, 3]
    assert wide.code == 2
    assert "25 is more than the 24 tokens that rollout.max_new_tokens=8 leaves in data.max_length=32" in wide.err
    assert refused.code == 1


def test_prompts_leave_room_and_answers_can_be_read(tmp_path: Path, tree: dict[str, Any]) -> None:
    answers = ["1", r"\frac{1}{2}", "", "4", "5"]
    rows = [{"prompt": "a" * (2 + 7 * place), "answer": answer} for place, answer in enumerate(answers)]
    write_rows(tmp_path / "rows.jsonl", rows)
    tree |= {"rollout": {"max_new_tokens": 8}, "reward": [{"kind": "math"}]}
    tree["data"]["overlong"] = "drop"
    write_run(tmp_path / "run.yaml", tree)

    done = check(tmp_path)

    lines = done.out.splitlines()
    assert done.code == 1, done.err
    assert lines[0] == "training, rows: 5 rows, 4 prompts of 50 tokens"
    assert "  1 (20.0% of rows): longer than 24 tokens and are left out" in lines
    assert "  data.max_length: 72 fits 99 % of them, 72 all" in lines
    assert lines[-1] == "  1 right answers that reward math cannot read, such as ''"


def test_rows_that_are_not_there_are_a_mistake_of_the_file(tmp_path: Path, tree: dict[str, Any]) -> None:
    (tmp_path / "rows.jsonl").unlink()
    write_run(tmp_path / "run.yaml", tree)

    done = check(tmp_path)

    assert done.code == 2
    assert "rows.jsonl" in done.err
    assert "Traceback" not in done.err


def test_videos_and_their_frames_are_counted_and_the_longest_is_named(tmp_path: Path) -> None:
    """Two frames of 16 x 16 pixels are 2 x 2 tokens; of 3 seconds 6 frames are taken, and 4 at least."""
    video_directory(tmp_path / "model", "qwen2_5_vl")
    for seconds in (1, 3):
        (tmp_path / f"{seconds}.mkv").write_bytes(film(noise(12 * seconds, 16, 16)))
    videos = [["1.mkv"], ["3.mkv"], [["frame.png"] * 2]]
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / "frame.png")
    rows = [{"prompt": "<video>a=", "completion": "b", "videos": video} for video in videos]
    (tmp_path / "cut.mkv").write_bytes((tmp_path / "3.mkv").read_bytes()[:9000])
    write_rows(tmp_path / "rows.jsonl", [*rows, {**rows[0], "videos": ["cut.mkv"]}])
    data = {"path": "rows.jsonl", "batch_size": 2, "max_length": 64}
    write_run(tmp_path / "run.yaml", {"steps": 1, "model": {"path": "model"}, "data": data})

    said = check(tmp_path)
    code, (training,) = checked(tmp_path)

    assert (said.code, code) == (1, 1)
    assert training["videos"] == {
        "videos": 3,
        "frames": 4 + 6 + 2,
        "tokens": 8 + 12 + 4,
        "longest_frames": 6,
        "longest": "rows row 1, video 0 of 16x16 pixels, 12 tokens",
    }
    assert "  videos: 3 of 12 frames and 24 tokens" in said.out.splitlines()
    assert "  longest video: 6 frames, rows row 1, video 0 of 16x16 pixels, 12 tokens" in said.out.splitlines()
    assert f"rows row 3, video 0 ({tmp_path}/cut.mkv) cannot be read as a film: it ends" in said.out


def test_images_are_counted_and_the_largest_is_named(tmp_path: Path) -> None:
    """A token stands for 8 x 8 pixels: 2 x 2 of the first two pictures, 3 x 4 of the third."""
    vision_directory(tmp_path / "model", "qwen2_5_vl")
    sizes = [(16, 16), (16, 16), (32, 24)]
    for number, size in enumerate(sizes):
        Image.fromarray(np.zeros((*size[::-1], 3), np.uint8)).save(tmp_path / f"{number}.png")
    rows = [{"prompt": "<image>a=", "completion": "b", "images": [f"{number}.png"]} for number in range(3)]
    write_rows(tmp_path / "rows.jsonl", [*rows, {"prompt": "a=", "completion": "b"}])
    data = {"path": "rows.jsonl", "batch_size": 2, "max_length": 64}
    write_run(tmp_path / "run.yaml", {"steps": 1, "model": {"path": "model"}, "data": data})

    said = check(tmp_path)
    code, (training,) = checked(tmp_path)

    assert (said.code, code) == (0, 0)
    assert training["images"] == {
        "images": 3,
        "tokens": 4 + 4 + 12,
        "sizes": 2,
        "width": [16, 32],
        "height": [16, 24],
        "largest_tokens": 12,
        "largest": "rows row 2, image 0 of 32x24 pixels",
    }
    assert "  images: 3 of 20 tokens, 16 to 32 pixels wide and 16 to 24 high" in said.out.splitlines()
    assert "  largest image: rows row 2, image 0 of 32x24 pixels, 12 tokens" in said.out.splitlines()
