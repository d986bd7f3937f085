"""Whole runs that sample from a server: versions, completions of the next step, checkpoints that hold some, proofs."""

from __future__ import annotations

import base64
import gzip
import json
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

PACED = '''
import time
from pathlib import Path

from holdfast.config.sections.policy import ClipConfig, CorrectionConfig, EntropyConfig, KLConfig
from holdfast.objectives.policy import PolicyGradient
from holdfast.objectives.surrogates import Reinforce


class Paced(PolicyGradient):
    """Takes its time, and says when."""

    def token_terms(self, logprobs, entropy, tokens):
        with open(EVENTS, "a") as file:
            file.write(f"{time.monotonic()} update begins\\n")
            time.sleep(SECONDS)
            file.write(f"{time.monotonic()} update ends\\n")
        return super().token_terms(logprobs, entropy, tokens)


def paced():
    return Paced(Reinforce())
'''
_WORDS = "asked", "answered"
STOPPING = """
import time
from pathlib import Path


def at_2(event):
    time.sleep(2.0 if event.step == 2 else 0.3)  # what was sent ahead is to be answered before the save
    return "stop" if event.step == 2 and Path(WHILE).exists() else None
"""


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


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_completions_are_of_weights_as_old_as_was_allowed(tmp_path: Path, staleness: int) -> None:
    served = ServedModel()
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
    served = ServedModel(seconds=0.4)
    events = tmp_path / "events.txt"
    (tmp_path / "paced.py").write_text(PACED.replace("EVENTS", repr(str(events))).replace("SECONDS", "0.9"))
    with serving(served) as url:
        tree = served_tree([url], str(tmp_path), objective={"kind": "path", "path": "paced.py:paced"}, steps=3)
        tree["rollout"]["max_staleness"] = 1

        run(tmp_path, tree)

    updates = [(float(line.split()[0]), line.split()[-1]) for line in events.read_text().splitlines()][-6:]
    asked, answered = ([when for when, what in served.events if what.startswith(word)][-24:] for word in _WORDS)
    for step in range(2):  # the last one has no next
        begins, ends = updates[2 * step][0], updates[2 * step + 1][0]
        of_next = slice(8 * (step + 1), 8 * (step + 2))
        assert min(asked[of_next]) < begins
        assert begins < min(answered[of_next])
        assert max(answered[of_next]) < ends


def test_a_resume_trains_what_was_finished_and_asks_for_the_rest_again(tmp_path: Path) -> None:
    (tmp_path / "stopping.py").write_text(STOPPING.replace("WHILE", repr(str(tmp_path / "stopping"))))
    (tmp_path / "stopping").touch()
    served = ServedModel(slow=lambda seed: 30.0 if seed % 2 else 0.0)
    with serving(served) as url:
        tree = served_tree([url], str(tmp_path), **AHEAD, observers=["stopping.py:at_2"])
        tree["rollout"] |= {"max_staleness": 1, "record": True}
        served.slow_after = 4 + 16  # those of the third step; four come before step 1
        run(tmp_path, tree)
    finished = ahead_of(tmp_path, 2)

    again = ServedModel()
    with serving(again) as url:
        tree["rollout"]["engine"]["url"] = [url]
        (tmp_path / "stopping").unlink()
        run(tmp_path, tree | {"steps": 3})

    trained = {(one["sample_id"] >> 20, one["sample_id"] % 2**20): one for one in recorded(tmp_path, 3)}
    assert 0 < len(finished) < 8
    assert len([what for _, what in again.events if what.startswith("asked")]) == 4 + 8 - len(finished)
    for one in finished:
        same = trained.pop((one["request_id"], one["place"]))
        assert same["tokens"] == np.frombuffer(base64.b64decode(one["tokens"]), "<i4").tolist()
        assert same["versions"] == [[0, 1]]
    assert all(one["versions"] == [[0, 2]] for one in trained.values())  # of the version that is pushed on a resume


def in_a_pool(world: World, values: dict[str, Any], base: str) -> int:
    return grpo(from_mapping(values, GRPOConfig), Path(base), world).step


def test_completions_of_all_ranks_are_trained_at_another_number_of_ranks(tmp_path: Path, pools: Any) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "stopping.py").write_text(STOPPING.replace("WHILE", repr(str(tmp_path / "stopping"))))
    (tmp_path / "stopping").touch()
    served = ServedModel()
    with serving(served) as url:
        tree = served_tree([url], str(tmp_path), **AHEAD, observers=["stopping.py:at_2"])
        tree["rollout"] |= {"max_staleness": 1, "record": True}
        pools(2).run(in_a_pool, tree, str(tmp_path))
        finished = {(one["request_id"], one["place"]) for one in ahead_of(tmp_path, 2)}
        before = len(served.events)
        (tmp_path / "stopping").unlink()

        run(tmp_path, tree | {"steps": 3})

    assert len(finished) == 8
    assert len([what for _, what in served.events[before:] if what.startswith("asked")]) == 4  # before step 1 alone
    assert all(one["versions"] == [[0, 1]] for one in recorded(tmp_path, 3))


@pytest.mark.deep
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


@pytest.mark.deep
def test_completions_of_two_policies_tell_where_one_ends(tmp_path: Path) -> None:
    served = ServedModel(seconds=1.5)
    (tmp_path / "paced.py").write_text(PACED.replace("EVENTS", repr(str(tmp_path / "e"))).replace("SECONDS", "0.6"))
    with serving(served) as url:
        tree = served_tree(
            [url], str(tmp_path), steps=3, objective={"kind": "path", "path": "paced.py:paced"},
            evaluation={"every_steps": 1, "sets": {"e": {"synthetic": {"task": "sort", "rows": 2}}}},
        )  # fmt: skip
        tree["rollout"] |= {"max_staleness": 1, "record": True}

        run(tmp_path, tree)  # an evaluation pushes while the next step's completions are on their way

    segments = [one["versions"] for one in recorded(tmp_path, 2)]
    assert all([version for _, version in each] == [0, 1] for each in segments), segments
    assert all(0 < each[1][0] < 6 for each in segments)


@pytest.mark.deep
def test_the_rehearsal_counts_what_is_sampled_ahead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for staleness in (0, 1):
        with serving(ServedModel()) as url:
            place = tmp_path / str(staleness)
            place.mkdir()
            rehearsal = {"rehearsal": {"enabled": True}}
            tree = served_tree([url], str(place), **AHEAD, steps=1, data={"batch_size": 64}, checkpoint=rehearsal)
            tree["rollout"] |= {"max_staleness": staleness, "max_new_tokens": 30}
            run(place, tree)
        told = capsys.readouterr().out
        sizes.append(float(told.split("a checkpoint has ")[1].split(" MiB")[0].replace(",", "")))
    least = 64 * 2 * 30 * 10 / 2**20  # ten bytes a token and more

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
