"""What reward functions print stands in the logs of the run, whoever started its ranks, and nowhere else."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.reward import RewardPoolConfig, UserRewardConfig
from holdfast.rewards.base import Sample
from holdfast.rewards.pool import RewardPool
from holdfast.training.policy.rewards import RewardLog
from tests.cli.fixtures import TINY, write_run
from tests.cli.warm import Done, WarmPython, run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"]
REWARD = """
import os
import time

print("imported", flush=True)

def reward(completion):
    time.sleep(0.1)  # the launcher moves logs when it looks next
    print(os.getpid(), "prints into", os.readlink("/proc/self/fd/1"), flush=True)
    return float(len(completion))
"""
SCRIPT = "import json, sys\nimport holdfast\n\nholdfast.grpo(json.loads(sys.argv[1]))\n"
LEFT = "holdfast-rewards-*"
STEPS, BATCH, GROUP = 3, 4, 2


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for temporary files that no other test uses."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def policy(tmp_path: Path) -> dict[str, Any]:
    """Return a run's tree with a reward that prints where it prints to."""
    (tmp_path / "rewards.py").write_text(REWARD)
    return {
        "steps": STEPS,
        "run": {"name": "printing", "dir": "made/by/the/run"},
        "model": {"config": dict(TINY), "tokenizer": "builtin:characters"},
        "data": {"synthetic": {"task": "reverse", "rows": 16}, "batch_size": BATCH, "max_length": 32},
        "rollout": {"group_size": GROUP, "max_new_tokens": 4},
        "reward": [{"path": "rewards.py:reward"}],
        "launch": {"device": "cpu"},
    }


def call(how: str, warm: WarmPython, policy: dict[str, Any], place: Path) -> Done:
    """Carry out a run as one call, as two ranks under torchrun, or by the command, which has a launcher."""
    write_run(place / "run.yaml", policy)
    if how == "call":
        (place / "call.py").write_text(SCRIPT)
        return warm.run("call.py", json.dumps(policy), cwd=place)
    words = ["-m", "holdfast.cli.main", "grpo", "run.yaml"]
    return run([*TORCHRUN, warm.program, *words], cwd=place) if how == "torchrun" else warm.run(*words, cwd=place)


@pytest.mark.parametrize("how", ["call", "torchrun", "command"])
def test_they_are_the_runs_while_functions_print(
    warm: WarmPython, tmp_path: Path, temporary: Path, policy: dict[str, Any], how: str
) -> None:
    done = call(how, warm, policy, tmp_path)

    assert done.code == 0, done.err
    logs = tmp_path / "made" / "by" / "the" / "run" / "printing" / "logs"
    texts = {path: path.read_text() for path in logs.glob("rewards-*.log")}
    assert len(texts) == (2 if how == "torchrun" else 1), done.err
    for path, text in texts.items():
        assert text.count("imported") == 1
        printed = re.findall("prints into (.*)", text)
        assert printed[-1] == str(path), "moved while the functions printed"
    assert sum(text.count("prints into") for text in texts.values()) >= STEPS * BATCH * GROUP
    assert list(temporary.glob(LEFT)) == []


@pytest.mark.parametrize("how", ["call", "command"])
def test_a_run_that_is_refused_leaves_none(
    warm: WarmPython, tmp_path: Path, temporary: Path, policy: dict[str, Any], how: str
) -> None:
    policy["model"]["freeze"] = ["nothing.of.this.name"]

    done = call(how, warm, policy, tmp_path)

    assert done.code != 0
    assert "nothing.of.this.name" in done.err
    assert not (tmp_path / "made").exists()
    assert list(temporary.glob(LEFT)) == []


def test_a_machine_that_has_the_logs_of_its_ranks_alone_gets_it_and_no_worker_starts_again(
    tmp_path: Path, temporary: Path, policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no disk is shared, other machines than the first have no more of a run."""
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    sample = Sample(0, "question", "text", [1], [2], "stop", {})
    log = RewardLog(tmp_path / "run", None)
    with RewardPool(
        [UserRewardConfig(path="rewards.py:reward")], RewardPoolConfig(workers=1), tmp_path, log.folder
    ) as pool:
        pool.score([sample])
        log.settle(pool)
        first = pool.log_path
        (tmp_path / "run" / "logs").mkdir(parents=True)
        log.settle(pool)
        pool.score([sample])
    log.close(pool)

    assert first.is_relative_to(temporary)
    assert pool.log_path.parent == tmp_path / "run" / "logs"
    lines = pool.log_path.read_text().splitlines()
    worker = lines[1].split()[0]
    assert lines == ["imported", f"{worker} prints into {first}", f"{worker} prints into {pool.log_path}"]
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("how", ["call", "command"])
def test_an_import_that_ends_its_process_is_quoted(
    warm: WarmPython, tmp_path: Path, temporary: Path, policy: dict[str, Any], how: str
) -> None:
    (tmp_path / "rewards.py").write_text("import os\nprint('the last word', flush=True)\nos._exit(5)\n")

    done = call(how, warm, policy, tmp_path)

    assert done.code != 0
    assert re.search(r"\bcode 5\b.*: the last word", done.err)
    assert list(temporary.glob(LEFT)) == []


@pytest.mark.parametrize("how", ["call", "torchrun", "command"])
def test_one_that_a_message_names_is_there(
    warm: WarmPython, tmp_path: Path, temporary: Path, policy: dict[str, Any], how: str
) -> None:
    """The process that keeps the workers is killed by what they run."""
    lines = REWARD.replace("return float", "os.kill(os.getppid(), 9)\n    return float")
    (tmp_path / "rewards.py").write_text(lines)

    done = call(how, warm, policy, tmp_path)

    assert done.code != 0
    named = re.search(r"Read (\S*rewards-\S*\.log)", done.err)
    assert named is not None, done.err
    assert list(temporary.glob(LEFT)) == []
    place = tmp_path / "made" / "by" / "the" / "run" / "printing" / named.group(1)
    assert "prints into" in place.read_text()
