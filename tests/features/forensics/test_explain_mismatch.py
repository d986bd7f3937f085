"""Why an engine's log-probabilities differ from the trainer's, on a step of a real run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.commands.train import train_run
from holdfast.errors import ConfigError
from holdfast.features.forensics.mismatch import CAUSES
from holdfast.features.forensics.proving import explain, replay
from holdfast.features.forensics.record_files import record_path
from tests.features.vllm.served import AHEAD, ServedModel, served_tree, serving
from tests.features.vllm.test_served_runs import run

RUN = """
steps: 3
run: {dir: DIRECTORY, name: recorded}
launch: {ranks: 1, device: cpu}
model:
  tokenizer: builtin:characters
  config: {model_type: llama, vocab_size: 64, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64, initializer_range: 0.3}
data: {synthetic: {task: sort, rows: 200}, batch_size: 4, max_length: 48}
rollout: {group_size: 4, max_new_tokens: 12, record: true, show: 0, temperature: 0.7}
reward: {kind: length, target: 6}
optim: {lr: 2.0e-2, schedule: constant}
checkpoint: {every_steps: 1, keep: {every: 1}, rehearsal: false}
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("recorded")
    (place / "run.yaml").write_text(RUN.replace("DIRECTORY", str(place)))
    assert train_run("grpo", place / "run.yaml", []) == 0
    return place / "recorded"


def change(directory: Path, step: int, to: Any) -> None:
    """Change what is recorded of every completion of a step."""
    path = record_path(directory, step)
    with gzip.open(path, "rt") as file:
        head, *groups = (json.loads(line) for line in file)
    for group in groups:
        for completion in group["completions"]:
            to(completion)
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in [head, *groups])


@pytest.mark.slow
def test_a_clean_pair_has_nothing_to_explain(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(directory, 1) == 0

    *table, words = capsys.readouterr().out.partition("what is assumed of the engine\n")[2].splitlines()
    assert words.startswith("nothing to explain: engine and trainer differ by")
    named = [line[21:].partition(":")[0] for line in table[1:]]
    assert sorted(named) == sorted(CAUSES)  # each once: by its nearest fit, or by why it was not tried
    assert "        -         -  stale weights: not tried, step 1 has no step before it" in table
    assert (
        "        -         -  routing: not tried, the model has no experts, or no token's change by rounding" in table
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 10}, "top_k support: renormalised over the 10 most probable tokens: the difference falls from"),
        ({"top_p": 0.9}, "top_p support: renormalised over the tokens that reach 0.9: the difference falls from"),
        ({"top_k": 7}, "top_k support: renormalised over what rollout.top_k, top_p and min_p leave, as the run asks"),
        ({"top_k": 7, "top_p": 0.9, "renormalise": True}, "nothing to explain"),
    ],
)
def test_a_support_that_was_sampled_over_is_named_unless_the_trainer_has_it_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], words: str
) -> None:
    tree = served_tree([], str(tmp_path), **AHEAD, steps=1)
    tree["rollout"] |= {"engine": "auto", "record": True, **options}
    run(tmp_path, tree)

    code = explain(tmp_path / "r", 1)

    assert capsys.readouterr().out.splitlines()[-1].startswith(words)
    assert code == int(not words.startswith("nothing"))


def test_a_temperature_that_the_trainer_does_not_know_is_named(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(directory, 2, lambda completion: completion.update(temperature=1.0))

    assert explain(directory, 2) == 1

    words = capsys.readouterr().out.splitlines()[-1]
    assert words.startswith("temperature: sampled at 0.7, scored at 1: the difference falls from")


def test_weights_of_the_step_before_are_named(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, later = record_path(directory, 2), record_path(directory, 3)
    change(directory, 2, lambda completion: completion.update(temperature=0.7))
    later.write_bytes(path.read_bytes())  # what step 2 sampled, looked at with the weights of step 3

    assert explain(directory, 3) == 1

    words = capsys.readouterr().out.splitlines()[-1]
    assert words.startswith("stale weights: those of step 1: the difference falls from")
    change(directory, 3, lambda completion: completion.update(sampler_logprobs=[-1.0] * len(completion["tokens"])))
    assert explain(directory, 3) == 1
    assert "no cause that was tried explains it" in capsys.readouterr().out.splitlines()[-1]


def test_a_step_is_made_again_as_before(directory: Path) -> None:
    assert replay(directory, 2) == 0


@pytest.mark.slow
def test_a_run_one_step_ahead_is_replayed_and_its_age_is_what_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(ServedModel()) as url:
        tree = served_tree([url], str(tmp_path), **AHEAD, steps=3)
        tree["rollout"] |= {"max_staleness": 1, "record": True}
        run(tmp_path, tree)  # the server ends with it: neither command needs one

    assert replay(tmp_path / "r", 3) == 0
    assert explain(tmp_path / "r", 1) == 0  # the first step samples from the weights that it trains
    assert explain(tmp_path / "r", 3) == 1

    words = capsys.readouterr().out.splitlines()[-1]
    assert words.startswith(
        "stale weights: those of step 1, as rollout.max_staleness: 1 asks for: the difference falls"
    )


def test_a_step_of_which_no_group_was_trained_is_told(tmp_path: Path) -> None:
    (tmp_path / "alike.py").write_text("def alike(completion, **_):\n    return 1.0\n")
    reward = {"kind": "path", "path": "alike.py:alike"}
    tree = served_tree([], str(tmp_path), steps=1, reward=reward, groups={"flat": "drop"})
    tree["rollout"] |= {"engine": "auto", "record": True}
    run(tmp_path, tree)

    with pytest.raises(ConfigError, match=r"The record of step 1 has no completion .* or choose another --step"):
        explain(tmp_path / "r", 1)
    assert replay(tmp_path / "r", 1) == 0  # it is made again all the same


def test_a_step_whose_engine_told_no_log_probability_is_told(directory: Path) -> None:
    change(directory, 1, lambda one: one.update(sampler_logprobs=[float("nan")] * len(one["tokens"])))

    with pytest.raises(ConfigError, match=r"has no completion whose log-probabilities the engine told"):
        explain(directory, 1)
