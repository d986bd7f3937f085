"""`holdfast doctor`: what it says of sound runs and of broken ones, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

import holdfast
from holdfast.cli.commands.data.survey import survey_of
from holdfast.config.sections.engine import StartConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.config.verbs.roots import load_run
from holdfast.config.verbs.training import as_plain
from holdfast.config.yaml12 import to_yaml
from holdfast.errors import ConfigError, ModelError
from holdfast.features.plan.checks.findings import Check, Finding, findings_of, ok
from holdfast.features.plan.checks.inputs import CheckedRun, changed_keys
from holdfast.features.plan.checks.machine import bad_pairs
from holdfast.features.plan.checks.servers import shortage
from holdfast.features.plan.doctor import doctor, machine_facts, told
from holdfast.models.files.origin import load_tokenizer
from holdfast.models.setup.model import blueprint
from tests.features.vllm.served import REWARD, served_tree
from tests.training.cases import run, tree

MODEL = tree("")["model"]
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
REWARDS = """
import time, pathlib
pathlib.Path(__file__).with_name("was-run").touch()

def hangs(completion, **rest):
    time.sleep(3600)

def raises(completion, **rest):
    raise ValueError("no such thing")

def sound(completion, **rest):
    return len(completion)
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

    assert code == 0
    assert [finding["name"] for finding in findings if finding["grade"] != "Ok"] == ["tokenizer"]  # of few characters
    names = [
        "configuration",
        "versions",
        "devices",
        "place",
        "ranks",
        "tokenizer",
        "model",
        "rows",
        "batches",
        "rewards",
        "resume",
        "plan",
    ]
    assert [finding["name"] for finding in findings] == names
    assert "2 over gloo" in by_name(findings, "ranks")[1]
    assert "8 prompts x 2 completions a step, 16 an update over 2 ranks" in by_name(findings, "batches")[1]
    assert sorted(place.rglob("*")) == before


def test_a_reward_that_hangs_fails_with_its_name(capsys: Any, place: Path) -> None:
    code, findings = looked(
        capsys, written(place, ["rewards.py:hangs", "rewards.py:sound"]), "launch.ranks=1", only="rewards"
    )

    rewards = [(finding["grade"], finding["text"]) for finding in findings if finding["name"] == "rewards"]
    assert code == 1
    assert rewards[0][0] == "Fail"
    assert rewards[0][1].startswith("hangs hangs: ")
    assert rewards[1][0] == "Ok"
    assert rewards[1][1].startswith("sound gives 1, 1 in ")


def test_a_reward_that_raises_fails_with_what_it_raised(capsys: Any, place: Path) -> None:
    code, findings = looked(capsys, written(place, "rewards.py:raises"), only="rewards")

    assert code == 1
    grade, text = by_name(findings, "rewards")
    assert grade == "Fail"
    assert "ValueError: no such thing" in text


def test_a_reward_whose_file_hangs_when_it_is_imported_fails_with_its_name(capsys: Any, place: Path) -> None:
    (place / "slow.py").write_text("import time\ntime.sleep(3600)\n")
    path = written(place, "slow.py:never", rewards={"start_timeout_seconds": 2.0})

    code, findings = looked(capsys, path, only="rewards")

    grade, text = by_name(findings, "rewards")
    assert (code, grade) == (1, "Fail")
    assert text.startswith("never: ")


def test_without_code_no_file_of_the_users_is_run(capsys: Any, place: Path) -> None:
    code, findings = looked(capsys, written(place, "rewards.py:hangs"), runs_code=False, only="rewards")

    assert code == 0
    assert by_name(findings, "rewards") == ("Unknown", "hangs is not run (--no-code)")
    assert not (place / "was-run").exists()


def test_a_place_that_cannot_be_written_fails_in_one_paragraph(capsys: Any, place: Path) -> None:
    code, findings = looked(capsys, written(place), "run.dir=/proc/runs", only="place")

    grade, text = by_name(findings, "place")
    assert (code, grade) == (1, "Fail")
    assert text.startswith("/proc cannot be written: ")


def test_more_ranks_than_rows_is_a_warning(capsys: Any, place: Path) -> None:
    code, findings = looked(capsys, written(place), "launch.ranks=3", "data.batch_size=1", only="rows")

    grade, text = by_name(findings, "batches")
    assert (code, grade) == (0, "Warn")
    assert "fewer than 3 ranks: 1 have nothing to do" in text


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


def test_ranks_that_cannot_be_arranged_fail(capsys: Any, place: Path) -> None:
    code, findings = looked(capsys, written(place), "launch.ranks=1", "parallel.replicate=2", only="rows")

    assert code == 1
    assert "parallel.replicate=2 copies cannot be spread over 1 ranks" in str(findings)


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


@pytest.fixture
def judge() -> Iterator[str]:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802 - its name
            body = json.dumps({"data": [{"id": "small"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:  # noqa: N802 - its name
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps({"choices": [{"message": {"content": "7"}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def judged(url: str, model: str) -> dict[str, Any]:
    return {
        "kind": "judge",
        "url": url,
        "model": model,
        "prompt": "{completion}",
        "attempts": 1,
        "timeout_seconds": 2.0,
    }


def test_an_endpoint_is_asked_for_its_models(capsys: Any, place: Path, judge: str) -> None:
    code, findings = looked(capsys, written(place, judged(judge, "small")), only="endpoints")
    assert code == 0
    assert by_name(findings, "endpoints")[1].startswith(f"reward[0]: {judge} serves small")

    code, findings = looked(capsys, written(place, judged(judge, "large")), only="endpoints")
    assert (code, by_name(findings, "endpoints")[0]) == (1, "Fail")

    code, findings = looked(
        capsys, written(place, judged("http://127.0.0.1:9/v1", "small")), runs_code=False, only="endpoints"
    )
    assert (code, by_name(findings, "endpoints")[0]) == (1, "Fail")
    assert "cannot be reached" in by_name(findings, "endpoints")[1]


def test_servers_of_rollouts_are_asked_or_could_be_started(capsys: Any, place: Path, judge: str) -> None:
    (place / "reward.py").write_text(REWARD)
    server, nobody = judge.removesuffix("/v1"), "http://127.0.0.1:9"
    values = served_tree([server, nobody], str(place / "runs"))
    (place / "served.yaml").write_text(yaml.safe_dump(values))

    code, findings = looked(capsys, place / "served.yaml", runs_code=False, only="endpoints")

    assert code == 1
    first, second = [each["text"] for each in findings if each["name"] == "endpoints"]
    assert first.startswith(f"rollout.engine: {server}/v1 serves small")
    assert second.startswith(f"rollout.engine: {nobody}/v1 cannot be reached")

    values["rollout"]["engine"] |= {"start": True, "python": "no-such-python"}
    (place / "served.yaml").write_text(yaml.safe_dump(values))
    code, findings = looked(capsys, place / "served.yaml", runs_code=False, only="endpoints")
    assert (code, by_name(findings, "endpoints")[0]) == (1, "Fail")
    assert "no-such-python is no program here" in by_name(findings, "endpoints")[1]


@pytest.mark.parametrize(
    ("start", "gib", "told"),
    [
        ({}, 14, ""),
        ({}, 74, "weights take 74 GiB of each GPU, and vLLM's share of 0.92 leaves a server 73.6 GiB of 80 GiB"),
        ({"tensor_parallel_size": 2}, 74, ""),
        (
            {"gpu_memory_utilization": 0.15},
            14,
            "weights take 14 GiB of each GPU, and gpu_memory_utilization: 0.15 leaves a server 12 GiB of 80 GiB",
        ),
        ({"gpu_memory_utilization": 0.15, "arguments": {"quantization": "fp8"}}, 14, ""),
    ],
)
def test_weights_that_no_server_has_room_for_are_told(start: dict[str, Any], gib: int, told: str) -> None:
    assert shortage(StartConfig.model_validate(start), gib * 2**30, [80 * 2**30, 96 * 2**30]) == told


def test_what_a_resume_would_do_is_said(capsys: Any, pools: Any, tmp_path: Path) -> None:
    values = tree(str(tmp_path), checkpoint={"every_steps": 2, "rehearsal": False}, steps=4)
    pools(1).run(run, values)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))

    grade, text = by_name(looked(capsys, path, "steps=6", only="resume")[1], "resume")
    assert grade == "Warn"
    assert text.startswith("the run would go on from step 4 (")
    assert "2 steps are left, with other values than it had: steps 4 -> 6" in text

    (tmp_path / "r/checkpoints/step-00000004/manifest.json").write_text("{")
    grade, text = by_name(looked(capsys, path, only="resume")[1], "resume")
    assert grade == "Warn"
    assert "from step 2" in text
    assert "newer ones are damaged: step-00000004" in text


def test_changed_values_are_told_by_leaf_and_without_what_may_be_secret(place: Path) -> None:
    (place / "rewards.py").write_text(REWARDS)
    own = {"kind": "path", "path": "rewards.py:sound", "kwargs": {"key": "planted1", "list": [{"a": "planted2"}]}}
    path = written(place, [own, {"kind": "exact", "weight": 0.5}], run={"name": "r", "dir": str(place / "runs")})
    before, after = load_run(path, []), load_run(path, ["reward.1.weight=1.0", "reward.0.kwargs.key=planted3"])
    run = CheckedRun(after.config, place, 1, survey_of, dict)
    run.directory.mkdir(parents=True)
    (run.directory / "config.resolved.yaml").write_text(to_yaml(as_plain(before.config)))

    assert changed_keys(run) == ["reward.0.kwargs changed", "reward.1.weight 0.5 -> 1.0"]


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

    code, findings = looked(capsys, path, "launch.ranks=1", only="configuration tokenizer plan")

    assert code == 1
    grade, words = by_name(findings, "configuration")
    assert grade == "Fail"
    assert words.endswith("The run in runs/first would write it at its end: start that one first.")
    assert by_name(findings, "plan") == ("Unknown", "not looked at, for what configuration says")


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
