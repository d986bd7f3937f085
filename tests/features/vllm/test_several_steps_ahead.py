"""Completions of several next steps on their way (`rollout.max_staleness: 3`): order, age, interruptions, kills."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import ConfigError
from holdfast.features.plan.execution.saved import ahead_bytes
from holdfast.rollout.sampling import mixed
from tests.cli.fixtures import write_run
from tests.cli.warm import WarmPython
from tests.features.vllm.kills import is_killed
from tests.features.vllm.served import AHEAD, REWARD, ServedModel, served_tree, serving
from tests.features.vllm.test_served_runs import (
    LONGEST_WAIT,
    OF_A_STEP,
    OF_THE_WALK,
    PACED,
    ahead_of,
    recorded,
    run,
    stopping_at_2,
)
from tests.rewards.conftest import wait_for


def ahead_tree(urls: list[str], directory: str, **sections: Any) -> dict[str, Any]:
    """Return a run that samples three steps ahead, and records."""
    tree = served_tree(urls, directory, **AHEAD, **sections)
    tree["rollout"] |= {"max_staleness": 3, "record": True}
    return tree


def seeds_of(tree: dict[str, Any], step: int) -> set[int]:
    """Return the seeds of the completions of a step, counted from 0: requests of several steps come in any order."""
    seed = from_mapping(tree, GRPOConfig).seed
    return {mixed(seed, step, prompt, place) for prompt in range(4 * step, 4 * step + 4) for place in range(2)}


def ages(directory: Path, step: int) -> set[int]:
    """Return by how many updates the oldest tokens of completions were older than the policy that learned from them."""
    return {step - 1 - min(version for _, version in one["versions"]) for one in recorded(directory, step)}


def keys(directory: Path, step: int) -> list[int]:
    """Return which completions a step was trained on."""
    return sorted(one["sample_id"] for one in recorded(directory, step))


@pytest.mark.slow
def test_a_completion_that_takes_three_steps_delays_none_of_them(tmp_path: Path) -> None:
    events, claimed, waited = tmp_path / "events.txt", threading.Lock(), list[bool]()
    of_the_last: set[int] = set()
    (tmp_path / "paced.py").write_text(PACED.replace("EVENTS", repr(str(events))).replace("GOES_ON", "True"))

    def updates() -> int:
        return events.read_text().count("begins") - 1 if events.exists() else 0  # without that of the walk

    def slow(seed: int) -> float:
        if seed in of_the_last and claimed.acquire(blocking=False):
            # The third step's is the last before its own.
            waited.append(wait_for(lambda: updates() >= 3, LONGEST_WAIT))
        return 0.0

    def before_push(pushed: int) -> None:
        others = OF_THE_WALK + 4 * OF_A_STEP - 1
        if pushed > 1:  # of weights that an update moved
            assert wait_for(lambda: served.count_of("answered") >= others, LONGEST_WAIT)

    served = ServedModel(slow=slow, before_push=before_push)
    with serving(served) as url:
        tree = ahead_tree([url], str(tmp_path), objective={"kind": "path", "path": "paced.py:paced"})
        del tree["correction"]
        of_the_last |= seeds_of(tree, 3)
        run(tmp_path, tree)

    assert waited == [True]
    assert served.count_of("asked") == OF_THE_WALK + 4 * OF_A_STEP
    # The one that was slow was sampled from what the third push brought.
    assert [ages(tmp_path, step) for step in (1, 2, 3, 4)] == [{0}, {1}, {2}, {1, 3}]


@pytest.mark.slow
def test_a_resume_takes_finished_completions_of_every_step_ahead(tmp_path: Path) -> None:
    served = ServedModel()
    observer = stopping_at_2(tmp_path, served, OF_THE_WALK + 5 * OF_A_STEP)
    with serving(served) as url:
        tree = ahead_tree([url], str(tmp_path), steps=8, observers=[observer])
        run(tmp_path, tree)
    saved = ahead_of(tmp_path, 2)
    (tmp_path / "stopping").unlink()
    again = ServedModel()
    with serving(again) as url:
        tree["rollout"]["engine"]["url"] = [url]
        run(tmp_path, tree | {"steps": 6})

    assert {one["step"] for one in saved} == {2, 3, 4}
    most = ahead_bytes(from_mapping(tree, GRPOConfig))
    assert 0.5 * most <= len(json.dumps(saved)) * 3 * OF_A_STEP / len(saved) <= most, "as the plan counts them"
    # Of six steps two were trained and three are in the checkpoint, but for answers that were on their way.
    assert again.count_of("asked") == OF_THE_WALK + 4 * OF_A_STEP - len(saved)
    for step, versions in ((3, {0}), (4, {0, 1}), (5, {0, 1, 2})):
        taken = {one["request_id"] * 2**20 + one["place"] for one in saved if one["step"] == step - 1}
        trained = recorded(tmp_path, step)
        assert taken <= {one["sample_id"] for one in trained}
        of_checkpoint = [one["versions"] for one in trained if one["sample_id"] in taken]
        assert {version for each in of_checkpoint for _, version in each} <= versions


def test_completions_of_a_checkpoint_from_one_step_ahead_are_taken(tmp_path: Path) -> None:
    from holdfast.training.policy.ahead import CompletionsAhead

    config = from_mapping(ahead_tree(["http://127.0.0.1:9"], str(tmp_path)), GRPOConfig)
    told = [
        record | {"request_id": number} for number, record in enumerate(CompletionsAhead(Any, config).largest()[:2])
    ]  # type: ignore[arg-type]
    for record in told:
        del record["step"]  # as checkpoints had it when one step was the most

    ahead = CompletionsAhead(Any, config)  # type: ignore[arg-type]
    ahead.restore(told)

    assert [record["step"] for record in ahead.finished()()] == [None, None]
    assert [record["request_id"] for record in ahead.finished()()] == [0, 1]


@pytest.mark.parametrize("interrupt", ["continue", "abandon"])
def test_a_push_meets_completions_that_go_on_or_are_sampled_again(tmp_path: Path, interrupt: str) -> None:
    """A completion of the third step waits before its fourth token for the next push."""
    claimed, here, waited = threading.Lock(), threading.local(), list[bool]()
    of_the_third: set[int] = set()

    def note_seed(seed: int) -> float:
        here.seed = seed
        return 0.0

    def before_token(_: str, number: int) -> None:
        if number == 3 and here.seed in of_the_third and claimed.acquire(blocking=False):
            before = served.count_of("pushed")
            waited.append(wait_for(lambda: served.count_of("pushed") > before, LONGEST_WAIT))

    served = ServedModel(slow=note_seed, before_token=before_token)
    with serving(served) as url:
        tree = ahead_tree([url], str(tmp_path))
        tree["rollout"]["engine"]["interrupt"] = interrupt
        of_the_third |= seeds_of(tree, 2)
        run(tmp_path, tree)

    assert waited == [True]

    asked = [what for _, what in served.events if what.startswith("asked")]
    aborted = [what for _, what in served.events if what.endswith("abort")]
    versions = [one["versions"] for step in (1, 2, 3, 4) for one in recorded(tmp_path, step)]
    several = [each for each in versions if len(each) > 1]
    if interrupt == "continue":
        assert not aborted
        assert len(asked) == OF_THE_WALK + 4 * OF_A_STEP
        assert several
        assert all([version for _, version in each] == sorted({version for _, version in each}) for each in several)
    else:
        assert aborted
        assert len(asked) == OF_THE_WALK + 4 * OF_A_STEP + len(aborted)
        assert not several
    assert all(ages(tmp_path, step) <= set(range(4)) for step in (1, 2, 3, 4))


@pytest.mark.slow
def test_a_server_that_dies_with_completions_of_three_steps_loses_none(tmp_path: Path) -> None:
    dead = threading.Event()

    def busy(path: str) -> bool:
        if sum(what.startswith("asked") for _, what in dying.events) >= OF_THE_WALK + 10:
            dead.set()
        return dead.is_set()

    straight, dying = tmp_path / "straight", ServedModel(seconds=0.2, busy=busy)
    straight.mkdir()
    with serving(ServedModel()) as url, serving(dying) as other:
        run(straight, ahead_tree([url], str(straight), steps=5))
        run(tmp_path, ahead_tree([other, url], str(tmp_path), steps=5))

    assert dead.is_set()
    for step in range(1, 6):
        assert keys(tmp_path, step) == keys(straight, step)
        assert len(set(keys(tmp_path, step))) == OF_A_STEP
        assert max(ages(tmp_path, step)) <= 3


def test_prompts_that_are_drawn_again_have_no_place_between_steps_ahead() -> None:
    tree = ahead_tree(["http://127.0.0.1:9"], "runs", groups={"flat": "resample"})

    with pytest.raises(ConfigError, match="3 gives the next steps their prompts before this one has trained"):
        from_mapping(tree, GRPOConfig)


@pytest.mark.slow
def test_twenty_kills_lose_no_completion_and_train_none_twice(warm: WarmPython, tmp_path: Path) -> None:
    """A run of 12 steps is killed at 20 events of its server, drawn by a seed, and started again each time."""
    draw, steps = random.Random(39), 12
    straight = tmp_path / "straight"
    straight.mkdir()
    with serving(ServedModel()) as url:
        run(straight, ahead_tree([url], str(straight), steps=steps))
    (tmp_path / "reward.py").write_text(REWARD)
    served, killed = ServedModel(), 0
    with serving(served) as url:
        write_run(tmp_path / "run.yaml", ahead_tree([url], ".", steps=steps))
        command = [str(warm.program), "-m", "holdfast.cli.main", "grpo", "run.yaml"]
        while killed < 20 and is_killed(command, tmp_path, served, draw.randint(2 * OF_THE_WALK, 2 * OF_THE_WALK + 24)):
            killed += 1
        done = warm.run(*command[1:], cwd=tmp_path)

    assert done.code == 0, done.out + done.err
    assert killed >= 10
    for step in range(1, steps + 1):
        assert keys(tmp_path, step) == keys(straight, step)
        assert len(set(keys(tmp_path, step))) == OF_A_STEP
        assert max(ages(tmp_path, step)) <= 3
