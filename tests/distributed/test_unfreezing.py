"""What is frozen until some step: plain torch that adds a param group then does the same, and so does a resumed run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.checkpoint.keep import find
from holdfast.config.sections.data import DataConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.models.files.vision import FREEZE_PRESETS
from tests.crash.runs import log_of, run_each, state_differences, values_of
from tests.distributed import grpo_cases
from tests.distributed.cases import rows_of, settings, train
from tests.distributed.test_vision import side_of
from tests.tiny import tiny_directory, tiny_model
from tests.training.cases import run
from tests.vision import picture_rows, tokenizer_of, vision_directory, vision_model

STEPS, BATCH, MAX_LENGTH = 5, 8, 48
TOWER = FREEZE_PRESETS["vision_tower"]


def batches_of(rows: list[Any], tokenizer: Any, max_length: int, *side: Any) -> list[list[Any]]:
    tokeniser = RowTokeniser(tokenizer, DataConfig(path="rows", max_length=max_length), Path.cwd(), *side)
    examples = [tokeniser.examples(row, index, "rows").examples[0] for index, row in enumerate(rows)]
    return [examples[start : start + BATCH] for start in range(0, len(examples), BATCH)]


def in_plain_torch(
    model: Any,
    batches: list[list[Any]],
    frozen: str,
    later: dict[int, str],
    inputs_of: Callable[[Any], dict[str, Any]] = lambda _: {},
) -> dict[str, Any]:
    """Train in float64, one row at a time; at each step of `later` add a param group to torch's AdamW."""
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        parameter.requires_grad_(re.search(frozen, name) is None)
    hyper = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([p for p in named.values() if p.requires_grad], lr=0.01, **hyper)
    losses, norms = [], []
    for step, batch in enumerate(batches):
        if step in later:
            mine = [named[name] for name in named if re.search(later[step], name)]
            assert not any(parameter.requires_grad for parameter in mine)
            optimizer.add_param_group({"params": [parameter.requires_grad_(True) for parameter in mine]})
        total: Any = 0.0
        for example in batch:
            tokens = torch.as_tensor(example.tokens)[None]
            logprobs = model(input_ids=tokens, **inputs_of(example)).logits.log_softmax(-1)[0, :-1]
            chosen = logprobs.gather(1, tokens[0, 1:, None]).squeeze(1)
            total = total - (chosen * torch.as_tensor(example.loss_mask[1:])).sum()
        loss = total / sum(int(example.loss_mask.sum()) for example in batch)
        optimizer.zero_grad()
        loss.backward()
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in trained:  # an update without images reaches no tower, and its momentum goes on
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        losses.append(float(loss.detach()))
        norms.append(float(torch.stack([(p.grad**2).sum() for p in trained]).sum().sqrt()))
        optimizer.step()
    return {"losses": losses, "norms": norms, "parameters": {name: p.detach().numpy() for name, p in named.items()}}


ADAMW = {
    "kind": "adamw",
    "lr": 0.01,
    "betas": [0.9, 0.95],
    "eps": 1e-6,
    "weight_decay": 0.1,
    "no_decay": [],
    "schedule": "constant",
    "clip_norm": None,
}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-10)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-10)
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][name], parameter, rtol=0, atol=1e-10, err_msg=name)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_adamw_counts_the_steps_of_what_comes_later_from_its_own_first(pools: Any, llama: Path, ranks: int) -> None:
    rows = rows_of(STEPS * BATCH)
    frozen, later = r"embed_tokens|layers\.0", {2: r"layers\.0\.mlp", 4: "embed_tokens"}
    model = tiny_model("llama", tie_word_embeddings=True).double()
    expected = in_plain_torch(model, batches_of(rows, character_tokenizer(), MAX_LENGTH), frozen, later)
    start = {
        name: p.detach().double().numpy()
        for name, p in tiny_model("llama", tie_word_embeddings=True).named_parameters()
    }

    tree = settings(str(llama), optim=ADAMW, data={"tokens_per_micro_batch": 128})
    tree["steps"] = STEPS
    tree["model"] |= {
        "freeze": ["embeddings", r"layers\.0"],
        "unfreeze": [
            {"at_step": 4, "patterns": ["embeddings"]},
            {"at_step": 2, "patterns": [r"layers\.0\.mlp"]},
        ],
    }
    for found in pools(ranks).run(train, tree, rows, STEPS):
        assert_equal(found, expected)
        moved = {name for name, value in found["parameters"].items() if not np.array_equal(value, start[name])}
        assert set(start) - moved == {name for name in start if re.search(r"layers\.0\.(self_attn|.*norm)", name)}
        trained = [set(gradients) for gradients in found["gradients"]]
        assert [any("layers.0.mlp" in name for name in names) for names in trained] == [False, False, True, True, True]
        assert ["model.embed_tokens.weight" in names for names in trained] == [False] * 4 + [True]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tower_that_is_unfrozen_gets_the_gradients_of_transformers(
    pools: Any, tmp_path_factory: pytest.TempPathFactory, ranks: int
) -> None:
    directory = vision_directory(tmp_path_factory.mktemp("qwen2_5_vl"), "qwen2_5_vl")
    rows = picture_rows(4 * BATCH, images=(1, 0, 0, 0, 0, 0, 0, 0))  # of two ranks, one sees nothing
    side = side_of(directory, "qwen2_5_vl")

    def inputs_of(example: Any) -> dict[str, Any]:
        given = side.upstream_inputs(example.tokens, example.model_inputs) if example.model_inputs else {}
        return {name: torch.as_tensor(values) for name, values in given.items()}

    batches = batches_of(rows, tokenizer_of("qwen2_5_vl"), 128, side)
    expected = in_plain_torch(vision_model("qwen2_5_vl").double(), batches, TOWER, {2: TOWER}, inputs_of)

    tree = settings(str(directory), optim=ADAMW, data={"max_length": 128, "tokens_per_micro_batch": 160})
    tree["steps"] = 4
    tree["model"] |= {"freeze": ["vision_tower"], "unfreeze": {"at_step": 2, "patterns": ["vision_tower"]}}
    for found in pools(ranks).run(train, tree, rows, 4):
        assert_equal(found, expected)
        assert [any(re.search(TOWER, name) for name in step) for step in found["gradients"]] == [0, 0, 1, 1]


def saving(place: Path) -> dict[str, Any]:
    """Return a run that trains a block, embeddings and averages from step 3 on, and saves every step."""
    return values_of(
        place,
        steps=5,
        dropout=False,
        model={
            "dtype": "float64",
            "freeze": [r"layers\.0\.", "embeddings"],
            "unfreeze": {"at_step": 3, "patterns": [r"layers\.0\.", "embeddings"]},
        },
        optim={"ema": {"decay": 0.9}},
        checkpoint={"every_steps": 1, "frozen": "skip"},
    )


@pytest.fixture(scope="module")
def straight(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("straight")
    pools(2).run(run, saving(place))
    return place


def cut_after(step: int, straight: Path, place: Path) -> dict[str, Any]:
    """Copy a run without the checkpoints of later steps, and return how it goes on."""
    shutil.copytree(straight, place, dirs_exist_ok=True)
    for checkpoint in (place / "r" / "checkpoints").glob("step-*"):
        if int(checkpoint.name[5:]) > step:
            shutil.rmtree(checkpoint)
    return saving(place)


def test_resumes_before_at_and_after_the_step_are_the_straight_run(pools: Any, straight: Path, tmp_path: Path) -> None:
    places = {step: tmp_path / str(step) for step in (2, 3, 4)}
    same, other = tmp_path / "same", {step: cut_after(step, straight, place) for step, place in places.items()}

    pools(2).run(run, cut_after(3, straight, same))
    pools(1).run(run_each, list(other.values()))

    assert log_of(same) == log_of(straight)
    assert state_differences(same, straight) == []
    expected = log_of(straight)
    for place in places.values():
        found = log_of(place)
        assert [line[0] for line in found] == [1, 2, 3, 4, 5]
        assert [line[1] for line in found] == pytest.approx([line[1] for line in expected], abs=1e-10)
        assert [line[2] for line in found] == pytest.approx([line[2] for line in expected], abs=1e-9)


def test_a_checkpoint_says_what_was_trained_at_its_step(straight: Path) -> None:
    for step in (2, 3, 4):
        manifest = find.one(str(straight / "r" / "checkpoints" / f"step-{step:08d}")).manifest
        block = {key: entry for key, entry in manifest.tensors.items() if "layers.0.mlp.up_proj" in key}
        assert block["model.model.layers.0.mlp.up_proj.weight"].requires_grad == (step >= 3)
        assert ("optim.model.layers.0.mlp.up_proj.weight.exp_avg" in block) == (step >= 4)
        assert ("ema.model.layers.0.mlp.up_proj.weight" in block) == (step >= 3)
        assert manifest.optimizer is not None
        updated = {name for group in manifest.optimizer["groups"] for name in group["parameters"]}
        assert ("model.layers.0.mlp.up_proj.weight" in updated) == (step >= 3)
        assert "model.layers.1.mlp.up_proj.weight" in updated


@pytest.mark.deep
def test_unfreezing_by_declaration_on_resume_is_unfreezing_at_that_step(pools: Any, tmp_path: Path) -> None:
    frozen: dict[str, Any] = {"freeze": [r"layers\.0\."]}
    planned, declared = tmp_path / "planned", tmp_path / "declared"
    later = frozen | {"unfreeze": {"at_step": 2, "patterns": [r"layers\.0\."]}}
    pools(2).run(run_each, [values_of(planned, steps=4, model=later), values_of(declared, steps=2, model=frozen)])

    pools(2).run(run, values_of(declared, steps=4, checkpoint={"resume": {"unfreeze": [r"layers\.0\."]}}))

    assert state_differences(declared, planned) == []
    assert log_of(declared) == log_of(planned)
    recorded = find.one(str(declared / "r")).manifest.deviations
    assert len(recorded) == 9
    assert "layers.0.self_attn.q_proj.weight was frozen then and is trained now (resume.unfreeze)" in str(recorded)


def test_a_policy_unfreezes_between_steps_and_not_between_the_updates_of_one(pools: Any, llama: Path) -> None:
    rows = grpo_cases.prompts_of(8)
    tree = grpo_cases.settings(str(llama), updates={"passes": 2})
    tree["model"] |= {"freeze": [r"layers\.0"], "unfreeze": {"at_step": 1, "patterns": [r"layers\.0"]}}
    start = {
        name: p.detach().double().numpy()
        for name, p in tiny_model("llama", tie_word_embeddings=True).named_parameters()
    }

    first, second = (pools(2).run(grpo_cases.train, tree, rows, steps)[0]["parameters"] for steps in (1, 2))

    for name, before in start.items():
        assert np.array_equal(first[name], before) == ("layers.0." in name), name
        assert not np.array_equal(second[name], first[name]), name
