"""No result depends on how the work was split: every split against plain transformers, one sequence at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.data import DataConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.types import Example
from tests.distributed.cases import reference, rows_of, settings, train
from tests.tiny import tiny_directory, tiny_model

ROWS = rows_of(24)
MAX_LENGTH = 48


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=True)


def examples() -> list[Any]:
    tokeniser = RowTokeniser(character_tokenizer(), DataConfig(path="rows", max_length=MAX_LENGTH), Path.cwd())
    return [tokeniser.examples(row, index, "rows").examples[0] for index, row in enumerate(ROWS)]


def by_hand(average: str) -> Callable[[list[Any]], tuple[list[float], list[float]]]:
    def weigh(batch: list[Any]) -> tuple[list[float], list[float]]:
        lengths = [int(example.loss_mask.sum()) for example in batch]
        match average:
            case "token_mean":
                return [1.0] * len(batch), [float(length) for length in lengths]
            case "sequence_mean":
                return [1.0 / length for length in lengths], [1.0] * len(batch)
            case "constant_length":
                return [1.0 / MAX_LENGTH] * len(batch), [1.0] * len(batch)
            case _:  # prompt_mean: every row is a prompt of its own here
                return [1.0 / length for length in lengths], [1.0] * len(batch)

    return weigh


@pytest.fixture(scope="module")
def oracle(llama: Path) -> Callable[[str], dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {}

    def of(average: str) -> dict[str, Any]:
        if average not in made:
            model = tiny_model("llama", tie_word_embeddings=True).double()
            batches = [examples()[start : start + 8] for start in (0, 8, 16)]
            made[average] = reference(model, batches, by_hand(average), lr=0.1)
        return made[average]

    return of


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=tolerance)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=tolerance)
    for step, gradients in enumerate(expected["gradients"]):
        assert set(found["gradients"][step]) == set(gradients)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(
                found["gradients"][step][name], gradient, rtol=tolerance, atol=tolerance, err_msg=f"{name} at {step}"
            )
    assert set(found["parameters"]) == set(expected["parameters"])
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][name], parameter, rtol=0, atol=tolerance, err_msg=name)


SPLITS = [
    pytest.param(1, {}, {}, id="1 rank, one pack"),
    pytest.param(1, {"tokens_per_micro_batch": 48}, {}, id="1 rank, packs of 48 tokens"),
    pytest.param(1, {"packing": "none"}, {}, id="1 rank, padded"),
    pytest.param(2, {}, {}, id="2 ranks, one pack each"),
    pytest.param(2, {"tokens_per_micro_batch": 64}, {}, id="2 ranks, packs of 64 tokens"),
    pytest.param(2, {"tokens_per_micro_batch": 96, "packing": "none"}, {}, id="2 ranks, padded"),
    pytest.param(2, {"tokens_per_micro_batch": 64}, {"reduce": "last_micro_batch"}, id="2 ranks, reduced once"),
    pytest.param(2, {}, {"replicate": 2}, id="2 copies"),
    pytest.param(4, {}, {}, id="4 ranks"),
    pytest.param(4, {"tokens_per_micro_batch": 64}, {"replicate": 2}, id="2 copies of 2 ranks"),
    pytest.param(
        4, {"packing": "none"}, {"replicate": 2, "blocks_per_unit": 2}, id="2 x 2, padded, both blocks at once"
    ),
    pytest.param(2, {}, {"reshard": False}, id="2 ranks, gathered parameters kept"),
    pytest.param(2, {}, {"units": [r"layers\.\d+\.mlp$", r"layers\.\d+$"]}, id="2 ranks, units inside units"),
    pytest.param(2, {}, {"recompute": "full"}, id="2 ranks, recomputed"),
    pytest.param(2, {"tokens_per_micro_batch": 64}, {"cpu_offload": True}, id="2 ranks, offloaded"),
]


@pytest.mark.cases(5)
@pytest.mark.parametrize(("ranks", "data", "parallel"), SPLITS)
def test_every_split_gives_the_gradients_of_plain_transformers(
    pools: Any, oracle: Any, llama: Path, ranks: int, data: dict[str, Any], parallel: dict[str, Any]
) -> None:
    tree = settings(str(llama), data=data, parallel=parallel)

    found = pools(ranks).run(train, tree, ROWS)

    for outcome in found:
        assert_same(outcome, oracle("token_mean"), 1e-10)


GRID = [
    pytest.param(
        copies * shards, {"tokens_per_micro_batch": budget, "packing": packing}, {"replicate": copies} | more,
        id=f"{copies} x {shards}, {budget} tokens, {packing}, {next(iter(more.items()), ('', ''))}",
    )
    for copies, shards in ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1))
    for packing, budget in (("best_fit", 4096), ("best_fit", 64), ("none", 4096), ("none", 96))
    for more in ({}, {"recompute": "full"}, {"reshard": False}, {"cpu_offload": True})
    if copies * shards > 1 or not {"reshard", "cpu_offload"} & set(more)
]  # fmt: skip


@pytest.fixture(scope="module")
def oracle_of_adamw(llama: Path) -> dict[str, Any]:
    model = tiny_model("llama", tie_word_embeddings=True).double()
    batches = [examples()[start : start + 8] for start in (0, 8, 16)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    return reference(model, batches, by_hand("token_mean"), lr=0.01, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "data", "parallel"), GRID)
def test_the_whole_grid_of_splits_gives_the_updates_of_plain_transformers_and_adamw(  # noqa: PLR0913 - as above
    pools: Any, oracle_of_adamw: dict[str, Any], llama: Path, ranks: int, data: dict[str, Any], parallel: dict[str, Any]
) -> None:
    optim = {"kind": "adamw", "lr": 0.01, "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8}

    found = pools(ranks).run(train, settings(str(llama), data=data, parallel=parallel, optim=optim), ROWS)

    for outcome in found:
        assert_same(outcome, oracle_of_adamw, 1e-10)


@pytest.mark.parametrize(
    ("ranks", "data", "parallel"),
    [
        pytest.param(1, {"tokens_per_micro_batch": 48}, {}, id="1 rank, packs of 48 tokens"),
        pytest.param(2, {"tokens_per_micro_batch": 64}, {}, id="2 ranks, packs of 64 tokens"),
        pytest.param(4, {"packing": "none"}, {"replicate": 2}, id="2 copies of 2 ranks, padded"),
    ],
)
def test_the_norm_that_clips_is_that_of_the_whole_gradient(
    pools: Any, llama: Path, ranks: int, data: dict[str, Any], parallel: dict[str, Any]
) -> None:
    clip = 0.05
    model = tiny_model("llama", tie_word_embeddings=True).double()
    batches = [examples()[start : start + 8] for start in (0, 8, 16)]
    expected = reference(model, batches, by_hand("token_mean"), lr=2.0, clip_norm=clip)

    tree = settings(str(llama), data=data, parallel=parallel, optim={"lr": 2.0, "clip_norm": clip})
    found = pools(ranks).run(train, tree, ROWS)

    assert min(expected["norms"]) > 2 * clip
    for outcome in found:
        assert_same(outcome, expected, 1e-10)


def test_a_gradient_below_the_norm_is_not_touched(pools: Any, oracle: Any, llama: Path) -> None:
    expected = oracle("token_mean")
    clip = max(expected["norms"]) * 1.01

    found = pools(2).run(train, settings(str(llama), optim={"clip_norm": clip}), ROWS)[0]

    assert_same(found, expected, 1e-10)


@pytest.mark.cases("all")
@pytest.mark.parametrize("average", ["sequence_mean", "constant_length", "prompt_mean"])
@pytest.mark.parametrize(("ranks", "budget"), [(1, 4096), (2, 64), (4, 48)])
def test_every_average_is_independent_of_the_split(
    pools: Any, oracle: Any, llama: Path, average: str, ranks: int, budget: int
) -> None:
    tree = settings(str(llama), data={"average": average, "tokens_per_micro_batch": budget})

    found = pools(ranks).run(train, tree, ROWS)

    assert_same(found[0], oracle(average), 1e-10)


@pytest.mark.parametrize(
    ("ranks", "data", "parallel"),
    [
        pytest.param(1, {}, {}, id="1 rank"),
        pytest.param(2, {"tokens_per_micro_batch": 64}, {}, id="2 ranks, packs of 64 tokens"),
        pytest.param(2, {"packing": "none"}, {}, id="2 ranks, padded"),
        pytest.param(4, {}, {"replicate": 2}, id="2 copies of 2 ranks"),
    ],
)
def test_float32_agrees_with_float64_as_far_as_float32_goes(  # noqa: PLR0913 - a split has three parts
    pools: Any, oracle: Any, llama: Path, ranks: int, data: dict[str, Any], parallel: dict[str, Any]
) -> None:
    tree = settings(str(llama), model={"dtype": "float32"}, data=data, parallel=parallel)

    found = pools(ranks).run(train, tree, ROWS)[0]

    expected = oracle("token_mean")
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-5)
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][name], parameter, rtol=0, atol=1e-6, err_msg=name)


def pieces(rows: list[dict[str, str]], limit: int) -> list[Any]:
    """Cut rows by hand into sequences of at most `limit` tokens, numbered by their row; the prompt trains nothing."""
    tokenizer = character_tokenizer()
    found = []
    for number, row in enumerate(rows):
        prompt, answer = (tokenizer(row[name], add_special_tokens=False)["input_ids"] for name in row)
        tokens = np.asarray([*prompt, *answer, tokenizer.eos_token_id])
        trained = np.arange(tokens.size) >= len(prompt)
        for start in range(0, tokens.size, limit):
            mask = trained[start : start + limit].copy()
            mask[0] = False  # nothing predicts it
            if mask.any():
                found.append(Example(number, number, tokens[start : start + limit], mask))
    return found


def by_prompt(batch: list[Any]) -> tuple[list[float], list[float]]:
    """Weigh a row's trained tokens alike, whichever of its sequences they are in; a row counts once."""
    trained = Counter[int]()
    for example in batch:
        trained[example.sample_id] += int(example.loss_mask.sum())
    shares = [int(example.loss_mask.sum()) / trained[example.sample_id] for example in batch]
    return [1.0 / trained[example.sample_id] for example in batch], shares


@pytest.mark.parametrize(("ranks", "budget"), [(1, 4096), (2, 32), (4, 12)])
def test_the_mean_over_prompts_counts_a_row_of_several_sequences_once(
    pools: Any, llama: Path, ranks: int, budget: int
) -> None:
    cut = [pieces(ROWS[start : start + 8], 12) for start in (0, 8, 16)]
    model = tiny_model("llama", tie_word_embeddings=True).double()
    expected = reference(model, cut, by_prompt, lr=0.1)
    sequences = reference(
        tiny_model("llama", tie_word_embeddings=True).double(), cut[:1], by_hand("sequence_mean"), lr=0.1
    )
    data = {"average": "prompt_mean", "overlong": "split", "max_length": 12, "tokens_per_micro_batch": budget}

    found = pools(ranks).run(train, settings(str(llama), data=data), ROWS)[0]

    assert max(Counter(example.sample_id for example in cut[0]).values()) > 2
    assert abs(expected["losses"][0] - sequences["losses"][0]) > 1e-4
    assert_same(found, expected, 1e-10)


def test_small_budgets_really_split_the_batch(pools: Any, llama: Path) -> None:
    tree = settings(str(llama), data={"tokens_per_micro_batch": 64})

    one, two = (pools(ranks).run(train, tree, ROWS)[0] for ranks in (1, 2))

    assert min(one["micro_batches"]) >= 3
    assert min(two["micro_batches"]) >= 2


def test_each_rank_tokenises_its_share_of_the_rows(pools: Any, llama: Path) -> None:
    found = pools(4).run(train, settings(str(llama)), ROWS)

    assert [outcome["rows_tokenised"] for outcome in found] == [6, 6, 6, 6]


def test_the_loss_is_the_one_transformers_computes(pools: Any, llama: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True).double()
    batch = examples()[:8]
    width = max(example.tokens.size for example in batch)
    tokens = torch.zeros(8, width, dtype=torch.int64)
    labels = torch.full((8, width), -100)
    mask = torch.zeros_like(tokens)
    for row, example in enumerate(batch):
        size = example.tokens.size
        tokens[row, :size] = torch.as_tensor(example.tokens)
        labels[row, :size] = torch.where(torch.as_tensor(example.loss_mask), tokens[row, :size], -100)
        mask[row, :size] = 1
    with torch.no_grad():
        expected = float(model(input_ids=tokens, attention_mask=mask, labels=labels).loss)

    found = pools(2).run(train, settings(str(llama)), ROWS, 1)[0]

    assert found["losses"][0] == pytest.approx(expected, rel=1e-6)  # transformers computes its loss in float32
