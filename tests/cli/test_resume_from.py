"""`checkpoint.resume.from`: back to an earlier step, or off as a branch; what is there stays on the disk."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import verify
from holdfast.checkpoint.format.shards import shard_file
from holdfast.metrics.sink import read_metrics
from tests.cli.fixtures import TINY, write_rows, write_run
from tests.cli.in_process import cli_in_process
from tests.cli.screens import resumed_at
from tests.cli.warm import Done, WarmPython
from tests.messages import Said, lacks

STEPS = 6
CHECKPOINTS = "runs/run/checkpoints"


@pytest.fixture(scope="module")
def straight(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a run of six steps and all their checkpoints; nobody changes it."""
    place = tmp_path_factory.mktemp("straight")
    write_rows(place / "rows.jsonl", [{"prompt": f"add {n}=", "completion": str(n)} for n in range(12)])
    tree = {
        "steps": STEPS,
        "model": {"config": dict(TINY), "tokenizer": "builtin:characters"},
        "data": {"path": "rows.jsonl", "batch_size": 4, "max_length": 32, "tokens_per_micro_batch": 64},
        "optim": {"lr": 0.01, "schedule": "constant"},
        "checkpoint": {"every_steps": 1, "keep": {"last": 9}, "rehearsal": False},
        "launch": {"ranks": 1, "device": "cpu"},
    }
    write_run(place / "run.yaml", tree)
    done = sft(warm, place)
    assert done.code == 0, done.err
    return place


@pytest.fixture
def place(straight: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(straight, tmp_path / "copy"))


def sft(warm: WarmPython, place: Path, *overrides: str) -> Done:
    return warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", *overrides, cwd=place)


def losses(place: Path, name: str = "run") -> dict[int, float]:
    lines = read_metrics(place / "runs" / name / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def rewinds(place: Path) -> list[int]:
    lines = (place / "runs/run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["to"] for line in lines if '"rewind"' in line]


def steps_in(place: Path, prefix: str, folder: str = CHECKPOINTS) -> list[int]:
    """Return the steps of checkpoints whose names begin so, each of which must be whole."""
    names = sorted(path.name for path in (place / folder).iterdir() if path.name.startswith(prefix))
    return [verify(str(place / folder / name)).step for name in names]


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Return every file below a directory, but for leases."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".lease-"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_run_goes_back_once_and_makes_the_later_steps_again(warm: WarmPython, straight: Path, place: Path) -> None:
    back = sft(warm, place, "checkpoint.resume.from=2", "optim.lr=0.02")
    changed = losses(place)
    again = sft(warm, place, "checkpoint.resume.from=2", "optim.lr=0.02", "steps=7")

    assert (back.code, again.code) == (0, 0), back.err + again.err
    assert re.search(r"\bstep 2\b.* checkpoint\.resume\.from\b", back.out)
    assert resumed_at(again.out) == 6
    assert rewinds(place) == [2, 6]
    was = losses(straight)
    assert [changed[step] == was[step] for step in range(1, STEPS + 1)] == [True] * 3 + [False] * 3
    assert steps_in(place, ".later-step-") == [3, 4, 5, 6]
    assert steps_in(place, "step-") == [1, 2, 3, 4, 5, 6, 7]
    events = [json.loads(line) for line in (place / "runs/run/events.jsonl").read_text().splitlines()]
    assert [event for event in events if event["event"] == "back"] == [
        {"event": "back", "step": 2, "renamed": [3, 4, 5, 6]}
    ]


def test_a_refused_start_without_the_key_forgets_nothing_and_the_same_command_goes_on(
    warm: WarmPython, place: Path
) -> None:
    write_rows(place / "other.jsonl", [{"prompt": f"sub {n}=", "completion": str(n)} for n in range(12)])
    back = sft(warm, place, "checkpoint.resume.from=2")
    before = bytes_of(place / CHECKPOINTS)

    refused = sft(warm, place, "data.path=other.jsonl")
    after = bytes_of(place / CHECKPOINTS)
    again = sft(warm, place, "checkpoint.resume.from=2", "steps=7")

    assert (back.code, refused.code, again.code) == (0, 2, 0), back.err + refused.err + again.err
    assert "(data: " in refused.err
    assert after == before
    assert rewinds(place) == [2, 6]
    assert steps_in(place, ".later-step-") == [3, 4, 5, 6]


def test_two_checkpoints_can_be_verified_after_a_run_went_back_to_its_first(warm: WarmPython, place: Path) -> None:
    for step in range(3, STEPS + 1):  # as of a run that keeps two: the one it goes back to, and the one it leaves
        shutil.rmtree(place / CHECKPOINTS / f"step-{step:08d}")

    done = sft(warm, place, "checkpoint.resume.from=1", "checkpoint.keep.last=2")
    kept = [path for path in (place / CHECKPOINTS).iterdir() if path.name.startswith((".later-", "step-00000001"))]
    verified = [cli_in_process("checkpoint", "verify", str(path), cwd=place) for path in kept]

    assert done.code == 0, done.err
    assert sorted(path.name[:20] for path in kept) == [".later-step-00000002", "step-00000001"]
    assert [each.code for each in verified] == [0, 0], verified[0].err + verified[-1].err


def best_exports(place: Path) -> dict[str, tuple[int, float]]:
    """Return step and metric of each best export, and of what became of earlier ones, by its name."""
    by_name = {}
    for path in (place / "runs/run/exports").iterdir():
        about = json.loads((path / "holdfast_export.json").read_text())
        name = path.name.rpartition("-")[0] if path.name.startswith(".") else path.name
        if about["rating"] is not None:
            by_name[name] = (about["step"], about["rating"]["value"])
    return by_name


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.cases("all")
def test_a_best_export_of_a_later_step_is_set_aside_and_the_best_of_now_takes_its_name(
    warm: WarmPython, place: Path, killed: bool
) -> None:
    best = ["checkpoint.export_best.metric=learning_rate", "checkpoint.export_best.mode=max", "steps=8"]
    higher = sft(warm, place, *best, "optim.lr=0.04")
    exports = place / "runs/run/exports"
    shutil.copytree(exports / "best", exports / "best-ema")

    stays = sft(warm, place, *best, "optim.lr=0.02", "checkpoint.resume.from=7")
    before = best_exports(place)
    if killed:  # after the first of two exports was renamed
        for path in sorted((place / CHECKPOINTS).glob("step-*"))[3:]:
            path.rename(path.with_name(f".later-{path.name}-killed00"))
        (exports / "best-ema").rename(exports / ".later-step-00000007-ema-killed00")
    lower = sft(warm, place, *best, "optim.lr=0.02", "checkpoint.resume.from=3")

    assert (higher.code, stays.code, lower.code) == (0, 0, 0), higher.err + stays.err + lower.err
    assert before == {"best": (7, 0.04), "best-ema": (7, 0.04)}
    assert best_exports(place) == {
        "best": (4, 0.02),
        ".later-step-00000007": (7, 0.04),
        ".later-step-00000007-ema": (7, 0.04),
    }
    assert re.search(r"exports/best .* runs/run/exports/\.later-step-00000007-", lower.out)


def test_two_ranks_go_back_together(warm: WarmPython, straight: Path, place: Path) -> None:
    done = sft(warm, place, "checkpoint.resume.from=3", "launch.ranks=2")

    assert done.code == 0, done.err
    assert rewinds(place) == [3]
    assert losses(place) == pytest.approx(losses(straight), rel=1e-5)
    assert steps_in(place, ".later-step-") == [4, 5, 6]


@pytest.mark.slow
def test_without_the_key_a_run_forgets_that_it_went_back_and_may_do_so_again(
    warm: WarmPython, straight: Path, place: Path
) -> None:
    done = [sft(warm, place, *words) for words in (["checkpoint.resume.from=4"], [], ["checkpoint.resume.from=4"])]

    assert [each.code for each in done] == [0, 0, 0], done[-1].err
    assert "nothing to" in done[1].out
    assert rewinds(place) == [4, 6, 4]
    assert steps_in(place, ".later-step-") == [5, 5, 6, 6]
    assert losses(place) == losses(straight)


def test_under_another_name_it_is_a_branch_and_the_original_stays(
    warm: WarmPython, straight: Path, place: Path
) -> None:
    before = bytes_of(place / "runs/run")
    words = ["run.name=branch", f"checkpoint.resume.from={CHECKPOINTS}/step-00000003"]

    first = sft(warm, place, *words, "steps=5")
    second = sft(warm, place, *words)

    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert bytes_of(place / "runs/run") == before
    assert f"{CHECKPOINTS}/step-00000003, step 3," in first.out
    assert resumed_at(second.out) == 5
    was = losses(straight)
    assert losses(place, "branch") == {step: was[step] for step in (4, 5, 6)}
    assert steps_in(place, "step-", "runs/branch/checkpoints") == [4, 5, 6]
    own, other = (json.loads((place / f"runs/{name}/run.json").read_text())["run_id"] for name in ("branch", "run"))
    assert own != other
    manifest = verify(str(place / "runs/branch/checkpoints/step-00000004"))
    assert manifest.run_id == own
    assert any(f" run {other}" in words for words in manifest.deviations)


@pytest.mark.slow
def test_a_branch_started_once_without_the_key_goes_on_by_its_own_command(warm: WarmPython, place: Path) -> None:
    words = ["run.name=branch", f"checkpoint.resume.from={CHECKPOINTS}/step-00000003"]

    done = [sft(warm, place, *each) for each in ([*words, "steps=4"], [words[0], "steps=5"], words)]

    assert [each.code for each in done] == [0, 0, 0], done[-1].err
    assert resumed_at(done[-1].out) == 5
    assert steps_in(place, "step-", "runs/branch/checkpoints") == [4, 5, 6]


def test_a_branch_records_the_checkpoint_that_it_starts_from_with_and_without_a_model(
    warm: WarmPython, place: Path
) -> None:
    model = ["model.path=runs/run/exports/final", "model.config=null", "model.tokenizer=null"]
    of_random = f"checkpoint.resume.from={CHECKPOINTS}/step-00000005"
    of_model = "checkpoint.resume.from=runs/second/checkpoints/step-00000001"

    done = [
        sft(warm, place, "run.name=branch", of_random),
        sft(warm, place, "run.name=second", *model, "steps=1"),
        sft(warm, place, "run.name=third", *model, "steps=2", of_model),
    ]

    assert [each.code for each in done] == [0, 0, 0], "".join(each.err for each in done)
    assert parent(place, "branch") == {"resume_from": f"{CHECKPOINTS}/step-00000005"}
    second = parent(place, "second")
    assert (second["model"], second["export"]["step"]) == ("runs/run/exports/final", STEPS)
    assert parent(place, "third") == {**second, "resume_from": "runs/second/checkpoints/step-00000001"}


def parent(place: Path, name: str) -> dict[str, Any]:
    """Return what a run says that it started from, which its export must say too."""
    folder = place / "runs" / name
    run, export = (
        json.loads((folder / file).read_text()) for file in ("run.json", "exports/final/holdfast_export.json")
    )
    assert run["parent"] == export["parent"]
    return dict(run["parent"])


@pytest.mark.parametrize("renamed", range(5))
@pytest.mark.parametrize("same", [True, False])
def test_a_kill_between_two_renames_leaves_a_run_that_goes_on(
    warm: WarmPython, straight: Path, place: Path, renamed: int, same: bool
) -> None:
    """As the renames go from the newest to the oldest, and the record follows: what is there after so many of them."""
    for step in range(STEPS, STEPS - renamed, -1):
        (place / CHECKPOINTS / f"step-{step:08d}").rename(place / CHECKPOINTS / f".later-step-{step:08d}-killed00")

    done = sft(warm, place, *(["checkpoint.resume.from=2"] if same else []), "optim.lr=0.01")

    assert done.code == 0, done.err
    assert rewinds(place) == [2 if same else STEPS - renamed]
    assert losses(place) == losses(straight)
    assert steps_in(place, "step-") == [1, 2, 3, 4, 5, 6]
    assert steps_in(place, ".later-step-") == ([3, 4, 5, 6] if same else list(range(STEPS - renamed + 1, STEPS + 1)))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["checkpoint.resume.from=9"], "checkpoint.resume.from=9 1, 2, 3, 4, 5, 6"),
        (["checkpoint.resume.from=other/step-00000002"], "other/step-00000002 runs/run"),
        (["checkpoint.resume.from=2", "run.name=new"], "checkpoint.resume.from=2 none"),
        (["checkpoint.resume.from=gone/step-00000002", "run.name=new"], "gone/step-00000002"),
        (["checkpoint.resume.from=2", "data.path=other.jsonl"], "step-00000002 data"),
        (["checkpoint.resume.from=x", "checkpoint.init_from=y"], "resume.from init_from"),
    ],
    ids=["no step", "another run", "a new run", "no checkpoint", "other rows", "two beginnings"],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    warm: WarmPython, place: Path, said: Said, words: list[str], named: str
) -> None:
    write_rows(place / "other.jsonl", [{"prompt": f"sub {n}=", "completion": str(n)} for n in range(12)])
    before = bytes_of(place / CHECKPOINTS)

    done = sft(warm, place, *words)

    assert done.code == 2, done.out
    assert lacks(done.err, named) == []
    said(done.err.strip())
    assert bytes_of(place / CHECKPOINTS) == before
    assert not (place / "runs/new").exists()


def test_a_damaged_step_is_refused_and_the_later_ones_keep_their_names(warm: WarmPython, place: Path) -> None:
    file = place / CHECKPOINTS / "step-00000002" / shard_file(0)
    file.write_bytes(b"?" + file.read_bytes()[1:])

    done = sft(warm, place, "checkpoint.resume.from=2")

    assert done.code != 0
    assert "step-00000002" in done.err
    assert "Traceback" not in done.err
    assert sorted(path.name for path in (place / CHECKPOINTS).iterdir() if path.name.startswith("step-")) == [
        f"step-{step:08d}" for step in range(1, STEPS + 1)
    ]
