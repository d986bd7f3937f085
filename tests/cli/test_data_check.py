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
from tests.cli.screens import numbers
from tests.cli.warm import Done, WarmPython
from tests.films import film, noise
from tests.messages import Said, lacks
from tests.videos import video_directory
from tests.vision import vision_directory


def check(folder: Path, *arguments: str) -> Done:
    return cli_in_process("data", "check", "run.yaml", *arguments, cwd=folder)


def checked(folder: Path) -> tuple[int, list[dict[str, Any]]]:
    done = check(folder, "--json")
    assert done.err == "", done.err
    return done.code, json.loads(done.out)["sets"]


def numbers_of_lines(out: str) -> list[list[float]]:
    return [numbers(line) for line in out.splitlines()]


def numbers_after(out: str, key: str) -> list[float]:
    """Return the numbers of the line that begins with `key: `.

    Of a length these are what fits a share of all rows, that share in percent, and what fits all of them.
    """
    (line,) = [line for line in out.splitlines() if line.lstrip().startswith(f"{key}: ")]
    return numbers(line)


def test_rows_without_a_mistake_are_counted(tmp_path: Path, tree: dict[str, Any], said: Said) -> None:
    """Each row is `add N=`, its number and the end: 6 + 1 + 1 characters, two more for 10 and 11."""
    write_run(tmp_path / "run.yaml", tree)

    done = check(tmp_path)

    assert (done.code, done.err) == (0, "")
    assert numbers_of_lines(done.out) == [[12, 12, 100, 26], [8, 90, 10, 99, 10, 10], [8, 10], [9, 0], [10, 2]]
    assert [line.count("#") for line in done.out.splitlines()[2:]] == [40, 0, 8]
    said(done.out.rstrip())


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


def test_a_run_that_refuses_long_rows_is_shown_how_long_they_are(
    tmp_path: Path, tree: dict[str, Any], said: Said
) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a" * length, "completion": "b"} for length in (5, 70, 200)])
    tree["data"]["overlong"] = "refuse"
    write_run(tmp_path / "run.yaml", tree)

    done = check(tmp_path)

    assert done.code == 1
    assert [1, 72, 32] in [numbers(line) for line in done.out.splitlines() if "data.overlong" in line]
    assert numbers_after(done.out, "data.max_length") == [256, 99, 256]
    said(done.out.rstrip())


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


def test_rows_left_out_before_they_are_measured_are_a_share_of_all_rows(
    tmp_path: Path, tree: dict[str, Any], said: Said
) -> None:
    alike = {"prompt": "ab", "chosen": "c", "rejected": "c"}
    long = {"prompt": "ab", "chosen": "c" * 50, "rejected": "d" * 50}
    write_rows(tmp_path / "rows.jsonl", [alike, long, {"prompt": "ab", "chosen": "c", "rejected": "d"}, alike] * 3)
    tree["preference"] = {"loss": "dpo"}
    tree["data"] |= {"overlong": "truncate", "unusable": "drop"}
    write_run(tmp_path / "run.yaml", tree)

    done = check(tmp_path)

    assert (done.code, done.err) == (0, "")
    shares = [line for line in done.out.splitlines() if "%" in line and ":" in line and "tokens:" not in line]
    assert [numbers(line) for line in shares] == [[6, 50], [3, 25, 32], [64, 99, 64]]
    assert shares[-1].split()[0] == "data.max_length:"
    said("\n".join(shares))


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_a_run_skips_are_no_mistake_of_the_file(
    streaming: bool, tmp_path: Path, tree: dict[str, Any], said: Said
) -> None:
    good = json.dumps({"prompt": "add 1=", "completion": "1"})
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt":\n{good}\n{{"prompt": "a", "completion": null}}\n{good}\n')
    tree["data"] |= {"on_bad_row": "skip", "rows": "prompt_completion", "streaming": streaming}
    write_run(tmp_path / "run.yaml", tree)

    done = check(tmp_path)

    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert numbers(lines[0]) == [4, 2, 16, 4]
    (skipped,) = [line for line in lines[1:] if line.endswith(":")]
    assert numbers(skipped) == [2]
    said(skipped)


def test_a_run_says_at_its_first_step_which_rows_it_cuts(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any], said: Said
) -> None:
    rows = [{"prompt": "add 1=", "completion": "1"} for _ in range(24)]
    write_rows(tmp_path / "rows.jsonl", [*rows, {"prompt": "a", "completion": "1" * 40}])
    tree["data"] |= {"batch_size": 25}
    write_run(tmp_path / "run.yaml", tree)

    done = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", cwd=tmp_path)

    assert done.code == 0, done.err
    (note,) = [line for line in done.out.splitlines() if line.startswith("note: ") and "data.max_length" in line]
    assert numbers(note) == [25, 1]
    assert "`holdfast data check`" in note
    said(note)


def test_prompts_have_a_limit_apart_from_that_of_completions(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any], said: Said
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

    assert [3, 25, 10] in numbers_of_lines(done.out)
    assert numbers_after(done.out, "data.max_prompt_length") == [64, 99, 64]
    assert numbers(shown.out) == [13, 10]
    assert "data.max_prompt_length" in shown.out
    said(shown.out.strip())
    assert trained.code == 0, trained.err
    lines = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert [line.get("data/overlong_dropped", 0) for line in lines if "reward" in line] == [0, 0, 3]
    assert wide.code == 2
    assert lacks(wide.err, "25 24 rollout.max_new_tokens=8 data.max_length=32") == []
    said(wide.err.strip())
    assert refused.code == 1


def test_prompts_leave_room_and_answers_can_be_read(tmp_path: Path, tree: dict[str, Any], said: Said) -> None:
    answers = ["1", r"\frac{1}{2}", "", "4", "5"]
    rows = [{"prompt": "a" * (2 + 7 * place), "answer": answer} for place, answer in enumerate(answers)]
    write_rows(tmp_path / "rows.jsonl", rows)
    tree |= {"rollout": {"max_new_tokens": 8}, "reward": [{"kind": "math"}]}
    tree["data"]["overlong"] = "drop"
    write_run(tmp_path / "run.yaml", tree)

    done = check(tmp_path)

    lines = done.out.splitlines()
    assert done.code == 1, done.err
    assert numbers(lines[0]) == [5, 4, 50]
    assert [1, 20, 24] in numbers_of_lines(done.out)
    assert numbers_after(done.out, "data.max_length") == [72, 99, 72]
    assert numbers(lines[-1]) == [1]
    assert lacks(lines[-1], "math ''") == []
    said(done.out.rstrip())


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

    shown = check(tmp_path)
    code, (training,) = checked(tmp_path)

    assert (shown.code, code) == (1, 1)
    longest = training["videos"].pop("longest")
    assert numbers(longest) == [1, 0, 12]  # row, video and tokens
    assert "16x16" in longest
    assert training["videos"] == {
        "videos": 3,
        "frames": 4 + 6 + 2,
        "tokens": 8 + 12 + 4,
        "longest_frames": 6,
    }
    assert numbers_after(shown.out, "videos") == [3, 12, 24]
    (line,) = [line for line in shown.out.splitlines() if line.endswith(longest)]
    assert numbers(line.removesuffix(longest)) == [6]
    assert f"row 3, video 0 ({tmp_path}/cut.mkv)" in shown.out


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

    shown = check(tmp_path)
    code, (training,) = checked(tmp_path)

    assert (shown.code, code) == (0, 0)
    largest = training["images"].pop("largest")
    assert numbers(largest) == [2, 0]  # row and image
    assert "32x24" in largest
    assert training["images"] == {
        "images": 3,
        "tokens": 4 + 4 + 12,
        "sizes": 2,
        "width": [16, 32],
        "height": [16, 24],
        "largest_tokens": 12,
    }
    assert numbers_after(shown.out, "images") == [3, 20, 16, 32, 16, 24]
    (line,) = [line for line in shown.out.splitlines() if largest in line]
    assert numbers(line.partition(largest)[2]) == [12]
