"""`holdfast doctor`: what it says of sound runs and of broken ones, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import holdfast
from holdfast.config.sections.model import ModelConfig
from holdfast.errors import ConfigError, ModelError
from holdfast.features.plan.checks.findings import Check, Finding, findings_of, ok
from holdfast.features.plan.checks.machine import bad_pairs
from holdfast.features.plan.doctor import doctor, machine_facts, told
from holdfast.models.files.origin import load_tokenizer
from holdfast.models.setup.model import blueprint
from tests.messages import lacks
from tests.training.cases import tree

MODEL = tree("")["model"]
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
REWARDS = """
import time, pathlib
pathlib.Path(__file__).with_name("was-run").touch()

def hangs(completion, **rest):
    time.sleep(3600)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def written(place: Path, reward: Any = "exact", **sections: Any) -> Path:
    values: dict[str, Any] = {
        "steps": 4,
        "run": {"dir": str(place / "runs")},
        "model": MODEL,
        "data": {"path": "rows.jsonl", "batch_size": 8, "max_length": 32},
        "rollout": {"max_new_tokens": 4, "group_size": 2},
        "reward": reward,
        "rewards": {"timeout_seconds": 1.0},
        "optim": {"lr": 1e-3},
    }
    path = place / "run.yaml"
    path.write_text(yaml.safe_dump(values | sections))
    return path


def looked(
    capsys: Any, path: Path | None, *overrides: str, only: str = "", runs_code: bool = True
) -> tuple[int, list[dict[str, str]]]:
    """Look at one thing alone, or at all."""
    capsys.readouterr()
    code = doctor(path, overrides, runs_code=runs_code, as_json=True, only=only.split())
    return code, json.loads(capsys.readouterr().out)["findings"]


def by_name(findings: list[dict[str, str]], name: str) -> tuple[str, str]:
    (finding,) = [finding for finding in findings if finding["name"] == name]
    return finding["grade"], finding["text"]


@pytest.mark.slow
def test_a_sound_run_is_ok_and_nothing_is_left(capsys: Any, place: Path) -> None:
    path = written(place)
    before = sorted(place.rglob("*"))

    code, findings = looked(capsys, path, "launch.ranks=2")

    assert code == 0, findings
    busy = {"place"}  # a disk that others use may be slow
    assert {finding["grade"] for finding in findings if finding["name"] not in busy} == {"Ok"}, findings
    names = ["configuration", "versions", "devices", "ranks", "place", "model", "plan", "run"]
    assert [finding["name"] for finding in findings] == names
    assert "2 over gloo" in by_name(findings, "ranks")[1]
    assert "the dry run of 2 steps" in by_name(findings, "run")[1]
    assert sorted(place.rglob("*")) == before


@pytest.mark.slow
def test_what_the_dry_run_says_is_told(capsys: Any, place: Path) -> None:
    code, findings = looked(capsys, written(place, "rewards.py:none"), "launch.ranks=1", only="run")

    grade, text = by_name(findings, "run")
    assert (code, grade) == (1, "Fail")
    assert lacks(text, "exit code 2 rewards.py none") == []
    assert not (place / "runs").exists()


def test_without_code_no_file_of_the_users_is_run(capsys: Any, place: Path) -> None:
    code, findings = looked(capsys, written(place, "rewards.py:hangs"), runs_code=False, only="plan run")

    assert code == 0
    assert {finding["grade"] for finding in findings} == {"Unknown"}
    assert not (place / "was-run").exists()


def test_a_place_that_cannot_be_written_fails_in_one_paragraph(capsys: Any, place: Path) -> None:
    code, findings = looked(capsys, written(place), "run.dir=/proc/runs", only="place")

    grade, text = by_name(findings, "place")
    assert (code, grade) == (1, "Fail")
    assert text.startswith("/proc cannot be written: ")


@pytest.mark.slow
def test_a_run_that_does_not_fit_fails_with_what_to_turn(capsys: Any, place: Path) -> None:
    large = {**MODEL["config"], "hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 4}
    path = written(place, model={**MODEL, "config": large})

    code, findings = looked(capsys, path, "launch.ranks=1", only="plan")

    grade, text = by_name(findings, "plan")
    assert (code, grade) == (1, "Fail"), text
    assert text.startswith("it does not fit: ")

    code, findings = looked(capsys, path, "launch.ranks=1", "rollout.copy_gib=1", only="plan")  # a limit of the file's

    grade, text = by_name(findings, "plan")
    assert (code, grade) == (1, "Fail"), text
    assert text.startswith("rollout: sampling takes ")
    assert text.endswith("or use fewer ranks on a machine.")


@pytest.mark.slow
def test_a_file_that_is_wrong_fails_beside_what_can_be_looked_at(capsys: Any, place: Path) -> None:
    code, findings = looked(capsys, written(place, steps="many"))

    assert code == 1
    assert [finding["name"] for finding in findings] == ["configuration", "versions", "devices", "ranks"]
    assert findings[0]["grade"] == "Fail"
    assert "steps" in findings[0]["text"]


@pytest.mark.slow
def test_a_device_that_is_not_here_fails(capsys: Any, place: Path) -> None:
    code, findings = looked(capsys, written(place), "launch.device=cuda", "launch.ranks=1", only="devices ranks")

    assert code == 1
    assert by_name(findings, "devices") == ("Fail", "launch.device: cuda, but there is no GPU")
    assert by_name(findings, "ranks")[0] == "Fail"
    assert "torch finds no GPU here" in by_name(findings, "ranks")[1]


def test_pairs_that_are_known_not_to_work_fail() -> None:
    sound = {
        "torch": "2.13.0+cpu",
        "torchvision": "0.28.0+cpu",
        "math-verify": "0.9.0",
        "antlr4-python3-runtime": "4.13.2",
    }

    assert list(bad_pairs(sound.get)) == []
    assert "torchvision 0.27.0" in next(bad_pairs((sound | {"torchvision": "0.27.0"}).get)).text
    assert "+cu130" in next(bad_pairs((sound | {"torchvision": "0.28.0+cu130"}).get)).text
    assert "breaks math-verify" in next(bad_pairs((sound | {"antlr4-python3-runtime": "4.9.3"}).get)).text


def test_an_environment_is_told_without_secrets() -> None:
    secrets = {
        "HF_TOKEN": "hf_planted1",
        "WANDB_API_KEY": "planted2",
        "OPENAI_API_KEY": "sk-planted3",
        "HTTPS_PROXY": "http://me:planted4@proxy",
        "AWS_SECRET_ACCESS_KEY": "planted5",
        "NCCL_DEBUG": "INFO /home/me/planted6",
        "HOME": "/home/planted7",
        "USER": "planted8",
    }

    text = json.dumps(machine_facts(secrets | {"OMP_NUM_THREADS": "2", "PATH": "/nowhere"}))

    assert "planted" not in text
    assert json.loads(text)["OMP_NUM_THREADS"] == "2"
    assert json.loads(text)["NCCL_DEBUG"] == "(set)"


def test_a_check_that_is_not_there_is_refused_with_those_that_are(capsys: Any, place: Path) -> None:
    with pytest.raises(ConfigError, match=r"--only reward: there is no such check here; there are configuration, "):
        looked(capsys, written(place), only="reward")


@pytest.mark.slow
def test_a_model_that_an_earlier_run_would_write_is_missing_once(capsys: Any, place: Path) -> None:
    path = written(place, model={"path": "runs/first/exports/final"})

    code, findings = looked(capsys, path, "launch.ranks=1", only="configuration plan run")

    assert code == 1
    grade, words = by_name(findings, "configuration")
    assert grade == "Fail"
    assert words.endswith("The run in runs/first would write it at its end: start that one first.")
    assert by_name(findings, "plan") == ("Unknown", "not looked at, for what configuration says")
    assert by_name(findings, "run") == ("Unknown", "not tried, for what fails above")


def stored_model(place: Path) -> Path:
    """Return a directory of a small model in several files of weights, and of its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = place / "stored"
    values = {name: value for name, value in MODEL["config"].items() if name != "model_type"}
    LlamaForCausalLM(LlamaConfig(**values)).save_pretrained(folder, max_shard_size="20KB")
    load_tokenizer(ModelConfig.model_validate(MODEL), place).save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def without_weights(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()


def with_a_cut_file(folder: Path) -> None:
    file = max(folder.glob("*.safetensors"), key=lambda each: each.stat().st_size)
    file.write_bytes(file.read_bytes()[:-100])


def without_a_shard(folder: Path) -> None:
    max(folder.glob("*.safetensors")).unlink()


@pytest.mark.cases("all")
@pytest.mark.parametrize("damage", [without_weights, with_a_cut_file, without_a_shard])
def test_weights_that_a_run_would_refuse_fail_with_the_runs_own_words(
    capsys: Any, place: Path, damage: Callable[[Path], None]
) -> None:
    folder = stored_model(place)
    path = written(place, model={"path": str(folder)})
    code, findings = looked(capsys, path, "launch.ranks=1", only="model")
    assert (code, {finding["grade"] for finding in findings}) == (0, {"Ok"}), findings
    damage(folder)

    code, findings = looked(capsys, path, "launch.ranks=1", only="model")

    with pytest.raises(ModelError) as refusal:
        blueprint(ModelConfig(path=str(folder)), place, seed=0)
    assert (code, by_name(findings, "model")) == (1, ("Fail", str(refusal.value)))
    assert "again" in str(refusal.value)  # what to do


def test_weights_on_a_hub_are_not_called_sound(capsys: Any, place: Path) -> None:
    code, findings = looked(capsys, written(place, model={"path": "nobody/has-this"}), only="model")

    grade, text = by_name(findings, "model")
    assert (code, grade) == (0, "Unknown")
    assert "not looked at" in text


@pytest.mark.slow
def test_without_metadata_of_our_own_versions_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as metadata\n"
        "found = metadata.distribution\n"
        "def distribution(name):\n"
        "    if name == 'holdfast':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.distribution = distribution\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(holdfast.__file__).parents[1]}"}

    command = [sys.executable, "-m", "holdfast.cli.main", "doctor", "--only", "versions", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["grade"] == "Unknown"
    assert finding["text"].startswith("holdfast is not installed as a package")


def test_a_check_that_breaks_is_unknown_and_stops_nothing() -> None:
    def broken() -> Iterator[Finding]:
        raise ZeroDivisionError("of the check itself")
        yield

    findings = list(findings_of([Check("first", broken), Check("second", lambda: iter([ok("second", "is there")]))]))

    assert [finding.line() for finding in findings] == [
        "Unknown  first: could not be looked at: ZeroDivisionError: of the check itself",
        "Ok       second: is there",
    ]


def test_a_check_that_lasts_is_named_while_it_lasts() -> None:
    said = io.StringIO()  # capsys loses what a thread writes while it is read

    def lasting() -> Iterator[Finding]:
        end = time.monotonic() + 30
        while not said.getvalue().endswith("\n") and time.monotonic() < end:  # a line comes in two pieces
            time.sleep(0.01)
        yield ok("first", "is there")

    with contextlib.redirect_stderr(said):
        findings = list(
            findings_of([told(Check("first", lasting), 0.01), told(Check("second", lambda: iter([])), 600)])
        )

    assert said.getvalue() == "looking at first\n"
    assert [finding.name for finding in findings] == ["first"]
