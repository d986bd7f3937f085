"""A reward model's updates are those of Bradley and Terry on plain transformers' scores; it is saved and read back."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from holdfast.checkpoint.export.stored import export_stored, export_stored_adapter
from holdfast.checkpoint.keep import find
from holdfast.config.sections.reward import ModelRewardConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.metrics.sink import read_metrics
from holdfast.models.heads.scorer import RewardModel
from holdfast.models.names import canonical_name
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.parallel.stream import full_tensor
from holdfast.recipes.reward import reward
from holdfast.training.preference.build import build_preference_run
from holdfast.training.setup.begin import Live
from tests.distributed.preference_cases import descend, pairs_of, parameters_of, sequences_of, settings, train
from tests.distributed.test_preference import assert_same
from tests.tiny import COMMON, tiny_directory
from tests.trees import run_from_mapping

ROWS = pairs_of(12)
CENTER, LR = 0.05, 0.5
LOSS = {"kind": "bradley_terry", "center": CENTER}


def scorer(dtype: torch.dtype = torch.float32) -> Any:
    """Return a model that scores; every tensor matters."""
    config = AutoConfig.for_model("starcoder2", **COMMON, num_labels=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scorer")
    scorer().save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def by_hand() -> dict[str, Any]:
    return updated(scorer(torch.float64))


def updated(model: Any) -> dict[str, Any]:
    """Make the updates with plain transformers, a text at a time, and the loss's derivatives by hand."""
    losses, margins, gradients = [], [], []
    for start in range(0, len(ROWS), 4):
        total, gap, linear = 0.0, 0.0, torch.zeros((), dtype=torch.float64)
        for pair in sequences_of(ROWS[start : start + 4]):
            chosen, rejected = (model(input_ids=torch.as_tensor(side.tokens)[None]).logits[0, 0] for side in pair)
            margin, level = float((chosen - rejected).detach()), float((chosen + rejected).detach())
            total += (np.log1p(np.exp(-margin)) + CENTER * level**2) / 4
            gap += margin / 4
            slope = -1 / (1 + np.exp(margin))
            linear = linear + (slope * (chosen - rejected) + 2 * CENTER * level * (chosen + rejected)) / 4
        losses.append(total)
        margins.append(gap)
        gradients.append(descend(model, linear, LR))
    return {"losses": losses, "margins": margins, "gradients": gradients, "parameters": parameters_of(model)}


@pytest.mark.parametrize(
    ("ranks", "data"),
    [
        pytest.param(1, {}, id="1 rank"),
        pytest.param(1, {"packing": "none"}, id="1 rank, padded"),
        pytest.param(2, {"tokens_per_micro_batch": 96}, id="2 ranks, packs of 96 tokens"),
        pytest.param(2, {"shared_prompt": "off"}, id="2 ranks, prompts repeated"),
        pytest.param(4, {}, id="4 ranks, of which some hold nothing of the score"),
    ],
)
def test_every_split_makes_the_updates_of_bradley_and_terry(
    pools: Any, directory: Path, by_hand: dict[str, Any], ranks: int, data: dict[str, Any]
) -> None:
    for found in pools(ranks).run(train, settings(str(directory), data=data, preference={"loss": LOSS}), ROWS):
        assert_same(found, by_hand)
        np.testing.assert_allclose([line["rewards/margins"] for line in found["lines"]], by_hand["margins"], rtol=1e-9)
        assert not any(name.startswith(("logps", "nll", "entropy")) for name in found["lines"][0])


def trained(world: World, tree: dict[str, Any], rows: Any) -> str:
    return str(reward(run_from_mapping(tree), Path(), world, Live(rows=rows)).export)


def tree(model: Path, place: Path, steps: int) -> dict[str, Any]:
    return settings(
        str(model),
        steps=steps,
        run={"dir": str(place), "name": "r"},
        model={"dtype": "float32"},
        preference={"loss": "bradley_terry"},
        optim={"kind": "adamw", "lr": 0.01},
        metrics={"progress": "off"},
        checkpoint={"every_steps": 2},
    )


@pytest.mark.slow
def test_a_run_from_a_language_model_resumes_and_exports_a_model_that_grpo_scores_with(
    pools: Any, tmp_path: Path
) -> None:
    tiny_directory(tmp_path / "model", "llama")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"

    (export, _) = pools(2).run(trained, tree(tmp_path / "model", straight, 4), ROWS)
    pools(2).run(trained, tree(tmp_path / "model", resumed, 2), ROWS)
    (again,) = pools(1).run(trained, tree(tmp_path / "model", resumed, 4), ROWS)

    losses = [
        {line["step"]: line["loss"] for line in read_metrics(place / "r/metrics.jsonl") if "loss" in line}
        for place in (straight, resumed)
    ]
    assert list(losses[0]) == list(losses[1]) == [1, 2, 3, 4]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert json.loads((Path(export) / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
    assert not [name for name in load_file(Path(export) / "model.safetensors") if name.startswith("lm_head")]
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(again), AutoTokenizer.from_pretrained(again)
    told = RewardModel(ModelRewardConfig(path=again, append_eos=True), tmp_path, torch.device("cpu"))
    for row in ROWS[:4]:
        tokens = torch.tensor([[*tokenizer(row["prompt"] + row["chosen"])["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            expected = float(model(input_ids=tokens).logits[0, 0])
        read = told.reading.tokens(told.reading.text(row["prompt"], row["chosen"], {}))
        assert told.scores([read]) == pytest.approx([expected], abs=1e-5)
    export_stored([find.one(str(resumed / "r"))], tmp_path / "stored")
    assert (tmp_path / "stored/model.safetensors").read_bytes() == (Path(again) / "model.safetensors").read_bytes()


@pytest.mark.parametrize("pad", [None, "<eos>"])
def test_a_model_whose_tokenizer_pads_with_nothing_else_is_read_at_the_token_that_was_trained(
    pools: Any, tmp_path: Path, pad: str | None
) -> None:
    tiny_directory(tmp_path / "model", "llama", pad_token_id=None if pad is None else 1)
    tokenizer = character_tokenizer()
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(tmp_path / "model")

    (export,) = pools(1).run(trained, tree(tmp_path / "model", tmp_path / "runs", 2), ROWS)

    texts = [row["prompt"] + row["chosen"] for row in ROWS[:4]]
    told = RewardModel(ModelRewardConfig(path=export, append_eos=True), tmp_path, torch.device("cpu"))
    rewards = told.scores([told.reading.tokens(told.reading.text(text, "", {})) for text in texts])
    model = AutoModelForSequenceClassification.from_pretrained(export)
    for text, reward_ in zip(texts, rewards, strict=True):
        tokens = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            trained_on = float(model.score(model.model(input_ids=tokens).last_hidden_state[0, -1]))
            upstream = float(model(input_ids=tokens).logits[0, 0])
        assert [reward_, upstream] == pytest.approx([trained_on] * 2, abs=1e-5)
    assert AutoConfig.from_pretrained(export).pad_token_id is None


LORA = {"rank": 4, "alpha": 8.0, "dora": True}


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_of_a_reward_model_are_trained_as_peft_trains_them(pools: Any, directory: Path, ranks: int) -> None:
    values = settings(str(directory), preference={"loss": LOSS}, model={"lora": LORA})
    start = pools(ranks).run(started, values)[0]
    model = scorer(torch.float64)
    layers = [path for path, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and "layers" in path]
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules=layers), model)
    for path, value in model.named_parameters():
        value.requires_grad_("lora_" in path or path == "score.weight")
        if "lora_" in path:
            value.data = torch.tensor(start[canonical_name(path)], dtype=torch.float64)
    expected = updated(model)

    found = pools(ranks).run(train, values, ROWS)[0]

    gradients = [{canonical_name(path): value for path, value in step.items()} for step in expected["gradients"]]
    parameters = {canonical_name(path): value for path, value in expected["parameters"].items()}
    assert_same(found, expected | {"gradients": gradients, "parameters": parameters})
    assert "score.weight" in gradients[0]


@pytest.mark.slow
def test_adapters_of_a_reward_model_resume_export_merged_and_alone_and_start_another_run(
    pools: Any, tmp_path: Path
) -> None:
    tiny_directory(tmp_path / "model", "llama")

    def values(steps: int, **lora: Any) -> dict[str, Any]:
        made = tree(tmp_path / "model", tmp_path, steps)
        return made | {"model": made["model"] | {"lora": LORA | lora}}

    pools(2).run(trained, values(2), ROWS)
    (export,) = pools(1).run(trained, values(4), ROWS)

    adapter = Path(f"{export}-adapter")
    assert [line["step"] for line in read_metrics(tmp_path / "r/metrics.jsonl") if "loss" in line] == [1, 2, 3, 4]
    merged = AutoModelForSequenceClassification.from_pretrained(export)
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1, pad_token_id=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads what transformers renamed
        adapted = PeftModel.from_pretrained(base, adapter)
    tokens = torch.arange(2, 40)[None]
    with torch.no_grad():
        scores = [model.eval()(input_ids=tokens).logits for model in (merged, adapted)]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-5)
    assert abs(float(scores[0])) > 1e-3
    export_stored_adapter(find.one(str(tmp_path / "r")), tmp_path / "again")
    for file in adapter.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    export_stored([find.one(str(tmp_path / "r"))], tmp_path / "whole")
    one, two = (load_file(Path(place) / "model.safetensors") for place in (export, tmp_path / "whole"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    again = pools(2).run(started, values(2, path=str(adapter)) | {"run": {"dir": str(tmp_path), "name": "other"}})[0]
    stored = load_file(adapter / "adapter_model.safetensors")
    assert "base_model.model.score.weight" in stored
    for name, value in stored.items():
        np.testing.assert_array_equal(again[name.removeprefix("base_model.model.")], value.numpy(), err_msg=name)


def started(world: World, values: dict[str, Any]) -> dict[str, Any]:
    training = build_preference_run(run_from_mapping(values), Path(), world, Live(rows=ROWS))
    return {
        name: full_tensor(value).numpy().copy() for name, value in sharded_parameters(training.model.module).items()
    }


def test_the_layer_that_files_lack_is_drawn_the_same_on_every_number_of_ranks(pools: Any, tmp_path: Path) -> None:
    tiny_directory(tmp_path / "model", "llama")

    (one,) = pools(1).run(started, tree(tmp_path / "model", tmp_path, 2))
    two, _ = pools(2).run(started, tree(tmp_path / "model", tmp_path, 2))

    stored = load_file(tmp_path / "model/model.safetensors")
    assert {*one} == {*stored, "score.weight"} - {"lm_head.weight"}
    for name, values in one.items():
        np.testing.assert_array_equal(two[name], values, err_msg=name)
        if name in stored:
            np.testing.assert_array_equal(values, stored[name].numpy(), err_msg=name)
    assert 0.005 < one["score.weight"].std() < 0.05  # transformers draws it with 0.02


@pytest.mark.parametrize(
    ("labels", "missing", "words"),
    [
        (3, None, "The model has 3 outputs, and a reward model has one"),
        (1, "model.norm.weight", "1 missing tensors (model.norm.weight)"),
    ],
)
def test_a_model_that_cannot_become_one_is_refused(
    pools: Any, directory: Path, tmp_path: Path, labels: int, missing: str | None, words: str
) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = AutoConfig.from_pretrained(directory)
    config.num_labels = labels
    config.save_pretrained(tmp_path)
    stored = load_file(directory / "model.safetensors")
    save_file({name: value for name, value in stored.items() if name != missing}, tmp_path / "model.safetensors")

    errors = pools(2).errors(trained, tree(tmp_path, tmp_path / "runs", 2), ROWS)

    assert errors[0] == errors[1]
    assert errors[0][0] == "ModelError"
    assert words in errors[0][1]
    assert not (tmp_path / "runs").exists()
