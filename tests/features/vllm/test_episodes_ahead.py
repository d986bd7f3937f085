"""Episodes of the next steps on their way (`rollout.max_staleness`): versions by turn, corrections, resumes, kills."""

from __future__ import annotations

import base64
import copy
import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.load import from_mapping
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import RunStopped
from holdfast.metrics.sink import METRICS, read_metrics
from holdfast.rollout.sampling import mixed
from tests.cli.fixtures import write_run
from tests.cli.warm import WarmPython
from tests.features.vllm.kills import is_killed
from tests.features.vllm.served import AHEAD, REWARD, ServedModel, served_tree, serving
from tests.features.vllm.test_served_runs import (
    LONGEST_WAIT,
    OF_A_STEP,
    OF_THE_WALK,
    ahead_of,
    recorded,
    run,
    stopping_at_2,
)
from tests.rewards.conftest import wait_for

TURNS = 2
CAP = 1.02
"""Of a token's weight."""
WORLD = """
from holdfast.environments.base import Observation
class World:
    def begin(self, row): ...
    def step(self, turn):
        return Observation("no", turn.number / 4, turn.number == 1)
class Replayable(World):
    replayable = True
class Mortal(World):
    def begin(self, row):
        self.dies = len(row["prompt"]) % 2
    def step(self, turn):
        import os
        if self.dies:
            os._exit(3)
        return super().step(turn)
"""
AGENT = """
import json, urllib.request
def agent(row, base_url, api_key):
    messages = [{"role": "user", "content": "one"}]
    for text in ("two", "three"):
        body = json.dumps({"messages": messages}).encode()
        request = urllib.request.Request(base_url + "/chat/completions", body, {"Authorization": f"Bearer {api_key}"})
        with urllib.request.urlopen(request) as answer:
            said = json.load(answer)["choices"][0]["message"]
        messages += [said, {"role": "user", "content": text}]
    return 0.5
"""
KINDS: dict[str, dict[str, Any]] = {
    "environment": {"path": "world.py:World", "on_cut": "continue"},
    "replayable": {"path": "world.py:Replayable", "on_cut": "continue"},
    "agent": {"kind": "endpoint", "run": "world.py:agent"},
}


def episode_tree(urls: list[str], place: Path, kind: str, staleness: int = 2, **sections: Any) -> dict[str, Any]:
    """Return a run of episodes of two turns that are sampled ahead, and recorded; write what they need."""
    (place / "world.py").write_text(WORLD + AGENT)
    tree = served_tree(
        urls, str(place), **copy.deepcopy(AHEAD), environment=KINDS[kind], reward=["environment", "reward.py:even"]
    )
    tree["rollout"] |= {"max_staleness": staleness, "record": True}
    tree["data"] |= {"max_length": 96}
    return tree | sections


def second_turns_of(tree: dict[str, Any], step: int) -> set[int]:
    """Return the seeds of the second turns of a step, counted from 0."""
    seed = from_mapping(tree, GRPOConfig).seed
    prompts = range(4 * step, 4 * step + 4)
    return {mixed(mixed(seed, step, prompt, place), 1) for prompt in prompts for place in range(2)}


def chosen_of(one: dict[str, Any]) -> list[tuple[int, int]]:
    """Return (place, version) of each token of a recorded episode that the policy chose."""
    edges = [*(start for start, _ in one["versions"]), len(one["tokens"])]
    pairs = zip(one["versions"], edges[1:], strict=True)
    return [(place, version) for (start, version), end in pairs if version >= 0 for place in range(start, end)]


def versions_of(saved: dict[str, Any]) -> list[int]:
    """Return the version of each token of a saved episode that the policy chose."""
    tokens = len(base64.b64decode(saved["tokens"])) // 4
    return [version for _, version in chosen_of({"versions": saved["segments"], "tokens": range(tokens)})]


def keys(directory: Path, step: int) -> list[int]:
    """Return which episodes a step was trained on."""
    return sorted(one["sample_id"] for one in recorded(directory, step))


class Watched(ServedModel):
    """A server that keeps the weights of each push, and what it sampled by the tokens that it answered with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights: list[dict[str, torch.Tensor]] = []
        self.pushes_of: dict[tuple[int, ...], list[int]] = {}
        self.on_event, self.answer = self._look, self._told

    def _look(self) -> None:
        if self.count_of("pushed") > len(self.weights):
            self.weights.append({name: value.clone().double() for name, value in self.model.state_dict().items()})

    def _told(self, path: str, told: Any) -> Any:
        if path == "/inference/v1/generate" and "choices" in told:
            choice = told["choices"][0]
            spans = choice["weight_versions"]
            ends = [*(span["start"] for span in spans[1:]), len(choice["token_ids"])]
            numbers = [int(span["version"].rpartition("-")[2]) for span in spans]
            pushes = [
                number
                for number, span, end in zip(numbers, spans, ends, strict=True)
                for _ in range(span["start"], end)
            ]
            self.pushes_of[tuple(choice["token_ids"])] = pushes
        return told


@pytest.mark.cases("all")
@pytest.mark.parametrize("kind", KINDS)
def test_each_turn_has_its_own_version_and_is_corrected_by_it(tmp_path: Path, kind: str) -> None:
    """The second turns of the third step wait for the second step's push, and episodes go on with its weights."""
    waited, of_the_third = list[bool](), set[int]()

    def slow(seed: int) -> float:
        if seed in of_the_third:
            waited.append(wait_for(lambda: served.count_of("pushed") >= 3, LONGEST_WAIT))
        return 0.0

    served = Watched(slow=slow)
    with serving(served) as url:
        sets = {"e": {"synthetic": {"task": "sort", "rows": 2}}}
        evaluation = {"every_steps": 2, "sets": sets, "sampling": {"temperature": 1.0}}
        tree = episode_tree([url], tmp_path, kind, evaluation=evaluation)
        tree["correction"]["cap"] = CAP
        of_the_third |= second_turns_of(tree, 2)
        run(tmp_path, tree)

    assert waited == [True] * OF_A_STEP
    lines = [line for line in read_metrics(tmp_path / "r" / METRICS) if "loss" in line]
    for step in range(1, 4):  # the weights of the fourth are pushed to nobody
        terms, ratios = list[float](), list[float]()
        for group in groups(tmp_path, step):
            rewards = np.array([told["reward"] for told in group["facts"]["completions"]])
            is_flat = np.ptp(rewards) == 0
            advantages = np.zeros(2) if is_flat else (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            for one, advantage in zip(group["completions"], advantages, strict=True):
                places, versions = map(np.array, zip(*chosen_of(one), strict=True))
                said = np.split(np.array(one["tokens"])[places], np.cumsum(one["episode"]["turn_lengths"])[:-1])
                pushes = [push for turn in said for push in served.pushes_of[tuple(turn.tolist())]]
                assert len(said) == TURNS
                assert versions.tolist() == np.maximum(0, np.array(pushes) - 2).tolist() == sorted(versions)
                assert max(0, step - 3) <= versions[0] <= versions[-1] <= step - 1
                assert step != 3 or versions[0] == 0 < versions[-1]
                told = np.array(one["sampler_logprobs"])[places]
                for version in set(versions.tolist()):
                    own = by_hand(served, version, group["prompt"], one["tokens"])[places]
                    np.testing.assert_allclose(told[versions == version], own[versions == version], atol=2e-5)
                present = by_hand(served, step - 1, group["prompt"], one["tokens"])[places]
                ratios += np.exp(present - told).tolist()
                terms += (-advantage * np.minimum(np.exp(present - told), CAP)).tolist()
        np.testing.assert_allclose(lines[step - 1]["loss"], np.mean(terms), atol=1e-5)
        mean = lines[step - 1]["sampling/importance_sampling_ratio/mean"]
        np.testing.assert_allclose(mean, np.mean(ratios), atol=1e-5)
        assert step != 3 or max(ratios) > CAP


def groups(place: Path, step: int) -> list[dict[str, Any]]:
    """Return the recorded groups of a step."""
    with gzip.open(place / "r" / "rollouts" / f"step-{step:08d}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in [*file][1:]]


def by_hand(served: Watched, version: int, prompt: list[int], tokens: list[int]) -> np.ndarray[Any, Any]:
    """Return [L] log-probabilities of the tokens behind a prompt by plain transformers in float64.

    Args:
        served: Has the weights of each push; the walk and step 1 push those before the first update.
        version: Updates that the weights have had.
        prompt: [P]
        tokens: [L]
    """
    model = copy.deepcopy(served.model).double()
    model.load_state_dict(served.weights[version + 1])
    row = torch.tensor([prompt + tokens])
    with torch.no_grad():
        logprobs = model(input_ids=row).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, row[0, 1:, None])[len(prompt) - 1 :, 0].numpy()


@pytest.mark.cases("all")
@pytest.mark.parametrize("kind", ["environment", "agent"])
def test_a_resume_takes_episodes_that_had_ended_and_samples_the_rest_again(tmp_path: Path, kind: str) -> None:
    straight = tmp_path / "straight"
    straight.mkdir()
    with serving(ServedModel()) as url:
        run(straight, episode_tree([url], straight, kind, steps=5))
    slow: list[int] = []
    of_the_fourth: set[int] = set()

    def seconds(seed: int) -> float:
        slow.extend([seed] if seed in of_the_fourth else [])
        return 60.0 if seed in of_the_fourth else 0.0

    served = ServedModel(slow=seconds)
    observer = stopping_at_2(tmp_path, served, OF_THE_WALK + 4 * TURNS * OF_A_STEP, lambda: len(slow))
    with serving(served) as url:
        tree = episode_tree([url], tmp_path, kind, steps=5, observers=[observer])
        of_the_fourth |= set(sorted(second_turns_of(tree, 3))[:3])
        run(tmp_path, tree)
    saved = ahead_of(tmp_path, 2)
    again = ServedModel()
    with serving(again) as url:
        (tmp_path / "stopping").unlink()
        tree["rollout"]["engine"]["url"] = [url]
        run(tmp_path, tree)

    assert len(slow) == 3
    assert {one["step"] for one in saved} == {2, 3}
    assert len(saved) == 2 * OF_A_STEP - 3
    assert again.count_of("asked") == OF_THE_WALK + TURNS * (3 * OF_A_STEP - len(saved))
    for step in range(1, 6):
        assert keys(tmp_path, step) == keys(straight, step)
    for one in saved:
        trained = {each["sample_id"]: each for each in recorded(tmp_path, one["step"] + 1)}
        same = trained[one["request_id"] * 2**20 + one["place"]]
        assert versions_of(one) == [version for _, version in chosen_of(same)]
        assert same["episode"]["turn_rewards"] == one["episode"]["turn_rewards"]
        assert same["text"] == one["last_text"]


def test_an_environment_that_dies_ahead_of_its_step_is_a_counted_sample(tmp_path: Path) -> None:
    with serving(ServedModel()) as url:
        tree = episode_tree(
            [url], tmp_path, "environment", environment={"path": "world.py:Mortal", "on_cut": "continue"}
        )
        run(tmp_path, tree)

    lines = [line for line in read_metrics(tmp_path / "r" / METRICS) if "loss" in line]
    shares = [line.get("environment/ended/fault", 0.0) for line in lines]
    assert len(lines) == 4
    assert any(0 < share < 1 for share in shares)
    assert [line["reward/error"] for line in lines] == [OF_A_STEP * share for share in shares]


def test_processes_of_environments_that_die_ahead_of_their_step_are_one_paragraph(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import os, pathlib\nfrom world import World as Mild\nclass World(Mild):\n"
        "    def step(self, turn):\n        if pathlib.Path(GONE).exists():\n            os.kill(os.getppid(), 9)\n"
        "        return super().step(turn)\n".replace("GONE", repr(str(tmp_path / "gone")))
    )
    served = ServedModel()

    def look() -> None:
        if served.count_of("asked") > OF_THE_WALK + TURNS * OF_A_STEP:  # of a step ahead
            (tmp_path / "gone").touch()

    served.on_event = look
    with serving(served) as url, pytest.raises(RunStopped) as error:
        tree = episode_tree([url], tmp_path, "environment", environment={"path": "late.py:World", "on_cut": "continue"})
        run(tmp_path, tree)

    assert "The environment processes died" in str(error.value)
    assert "\n" not in str(error.value)


def test_instances_are_of_a_rank_and_not_of_a_step(tmp_path: Path) -> None:
    counting = (
        "import os, time, pathlib\nfrom world import World as Mild\nclass World(Mild):\n"
        "    def begin(self, row):\n        self.mark = pathlib.Path(PLACE) / str(os.getpid())\n"
        "        self.mark.touch()\n"
        "        with open(PLACE + '.log', 'a') as log:\n            print(len(os.listdir(PLACE)), file=log)\n"
        "    def close(self):\n        self.mark.unlink()\n"
    ).replace("PLACE", repr(str(tmp_path / "living")))
    (tmp_path / "living").mkdir()
    (tmp_path / "counted.py").write_text(counting)
    environment = {"path": "counted.py:World", "on_cut": "continue", "instances": 3}
    with serving(ServedModel()) as url:
        run(tmp_path, episode_tree([url], tmp_path, "environment", steps=3, environment=environment))

    living = [int(line) for line in (tmp_path / "living.log").read_text().split()]
    assert len(living) >= 3 * OF_A_STEP
    assert max(living) <= 3 + 1, "one that was left may still be closing"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_kills_lose_no_episode_and_train_none_twice(warm: WarmPython, tmp_path: Path, kind: str) -> None:
    """A run of 16 steps is killed at 20 events of its server, drawn by a seed, and started again each time."""
    draw, steps = random.Random(60), 16
    straight = tmp_path / "straight"
    straight.mkdir()
    with serving(ServedModel()) as url:
        run(straight, episode_tree([url], straight, kind, steps=steps))
    (tmp_path / "reward.py").write_text(REWARD)
    served, killed, lost = ServedModel(), 0, 0
    saved: dict[tuple[int, int, int], dict[str, Any]] = {}
    with serving(served) as url:
        tree = episode_tree([url], tmp_path, kind, steps=steps)
        tree["run"]["dir"] = "."
        # Before each save, so that episodes ahead have ended; the run is killed then, too.
        (tmp_path / "late.py").write_text("import time\ndef save(event):\n    time.sleep(0.5)\n")
        tree["observers"] = ["late.py:save"]
        write_run(tmp_path / "run.yaml", tree)
        command = [str(warm.program), "-m", "holdfast.cli.main", "grpo", "run.yaml"]
        while killed < 20 and is_killed(
            command, tmp_path, served, draw.randint(2 * OF_THE_WALK + 50, 2 * OF_THE_WALK + 130)
        ):
            killed += 1
            places = sorted((tmp_path / "r" / "checkpoints").glob("step-*"))
            if places:
                newest = int(places[-1].name.rpartition("-")[2])
                saved |= {(one["step"], one["request_id"], one["place"]): one for one in ahead_of(tmp_path, newest)}
        done = warm.run(*command[1:], cwd=tmp_path)

    assert done.code == 0, done.out + done.err
    assert killed >= 10
    for step in range(1, steps + 1):
        assert keys(tmp_path, step) == keys(straight, step)
        assert len(set(keys(tmp_path, step))) == OF_A_STEP
        trained = {each["sample_id"]: each for each in recorded(tmp_path, step)}
        for (of_step, prompt, place), one in saved.items():
            if of_step == step - 1:
                same = trained[prompt * 2**20 + place]
                lost += same["episode"]["turn_rewards"] != one["episode"]["turn_rewards"]
                lost += versions_of(one) != [version for _, version in chosen_of(same)]
        ages = {step - 1 - version for one in trained.values() for _, version in chosen_of(one)}
        assert max(ages) <= 2
    assert saved
    assert lost == 0, "an episode that had ended was sampled again"
