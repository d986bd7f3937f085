"""A reward model in shards says what plain transformers says of each text alone, whoever has texts and whoever none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from holdfast.data.tasks.synthetic import CHARACTERS, character_tokenizer
from holdfast.files import size_words
from holdfast.metrics.sink import read_metrics
from holdfast.rewards.base import Sample
from tests.distributed.grpo_cases import prompts_of, settings
from tests.distributed.reward_cases import evaluated, leave_and_make_again, look, run, score
from tests.tiny import COMMON, EXTRA, tiny_directory

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
TEXTS = ["1", "13", "1133", "ab" * 20, "zebra", "3", "q" * 9]
NAMES = {"gpt2": {"n_positions": 128}, "bloom": {"n_head": 4}}


def directory(path: Path, kind: str = "llama", outputs: int = 1, tokenizer: Any = None, **overrides: Any) -> Path:
    """Save a model for sequence classification in which every tensor matters, with plain transformers."""
    config = AutoConfig.for_model(kind, **COMMON | EXTRA.get(kind, {}) | NAMES.get(kind, {}) | overrides)
    config.num_labels = outputs
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    (tokenizer or character_tokenizer()).save_pretrained(path)
    return path


def alone(path: Path, texts: list[str], output: int = 0) -> list[float]:
    """Return what plain transformers says of each text, one at a time."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        read = [tokenizer(text, add_special_tokens=False, return_tensors="pt") for text in texts]
        return [float(model(input_ids=each["input_ids"]).logits[0, output]) for each in read]


def samples(texts: list[str], **row: Any) -> list[Sample]:
    return [Sample(number, "sort 31=", text, [1], [1], "stop", row) for number, text in enumerate(texts)]


def tree(path: Path, place: Path, where: str = "sharded", **section: Any) -> dict[str, Any]:
    reward = {"kind": "model", "path": str(path), "place": where, "batch_size": 2, **section}
    return settings("none", reward=[reward], run={"dir": str(place), "name": "r"})


def dealt(texts: list[str], counts: list[int], **row: Any) -> list[list[Sample]]:
    """Give the first texts to the first rank, and so on."""
    edges = np.cumsum([0, *counts])
    return [samples(texts[start:stop], **row) for start, stop in zip(edges[:-1], edges[1:], strict=True)]


@pytest.mark.parametrize(
    ("kind", "counts", "where"),
    [
        pytest.param("llama", [7], "sharded", id="one rank, where nothing is split"),
        pytest.param("llama", [7], "offloaded", id="one rank, in host memory"),
        pytest.param("llama", [7, 0], "sharded", id="a rank without texts"),
        pytest.param("llama", [1, 6], "offloaded", id="one text here and six there, in host memory"),
        pytest.param("gpt2", [2, 5], "sharded", id="positions in a table"),
        pytest.param("bloom", [5, 2], "sharded", id="one text per row"),
        pytest.param("mixtral", [6, 1], "sharded", id="experts"),
    ],
)
def test_scores_are_those_of_plain_transformers_however_texts_are_dealt(
    pools: Any, tmp_path: Path, kind: str, counts: list[int], where: str
) -> None:
    path = directory(tmp_path / "m", kind)
    values = tree(path, tmp_path, where, max_length=64)
    calls = [dealt(TEXTS, counts), dealt(TEXTS, counts[::-1]), [[] for _ in counts]]

    told = pools(len(counts)).run(score, values, calls)

    expected = alone(path, [f"sort 31={text}" for text in TEXTS])
    for call in range(2):
        found = [item.reward for of_rank in told for item in of_rank[call]]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert all(of_rank[2] == [] for of_rank in told)
    assert np.ptp(expected) > 0.05


@pytest.mark.parametrize("kind", ["llama", "bloom"])
@pytest.mark.parametrize("pad", [None, 0, 1])
def test_scores_stand_where_transformers_reads_them(pools: Any, tmp_path: Path, kind: str, pad: int | None) -> None:
    path = directory(tmp_path / "m", kind, pad_token_id=pad)

    told = pools(2).run(score, tree(path, tmp_path, append_eos=True), [dealt(TEXTS, [3, 4])])

    found = [item.reward for of_rank in told for item in of_rank[0]]
    np.testing.assert_allclose(found, alone(path, [f"sort 31={text}<eos>" for text in TEXTS]), rtol=1e-5, atol=1e-5)
    before = alone(path, [f"sort 31={text}" for text in TEXTS])
    assert (pad == 1) == np.allclose(found, before, rtol=1e-5, atol=1e-5)


def test_texts_of_nothing_but_padding_and_of_one_token_are_read_as_transformers_reads_them(
    pools: Any, tmp_path: Path
) -> None:
    path = directory(tmp_path / "m")
    texts = ["<pad><pad>", "a", "b<pad>", "<pad>c"]
    given = [[Sample(n, "", text, [1], [1], "stop", {})] for n, text in enumerate(texts)]

    told = pools(2).run(score, tree(path, tmp_path), [given[:2], given[2:]])

    found = [of_rank[call][0].reward for call in range(2) for of_rank in told]
    np.testing.assert_allclose(found, alone(path, texts), rtol=1e-5, atol=1e-5)


def test_an_output_layer_that_files_keep_beside_the_score_is_passed_over(pools: Any, tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    held = load_file(path / "model.safetensors")
    save_file(held | {"lm_head.weight": torch.zeros(96, 32)}, path / "model.safetensors", {"format": "pt"})

    told = pools(2).run(score, tree(path, tmp_path), [dealt(TEXTS, [4, 3])])

    found = [item.reward for of_rank in told for item in of_rank[0]]
    np.testing.assert_allclose(found, alone(path, [f"sort 31={text}" for text in TEXTS]), rtol=1e-5, atol=1e-5)


def test_one_of_several_outputs_is_squashed_cut_and_written_in_the_models_own_template(
    pools: Any, tmp_path: Path
) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    path = directory(tmp_path / "m", outputs=3, tokenizer=tokenizer)
    values = tree(path, tmp_path, output=2, sigmoid=True, max_length=8)
    talk = [{"role": "user", "content": "sort 31"}]

    told = pools(2).run(score, values, [dealt(TEXTS, [6, 1], prompt=talk)])

    found = [item.reward for of_rank in told for item in of_rank[0]]
    expected = np.array(alone(path, [f"u:sort 31;a:{text};"[-8:] for text in TEXTS], 2))
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-expected)), rtol=1e-5, atol=1e-5)


def test_a_tokenizer_other_than_the_policys_reads_what_the_policy_wrote(pools: Any, tmp_path: Path) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({sign: 80 - place for place, sign in enumerate(CHARACTERS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    other = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="|", unk_token="?")
    path = directory(tmp_path / "m", tokenizer=other, pad_token_id=None)
    tiny_directory(tmp_path / "policy", "llama")
    values = run_tree(tmp_path / "policy", path, tmp_path, "sharded", steps=1)

    pools(2).run(run, values, prompts_of(8))

    lines = [json.loads(line) for line in (tmp_path / "r/samples.jsonl").read_text().splitlines()]
    assert len(lines) == 16
    expected = alone(path, [line["prompt"] + line["completion"] for line in lines])
    np.testing.assert_allclose([line["reward"] for line in lines], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("where", "ranks"), [("sharded", 2), ("offloaded", 2), ("sharded", 1)])
def test_each_rank_holds_its_share_of_the_bytes_and_no_more_after_scoring(
    pools: Any, tmp_path: Path, where: str, ranks: int
) -> None:
    path = directory(tmp_path / "m")
    whole = sum(value.numel() * 4 for value in load_file(path / "model.safetensors").values())

    told = pools(ranks).run(look, tree(path, tmp_path, where), [5, 0][:ranks])

    padding = 32 * 4 if ranks == 2 else 0  # the one row of `score`, which rank 1 has none of
    for rank, each in enumerate(told):
        assert each["held"] == each["left"]
        assert each["held"] <= whole / ranks + padding
        assert each["devices"] == {"cpu"}
        assert not each["trained"]
        assert each["passes"] == 3  # of the rank with five texts, two at a time
        assert each["numbers"] == (5 if rank == 0 else 0)
        assert not each["padded"]
    assert sum(each["held"] for each in told) <= whole + ranks * padding
    title = "in host memory" if where == "offloaded" else "sharded like the policy"
    said = "\n".join(told[0]["said"])
    assert f"reward model: {title}; its plan:" in said
    assert f"reward model: {size_words(whole / ranks + padding / 2)} of weights in float32 per rank" in said
    assert all(not each["said"] for each in told[1:])


def run_tree(policy: Path, model: Path, place: Path, where: str, **sections: Any) -> dict[str, Any]:
    return settings(
        str(policy),
        **{
            "steps": 2,
            "run": {"dir": str(place), "name": "r"},
            "model": {"dtype": "float32"},
            "rollout": {"show_every": 1},
            "reward": [{"kind": "model", "path": str(model), "name": "judge", "place": where, "batch_size": 3}],
            "metrics": {"progress": "off"},
            "checkpoint": {"export_at_end": False},
        }
        | sections,
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("both")
    return tiny_directory(place / "policy", "llama"), directory(place / "reward")


@pytest.mark.slow
def test_a_run_with_a_sharded_reward_is_the_run_with_a_whole_one(
    pools: Any, both: tuple[Path, Path], tmp_path: Path
) -> None:
    rows = tmp_path / "held_out.jsonl"
    rows.write_text(json.dumps(prompts_of(1)[0]) + "\n")  # one prompt, so a rank without any
    sections: dict[str, Any] = {
        "groups": {"flat": "resample", "max_rounds": 3, "between": {"reward": "judge", "low": 0.7}},
        "residency": {"parameters": "host", "optimizer": "host"},
        "evaluation": {"every_steps": 1, "sets": {"held_out": {"path": str(rows)}}},
    }

    for where in ("whole", "sharded", "offloaded"):
        pools(2).run(run, run_tree(*both, tmp_path / where, where, **sections), prompts_of(40))

    lines = [read_metrics(tmp_path / where / "r/metrics.jsonl") for where in ("whole", "sharded", "offloaded")]
    steps = [[line for line in part if "loss" in line] for part in lines]
    told = [[line["eval/held_out/reward"] for line in part if "eval/held_out/reward" in line] for part in lines]
    assert [step["rollout/rounds"] for step in steps[0]] != [1.0, 1.0], "no group was ever sampled anew"
    for other in (1, 2):
        for name in ("reward", "loss", "grad_norm", "rollout/rounds"):
            found, expected = ([step[name] for step in steps[which]] for which in (other, 0))
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(told[other], told[0], rtol=1e-5, atol=1e-5)
        assert len(told[0]) == 3
        samples_ = [
            [json.loads(line) for line in (tmp_path / where / "r/samples.jsonl").read_text().splitlines()]
            for where in ("whole", ("", "sharded", "offloaded")[other])
        ]
        for one, two in zip(*samples_, strict=True):
            assert one["completion"] == two["completion"]
            assert one["rewards"]["judge"] == pytest.approx(two["rewards"]["judge"], abs=1e-5)


def test_an_evaluation_scores_with_a_rank_that_has_no_prompt(
    pools: Any, both: tuple[Path, Path], tmp_path: Path
) -> None:
    rows = tmp_path / "held_out.jsonl"
    rows.write_text(json.dumps(prompts_of(1)[0]) + "\n")
    evaluation = {"sets": {"held_out": {"path": str(rows)}}, "per_prompt": 4}

    one, two = pools(2).run(evaluated, run_tree(*both, tmp_path, "sharded", evaluation=evaluation))

    line = next((tmp_path / "r/completions").glob("*/eval.held_out.jsonl"))
    found = [json.loads(each) for each in line.read_text().splitlines()]
    expected = alone(both[1], [each["prompt"] + each["completion"] for each in found])
    np.testing.assert_allclose([each["reward"] for each in found], expected, rtol=1e-5, atol=1e-5)
    assert one == two
    assert one["eval/held_out/reward"] == pytest.approx(np.mean(expected), abs=1e-5)


def test_a_step_that_is_left_while_it_is_sampled_is_made_again_with_the_same_rewards(
    pools: Any, both: tuple[Path, Path], tmp_path: Path
) -> None:
    left, whole = (
        pools(2).run(leave_and_make_again, run_tree(*both, tmp_path, where), prompts_of(20))
        for where in ("sharded", "whole")
    )

    for ours, theirs in zip(left, whole, strict=True):
        assert len(ours) == len(theirs) == 2
        np.testing.assert_allclose(*([line["reward"] for line in lines] for lines in (ours, theirs)), atol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_its_reward_model_in_another_place(
    pools: Any, both: tuple[Path, Path], tmp_path: Path
) -> None:
    pools(2).run(run, run_tree(*both, tmp_path / "straight", "sharded"), prompts_of(20))
    pools(2).run(run, run_tree(*both, tmp_path / "moved", "whole", steps=1), prompts_of(20))
    pools(1).run(run, run_tree(*both, tmp_path / "moved", "sharded"), prompts_of(20))

    lines = [read_metrics(tmp_path / where / "r/metrics.jsonl") for where in ("straight", "moved")]
    rewards = [[line["reward"] for line in part if "loss" in line] for part in lines]
    assert len(rewards[0]) == 2
    np.testing.assert_allclose(rewards[1], rewards[0], atol=1e-5)


def test_functions_that_fail_on_one_rank_leave_no_other_waiting_for_the_model(pools: Any, tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    (tmp_path / "my.py").write_text(
        "import os, time\n"
        "def slow(completion):\n    time.sleep(60 if completion == '13' else 0)\n    return 0.0\n"
        "def deadly(completion):\n    os.kill(os.getppid(), 9) if completion == '13' else None\n    return 0.0\n"
    )
    model = tree(path, tmp_path)["reward"][0]
    texts = [samples(["1", "13"]), samples(["1"])]

    def values(function: str) -> dict[str, Any]:
        named = {"kind": "path", "path": f"{tmp_path / 'my.py'}:{function}"}
        rewards = {"workers": 1, "timeout_seconds": 0.5}
        return settings("none", reward=[named, model], rewards=rewards, run={"dir": str(tmp_path), "name": "r"})

    slow = pools(2).run(score, values("slow"), [texts, texts])
    dead = pools(2).outcomes(score, values("deadly"), [texts], timeout_seconds=60.0)

    expected = alone(path, ["sort 31=1", "sort 31=13", "sort 31=1"])
    for call in range(2):
        found = [item for of_rank in slow for item in of_rank[call]]
        np.testing.assert_allclose([item.parts["model"] for item in found], expected, rtol=1e-5, atol=1e-5)
        assert [item.fault for item in found] == [None, "timeout", None]
    assert [ok for ok, _ in dead] == [False, True]
    assert dead[0][1][0] == "RunStopped"


def broken(place: Path, what: str) -> Path:
    """Save a directory with one thing wrong."""
    path = place / "m"
    match what:
        case "language model":
            return tiny_directory(path, "llama")
        case "outputs":
            return directory(path, outputs=3)
        case "encoder":
            return directory(path, "bert")
        case "tensor":
            directory(path)
            held = load_file(path / "model.safetensors")
            del held["model.norm.weight"]
            save_file(held, path / "model.safetensors", {"format": "pt"})
            return path
        case "positions":
            return directory(path, "gpt2")
    return path


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("nothing", "ModelError", r"There is no directory "),
        ("language model", "ModelError", "holds no score.weight as its model has it"),
        ("outputs", "ModelError", "has 3 outputs, and a reward is one of them. Name it by output."),
        ("encoder", "ModelError", "BertForSequenceClassification has no layer `score`"),
        ("tensor", "ModelError", "1 missing tensors (model.norm.weight)"),
        ("positions", "ConfigError", "max_length=2048 allows texts that are longer than the 128 positions of gpt2"),
    ],
)
def test_what_cannot_be_a_sharded_reward_is_refused_alike_on_all_ranks(
    pools: Any, tmp_path: Path, what: str, kind: str, words: str
) -> None:
    path = broken(tmp_path, what)

    errors = pools(2).errors(score, tree(path, tmp_path / "runs"), [])

    assert errors[0] == errors[1]
    assert errors[0][0] == kind
    assert errors[0][1].startswith("reward model: ")
    assert words in errors[0][1]
    assert not (tmp_path / "runs").exists()


def test_one_that_has_no_room_is_refused_with_the_places_that_take_less(pools: Any, tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    header = json.dumps({"score.weight": {"dtype": "F32", "shape": [2**20, 2**20], "data_offsets": [0, 2**42]}})
    with (path / "model.safetensors").open("wb") as file:  # a hole of 4 TiB, which takes no disk
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + 2**42)

    whole = pools(2).errors(score, tree(path, tmp_path, "whole"), [])
    sharded = pools(2).errors(score, tree(path, tmp_path, "sharded"), [])
    alone_ = pools(1).errors(score, tree(path, tmp_path, "whole"), [])

    assert whole[0] == whole[1]
    assert "reward model: its weights take 4,096 GiB in float32, whole on every rank, and rank 0 has" in whole[0][1]
    assert "Use place: sharded, which leaves each rank a share of 1/2, a smaller model, dtype: bfloat16" in whole[0][1]
    assert sharded[0] == sharded[1]
    assert "4,096 GiB in float32, and each of 2 ranks holds 2,048 GiB, and rank 0 has" in sharded[0][1]
    assert "Use a smaller model, dtype: bfloat16, more machines, or serve it" in sharded[0][1]
    assert "Use a smaller model" in alone_[0][1]
