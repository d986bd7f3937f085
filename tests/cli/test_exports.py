"""What exports say of themselves, and what becomes of one when its run goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from holdfast.checkpoint.keep import find
from tests.cli.fixtures import write_rows, write_run
from tests.cli.screens import ended, numbers, page_of
from tests.cli.warm import Done, WarmPython
from tests.messages import lacks

COMMAND = ("-m", "holdfast.cli.main")


@pytest.fixture
def run_of_two_steps(warm: WarmPython, tmp_path: Path, tree: dict[str, Any]) -> Path:
    """Return the directory of a run that ended after two steps and was exported."""
    sets = {"sets": {"held": {"path": "rows.jsonl"}}, "at_end": False}
    write_run(tmp_path / "run.yaml", tree | {"launch": {"ranks": 1, "device": "cpu"}, "evaluation": sets})
    done = warm.run(*COMMAND, "sft", "run.yaml", cwd=tmp_path)
    assert done.code == 0, done.err
    return tmp_path / "runs" / "run"


def about(place: Path) -> dict[str, Any]:
    """Return what an export says of itself."""
    return dict(json.loads((place / "holdfast_export.json").read_text()))


def set_aside(out: str) -> str:
    """Return what has become of `exports/final`."""
    (name,) = re.findall(r"exports/final .*?(exports/[\w-]+)", out)
    return str(name)


def start_of(out: str) -> tuple[str, str, int]:
    """Return the run, its id and the step of the export that a run starts from."""
    ((name, run_id, step),) = re.findall(r"^model\.path .* (\S+) \((\w+)\), step (\d+)$", out, re.MULTILINE)
    return name, run_id, int(step)


def stopped_later(warm: WarmPython, place: Path, **others: object) -> Done:
    """Raise the run's steps, and let a clock stop it on its way."""
    words = [f"{key}={value}" for key, value in {"steps": 100_000, "max_minutes": 0.005, **others}.items()]
    done = warm.run(*COMMAND, "sft", "run.yaml", *words, cwd=place)
    assert done.code == 3, done.err
    return done


@pytest.mark.slow
def test_a_run_that_goes_on_renames_the_export_of_its_earlier_end_and_says_how_to_make_a_newer_one(
    warm: WarmPython, run_of_two_steps: Path, tmp_path: Path
) -> None:
    weights = (run_of_two_steps / "exports/final/model.safetensors").read_bytes()

    done = stopped_later(warm, tmp_path)

    step = find.one(str(run_of_two_steps)).manifest.step
    name = f"step-{step:08d}"
    command = f"holdfast checkpoint export runs/run/checkpoints/{name} -o runs/run/exports/{name}"
    assert step > 2
    assert ended(done.out)[1:] == (step, "runs/run")
    assert "max_minutes=0.005" in ended(done.out).why
    assert lacks(done.out.splitlines()[-3], "runs/run/exports step-00000002 2") == []
    assert done.out.splitlines()[-2].endswith(f": {command}")
    assert page_of(done.out) == "runs/run/report.html"
    assert set_aside(done.out) == "exports/step-00000002"
    kept = run_of_two_steps / "exports/step-00000002"
    assert sorted(path.name for path in kept.parent.iterdir()) == ["step-00000002"]
    assert (kept / "model.safetensors").read_bytes() == weights
    assert (about(kept)["run"], about(kept)["step"]) == ("run", 2)
    again = warm.run(*COMMAND, *command.split()[1:], cwd=tmp_path)
    assert again.code == 0, again.err
    assert about(kept.with_name(name))["step"] == step


def test_an_export_of_a_run_without_the_file_is_set_aside_too(
    warm: WarmPython, run_of_two_steps: Path, tmp_path: Path
) -> None:
    (run_of_two_steps / "exports/final/holdfast_export.json").unlink()

    done = stopped_later(warm, tmp_path)

    assert set_aside(done.out) == "exports/before-step-00000002"
    assert not (run_of_two_steps / "exports/final").exists()


def test_a_start_from_an_export_says_whose_it_is_and_records_it_and_changed_weights_are_refused(
    warm: WarmPython, run_of_two_steps: Path, tmp_path: Path
) -> None:
    export = run_of_two_steps / "exports/final"
    own = about(export)
    start = [f"model.path={export}", "model.config=null", "model.tokenizer=null", "run.name=second", "steps=1"]

    evaluated = warm.run(*COMMAND, "eval", str(export), cwd=tmp_path)
    second = warm.run(*COMMAND, "sft", "run.yaml", *start, cwd=tmp_path)
    weights = bytearray((export / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (export / "model.safetensors").write_bytes(weights)
    changed = warm.run(*COMMAND, "eval", str(export), cwd=tmp_path)
    save_file(load_file(export / "model.safetensors"), export / "model.safetensors", {"merged": "by hand"})
    longer = warm.run(*COMMAND, "sft", "run.yaml", *start, "run.name=third", cwd=tmp_path)

    assert start_of(evaluated.out) == start_of(second.out) == ("run", own["run_id"][:8], 2)
    recorded = json.loads((tmp_path / "runs/second/run.json").read_text())["parent"]
    assert recorded == about(tmp_path / "runs/second/exports/final")["parent"]
    assert recorded["model"] == str(export)
    assert (recorded["export"]["run_id"], recorded["export"]["step"]) == (own["run_id"], 2)
    assert changed.code == longer.code == 2
    assert lacks(changed.err, f"{export}/model.safetensors hash") == []
    now = (export / "model.safetensors").stat().st_size
    assert f"{export}/model.safetensors" in longer.err
    assert numbers(longer.err)[:2] == [now, len(weights)]
    assert not (tmp_path / "runs/third").exists()


REWARD = """
def even(completion_ids):
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
"""


@pytest.mark.parametrize(
    ("verb", "sections"),
    [
        ("grpo", {"reward": {"path": "reward.py:even"}, "rollout": {"group_size": 2, "max_new_tokens": 4}}),
        ("dpo", {"preference": {"loss": "dpo"}}),
    ],
)
@pytest.mark.cases(1)
def test_a_policy_that_starts_from_an_export_of_sft_says_whose_it_is_and_records_it(
    warm: WarmPython, run_of_two_steps: Path, tmp_path: Path, tree: dict[str, Any], verb: str, sections: dict[str, Any]
) -> None:
    export = run_of_two_steps / "exports/final"
    own = about(export)
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"add {n}=", "chosen": str(n), "rejected": "x"} for n in range(12)]
    write_rows(tmp_path / "rows.jsonl", rows)
    later = {"steps": 1, "model": {"path": str(export)}, "launch": {"ranks": 1, "device": "cpu"}}
    write_run(tmp_path / "later.yaml", tree | later | sections)

    done = warm.run(*COMMAND, verb, "later.yaml", cwd=tmp_path)

    assert done.code == 0, done.err
    assert start_of(done.out) == ("run", own["run_id"][:8], 2)
    recorded = json.loads((tmp_path / "runs/later/run.json").read_text())["parent"]
    parents = {name: recorded["export"][name] for name in ("run", "run_id", "step")}
    assert (recorded["model"], parents) == (str(export), {"run": "run", "run_id": own["run_id"], "step": 2})
    assert about(tmp_path / "runs/later/exports/final")["parent"] == recorded
