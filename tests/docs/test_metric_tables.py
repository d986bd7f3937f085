"""Every metric that a trainer writes stands in the table `Metrics` of its page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
HEADINGS = {"environments": "Rewards and metrics"}
"""Of the section with the table, on pages that are no trainer's."""
ANOTHER = re.compile(r"as in \[[^]]+\]\((\w+)\.md#[\w-]*metrics\)")
"""In a row of names that stand in the table of another page too."""
EVALUATED = "eval/SET/METRIC"
"""Stands for each other name of the table, of an evaluation set."""
START = "runs/sft_sort_noisy/exports/final"
SFT = ["sft", "examples/sft_sort.yaml", "run.name=sft_sort_noisy", "data.synthetic.noise=0.7"]


class Row(NamedTuple):
    """A name of a table, in which words in capitals stand for anything, and the page that has it too."""

    name: str
    pattern: re.Pattern[str]
    other: str | None


@cache
def table(page: str) -> tuple[Row, ...]:
    """Return the names in a page's table of metrics."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {HEADINGS.get(page, 'Metrics')}\n")[2].partition("\n## ")[0]
    rows = []
    for line in re.findall(r"^\| `.+\|$", section, re.MULTILINE):
        names, meaning = line.strip("|").split(" | ", 1)
        other = ANOTHER.search(meaning)
        for name in re.findall(r"`([^`]+)`", names):
            pattern = re.compile("(.+)".join(map(re.escape, re.split(r"[A-Z]+", name))))
            rows.append(Row(name, pattern, other and other[1]))
    return tuple(rows)


def stands(page: str, metric: str) -> bool:
    """Return whether a page's table has a metric."""
    return any(_fits(page, row, metric) for row in table(page))


def _fits(page: str, row: Row, metric: str) -> bool:
    if row.name == EVALUATED:
        ends = [match.end() for match in re.finditer("/", metric)][1:]
        return metric.startswith("eval/") and any(stands(page, metric[end:]) for end in ends)
    return row.pattern.fullmatch(metric) is not None and (row.other is None or stands(row.other, metric))


def test_a_name_is_found_by_its_row_and_another_is_not() -> None:
    found = [
        ("sft", "nll/chats"),
        ("sft", "eval/held_out/loss"),
        ("dpo", "timing/reference"),
        ("dpo", "timing/forward_backward"),
        ("dpo", "eval/held_out/rewards/margins"),
        ("grpo", "rewards/my/part/mean"),
        ("grpo", "eval/validation/chats/pass@4"),
        ("grpo", "environment/ended/done"),
        ("ppo", "clip_ratio/low_mean"),
    ]
    missing = [
        ("sft", "reward"),
        ("sft", "timing/rollout"),
        ("dpo", "timing/rollout"),
        ("dpo", "throughput/other"),
        ("reward_models", "nll"),
        ("grpo", "eval/held_out/other"),
        ("grpo", "environment/other"),
        ("ppo", "sampling/other"),
    ]

    assert [case for case in found if not stands(*case)] == []
    assert [case for case in missing if stands(*case)] == []


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory like a checkout's."""
    place = tmp_path_factory.mktemp("checkout")
    (place / "examples").symlink_to(ROOT / "examples")
    return place


@pytest.fixture(scope="module")
def start(checkout: Path) -> Path:
    """Return the directory with the model that other runs start from."""
    run(checkout, [*SFT, "steps=2", "checkpoint.every_steps=1", "metrics.entropy=true"])
    return checkout


def run(place: Path, words: list[str]) -> None:
    program = ["holdfast.cli.main", *words] if words[0] != "python" else []
    command = [sys.executable, "-m", *program] if program else [sys.executable, *words[1:]]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def written(place: Path, name: str) -> set[str]:
    """Return the names that a run has written."""
    text = (place / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [line for line in map(json.loads, text.splitlines()) if "event" not in line]
    return {name for line in lines for name in line} - {"step"}


GRPO = ["grpo", "examples/grpo_sort.yaml", "data.batch_size=8", "rollout.group_size=4", "evaluation.limit_samples=8"]
EVERYTHING = [
    "metrics.entropy=true",
    "kl={coefficient: 0.05, target: 0.1}",
    "entropy={coefficient: 0.01, top_quantile: 0.5}",
    "correction=truncate",
    "off_policy_mask.max_kl=1.0",
    "updates.mini_batches=2",
    "objective={kind: clip, dual_clip: 3.0}",
    "evaluation={per_prompt: 2, sampling: {temperature: 1.0}}",
]
CASES = {
    "dpo": ("dpo", [["dpo", "examples/dpo_sort.yaml", "preference={loss: [dpo, ipo]}"]]),
    "kto": ("dpo", [["dpo", "examples/dpo_sort.yaml", "preference={loss: kto}"]]),
    "reward": ("reward_models", [["reward", "examples/reward_sort.yaml"]]),
    "grpo": ("grpo", [GRPO]),
    "everything": ("grpo", [[*GRPO, *EVERYTHING]]),
    "covariance": ("grpo", [[*GRPO, "objective=clip_cov"]]),
    "ppo": ("ppo", [["grpo", "examples/ppo_sort.yaml", "data.batch_size=8", "critic.warmup_steps=1"]]),
    "distill": (
        "distillation",
        [["distill", "examples/distill_sort.yaml", f"teacher.path={START}", "rollout.share=1", "data.batch_size=8"]],
    ),
    "guess": (
        "grpo",
        [
            ["python", "examples/guess.py"],
            ["sft", "examples/sft_guess.yaml", "steps=2"],
            ["grpo", "examples/grpo_guess.yaml", "data.batch_size=4", "evaluation.limit_samples=4"],
        ],
    ),
}
"""Name of a run to the page of its trainer, and the commands that make it."""


@pytest.mark.slow
def test_the_table_has_every_metric_of_supervised_runs(start: Path) -> None:
    names = written(start, "sft_sort_noisy")

    assert {"nll", "entropy", "timing/save"} <= names
    assert sorted(name for name in names if not stands("sft", name)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_table_has_every_metric_that_a_trainer_writes(start: Path, name: str) -> None:
    page, commands = CASES[name]
    *before, last = commands
    for words in before:
        run(start, words)

    run(start, [*last, f"run.name={name}", "steps=2"])

    names = written(start, name)
    assert len(names) > 20
    assert sorted(metric for metric in names if not stands(page, metric)) == []
