"""A recorded step that is damaged is told in a paragraph."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

from holdfast.config.load import from_mapping
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import as_plain
from holdfast.config.yaml12 import to_yaml
from holdfast.errors import ConfigError, RunStopped
from holdfast.features.forensics.mismatch import completions_of
from holdfast.features.forensics.record_files import record_path
from holdfast.features.forensics.recorded import RecordedEngine
from holdfast.features.forensics.recorder import group_line, read_record
from holdfast.training.policy.build import unreplayable_steps
from holdfast.training.policy.samples import SampleRow, sample_table
from holdfast.types import EpisodeSummary, Finish, Group, Prompt, Trajectory
from tests.fake_devices.cases import policy

HEAD = {"step": 1, "base": "/", "compute_dtype": "float32", "metrics": {"loss": 0.5, "grad_norm": 1.0}}
GROUP = {
    "prompt_id": 0,
    "prompt": [5, 6],
    "source": "rows",
    "completions": [
        {"sample_id": 0, "seed": 1, "temperature": 1.0, "tokens": [7], "trained": True, "sampler_logprobs": [-0.5],
         "versions": [[0, 0]], "text": "a"}
    ],
    "facts": {"greedy": None, "completions": [{"reward": 1.0, "parts": {"exact": 1.0}, "finish": "stop"}]},
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = record_path(tmp_path, 1)
    path.parent.mkdir()
    path.write_bytes(gzip.compress((json.dumps(HEAD) + "\n" + json.dumps(GROUP) + "\n").encode(), mtime=0))
    return path


def test_a_bit_that_flips_anywhere_changes_nothing_or_is_named(tmp_path: Path, place: Path) -> None:
    whole = place.read_bytes()
    expected = repr(read_record(tmp_path, 1))

    unnoticed = []
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        place.write_bytes(damaged)
        try:
            found = repr(read_record(tmp_path, 1))
        except ConfigError as error:
            assert "is damaged (" in str(error)
        else:
            unnoticed += [] if found == expected else [bit]

    assert unnoticed == []


@pytest.mark.parametrize("length", [0, 11, 60])
def test_a_torn_one_is_named(tmp_path: Path, place: Path, length: int) -> None:
    place.write_bytes(place.read_bytes()[:length])

    with pytest.raises(ConfigError, match=r"step-00000001.jsonl.gz is damaged \(.*so step 1 cannot be made again"):
        read_record(tmp_path, 1)


@pytest.mark.parametrize(
    ("steps", "checkpoint", "said"),
    [
        (100, {"every_steps": 1, "keep": {"every": 1}}, ""),
        (3, {"every_steps": 1}, ""),
        (100, {}, "saved by the clock alone, and of them the last 3 stay"),
        (100, {"every_steps": 1}, "saved every 1 steps, and of them the last 3 stay"),
        (100, {"every_steps": 5, "keep": {"every": 10}}, "the last 3 and those of every 10 steps stay"),
    ],
)
def test_steps_that_cannot_be_made_again_are_told_at_start(steps: int, checkpoint: dict[str, Any], said: str) -> None:
    tree = {"steps": steps, "model": {"path": "m"}, "data": {"path": "d"}, "reward": "exact", "checkpoint": checkpoint}

    found = unreplayable_steps(from_mapping(tree | {"rollout": {"record": True}}, GRPOConfig))

    assert said in found if said else found == ""
    assert unreplayable_steps(from_mapping(tree, GRPOConfig)) == ""


def shown(**changed: Any) -> SampleRow:
    values: dict[str, Any] = {
        "step": 3, "sample_id": 0, "prompt": "2+2=", "completion": "4", "reward": 1.5, "rewards": {}, "advantage": 0.7,
        "finish": "stop", "trained": True,
    }  # fmt: skip
    return SampleRow(**values | changed)


def test_a_table_of_completions_has_reward_advantage_and_the_rewards_parts() -> None:
    best = shown(rewards={"math": 1.0, "reward": 0.5})
    worst = shown(reward=-10.0, advantage=-0.7, rewards={"math": None, "reward": 0.0}, finish="length")
    newest = shown(reward=None, advantage=0.0, trained=False)

    lines = sample_table([("best", best), ("worst", worst), ("newest", newest)], 3).splitlines()

    assert lines == [
        "completions of step 3:",
        "          reward  advantage  math  reward",
        "    best    1.50      +0.70  1.00    0.50  2+2= -> 4",
        "   worst  -10.00      -0.70  none    0.00  2+2= -> 4 (cut)",
        "  newest    none  untrained  none    none  2+2= -> 4",
    ]


def test_a_table_leaves_out_a_part_that_is_the_reward_and_parts_beyond_the_sixth() -> None:
    alone = sample_table([("best", shown(rewards={"exact": 1.5}))], 3).splitlines()
    many = sample_table([("best", shown(rewards={f"part{n}": float(n) for n in range(8)}))], 3).splitlines()

    assert alone[1] == "          reward  advantage"
    assert many[1].split()[2:] == [*(f"part{n}" for n in range(6)), "(and", "2", "more)"]
    assert many[2].split()[3:9] == [f"{n}.00" for n in range(6)]


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("answer", ["4", "x" * 400, "答" * 400])
@pytest.mark.parametrize("names", [[], ["words"], ["a name that takes columns", *(f"part{n}" for n in range(8))]])
def test_a_table_is_as_wide_as_the_terminal_at_most(columns: int, answer: str, names: list[str]) -> None:
    item = shown(prompt="What is 2+2? " * 40, completion=answer, finish="length", rewards=dict.fromkeys(names, 0.0))

    head, *rows = sample_table([("best", item), ("newest", item)], 3, columns).splitlines()[1:]

    assert max(cell_len(line) for line in [head, *rows]) <= columns
    asked, answered = rows[0].split(" -> ")
    assert all(cell_len(row) >= min(columns - 1, 180) for row in rows)
    assert asked.endswith("2? ") and answered.endswith(answer[-1] + " (cut)")
    left_out = len(names) - len(rows[0].split("...")[0].split()[3:])
    assert (f"(and {left_out} more)" in head) == (left_out > 0)


def test_a_short_completion_leaves_its_columns_to_the_prompt() -> None:
    item = shown(prompt="p" * 100, completion="4")

    row = sample_table([("best", item)], 3, 60).splitlines()[-1]

    assert row == "    best    1.50      +0.70  ..." + "p" * 23 + " -> 4"


def test_a_hostile_completion_is_one_escaped_line_of_bounded_length() -> None:
    hostile = "\x1b[2J\r\nstep 99/99  loss 0.0\x00\ud83d\u202e" + "x" * 100_000
    item = shown(completion=hostile, prompt=hostile[:40], rewards={"\x1b]0;name\x07" * 9: 1.0, "other": 0.0})

    lines = sample_table([("best", item)], 3).splitlines()

    assert len(lines) == 3
    assert all(line.isprintable() and line.isascii() for line in lines)
    assert max(map(len, lines)) < 500
    assert lines[2].endswith("..." + "x" * 157)
    assert r"\x1b[2J\r\nstep 99/99" in lines[2]


EPISODE = EpisodeSummary(
    messages=({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}),
    prompt_messages=1,
    turns=2,
    ended="done",
    reward=0.75,
    turn_rewards=(0.25, 0.5),
    turn_lengths=(2, 1),
    called={"add": 1},
    failed_calls=0,
    cut_turns=1,
    waited_seconds=0.5,
    info={"depth": 2.0},
    samples=((5, 2), (4, 1)),
    tools=({"type": "function", "function": {"name": "add"}},),
)
"""Trained as two samples, since its template writes its first turn otherwise once another one follows."""


def episode(seed: int) -> Trajectory:
    sampled = np.array([0, 0, 1, 1, 0, 0, 0, 0, 1], np.bool_)
    return Trajectory(
        prompt_id=4,
        sample_id=4 * 2**20,
        seed=seed,
        temperature=0.5,
        tokens=np.array([5, 6, 7, 8, 9, 5, 6, 11, 12], np.int64),
        loss_mask=sampled,
        sampler_logprobs=np.where(sampled, np.float32(-1 / 3), np.float32(0)),
        weights_versions=np.where(sampled, 3, -1).astype(np.int32),
        finish=Finish.STOP,
        completion="2",
        episode=EPISODE,
    )


def test_a_recorded_episode_is_the_one_that_was_sampled(tmp_path: Path) -> None:
    prompt = Prompt(4, np.array([5, 6], np.int64), "<a>", {"answer": "2"}, "rows")
    group = Group(prompt, (episode(seed=1), episode(seed=2)))
    untrained = replace(group.trajectories[0], loss_mask=np.zeros(9, np.bool_))
    path = record_path(tmp_path, 1)
    path.parent.mkdir()
    lines = [HEAD, group_line(replace(group, trajectories=(untrained, group.trajectories[1])))]
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))

    asked = replace(prompt, tokens=np.array([5], np.int64))
    found = RecordedEngine(tmp_path).episodes(asked, (1, 2), SamplingConfig(temperature=0.5))

    assert repr(found) == repr(group)
    with pytest.raises(RunStopped, match="was recorded at temperature 0.5, and rollout.temperature is 1"):
        RecordedEngine(tmp_path).episodes(asked, (1, 2), SamplingConfig())
    with pytest.raises(RunStopped, match="has no recorded completion of prompt 4 with seed 3"):
        RecordedEngine(tmp_path).episodes(asked, (1, 3), SamplingConfig(temperature=0.5))


def test_what_was_observed_in_an_episode_is_not_compared_with_an_engine() -> None:
    prompt = Prompt(4, np.array([5, 6], np.int64), "<a>", {})

    compared = list(completions_of([Group(prompt, (episode(seed=1),))]))

    assert [(size, tokens.tolist()) for size, tokens, _ in compared] == [(2, [5, 6, 7, 8, 9]), (2, [5, 6, 11, 12])]
    assert [np.isnan(logprobs).tolist() for *_, logprobs in compared] == [[False, False, True], [True, False]]


def test_a_checkpoint_that_was_not_kept_is_missed_before_anything_that_builds_models_is_imported(
    tmp_path: Path,
) -> None:
    path = record_path(tmp_path, 3)
    path.parent.mkdir()
    path.write_bytes(gzip.compress((json.dumps(HEAD | {"step": 3}) + "\n" + json.dumps(GROUP) + "\n").encode()))
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    tree = policy() | {"model": {"path": str(tmp_path / "no model is here")}}
    (tmp_path / "config.resolved.yaml").write_text(to_yaml(as_plain(from_mapping(tree, GRPOConfig))))
    program = f"""
import sys
from pathlib import Path
from holdfast.errors import ConfigError
from holdfast.features.forensics.proving import explain, replay
for command in (replay, explain):
    try:
        command(Path({str(tmp_path)!r}), 3)
    except ConfigError as error:
        print(error)
print([name for name in ("transformers", "holdfast.training.setup.begin") if name in sys.modules])
"""

    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    needed = "Step 3 is made again from the checkpoint of step 2, and "
    assert said.count(f"{needed}{tmp_path / 'checkpoints'} has none.") == said.count("checkpoint.keep.every") == 2
    assert said.splitlines()[-1] == "[]"
