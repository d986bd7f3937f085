"""Ranks that share a row train as one rank does: losses, norms, gradients and parameters in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases import rows_of, settings, train
from tests.distributed.context_cases import branched, differences, document, first_lines, train_without_float32
from tests.distributed.test_split_invariance import assert_same
from tests.models.architectures import DYNAMIC
from tests.tiny import tiny_directory

ROWS = rows_of(24)

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}, {}),
    "one key head": ("qwen3", {"num_key_value_heads": 1}, {}),
    "windows and caps": ("gemma2", {"attn_logit_softcapping": 3.0}, {}),
    "lora": ("llama", {}, {"lora": {"rank": 2}}),
    "experts": ("mixtral", {"router_aux_loss_coef": 0.05, "output_router_logits": False}, {}),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            kind, overrides, _ = FAMILIES[family]
            made[family] = tiny_directory(tmp_path_factory.mktemp("model"), kind, **overrides)
        return made[family]

    return of


@pytest.fixture(scope="module")
def of_one_rank(pools: Any, directory: Any) -> Any:
    made: dict[tuple[str, str], Any] = {}

    def of(family: str, packing: str) -> dict[str, Any]:
        if (family, packing) not in made:
            tree = settings(str(directory(family)), model=FAMILIES[family][2], data={"packing": packing})
            made[family, packing] = pools(1).run(train_without_float32, tree, ROWS)[0]
        return made[family, packing]

    return of


SPLITS = [
    pytest.param("llama", 2, {}, {}, id="llama, 2"),
    pytest.param("llama", 2, {"tokens_per_micro_batch": 24}, {}, id="llama, rows of two ranks' tokens"),
    pytest.param("llama", 2, {"packing": "wrapped"}, {}, id="llama, windows"),
    pytest.param("llama", 2, {}, {"recompute": "full"}, id="llama, recomputed"),
    pytest.param("llama", 2, {}, {"recompute": "full", "offload": ["activations", "optimizer"]}, id="llama, offloaded"),
    pytest.param("llama", 4, {"tokens_per_micro_batch": 32}, {}, id="llama, context 2 x shard 2"),
    pytest.param("llama", 4, {}, {"replicate": 2}, id="llama, replicate 2 x context 2"),
    pytest.param("llama", 4, {"tokens_per_micro_batch": 12}, {"context": 4}, id="llama, 4"),
    pytest.param("one key head", 2, {}, {}, id="one key head, 2"),
    pytest.param("one key head", 4, {}, {"context": 4}, id="one key head, 4"),
    pytest.param("windows and caps", 2, {"tokens_per_micro_batch": 24}, {}, id="windows and caps, 2"),
    pytest.param("experts", 2, {"tokens_per_micro_batch": 24}, {"recompute": "full"}, id="experts, 2, recomputed"),
    pytest.param("experts", 4, {"tokens_per_micro_batch": 24}, {}, id="experts, context 2 x shard 2"),
    pytest.param("experts", 4, {"packing": "wrapped"}, {"context": 4}, id="experts, windows, 4"),
    pytest.param("lora", 2, {}, {}, id="lora, 2"),
]


@pytest.mark.cases(4)
@pytest.mark.parametrize(("family", "ranks", "data", "parallel"), SPLITS)
def test_ranks_that_share_a_row_train_as_one_rank(  # noqa: PLR0913 - a split has four parts
    pools: Any,
    directory: Any,
    of_one_rank: Any,
    family: str,
    ranks: int,
    data: dict[str, Any],
    parallel: dict[str, Any],
) -> None:
    expected = of_one_rank(family, data.get("packing", "best_fit"))
    tree = settings(str(directory(family)), model=FAMILIES[family][2], data=data, parallel={"context": 2} | parallel)

    found = pools(ranks).run(train_without_float32, tree, ROWS)

    for outcome in found:
        assert_same(outcome, expected, 1e-10)
        for step, metrics in enumerate(expected["metrics"]):
            names = {"mean_token_accuracy", "num_tokens"} | {name for name in metrics if name.startswith("router/")}
            told = {name: outcome["metrics"][step][name] for name in names}
            assert told == pytest.approx({name: metrics[name] for name in names}, rel=1e-9)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("family", "ranks"), [("llama", 2), ("windows and caps", 4)])
def test_the_span_of_a_rank_may_end_at_every_offset_of_a_document(
    pools: Any, directory: Any, family: str, ranks: int
) -> None:
    lengths = [(offset, 17 - offset, 4) for offset in range(1, 17)]
    packs: list[tuple[Any, Any]] = [
        ([document(index, length, offset) for index, length in enumerate(row)], None)
        for offset, row in enumerate(lengths)
    ]
    packs += [([document(0, length, 7)], None) for length in range(1, 2 * ranks + 1)]
    packs += [([*branched((offset, 3, 5), 4, offset), document(8, 3, 1)], [(3, 4), (1, 0)]) for offset in range(1, 9)]
    packs.append(([], None))
    tree = settings(str(directory(family)), parallel={"context": ranks})

    found = pools(ranks).run(differences, tree, ROWS, packs)

    assert len(found[0]) == len(packs)
    for of_rank in found:
        assert max(of_rank) < 1e-10


@pytest.mark.parametrize(
    ("kind", "overrides", "ranks", "parallel", "sentence"),
    [
        ("llama", {}, 4, {"context": 3}, "cannot be spread over 4 ranks. Set launch.ranks to a multiple of 3"),
        ("llama", {}, 4, {"context": 2, "shard": 4}, "is not the number of ranks, 4. Set shard: auto, or shard: 2."),
        (
            "llama",
            {"num_attention_heads": 2, "num_key_value_heads": 1},
            4,
            {"context": 4},
            "llama has 2. Set parallel.context to one of 2,",
        ),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, 2, {"context": 2}, "lfm2 is not packed: its conv layers"),
        ("llama", {"rope_parameters": DYNAMIC}, 2, {"context": 2}, "llama is not packed: its rotary angles depend"),
    ],
)
def test_what_cannot_share_rows_is_refused_on_all_ranks(  # noqa: PLR0913 - a model and its ranks
    pools: Any,
    tmp_path: Path,
    kind: str,
    overrides: dict[str, Any],
    ranks: int,
    parallel: dict[str, Any],
    sentence: str,
) -> None:
    tree = settings(str(tiny_directory(tmp_path, kind, **overrides)), parallel=parallel)

    errors = pools(ranks).errors(train, tree, ROWS)

    assert {name for name, _ in errors} == {"ConfigError"}
    for _, message in errors:
        assert sentence in message


@pytest.mark.parametrize(("local_size", "crosses"), [(3, True), (4, False)])
def test_groups_that_cross_machines_are_told_by_the_first_rank_alone(
    pools: Any, directory: Any, local_size: int, crosses: bool
) -> None:
    tree = settings(str(directory("llama")), parallel={"context": 2})

    first, *others = pools(4).run(first_lines, tree, ROWS, local_size)

    note = (
        "note: this machine has 3 ranks, so some groups of parallel.context=2 cross machines, and exchange queries, "
        "keys and values over the network."
    )
    assert first[0] == "every packed row is shared by 2 ranks (parallel.context)"
    assert (note in first) == crosses
    assert not any("parallel.context" in line for lines in others for line in lines)
