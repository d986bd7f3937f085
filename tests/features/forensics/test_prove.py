"""`holdfast prove`: identical after a real kill -9, and a divergence wherever something was spoiled on purpose."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fixtures import TINY, write_run
from tests.cli.in_process import cli_in_process
from tests.cli.warm import Done, WarmPython
from tests.features.vllm.served import AHEAD, REWARD, ServedModel, served_tree, serving
from tests.messages import Said


def prove(warm: WarmPython, place: Path, tree: dict[str, Any], *options: str) -> Done:
    write_run(place / "run.yaml", tree)
    return warm.run("-m", "holdfast.cli.main", "prove", "run.yaml", *options, cwd=place)


def refused(place: Path, tree: dict[str, Any], *options: str) -> Done:
    """Run a proof that is refused before anything runs."""
    write_run(place / "run.yaml", tree)
    return cli_in_process("prove", "run.yaml", *options, cwd=place)


@pytest.fixture
def dropping(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a run with dropout, so that random state matters."""
    tree["model"] = {"config": TINY | {"attention_dropout": 0.3}, "tokenizer": "builtin:characters", "dropout": True}
    return tree | {"optim": {"lr": 0.01}}


def test_a_killed_run_that_goes_on_is_identical(warm: WarmPython, tmp_path: Path, dropping: dict[str, Any]) -> None:
    done = prove(warm, tmp_path, dropping, "--steps", "6", "--kill-at", "5")

    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert re.fullmatch(r"killed: SIGKILL to rank [01] in phase (data|forward_backward|optimizer) of step 5", lines[1])
    resumed = re.fullmatch(r"resumed: process (\d+) after (\d+), from step (\d); (\d) steps? computed again", lines[2])
    assert resumed is not None, done.out
    assert resumed[1] != resumed[2]
    assert int(resumed[3]) + int(resumed[4]) == 5
    assert "steps 1 to 6: loss, gradient norm, learning rate and sequences are identical" in lines
    assert lines[-1] == "identical"


READING = """
import os, threading, time
from pathlib import Path

OWN = Path(f"rows-{os.environ['RANK']}-{os.getpid()}.txt")
FIRST = []

def is_taken(row):
    if threading.current_thread().name == "holdfast-rows":
        with OWN.open("a") as file:
            file.write(row["prompt"] + "\\n")
    return True

def returns_when_the_next_batch_is_read(event):
    FIRST.append(event.step)
    deadline = time.monotonic() + 60
    while event.step < 6 and time.monotonic() < deadline:
        if len(OWN.read_text().splitlines()) == 2 * (event.step - FIRST[0] + 2):
            return
        time.sleep(0.01)
"""
"""A filter that writes the rows that a rank reads, and an observer that waits until those of the next step are read."""


@pytest.mark.slow
def test_a_run_that_is_killed_when_its_next_batch_is_read_and_not_trained_is_identical(
    warm: WarmPython, tmp_path: Path, dropping: dict[str, Any]
) -> None:
    (tmp_path / "reading.py").write_text(READING)
    dropping["data"] |= {"filter": "reading.py:is_taken"}
    dropping["observers"] = ["reading.py:returns_when_the_next_batch_is_read"]

    done = prove(warm, tmp_path, dropping, "--steps", "6", "--kill-at", "5", "--seed", "2")

    assert done.code == 0, done.out + done.err
    assert "killed: SIGKILL to rank 0 in phase data of step 5" in done.out
    assert done.out.splitlines()[-1] == "identical"
    resumed = re.search(r"from step (\d);", done.out)
    assert resumed is not None
    read = sorted(len(file.read_text().splitlines()) for file in tmp_path.glob("rows-0-*.txt"))
    # Rank 0 reads two rows of a batch: straight, in the run that died before it trained step 5, and in the rest.
    assert read == sorted([2 * 6, 2 * 5, 2 * (6 - int(resumed[1]))])


WORLD = """
from holdfast.environments.base import Observation
class World:
    replayable = True
    def begin(self, row): ...
    def step(self, turn):
        odd = sum(ord(character) % 2 for character in turn.text)
        return Observation(f"turn {turn.number}: {odd}", odd / 8, turn.number == 1)
"""


@pytest.mark.slow
def test_a_run_with_an_environment_is_proved_by_sampling_its_episodes_again(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    """Killed while it samples; its environment promises to be replayable."""
    (tmp_path / "world.py").write_text(WORLD)
    tree["model"]["config"]["max_position_embeddings"] = 96
    tree["data"] |= {"max_length": 96, "tokens_per_micro_batch": 256}
    tree |= {
        "environment": {"path": "world.py:World", "on_cut": "continue"},
        "reward": "environment",
        "rollout": {"group_size": 2, "max_new_tokens": 8, "show": 0},
    }

    done = prove(warm, tmp_path, tree, "--steps", "3", "--kill-at", "3", "--seed", "7")

    assert done.code == 0, done.out + done.err
    assert re.search(r"killed: SIGKILL to rank [01] in phase rollout of step 3", done.out)
    assert "steps 1 to 3: loss, gradient norm, learning rate and sequences are identical" in done.out
    assert done.out.splitlines()[-1] == "identical"


@pytest.mark.slow
def test_a_run_whose_environment_keeps_time_is_proved_from_what_it_recorded(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    """Its environment answers by the clock: no rollout can be sampled again, and each turn has a return of its own."""
    world = WORLD.replace("    replayable = True\n", "").replace("odd / 8", "odd / 8 + time.time() % 1")
    (tmp_path / "world.py").write_text("import time\n" + world)
    tree["model"]["config"]["max_position_embeddings"] = 96
    tree["data"] |= {"max_length": 96, "tokens_per_micro_batch": 256}
    tree |= {
        "environment": {"path": "world.py:World", "on_cut": "continue"},
        "reward": "environment",
        "rollout": {"group_size": 2, "max_new_tokens": 8, "show": 0},
        "advantage": {"kind": "grpo", "turns": "discounted"},
        "groups": {"truncated": "keep"},
    }
    tree["launch"]["ranks"] = 1

    done = prove(warm, tmp_path, tree, "--steps", "3", "--kill-at", "3", "--seed", "7")

    assert done.code == 0, done.out + done.err
    assert "sampling is outside of this proof: what is decoded together while environments are at work" in done.out
    assert "steps 1 to 3: loss, gradient norm, learning rate and sequences are identical" in done.out
    assert done.out.splitlines()[-1] == "identical"


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_served_run_is_proved_from_what_it_recorded(warm: WarmPython, tmp_path: Path, staleness: int) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    with serving(ServedModel()) as url:
        tree = served_tree([url], "runs", **AHEAD, launch={"device": "cpu", "ranks": 2})
        tree["rollout"]["max_staleness"] = staleness

        done = prove(warm, tmp_path, tree, "--steps", "4", "--kill-at", "3")

    assert done.code == 0, done.out + done.err
    assert "sampling is outside of this proof" in done.out
    assert "steps 1 to 4: loss, gradient norm, learning rate and sequences are identical" in done.out
    assert done.out.splitlines()[-1] == "identical"


@pytest.mark.parametrize(
    ("sections", "left_out", "named"),
    [
        (
            {"advantage": "remax"},
            [],
            "advantage: remax",
        ),
        (
            {"teacher": {"path": "t"}, "distill": {"loss": "sampled_reverse_kl"}},
            ["reward", "rollout.show", "data.max_prompt_length"],
            "distill",
        ),
    ],
)
def test_what_nothing_records_is_refused_before_anything_runs(
    tmp_path: Path, sections: dict[str, Any], left_out: list[str], named: str, said: Said
) -> None:
    tree = served_tree(["http://127.0.0.1:9"], "runs", **sections)
    for key in left_out:
        section, _, name = key.rpartition(".")
        del (tree[section] if section else tree)[name]
    done = refused(tmp_path, tree, "--steps", "4", "--kill-at", "3")

    assert done.code == 2
    said(done.err)
    assert "rollout.engine" in done.err
    assert named in done.err
    assert not (tmp_path / "runs").exists()


def test_an_advantage_that_nothing_records_is_refused_where_an_environment_keeps_time(
    tmp_path: Path, tree: dict[str, Any], said: Said
) -> None:
    (tmp_path / "world.py").write_text(WORLD.replace("replayable = True", ""))
    tree |= {
        "environment": {"path": "world.py:World"},
        "reward": "environment",
        "rollout": {"max_new_tokens": 8},
        "advantage": "remax",
    }

    done = refused(tmp_path, tree, "--steps", "4", "--kill-at", "3")

    assert done.code == 2
    said(done.err)
    assert "advantage" in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_proof_keeps_out_of_the_run_s_own_checkpoints(warm: WarmPython, tmp_path: Path, tree: dict[str, Any]) -> None:
    done = prove(
        warm, tmp_path, tree | {"checkpoint": {"storage": str(tmp_path / "store")}}, "--steps", "4", "--kill-at", "3"
    )

    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == "identical"
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("broken", "divergence"),
    [
        pytest.param("rng", r"first divergence: step [345]: loss is ", marks=pytest.mark.slow, id="rng"),
        pytest.param(
            "cursor", r"first divergence: step [345]: (loss|data/order_hash) is ", marks=pytest.mark.slow, id="cursor"
        ),
        ("optimizer", r"first divergence: step [3456]: (loss|grad_norm) is "),
    ],
)
def test_whatever_is_broken_on_purpose_is_a_divergence(
    warm: WarmPython, tmp_path: Path, dropping: dict[str, Any], broken: str, divergence: str
) -> None:
    done = prove(warm, tmp_path, dropping, "--steps", "6", "--kill-at", "5", "--break", broken)

    assert done.code == 1, done.err
    assert re.search(divergence, done.out), done.out
    assert "identical" not in done.out.splitlines()[-1]


def test_a_kill_that_leaves_nothing_to_compute_again_is_refused(
    tmp_path: Path, tree: dict[str, Any], said: Said
) -> None:
    done = refused(tmp_path, tree, "--steps", "4", "--kill-at", "5")

    assert done.code == 2
    said(done.err)
    assert "--kill-at 5" in done.err
    assert "--steps 4" in done.err


@pytest.mark.slow
def test_a_killed_run_with_quantised_moments_and_averages_goes_on_identically(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    tree["model"] = {"config": TINY | {"hidden_size": 64, "intermediate_size": 128}, "tokenizer": "builtin:characters"}
    tree["optim"] = {"kind": "adamw_8bit", "lr": 0.01, "ema": {"decay": 0.9}}

    done = prove(warm, tmp_path, tree, "--steps", "6", "--kill-at", "5")

    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == "identical"
    # One layer has 12 trained tensors: weights and averages, a counter, and two moments, whole or in three parts each.
    tensors = re.search(r"state of step 6: (\d+) tensors", done.out)
    assert tensors is not None, done.out
    assert int(tensors[1]) > 12 * (1 + 1 + 1 + 2)
