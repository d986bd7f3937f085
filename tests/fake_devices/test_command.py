"""`holdfast plan`: what it prints, and what it says of what cannot be planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.yaml12 import to_yaml
from holdfast.features.plan.execution.process import NEWS
from tests.fake_devices.cases import DENSE, policy, tree
from tests.fake_devices.conftest import ROOT, needs_guard
from tests.features.vllm.served import AHEAD, served_tree
from tests.models.architectures import settings_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__), pytest.mark.timeout(900)]


def plan(file: Path, *options: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.cli.main", "plan", str(file), *options]
    own = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(environment or {})
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=file.parent, env=own)


def without_news(errors: str) -> list[str]:
    """Return the lines of standard error but for those that say what is being planned."""
    return [line for line in errors.strip().splitlines() if not line.startswith(NEWS)]


def run_file(folder: Path, **sections: Any) -> Path:
    file = folder / "run.yaml"
    file.write_text(to_yaml(tree(**sections)), encoding="utf-8")
    return file


def test_a_plan_for_scripts_names_every_part_and_leaves_plan_json(tmp_path: Path) -> None:
    needs_guard()

    done = plan(run_file(tmp_path), "--ranks", "8", "--json", "--save")

    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["executed"]
    by_formulas, begun = done.stderr.splitlines()
    assert begun.startswith(NEWS)
    assert "8 ranks of h100" in begun
    assert float(by_formulas.removeprefix(f"{NEWS}by formulas ").split()[0]) == pytest.approx(
        made["peak_bytes"] / 2**30, abs=0.01
    )
    assert {"load", "forward", "backward", "optimizer", "resume"} <= set(made["phases"])
    assert made["host"]["save"]["total"] > 0
    for phase in made["phases"].values():
        assert phase["total"] == pytest.approx(sum(phase["parts"].values()), rel=0.01)
    # Twelve bytes of a parameter: its own four, and two moments. What frames them is as much in so small a model: of 21
    # tensors and their moments eight chunks each, and one of every count of steps, and each rank's random state.
    framed = 21 * (3 * 8 + 1) * 560 + 8 * 17_500
    assert made["checkpoint_bytes"] == pytest.approx(12 * made["parameters"] + framed, rel=0.01)
    assert made["export_bytes"] == pytest.approx(4 * made["parameters"], rel=0.02)
    left = json.loads((tmp_path / "runs" / "run" / "plan.json").read_text())
    assert made.pop("servers") == []  # whose command lines may hold secrets
    assert left == made
    assert left["clock_phases"]["forward_backward"] == max(
        made["phases"][row]["total"] for row in ("forward", "backward")
    )
    assert left["clock_phases"]["load"] == made["phases"]["load"]["total"]


def test_a_run_that_does_not_fit_is_told_what_to_turn_and_exits_with_1(tmp_path: Path) -> None:
    needs_guard()
    wide = {"batch_size": 64, "max_length": 128, "tokens_per_micro_batch": 4096}

    done = plan(run_file(tmp_path, data=wide), "--ranks", "8", "--memory", "1742MiB", "--json")

    made = json.loads(done.stdout)
    assert done.returncode == 1
    assert not made["fits"]
    peaks = [turn["peak_bytes"] for turn in made["turns"]]
    assert [turn["key"] for turn in made["turns"]][:2] == ["data.tokens_per_micro_batch", "parallel.recompute"]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] < made["peak_bytes"]


def planned_policy(folder: Path, memory: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the plan of a policy on one device."""
    (folder / "run.yaml").write_text(to_yaml(policy()), encoding="utf-8")
    done = plan(folder / "run.yaml", "--ranks", "1", "--memory", memory, "--json")
    return done.returncode, json.loads(done.stdout)


@pytest.mark.cases(2)
@pytest.mark.parametrize("memory", ["1MiB", "1.9MiB"], ids=["none for the state", "none for keys and values"])
def test_a_policy_that_does_not_fit_is_planned_as_if_it_did(memory: str, tmp_path: Path) -> None:
    needs_guard()

    code, made = planned_policy(tmp_path, memory)
    _, ample = planned_policy(tmp_path, "80GiB")

    assert (code, made["executed"], made["fits"]) == (1, True, False)
    assert made["turns"]
    assert made["phases"]["rollout"] == ample["phases"]["rollout"]


def test_a_policy_with_recurrent_layers_is_planned_with_its_rollouts(tmp_path: Path) -> None:
    needs_guard()
    dense = {name: value for name, value in DENSE.items() if name != "head_dim"}
    recurrent = {**settings_of("lfm2"), **dense, "model_type": "lfm2"}
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(policy(model={"config": recurrent})), encoding="utf-8")

    done = plan(file, "--ranks", "2", "--json")

    made = json.loads(done.stdout)
    assert made["executed"]
    assert made["phases"]["rollout"]["parts"]["key_value_cache"] > 0
    assert not [note for note in made["notes"] if "generate" in note]


def test_a_policy_has_the_blocks_that_memory_has_room_for(tmp_path: Path) -> None:
    needs_guard()

    _, made = planned_policy(tmp_path, "8MiB")
    _, ample = planned_policy(tmp_path, "80GiB")

    caches = [found["phases"]["rollout"]["parts"]["key_value_cache"] for found in (made, ample)]
    assert 0 < caches[0] < caches[1] / 2


@pytest.mark.cases("all")
@pytest.mark.parametrize(
    ("sections", "options", "words"),
    [
        ({}, ["--device", "k80"], ["--device k80", "h100, h200, a100, l40s, b200"]),
        ({}, ["--memory", "much"], ["--memory much", "80GiB"]),
        ({}, ["--ranks", "65"], ["65 ranks", "data.batch_size=64"]),
        ({"parallel": {"replicate": 3}}, ["--ranks", "8"], ["parallel.replicate=3", "8 ranks"]),
        (
            {"model": {"path": "nobody/has-this", "config": None, "tokenizer": None}},
            ["--ranks", "8"],
            ["needs no weights", "config.json", "Qwen/Qwen2.5-7B"],
        ),
    ],
    ids=["device", "memory", "more ranks than rows", "copies that do not divide", "no configuration"],
)
def test_what_cannot_be_planned_is_told_in_one_paragraph(
    tmp_path: Path, sections: dict[str, Any], options: list[str], words: list[str]
) -> None:
    needs_guard()

    done = plan(run_file(tmp_path, **sections), *options)

    assert done.returncode == 2, done.stderr
    assert len(without_news(done.stderr)) == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert done.stdout == ""


def test_a_plan_asks_no_server_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    needs_guard()
    (tmp_path / "run.yaml").write_text(to_yaml(served_tree(["http://127.0.0.1:9"], "runs", **AHEAD)), encoding="utf-8")

    done = plan(tmp_path / "run.yaml", "--ranks", "2", "rollout.max_staleness=1", "rollout.engine.start=true")

    assert done.returncode == 0, done.stderr
    assert (
        "note: rollout: servers of vLLM sample (1), on devices of their own: their memory and time are left out, and "
        "so are pushes of weights to them, which take up to two buckets (0.04 MiB) and the largest tensor of rank 0's "
        "host memory\n"
    ) in done.stdout
    assert "BY FORMULAS" not in done.stdout


def test_a_plan_that_cannot_be_saved_says_which_key_is_wrong(tmp_path: Path) -> None:
    done = plan(run_file(tmp_path, run={"dir": "/proc/runs"}), "--save")

    assert done.returncode == 2, done.stderr
    assert "/proc" in done.stderr
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_compiler_a_plan_is_made_by_formulas_and_says_so(tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    elsewhere = {"PATH": str(empty), "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    done = plan(run_file(tmp_path), "--ranks", "8", environment=elsewhere)

    assert done.returncode == 0, done.stderr
    assert "BY FORMULAS" in done.stdout
    assert "No C++ compiler" in done.stdout
