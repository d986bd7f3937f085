"""`holdfast demo`, whole: two runs on two ranks, a real kill -9, and what the summary claims."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.commands.demo import KILL_AT, device_for
from holdfast.config.yaml12 import parse_file
from holdfast.launch.environment import cuda_devices
from holdfast.metrics.sink import read_metrics
from tests.cli.warm import WarmPython
from tests.features.report.cases import data_of, steps_of

STEPS = 80
SHORT = """
import sys
from pathlib import Path
from holdfast.cli.commands.demo import demo

sys.executable, *words = sys.argv[1:]
demo(Path(words[0]), 0, *words[1:], kill_at=4)
"""


def summary_of(command: list[object]) -> dict[str, str]:
    """Run a demo and return the lines of its summary by their heads."""
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout
    assert done.stdout.count("whole: ") >= 3
    summary = done.stdout.rpartition("=== 5/5  summary\n")[2]
    return dict(re.split(r"  +", line, maxsplit=1) for line in summary.splitlines())


def check_parts(directory: Path, summary: dict[str, str], steps: int, back_to: int, kill_at: int) -> None:
    run = directory / "grpo"
    logged = [line["step"] for line in read_metrics(run / "metrics.jsonl") if "reward" in line]
    assert logged == list(range(1, steps + 1))
    raw = (run / "metrics.jsonl").read_text()
    assert f'"event":"rewind","to":{back_to}' in raw, f"a kill at step {kill_at} sets the run back to step {back_to}"
    words = rf"rank 1 \(process \d+\) at step {kill_at}; all {steps} steps are there"
    assert re.fullmatch(words, summary["killed and resumed"])
    assert Path(summary["the model"]).is_dir()
    page = Path(summary["what happened"])
    (drawn,) = data_of(page.read_text())["runs"]
    axis, rewards = drawn["curves"]["reward"]
    assert (steps_of(drawn, axis), len(rewards)) == (list(range(1, steps + 1)), steps)
    assert [mark[0] for mark in drawn["marks"]["resumed"]] == [back_to]
    assert "was killed by SIGKILL" in drawn["marks"]["failed"][0][1]
    assert any(whole["tokens"] for whole in drawn["samples"]["whole"].values())


def check_whole(directory: Path, seed: int) -> None:
    command = ["-m", "holdfast.cli.main", "demo", "--dir", directory, "--seed", seed]

    summary = summary_of(command)

    first, last = map(float, re.findall(r"\d\.\d+", summary["sampled reward"]))
    before, after, plain = map(float, re.findall(r"\d\.\d+", summary["held-out accuracy"]))
    assert first < 0.4
    assert last >= 0.9
    assert before < 0.9
    assert after >= 0.95
    assert plain >= 0.95
    check_parts(directory, summary, STEPS, 30, KILL_AT)


@pytest.mark.parametrize(
    ("gpus", "device", "where"),
    [
        (0, "cpu", "the CPU"),
        (1, "cpu", "the CPU, since 1 GPU is too few for 2 ranks"),
        (2, "auto", "2 of 2 GPUs"),
        (8, "auto", "2 of 8 GPUs"),
    ],
)
def test_two_ranks_share_no_gpu(gpus: int, device: str, where: str) -> None:
    assert device_for(gpus) == (device, where)


def test_a_demo_of_few_steps_kills_resumes_verifies_and_exports(warm: WarmPython, tmp_path: Path) -> None:
    few = ["steps=10", "checkpoint.every_steps=3", "evaluation.sets.held_out.synthetic.rows=8", "data.batch_size=4"]

    summary = summary_of(["-c", SHORT, warm.launcher, tmp_path, *few])

    check_parts(tmp_path, summary, 10, 3, 4)
    launch = parse_file(tmp_path / "grpo" / "config.resolved.yaml").values["launch"]
    assert (launch["ranks"], launch["device"]) == (2, device_for(cuda_devices())[0])


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two whole runs, on cores that other tests share
def test_the_demo_does_what_it_says(tmp_path: Path) -> None:
    check_whole(tmp_path, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_demo_does_so_with_other_seeds(tmp_path: Path, seed: int) -> None:
    check_whole(tmp_path, seed)
