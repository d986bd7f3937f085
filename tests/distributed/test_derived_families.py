"""Families known by their processors alone: updates on 2 ranks are those of plain transformers, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.config.sections.data import DataConfig, PromptDataConfig
from holdfast.data.content.lengths import joined_inputs
from holdfast.data.tokens.chat import RowTokeniser
from tests.distributed import grpo_cases
from tests.distributed.cases import reference, settings, train
from tests.distributed.test_split_invariance import assert_same, by_hand
from tests.distributed.test_vision import with_zeros
from tests.vision import picture_rows
from tests.vision_derived import derived_directory, derived_model, derived_side, tokenizer_in

KINDS = ["qwen3_5", "gemma4", "janus", "ovis2", "internvl", "llava_next"]
MAX_LENGTH = 256
TOLERANCE = dict.fromkeys(KINDS, 1e-10) | {"qwen3_5": 1e-6, "gemma4": 1e-5, "ovis2": 1e-8}
"""Gemma's norms, those of Ovis2's tower and the linear attention of Qwen3.5 compute in float32 in a float64 model."""
LR = 1e-3
"""Larger updates of these models send rounding in float32 to other places within three steps."""
ROWS = {
    "mixed": picture_rows(24),
    "a picture in one row of eight": picture_rows(24, images=(1, 0, 0, 0, 0, 0, 0, 0)),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = derived_directory(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return of


def oracle(directory: Path, kind: str, rows: str) -> dict[str, Any]:
    """Train with plain transformers: its own forward with pixel values, one row at a time, in float64."""
    side, tokenizer = derived_side(directory), tokenizer_in(directory)
    tokeniser = RowTokeniser(tokenizer, DataConfig(path="rows", max_length=MAX_LENGTH), Path.cwd(), side)
    examples = [tokeniser.examples(row, index, "rows").examples[0] for index, row in enumerate(ROWS[rows])]

    def inputs_of(example: Any) -> dict[str, Any]:
        if not example.model_inputs:
            return {}
        inputs = side.upstream_inputs(example.tokens, example.model_inputs)
        return {name: torch.as_tensor(values) for name, values in inputs.items()}

    batches = [examples[start : start + 8] for start in (0, 8, 16)]
    return reference(derived_model(kind, tokenizer).double(), batches, by_hand("token_mean"), LR, inputs_of)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ranks", "rows", "data"),
    [
        pytest.param(1, "mixed", {"packing": "none"}, id="1 rank, padded"),
        pytest.param(2, "mixed", {"tokens_per_micro_batch": 320}, id="2 ranks, small packs"),
        pytest.param(2, "a picture in one row of eight", {"tokens_per_micro_batch": 256}, id="2 ranks, images on one"),
    ],
)
def test_updates_are_those_of_transformers(
    pools: Any, directory: Callable[[str], Path], kind: str, ranks: int, rows: str, data: dict[str, Any]
) -> None:
    expected = oracle(directory(kind), kind, rows)
    expected = with_zeros(expected, list(expected["parameters"]))
    tree = settings(str(directory(kind)), data={"max_length": MAX_LENGTH, "tokens_per_micro_batch": 512} | data)
    tree["optim"] |= {"lr": LR}

    for found in pools(ranks).run(train, tree, ROWS[rows]):
        assert_same(found, expected, TOLERANCE[kind])


def prompts() -> list[dict[str, Any]]:
    return [{"prompt": row["messages"][:1]} for row in picture_rows(12, images=(1, 0, 2))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_s_steps_are_those_of_the_paper(pools: Any, directory: Callable[[str], Path], kind: str) -> None:
    place, rows = directory(kind), prompts()
    side, tokenizer = derived_side(place), tokenizer_in(place)
    tokeniser = RowTokeniser(tokenizer, PromptDataConfig(path="rows", max_length=MAX_LENGTH), Path.cwd(), side)
    images = [joined_inputs(tokeniser.opening(row, "row").laid) for row in rows]
    tree = grpo_cases.settings(str(place), data={"max_length": MAX_LENGTH, "tokens_per_micro_batch": 1024})

    tree["optim"] |= {"lr": LR}
    found = pools(2).run(grpo_cases.train, tree, rows)[0]

    def shown(prompt_id: int, tokens: Sequence[int]) -> dict[str, Any]:
        read = np.array([*tokens[:-1], 0 if tokens[-1] in side.marks else tokens[-1]])
        inputs = side.upstream_inputs(read, images[prompt_id]) if images[prompt_id] else {}
        return {"input_ids": torch.tensor(read)[None]} | {name: torch.as_tensor(v) for name, v in inputs.items()}

    expected = grpo_cases.by_hand(derived_model(kind, tokenizer).double(), found["sampled"], lr=LR, shown=shown)
    losses, norms = ([line[name] for line in found["lines"]] for name in ("loss", "grad_norm"))
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=1e-7)
    np.testing.assert_allclose(norms, expected["norms"], rtol=max(TOLERANCE[kind], 1e-6))
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(
            found["parameters"][name], parameter, rtol=0, atol=max(TOLERANCE[kind], 1e-6), err_msg=name
        )


@pytest.mark.parametrize("kind", ["janus", "ovis2"])
def test_a_policy_that_samples_a_mark_of_images_ends_its_completion(pools: Any, tmp_path: Path, kind: str) -> None:
    """Behind it, training would read a feature, or miss one, where sampling read an embedding."""
    directory = derived_directory(tmp_path / kind, kind)
    side, file = derived_side(directory), directory / "model.safetensors"
    tensors = load_file(file)
    for mark in side.marks:
        tensors["lm_head.weight"][mark] *= 4.0
    save_file(tensors, file, {"format": "pt"})
    tree = grpo_cases.settings(str(directory), data={"max_length": MAX_LENGTH, "tokens_per_micro_batch": 1024})

    found = pools(1).run(grpo_cases.train, tree, prompts())[0]

    completions = [(list(tokens), finish) for step in found["sampled"] for _, _, tokens, finish, _ in step]
    marked = [(tokens, finish) for tokens, finish in completions if set(tokens) & set(side.marks)]
    assert len(marked) > 3
    for tokens, finish in marked:
        assert (finish, set(tokens[:-1]) & set(side.marks)) == ("stop", set())
