"""Noise on embeddings: transformers' own NEFTune, one sequence at a time, and no split of the work changes it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

from holdfast.data.batches.packing import Share, pack
from holdfast.models.heads.noise import EmbeddingNoise
from holdfast.parallel.mesh import World
from tests.crash.runs import log_of, run, values_of
from tests.distributed.cases import reference, settings, train
from tests.distributed.test_split_invariance import ROWS, assert_same, by_hand, examples
from tests.tiny import tiny_directory, tiny_model
from tests.training.cases import evaluate, tree

ALPHA = 15.0
SEED = 3


def by_transformers(example: Any, step: int, output: torch.Tensor) -> torch.Tensor:
    """Return what transformers adds to the embeddings of one sequence, from the generator's state of ours."""
    digest = hashlib.sha256(f"neftune:{SEED}:{step}:{example.sample_id}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "little"))
    module: Any = SimpleNamespace(training=True, neftune_noise_alpha=ALPHA)
    zeros = torch.zeros(output.shape, dtype=torch.float32)
    torch.set_default_dtype(torch.float64)  # of the root that it takes of L d
    noise: torch.Tensor = neftune_post_forward_hook(module, None, zeros)
    torch.set_default_dtype(torch.float32)
    return noise.to(output.dtype)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def oracle() -> dict[str, Any]:
    model = tiny_model("llama", tie_word_embeddings=True).double()
    current: list[Any] = []

    def inputs_of(example: Any) -> dict[str, Any]:
        current[:] = [example]
        return {}

    model.get_input_embeddings().register_forward_hook(
        lambda _, __, output: output + by_transformers(current[0], current[0].sample_id // 8, output)
    )
    batches = [examples()[start : start + 8] for start in (0, 8, 16)]
    return reference(model, batches, by_hand("token_mean"), lr=0.1, inputs_of=inputs_of)


@pytest.mark.parametrize(
    ("ranks", "data", "parallel"),
    [
        pytest.param(1, {"packing": "none"}, {"recompute": "full"}, id="1 rank, padded, recomputed"),
        pytest.param(2, {"tokens_per_micro_batch": 64}, {}, id="2 ranks, packs of 64 tokens"),
        pytest.param(2, {"tokens_per_micro_batch": 96, "packing": "none"}, {"replicate": 2}, id="2 copies, padded"),
    ],
)
def test_every_split_gives_the_updates_of_transformers_with_its_noise(  # noqa: PLR0913 - a split, and what it trains
    pools: Any, oracle: dict[str, Any], llama: Path, ranks: int, data: dict[str, Any], parallel: dict[str, Any]
) -> None:
    values = settings(str(llama), data=data, parallel=parallel, neftune_alpha=ALPHA, seed=SEED)

    outcomes = pools(ranks).run(train, values, ROWS)

    for outcome in outcomes:
        assert_same(outcome, oracle, 1e-10)


def noise_of(rows: list[Any], step: int, *, padded: bool = False) -> torch.Tensor:
    """Return [B, T, 64] what is added to embeddings of zeros."""
    embeddings = torch.nn.Embedding.from_pretrained(torch.zeros(64, 64))
    noise = EmbeddingNoise(embeddings, ALPHA, SEED, step)
    batch = pack(rows, [Share(1.0, 1.0)] * len(rows), padded=padded)
    noise.follow(batch)
    added: torch.Tensor = embeddings(batch.tokens)
    noise.end()
    assert not embeddings(batch.tokens).any()
    return added


def test_numbers_are_uniform_in_bounds_of_the_sequence_s_own_length() -> None:
    rows = examples()[:6]

    packed, padded = noise_of(rows, 0), noise_of(rows, 0, padded=True)

    start = 0
    for row, example in enumerate(rows):
        length = example.tokens.size
        own = packed[0, start : start + length]
        bound = ALPHA / (length * 64) ** 0.5
        assert 0.98 * bound < float(own.abs().max()) <= bound
        assert float(own.var()) == pytest.approx(bound**2 / 3, rel=0.15)
        assert float(own.mean()) == pytest.approx(0.0, abs=0.1 * bound)
        assert torch.equal(padded[row, :length], own)
        assert not padded[row, length:].any()
        start += length
    assert start == packed.shape[1]


def test_every_step_and_every_sample_has_numbers_of_its_own() -> None:
    (row,) = examples()[:1]
    first = noise_of([row], 0)

    assert torch.equal(noise_of([row], 0), first)
    assert not torch.isclose(noise_of([row], 1), first).any(-1).all()


def test_an_idle_rank_s_batch_has_no_noise() -> None:
    assert not noise_of([], 0).any()


def both(world: World, several: list[dict[str, Any]]) -> list[Any]:
    return [evaluate(world, values) for values in several]


@pytest.mark.slow
def test_evaluation_has_no_noise(pools: Any, tmp_path: Path) -> None:
    sets = {"sets": {"other": {"synthetic": {"task": "sort", "rows": 40, "seed": 9}}}}
    plain = tree(str(tmp_path), evaluation=sets)

    quiet, noisy = pools(1).run(both, [plain, plain | {"neftune_alpha": 50.0}])[0]

    assert quiet["eval/other/loss"] == noisy["eval/other/loss"]


@pytest.mark.slow
def test_a_resume_draws_what_the_run_would_have_drawn(pools: Any, tmp_path: Path) -> None:
    noisy: Callable[..., dict[str, Any]] = lambda name, steps: values_of(  # noqa: E731
        tmp_path / name, steps=steps, dropout=False, neftune_alpha=ALPHA
    )
    pools(2).run(run, noisy("straight", 4))
    pools(2).run(run, values_of(tmp_path / "quiet", steps=1, dropout=False))
    pools(2).run(run, noisy("resumed", 2))

    pools(2).run(run, noisy("resumed", 4))

    assert log_of(tmp_path / "resumed") == log_of(tmp_path / "straight")
    assert log_of(tmp_path / "quiet")[0][1] != log_of(tmp_path / "straight")[0][1]
