"""A model as a reward: its numbers are those of plain transformers, one text at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from holdfast.config.load import from_mapping
from holdfast.config.sections.reward import (
    LengthConfig,
    ModelRewardConfig,
    Reward,
    RewardPoolConfig,
)
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.errors import ConfigError, ModelError
from holdfast.models.heads.scorer import RewardModel, TextScorer
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.failure.channel import FailureChannel
from holdfast.parallel.mesh import World
from holdfast.rewards.base import Sample
from holdfast.training.policy.reward_model import open_reward_model
from holdfast.training.policy.rewards import RewardScorer
from holdfast.training.run import Run
from tests.distributed.grpo_cases import settings
from tests.models.architectures import DYNAMIC, fresh
from tests.tiny import COMMON, tiny_directory

CPU = torch.device("cpu")
TEXTS = ["sort 31=13", "a", "reverse abcdef=fedcba", "add 1+2=3"]
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"


def directory(path: Path, outputs: int = 1, template: str | None = None, **overrides: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **COMMON | overrides, num_labels=outputs)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path)
    tokenizer = character_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


def alone(path: Path, texts: list[str], output: int = 0) -> list[float]:
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), character_tokenizer()
    with torch.no_grad():
        return [float(fresh(model)(**tokenizer(text, return_tensors="pt")).logits[0, output]) for text in texts]


def scorer_of(sections: list[Reward], place: Path) -> RewardScorer:
    world = World(0, 1, 0, CPU, FailureChannel(torch.distributed.HashStore(), 0, 1))
    config = from_mapping(settings("none"), GRPOConfig).model_copy(update={"reward": tuple(sections)})
    run = Run(config=config, base=place, world=world, ranks=RankGroup())
    models = {
        section.label: open_reward_model(section, run) for section in sections if isinstance(section, ModelRewardConfig)
    }
    return RewardScorer(run, RewardPoolConfig(workers=1), models, place)


def scores(model: TextScorer, texts: list[str]) -> list[float]:
    return model.scores([model.reading.tokens(text) for text in texts])


def sample(number: int, completion: str, **row: Any) -> Sample:
    return Sample(number, "sort 31=", completion, [1] * 8, [1] * len(completion), "stop", row)


@pytest.mark.parametrize("texts_per_pass", [1, 4])
def test_rotary_angles_are_those_of_each_text_alone(tmp_path: Path, texts_per_pass: int) -> None:
    path = str(directory(tmp_path / "m", max_position_embeddings=8, rope_parameters=DYNAMIC))

    model = RewardModel(ModelRewardConfig(path=path, batch_size=texts_per_pass), tmp_path, CPU)

    for _ in range(2):  # a call ends with the longest text, which the next one must not remember
        np.testing.assert_allclose(scores(model, TEXTS), alone(tmp_path / "m", TEXTS), rtol=1e-4, atol=1e-5)


def test_scores_are_those_of_each_text_alone(tmp_path: Path) -> None:
    path = str(directory(tmp_path / "m"))

    found = scores(RewardModel(ModelRewardConfig(path=path, batch_size=3), tmp_path, CPU), TEXTS)

    expected = alone(tmp_path / "m", TEXTS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert len({round(value, 3) for value in expected}) == 4
    squashed = scores(RewardModel(ModelRewardConfig(path=path, sigmoid=True), tmp_path, CPU), TEXTS)
    np.testing.assert_allclose(squashed, 1 / (1 + np.exp(-np.array(expected))), rtol=1e-4)


@pytest.mark.parametrize(("pad", "notes"), [(None, 0), (-1, 0), (0, 0), (1, 1)])
def test_scores_stand_where_transformers_reads_them_whatever_the_tokenizer_pads_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pad: int | None, notes: int
) -> None:
    path = directory(tmp_path / "m", pad_token_id=pad)
    tokenizer = character_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(path)
    scorer = scorer_of([ModelRewardConfig(path=str(path), append_eos=True)], tmp_path)

    found = [item.reward for item in scorer.score([sample(number, text) for number, text in enumerate(TEXTS)])]

    np.testing.assert_allclose(found, alone(path, [f"sort 31={text}<eos>" for text in TEXTS]), rtol=1e-4, atol=1e-5)
    without = alone(path, [f"sort 31={text}" for text in TEXTS])
    assert (pad == 1) == np.allclose(found, without, rtol=1e-4, atol=1e-5)
    assert capsys.readouterr().out.count("calls the end of text, token 1, padding") == notes


def test_one_of_several_outputs_is_named_or_refused(tmp_path: Path) -> None:
    path = str(directory(tmp_path / "m", outputs=3))

    found = scores(RewardModel(ModelRewardConfig(path=path, output=2), tmp_path, CPU), TEXTS)

    np.testing.assert_allclose(found, alone(tmp_path / "m", TEXTS, 2), rtol=1e-4, atol=1e-5)
    with pytest.raises(ModelError, match="has 3 outputs, and a reward is one of them"):
        RewardModel(ModelRewardConfig(path=path), tmp_path, CPU)
    with pytest.raises(ModelError, match="has 3 outputs, numbered from 0"):
        RewardModel(ModelRewardConfig(path=path, output=3), tmp_path, CPU)


def test_a_conversation_is_written_in_the_models_own_template(tmp_path: Path) -> None:
    path = str(directory(tmp_path / "m", template=TEMPLATE))
    reading = RewardModel(ModelRewardConfig(path=path), tmp_path, CPU).reading

    text = reading.text("ignored", "13", {"prompt": [{"role": "user", "content": "sort 31"}]})

    assert text == "u:sort 31;a:13;"
    assert reading.text("sort 31=", "13", {"prompt": "sort 31="}) == "sort 31=13"


def test_a_model_and_a_function_are_summed_by_their_weights(tmp_path: Path) -> None:
    path = str(directory(tmp_path / "m"))
    sections: list[Reward] = [LengthConfig(max=3, weight=2.0), ModelRewardConfig(path=path, weight=0.5, name="judge")]
    samples = [sample(0, "13"), sample(1, "1333333")]
    scorer = scorer_of(sections, tmp_path)
    scorer.start()
    try:
        found = scorer.score(samples)
    finally:
        scorer.close()

    judged = alone(tmp_path / "m", ["sort 31=13", "sort 31=1333333"])
    assert [item.parts["length"] for item in found] == [1.0, 0.0]
    np.testing.assert_allclose([item.parts["judge"] for item in found], judged, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        [item.reward for item in found], [2.0 + 0.5 * judged[0], 0.5 * judged[1]], rtol=1e-4, atol=1e-5
    )


def test_a_completion_that_the_template_refuses_is_an_error_of_its_own(tmp_path: Path) -> None:
    picky = "{% if messages[1].content == 'no' %}{{ raise_exception('not that') }}{% endif %}{{ messages[1].content }}"
    path = str(directory(tmp_path / "m", template=picky))
    scorer = scorer_of([ModelRewardConfig(path=path)], tmp_path)
    talk = [{"role": "user", "content": "sort 31"}]

    found = scorer.score([sample(n, text, prompt=talk) for n, text in enumerate(["13", "no", "", "1333333"])])

    judged = alone(tmp_path / "m", ["13", "1333333"])
    np.testing.assert_allclose([found[0].reward, found[3].reward], judged, rtol=1e-4, atol=1e-5)
    assert [(item.reward, item.fault) for item in found[1:3]] == [(None, "error")] * 2
    assert found[1].message.startswith("reward model raised TemplateError: not that")
    assert found[2].message.startswith("reward model has no text to read")


def test_a_directory_without_such_a_model_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(ModelError, match="reward model: .*empty cannot be loaded for sequence classification"):
        scorer_of([ModelRewardConfig(path=str(tmp_path / "empty"))], tmp_path)


def test_a_model_that_has_no_room_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    header = json.dumps({"score.weight": {"dtype": "F32", "shape": [2**20, 2**18], "data_offsets": [0, 2**40]}})
    with (path / "model.safetensors").open("wb") as file:  # a hole of a TiB, which takes no disk
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + 2**40)

    words = r"reward model: its weights take 512 GiB in bfloat16, whole on every rank, and rank 0 has .* free in its"
    with pytest.raises(ConfigError, match=words):
        scorer_of([ModelRewardConfig(path=str(path), dtype="bfloat16")], tmp_path)


def test_the_start_says_what_a_model_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = directory(tmp_path / "m")

    scorer_of([ModelRewardConfig(path=str(path), name="judge", dtype="float32")], tmp_path)

    count = sum(value.numel() for value in AutoModelForSequenceClassification.from_pretrained(path).parameters())
    assert f"reward judge: {count * 4 / 2**10:.1f} KiB of weights in float32, on every rank" in capsys.readouterr().out


def test_a_model_without_a_trained_score_is_refused_instead_of_drawing_rewards_at_random(tmp_path: Path) -> None:
    path = str(tiny_directory(tmp_path / "m", "llama"))
    character_tokenizer().save_pretrained(path)

    with pytest.raises(ModelError, match=r"m holds no score\.weight as its model has it"):
        RewardModel(ModelRewardConfig(path=path, output=0), tmp_path, CPU)


def test_a_text_with_a_token_that_the_model_does_not_know_is_an_error_of_its_own(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    rows = len(tokenizer)
    path = directory(tmp_path / "m", vocab_size=rows)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(path)

    found = scorer_of([ModelRewardConfig(path=str(path))], tmp_path).score([sample(0, "1<new>3"), sample(1, "13")])

    assert found[0].message.startswith(f"reward model raised ValueError: its tokenizer makes token {rows} of the text")
    np.testing.assert_allclose([found[1].reward], alone(path, ["sort 31=13"]), rtol=1e-4, atol=1e-5)
