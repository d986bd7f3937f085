"""What user code takes may be secret: planted in a real run, and looked for in every byte that leaves it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.commands.push import outgoing_files
from holdfast.config.base import LEFT_OUT
from holdfast.config.yaml12 import parse_file
from tests.cli.fixtures import TINY, write_run
from tests.cli.in_process import cli_in_process
from tests.cli.screens import resumed_at
from tests.cli.warm import WarmPython
from tests.messages import lacks

SECRETS = [f"planted{number:02d}" for number in range(7)]
FUNCTIONS = """
import torch

def reward(completion, key, server):
    assert key.startswith("planted") and "@" in server
    return float(len(completion))

def mean(groups, key):
    assert key == "planted03"
    return groups.rewards - groups.rewards.mean(axis=1, keepdims=True)

class SGD(torch.optim.SGD):
    def __init__(self, parameters, lr, key, weight_decay=0.0):
        assert key == "planted04"
        super().__init__(parameters, lr, weight_decay=weight_decay)

class Mine:
    def __init__(self, run, key):
        assert key == "planted05"
        self.file = (run.folder / "mine.txt").open("a")

    def write(self, step, metrics):
        print(step, metrics, file=self.file, flush=True)

    def close(self, status):
        self.file.close()
"""
AGENT = """
import json, os, sys, urllib.request

assert sys.argv[1:] == ["--api-key", "planted06"]
row = json.load(sys.stdin)
body = {"model": "policy", "messages": [{"role": "user", "content": row["prompt"]}]}
asked = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
urllib.request.urlopen(asked).read()
"""


@pytest.fixture
def policy(tmp_path: Path) -> dict[str, Any]:
    """Return a run's tree with secrets in the arguments of a reward, and in the address of a judge nobody asks."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "agent.py").write_text(AGENT)
    address = f"https://me:{SECRETS[1]}@host.example/v1?token={SECRETS[2]}"
    kwargs = {"key": SECRETS[0], "server": address}
    return {
        "steps": 2,
        "model": {"config": dict(TINY), "tokenizer": "builtin:characters"},
        "data": {"synthetic": {"task": "reverse", "rows": 16}, "batch_size": 4, "max_length": 32},
        "rollout": {"group_size": 2, "max_new_tokens": 4},
        "environment": {"kind": "endpoint", "command": [sys.executable, "agent.py", "--api-key", SECRETS[6]]},
        "reward": [{"path": "functions.py:reward", "kwargs": kwargs}],
        "advantage": {"kind": "path", "path": "functions.py:mean", "kwargs": {"key": SECRETS[3]}},
        "optim": {"kind": "path", "path": "functions.py:SGD", "kwargs": {"key": SECRETS[4]}},
        "evaluation": {"sets": {"held": {"synthetic": {"task": "reverse", "rows": 4, "seed": 1}}}},
        "metrics": {"sinks": ["csv", {"kind": "path", "path": "functions.py:Mine", "kwargs": {"key": SECRETS[5]}}]},
        "checkpoint": {"every_steps": 1, "keep": {"last": 9}},
        "launch": {"device": "cpu"},
    }


@pytest.mark.slow
def test_no_argument_of_user_code_leaves_a_run_and_the_run_goes_on(
    warm: WarmPython, tmp_path: Path, policy: dict[str, Any]
) -> None:
    write_run(tmp_path / "run.yaml", policy)
    first = warm.run("-m", "holdfast.cli.main", "grpo", "run.yaml", cwd=tmp_path)
    again = warm.run("-m", "holdfast.cli.main", "grpo", "run.yaml", "steps=3", cwd=tmp_path)
    run = tmp_path / "runs" / "run"
    report = cli_in_process("report", str(run), cwd=tmp_path)
    export = run / "exports" / "final"
    evaluated = warm.run("-m", "holdfast.cli.main", "eval", str(export), cwd=tmp_path)
    of_run = warm.run("-m", "holdfast.cli.main", "eval", "run.yaml", f"model.path={export}", "model.config=null",
                      "model.tokenizer=null", "run.name=looked", cwd=tmp_path)  # fmt: skip

    assert (first.code, again.code, report.code) == (0, 0, 0), first.err + again.err + report.err
    assert resumed_at(again.out) == 2
    assert "checkpoint: reward" not in again.out
    (reward,) = parse_file(export / "holdfast.yaml").values["reward"]
    assert reward["kwargs"] == LEFT_OUT
    assert evaluated.code == 2
    assert lacks(evaluated.err, "`holdfast eval RUN.yaml model.path=EXPORT`") == []
    assert of_run.code == 0, of_run.err
    secret = [name.encode() for name in SECRETS]
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "config.resolved.yaml"]
    assert len(files) > 30
    assert [str(path) for path in files if any(each in path.read_bytes() for each in secret)] == []
    pushed = [content for content in outgoing_files(export)[0].values() if isinstance(content, bytes)]
    assert len(pushed) == 2
    assert not any(each in content for each in secret for content in pushed)
    texts = [done.out + done.err for done in (first, again, report, evaluated, of_run)]
    assert [text for text in texts if any(each.decode() in text for each in secret)] == []
