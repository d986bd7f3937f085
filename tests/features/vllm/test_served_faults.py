"""Servers that go wrong in the middle of a run: nothing wrong is saved or trained on, and nothing ends needlessly."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast import patience
from holdfast.errors import ConfigError, RunStopped
from tests.features.vllm.served import AHEAD, ServedModel, served_tree, serving
from tests.features.vllm.test_served_runs import OF_A_STEP, OF_THE_WALK, ahead_of, recorded, run, stopping_at_2

EVALUATED: dict[str, Any] = {"every_steps": 1, "sets": {"e": {"synthetic": {"task": "sort", "rows": 2}}}}


def ahead_tree(urls: list[str], directory: str, **sections: Any) -> dict[str, Any]:
    """Return a run that samples a step ahead, and records."""
    tree = served_tree(urls, directory, **AHEAD, **sections)
    tree["rollout"] |= {"max_staleness": 1, "record": True}
    return tree


@pytest.mark.slow
def test_completions_behind_a_push_that_fails_its_proof_are_not_saved(tmp_path: Path) -> None:
    spoiled = []

    def garble(tensors: dict[str, Any]) -> dict[str, Any]:
        if sum(what == "pushed" for _, what in served.events) >= 3:  # of the walk, step 1 and step 2
            spoiled.append(True)
            tensors = {name: value + 0.3 for name, value in tensors.items()}
        return tensors

    def answer(path: str, told: Any) -> Any:
        if spoiled and "prompt_logprobs" in told:
            time.sleep(1.5)  # completions that waited through the push end before the proof says what is wrong
        return told

    served = ServedModel(seconds=0.6, garble=garble, answer=answer)
    with serving(served) as url:
        tree = ahead_tree([url], str(tmp_path), evaluation=EVALUATED)
        with pytest.raises(RunStopped, match="say other log-probabilities than the trainer"):
            run(tmp_path, tree)

    pushes = [when for when, what in served.events if what == "pushed"]
    answered = [when for when, what in served.events if what.startswith("answered") and what.endswith("length")]
    step = max(int(place.name[5:]) for place in (tmp_path / "r" / "checkpoints").glob("step-*"))
    assert [when for when in answered if when > pushes[-1]]  # there were some
    assert {version for one in ahead_of(tmp_path, step) for _, version in one["segments"]} == set()
    assert {one["weights_version"] for one in ahead_of(tmp_path, step)} <= {step - 1}
    assert len(ahead_of(tmp_path, step)) < 8


@pytest.mark.slow
def test_averages_that_are_evaluated_sample_nothing_that_is_trained_on(tmp_path: Path) -> None:
    served = ServedModel(seconds=0.6)
    with serving(served) as url:
        ema = {"lr": 3e-3, "schedule": "constant", "ema": {"decay": 0.5, "evaluate": True}}
        tree = ahead_tree([url], str(tmp_path), steps=3, optim=ema, evaluation=EVALUATED)

        run(tmp_path, tree)

    assert [{tuple(map(tuple, one["versions"])) for one in recorded(tmp_path, step)} for step in (2, 3)] == [
        {((0, 0),)},
        {((0, 1),)},
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_server_that_samples_from_replaced_weights_is_asked_no_more(tmp_path: Path, staleness: int) -> None:
    first: list[str] = []

    def answer(path: str, told: Any) -> Any:
        pushes = [what for _, what in served.events if what == "pushed"]
        for choice in told.get("choices", ()) if len(pushes) >= 2 else ():
            first.append(choice["weight_versions"][0]["version"])
            if len(pushes) >= 4:
                choice["weight_versions"][0]["version"] = first[0]
        return told

    served = ServedModel(answer=answer)
    with serving(served) as url:
        tree = ahead_tree([url], str(tmp_path))
        tree["rollout"]["max_staleness"] = staleness
        with pytest.raises(RunStopped, match=rf"{url} samples from weights called .*, or replaced since"):
            run(tmp_path, tree)

    assert (tmp_path / "r" / "checkpoints" / "step-00000002").is_dir()  # what came of the right weights was trained on
    ages = {step - 1 - version for step in (1, 2) for one in recorded(tmp_path, step) for _, version in one["versions"]}
    assert ages <= {0, staleness}


def spoil(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return other weights than were sent."""
    return {name: value + 0.3 for name, value in tensors.items()}


@pytest.mark.slow
def test_weights_of_a_checkpoint_are_proved_where_the_start_alone_is(tmp_path: Path) -> None:
    def garble(tensors: dict[str, Any]) -> dict[str, Any]:
        return spoil(tensors) if [what for _, what in again.events if what == "pushed"] else tensors

    with serving(ServedModel()) as url:
        tree = served_tree([url], str(tmp_path), steps=2)
        tree["rollout"]["engine"]["prove"] = "start"
        run(tmp_path, tree)
    again = ServedModel(garble=garble)
    with serving(again) as url:
        tree["rollout"]["engine"]["url"] = [url]
        with pytest.raises(RunStopped, match="say other log-probabilities than the trainer"):
            run(tmp_path, tree | {"steps": 3})

    assert len([what for _, what in again.events if what.startswith("asked")]) == 4  # of the walk


def test_a_server_that_was_started_again_is_proved_where_the_start_alone_is(tmp_path: Path) -> None:
    def garble(tensors: dict[str, Any]) -> dict[str, Any]:
        pushes = len([what for _, what in served.events if what == "pushed"])
        if pushes == 2:
            served.facts["identity"] = "another"  # seen before the next push
        return spoil(tensors) if pushes == 3 else tensors

    served = ServedModel(garble=garble)
    with serving(served) as url:
        tree = served_tree([url], str(tmp_path))
        tree["rollout"]["engine"]["prove"] = "start"
        with pytest.raises(RunStopped, match="say other log-probabilities than the trainer"):
            run(tmp_path, tree)

    assert (tmp_path / "r" / "checkpoints" / "step-00000002").is_dir()


def test_completions_of_a_checkpoint_are_not_joined_to_prompts_of_other_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = ServedModel()
    observer = stopping_at_2(tmp_path, served, OF_THE_WALK + 3 * OF_A_STEP)
    with serving(served) as url:
        tree = ahead_tree([url], str(tmp_path), observers=[observer])
        run(tmp_path, tree)
        (tmp_path / "stopping").unlink()
        tree["data"] |= {"synthetic": {"task": "reverse", "rows": 200}}
        tree["checkpoint"] |= {"resume": {"changed": ["data"]}}
        run(tmp_path, tree | {"steps": 3})

    saved = len(ahead_of(tmp_path, 2))
    assert 0 < saved <= OF_A_STEP
    assert all(one["versions"] == [[0, 2]] for one in recorded(tmp_path, 3))
    assert f"note: {saved} completions that the checkpoint has of the next steps are of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "event", "count"),
    [
        ("/health", "pushed", 2),
        ("/pause", "pushed", 2),
        ("/inference/v1/generate", "pushed", 2),  # of the proof
        ("/inference/v1/generate", "asked", 6),  # of a completion of step 1
    ],
)
def test_half_a_second_without_service_ends_no_run(tmp_path: Path, path: str, event: str, count: int) -> None:
    seconds = 0.5 * patience.current.http_first_pause_seconds / patience.Patience().http_first_pause_seconds
    until: list[float] = []

    def busy(asked: str) -> bool:
        if not until and asked == path and len([what for _, what in served.events if what.startswith(event)]) == count:
            until.append(time.monotonic() + seconds)
        return bool(until) and time.monotonic() < until[0]

    served = ServedModel(busy=busy)
    with serving(served) as url:
        tree = served_tree([url], str(tmp_path), steps=2)
        tree["rollout"]["engine"]["attempts"] = 4  # the default

        assert run(tmp_path, tree).step == 2

    assert until


def test_service_that_does_not_come_back_ends_a_run_with_its_address(tmp_path: Path) -> None:
    def busy(asked: str) -> bool:
        return asked == "/inference/v1/generate" and len([what for _, what in served.events if what == "pushed"]) == 2

    served = ServedModel(busy=busy)
    with serving(served) as url:
        tree = served_tree([url], str(tmp_path), steps=2)
        tree["rollout"]["engine"] |= {"attempts": 2, "prove": "start"}
        with pytest.raises(RunStopped, match=f"at {url} took the weights, and then answers 503"):
            run(tmp_path, tree)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_stop_does_not_wait_for_a_server_that_hangs(tmp_path: Path, staleness: int) -> None:
    hangs, once, stopped_at = threading.Event(), threading.Lock(), list[float]()

    def stop() -> None:
        stopped_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    def answer(path: str, told: Any) -> Any:
        pushes = len([what for _, what in served.events if what == "pushed"])
        is_sample = any(len(choice["token_ids"]) > 1 for choice in told.get("choices", ()))
        if pushes >= 4 and (is_sample or path == "/abort_requests" or (once.locked() and path == "/collective_rpc")):
            if once.acquire(blocking=False):
                killer.start()
            hangs.wait(60)
        return told

    killer = threading.Timer(0.5, stop)
    served = ServedModel(answer=answer)
    with serving(served) as url:
        tree = ahead_tree([url], str(tmp_path))
        tree["rollout"]["max_staleness"] = staleness
        try:
            outcome = run(tmp_path, tree)
        finally:
            seconds = time.monotonic() - stopped_at[0]
            hangs.set()

    assert outcome.stopped == "stopped by SIGTERM"
    assert seconds < 8  # two for requests to be ended, one to give the server back, and the save
    assert (tmp_path / "r" / "checkpoints" / f"step-{outcome.step:08d}").is_dir()


@pytest.mark.parametrize("pushes", [0, 2])
def test_a_server_that_dies_behind_a_look_at_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pushes: int
) -> None:
    def busy(asked: str) -> bool:
        return asked == "/collective_rpc" and len([what for _, what in dying.events if what == "pushed"]) >= pushes

    dying = ServedModel(busy=busy)
    with serving(ServedModel()) as url, serving(dying) as dead:
        tree = served_tree([url, dead], str(tmp_path))
        if pushes:
            run(tmp_path, tree)
            assert f"warning: the server at {dead} answers 503" in capsys.readouterr().out
        else:
            with pytest.raises(ConfigError, match=f"the server at {dead} answers 503 .*, although it said"):
                run(tmp_path, tree)
            assert not (tmp_path / "r").exists()


def test_no_server_that_outlives_a_look_at_it_ends_the_run_with_its_address(tmp_path: Path) -> None:
    def busy(asked: str) -> bool:
        return asked == "/collective_rpc" and len([what for _, what in served.events if what == "pushed"]) >= 3

    served = ServedModel(busy=busy)
    with serving(served) as url, pytest.raises(RunStopped, match=f"No server took the weights: {url} answers 503"):
        run(tmp_path, served_tree([url], str(tmp_path)))
