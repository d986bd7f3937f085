"""Whole runs that sample from a server: versions, completions of the next step, checkpoints that hold some, proofs."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.config.load import from_mapping
from holdfast.config.sections.launch import LaunchConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import ConfigError
from holdfast.metrics.sink import METRICS, read_metrics
from holdfast.parallel.mesh import World, joined_world
from holdfast.recipes.grpo import grpo
from tests.features.vllm.served import AHEAD, REWARD, ServedModel, served_tree, serving
from tests.rewards.conftest import wait_for

PACED = '''
import time
from pathlib import Path

from holdfast.config.sections.policy import ClipConfig, CorrectionConfig, EntropyConfig, KLConfig
from holdfast.objectives.policy import PolicyGradient
from holdfast.objectives.surrogates import Reinforce


class Paced(PolicyGradient):
    """Says when it begins and when it ends, and waits for a condition in between."""

    def token_terms(self, logprobs, entropy, tokens):
        events, last = Path(EVENTS), time.monotonic() + 60
        with events.open("a") as file:
            file.write("update begins\\n")
        begun = events.read_text().count("begins")
        while not (GOES_ON) and time.monotonic() < last:
            time.sleep(0.01)
        with events.open("a") as file:
            file.write("update ends\\n" if time.monotonic() < last else "update waited in vain\\n")
        return super().token_terms(logprobs, entropy, tokens)


def paced():
    return Paced(Reinforce())
'''
STOPPING = """
import time
from pathlib import Path


def at_2(event):
    last = time.monotonic() + 60
    while event.step == 2 and Path(WHILE).exists() and not Path(SETTLED).exists() and time.monotonic() < last:
        time.sleep(0.01)  # what was sent ahead is to be answered before the save
    time.sleep(0.5 if event.step == 2 else 0.0)  # and read, which nobody can look for
    return "stop" if event.step == 2 and Path(WHILE).exists() else None
"""
OF_THE_WALK, OF_A_STEP = 4, 8
"""Completions that are asked for before step 1, and for each step."""
LONGEST_WAIT = 60.0


def stopping_at_2(place: Path, served: ServedModel, asked: int, slow: Callable[[], int] = lambda: 0) -> str:
    """Write an observer that stops after step 2, once a server was asked for so many completions and gave all but some.

    Args:
        place: Where; its file `stopping` lets the run stop.
        served: The server.
        asked: Completions since it was started.
        slow: How many of them are not waited for.

    Returns:
        Its name in `observers`.
    """
    settled = place / "settled"
    source = STOPPING.replace("WHILE", repr(str(place / "stopping"))).replace("SETTLED", repr(str(settled)))
    (place / "stopping.py").write_text(source)
    (place / "stopping").touch()

    def look() -> None:
        if served.count_of("asked") >= asked and served.count_of("answered") >= asked - slow():
            settled.touch()

    served.on_event = look
    return "stopping.py:at_2"


def all_answered(served: ServedModel, staleness: int) -> Callable[[int], None]:
    """Return what holds a push back until all that was asked before it is answered, on a machine of any speed."""

    def before_push(pushed: int) -> None:
        steps = min(4, pushed - 1 + staleness)
        if pushed > 1:  # the first is of the walk, and before the second nothing of a step was asked
            assert wait_for(lambda: served.count_of("answered") >= OF_THE_WALK + OF_A_STEP * steps, LONGEST_WAIT)

    return before_push


def run(tmp_path: Path, tree: dict[str, Any]) -> Any:
    """Run in this process."""
    (tmp_path / "reward.py").write_text(REWARD)
    with joined_world(LaunchConfig(device="cpu")) as world:
        return grpo(from_mapping(tree, GRPOConfig), tmp_path, world)


def recorded(tmp_path: Path, step: int) -> list[dict[str, Any]]:
    """Return the completions of a recorded step."""
    path = tmp_path / "r" / "rollouts" / f"step-{step:08d}.jsonl.gz"
    with gzip.open(path, "rt") as file:
        return [one for line in [*file][1:] for one in json.loads(line)["completions"]]


def ahead_of(tmp_path: Path, step: int) -> list[dict[str, Any]]:
    """Return what a checkpoint has of the next step."""
    file = tmp_path / "r" / "checkpoints" / f"step-{step:08d}" / "trainer.json"
    saved: list[dict[str, Any]] = json.loads(file.read_text())["ahead"]
    return saved


@pytest.mark.cases(1)
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_completions_are_of_weights_as_old_as_was_allowed(tmp_path: Path, staleness: int) -> None:
    served = ServedModel()
    served.before_push = all_answered(served, staleness)
    with serving(served) as url:
        tree = served_tree([url], str(tmp_path), **AHEAD, rollout={"record": True, "max_staleness": staleness})
        tree["rollout"] = served_tree([url], "")["rollout"] | tree["rollout"]

        run(tmp_path, tree)

    versions = [{one["versions"][0][1] for one in recorded(tmp_path, step)} for step in (1, 2, 3, 4)]
    assert versions == [{max(0, step - staleness)} for step in range(4)]
    metrics = read_metrics(tmp_path / "r" / METRICS)
    ages = [line.get("sampling/staleness/max") for line in metrics if "loss" in line]
    assert ages == ([float(min(step, staleness)) for step in range(4)] if staleness else [None] * 4)
    differences = [line["sampling/sampling_logp_difference/mean"] for line in metrics if "loss" in line]
    assert [difference > 1e-3 for difference in differences] == [False] + 3 * [staleness > 0]
    largest = [line["sampling/sampling_logp_difference/max"] for line in metrics if "loss" in line]
    assert all(most >= mean for most, mean in zip(largest, differences, strict=True))
    assert all(line["ratio/mean"] == 1.0 for line in metrics if "loss" in line)  # against the proximal policy


def test_the_next_step_is_sampled_while_the_present_one_updates(tmp_path: Path) -> None:
    """Each update of a step waits for the answers of the next one, and these wait for the update to begin."""
    events, answered = tmp_path / "events.txt", tmp_path / "answered.txt"
    waited: list[bool] = []
    answered.write_text("0")

    def before_token(name: str, number: int) -> None:
        order = [what for _, what in served.events if what.startswith("asked")].index(f"asked {name}")
        step = 1 + (order - OF_THE_WALK) // OF_A_STEP
        if number == 0 and step > 1:  # an update more was the walk's
            waited.append(wait_for(lambda: events.read_text().count("begins") >= step, LONGEST_WAIT))

    served = ServedModel(before_token=before_token)
    served.on_event = lambda: answered.write_text(str(served.count_of("answered"))) and None
    count = f"int(Path({str(answered)!r}).read_text() or 0)"
    goes_on = f"begun in (1, 4) or {count} >= {OF_THE_WALK} + {OF_A_STEP} * begun"
    (tmp_path / "paced.py").write_text(PACED.replace("EVENTS", repr(str(events))).replace("GOES_ON", goes_on))
    with serving(served) as url:
        tree = served_tree([url], str(tmp_path), objective={"kind": "path", "path": "paced.py:paced"}, steps=3)
        tree["rollout"]["max_staleness"] = 1

        run(tmp_path, tree)

    assert waited == [True] * 2 * OF_A_STEP
    assert events.read_text().splitlines() == ["update begins", "update ends"] * 4


@pytest.mark.slow
def test_a_resume_trains_what_was_finished_and_asks_for_the_rest_again(tmp_path: Path) -> None:
    slow: list[int] = []

    def seconds(seed: int) -> float:
        slow.extend([seed] if seed % 2 else [])
        return 60.0 if seed % 2 else 0.0

    served = ServedModel(slow=seconds)
    observer = stopping_at_2(tmp_path, served, OF_THE_WALK + 3 * OF_A_STEP, lambda: len(slow))
    with serving(served) as url:
        tree = served_tree([url], str(tmp_path), **AHEAD, observers=[observer])
        tree["rollout"] |= {"max_staleness": 1, "record": True}
        served.slow_after = OF_THE_WALK + 2 * OF_A_STEP  # those of the third step
        run(tmp_path, tree)
    finished = ahead_of(tmp_path, 2)

    again = ServedModel()
    with serving(again) as url:
        tree["rollout"]["engine"]["url"] = [url]
        (tmp_path / "stopping").unlink()
        run(tmp_path, tree | {"steps": 3})

    trained = {(one["sample_id"] >> 20, one["sample_id"] % 2**20): one for one in recorded(tmp_path, 3)}
    assert 0 < len(finished) <= OF_A_STEP - len(slow) < OF_A_STEP
    assert again.count_of("asked") == OF_THE_WALK + OF_A_STEP - len(finished)
    for one in finished:
        same = trained.pop((one["request_id"], one["place"]))
        assert same["tokens"] == np.frombuffer(base64.b64decode(one["tokens"]), "<i4").tolist()
        assert same["versions"] == [[0, 1]]
    assert all(one["versions"] == [[0, 2]] for one in trained.values())  # of the version that is pushed on a resume


def in_a_pool(world: World, values: dict[str, Any], base: str) -> int:
    return grpo(from_mapping(values, GRPOConfig), Path(base), world).step


@pytest.mark.slow
def test_completions_of_all_ranks_are_trained_at_another_number_of_ranks(tmp_path: Path, pools: Any) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    served = ServedModel()
    observer = stopping_at_2(tmp_path, served, OF_THE_WALK + 3 * OF_A_STEP)
    with serving(served) as url:
        tree = served_tree([url], str(tmp_path), **AHEAD, observers=[observer])
        tree["rollout"] |= {"max_staleness": 1, "record": True}
        pools(2).run(in_a_pool, tree, str(tmp_path))
        finished = {one["request_id"] * 2**20 + one["place"] for one in ahead_of(tmp_path, 2)}
        before = served.count_of("asked")
        (tmp_path / "stopping").unlink()

        run(tmp_path, tree | {"steps": 3})

    assert len({number >> 20 for number in finished}) > 2, "of both ranks, each of which has two prompts"
    assert served.count_of("asked") - before == OF_THE_WALK + OF_A_STEP - len(finished)
    trained = {one["sample_id"]: one["versions"] for one in recorded(tmp_path, 3)}
    assert all(versions == [[0, 1 if number in finished else 2]] for number, versions in trained.items())


@pytest.mark.slow
def test_prompts_are_drawn_again_where_groups_of_the_next_step_teach_nothing(tmp_path: Path) -> None:
    served = ServedModel()
    with serving(served) as url:
        tree = served_tree([url], str(tmp_path), **AHEAD, groups={"flat": "resample"})
        tree["rollout"] |= {"max_staleness": 1, "record": True, "max_new_tokens": 1}

        run(tmp_path, tree)

    metrics = [line for line in read_metrics(tmp_path / "r" / METRICS) if "loss" in line]
    assert any(line["rollout/rounds"] > 1 for line in metrics)
    ages = {
        step - 1 - version for step in (2, 3, 4) for one in recorded(tmp_path, step) for _, version in one["versions"]
    }
    assert ages == {0, 1}  # those drawn again are of the present weights


@pytest.mark.slow
def test_completions_of_two_policies_tell_where_one_ends(tmp_path: Path) -> None:
    """The push of an evaluation waits for all completions of the next step, and their second tokens for the push."""
    met: list[bool] = []
    reached: set[str] = set()
    evaluated = 2  # before step 1

    def before_token(name: str, number: int) -> None:
        order = [what for _, what in served.events if what.startswith("asked")].index(f"asked {name}")
        if number == 1 and 0 <= order - OF_THE_WALK - evaluated - OF_A_STEP < OF_A_STEP:
            reached.add(name)
            met.append(wait_for(lambda: served.count_of("pushed") > 2, LONGEST_WAIT))

    def before_push(pushed: int) -> None:
        if pushed == 2:  # that of the walk, and that of the first step
            met.append(wait_for(lambda: len(reached) == OF_A_STEP, LONGEST_WAIT))

    served = ServedModel(before_token=before_token, before_push=before_push)
    with serving(served) as url:
        tree = served_tree(
            [url], str(tmp_path), steps=2, **AHEAD,
            evaluation={"every_steps": 1, "sets": {"e": {"synthetic": {"task": "sort", "rows": evaluated}}}},
        )  # fmt: skip
        tree["rollout"] |= {"max_staleness": 1, "record": True}

        run(tmp_path, tree)

    assert met == [True] * (OF_A_STEP + 1)
    assert [one["versions"] for one in recorded(tmp_path, 2)] == [[[0, 0], [1, 1]]] * OF_A_STEP


@pytest.mark.slow
def test_the_rehearsal_counts_what_is_sampled_ahead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for staleness in (0, 1):
        with serving(ServedModel()) as url:
            place = tmp_path / str(staleness)
            place.mkdir()
            rehearsal = {"rehearsal": True}
            tree = served_tree([url], str(place), **AHEAD, steps=1, data={"batch_size": 192}, checkpoint=rehearsal)
            tree["rollout"] |= {"max_staleness": staleness, "max_new_tokens": 30}
            run(place, tree)
        told = capsys.readouterr().out
        sizes.append(float(told.split("a checkpoint has ")[1].split(" MiB")[0].replace(",", "")))
    least = 192 * 2 * 30 * 10 / 2**20  # ten bytes a token and more; sizes are told in tenths of a MiB

    assert sizes[1] - sizes[0] >= least


def test_what_was_not_recorded_is_told(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    tree = served_tree(["http://127.0.0.1:9"], str(tmp_path))
    tree["rollout"]["engine"] = {"kind": "recorded", "path": str(tmp_path / "other")}

    with pytest.raises(ConfigError, match="has no recorded rollouts; its run needs rollout.record: true"):
        run(tmp_path, tree)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rollout": {"max_staleness": 1}}, "1 samples while training goes on, and engine: auto samples in the ranks'"),
        (
            {"rollout": {"max_staleness": 1, "engine": {"kind": "vllm", "url": "http://127.0.0.1:9"}}},
            "1 learns from completions of older weights, which biases every update; weigh tokens by correction",
        ),
        (
            {"rollout": {"engine": {"kind": "recorded", "path": "x"}}, "advantage": "remax"},
            "recorded has what a run sampled, and advantage: remax compares with greedy completions",
        ),
    ],
)
def test_sampling_that_cannot_be_is_told(sections: dict[str, Any], words: str) -> None:
    tree = served_tree([], "runs") | sections

    with pytest.raises(ConfigError, match=words):
        from_mapping(tree, GRPOConfig)


@pytest.mark.parametrize("renormalise", [True, False])
def test_a_policy_that_is_renormalised_says_what_was_sampled(tmp_path: Path, renormalise: bool) -> None:
    tree = served_tree([], str(tmp_path), steps=2, correction={"kind": "off" if renormalise else "truncate"})
    tree["rollout"] |= {"engine": "auto", "top_k": 5, "top_p": 0.9, "renormalise": renormalise}

    run(tmp_path, tree)

    metrics = [line for line in read_metrics(tmp_path / "r" / METRICS) if "loss" in line]
    assert all((line["sampling/sampling_logp_difference/max"] < 1e-5) is renormalise for line in metrics)


GUESS = """
from holdfast.environments.base import Observation
class World:
    def begin(self, row):
        self.lasts = 1 + len(row["prompt"]) % 3
    def step(self, turn):
        return Observation("no", turn.number / 4, turn.number + 1 == self.lasts)
"""
AGENT = """
import json, urllib.request
def agent(row, base_url, api_key):
    for text in ("one", "two"):
        body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
        request = urllib.request.Request(base_url + "/chat/completions", body, {"Authorization": f"Bearer {api_key}"})
        urllib.request.urlopen(request).close()
    return 0.5
"""


@pytest.mark.parametrize(
    "environment", [{"path": "world.py:World", "on_cut": "continue"}, {"kind": "endpoint", "run": "world.py:agent"}]
)
def test_turns_are_sampled_by_servers_and_each_is_of_the_present_weights(
    tmp_path: Path, environment: dict[str, Any]
) -> None:
    (tmp_path / "world.py").write_text(GUESS + AGENT)
    with serving(ServedModel()) as url:
        tree = served_tree([url], str(tmp_path), steps=2, environment=environment, reward="environment")
        tree["rollout"]["record"] = True
        run(tmp_path, tree)

    told = [line for line in read_metrics(tmp_path / "r" / METRICS) if "loss" in line]
    assert len(told) == 2
    for step, line in enumerate(told):
        assert line["sampling/sampling_logp_difference/max"] <= 1e-4
        assert line["environment/turns/max"] == (3 if "path" in environment else 2)
        completions = recorded(tmp_path, step + 1)
        assert {version for one in completions for _, version in one["versions"]} == {-1, step}, "-1 was observed"
