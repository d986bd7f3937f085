"""Compiled blocks give eager numbers, and batches of other shapes do not compile them again."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.parallel.mesh import World
from holdfast.recipes.sft import sft_step
from holdfast.training.setup.begin import Live, build_run
from tests.distributed.cases import rows_of, settings, train
from tests.tiny import tiny_directory

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_compiled_run_is_the_eager_run(pools: Any, directory: Path, recompute: str) -> None:
    trees = [settings(str(directory), parallel={"compile": it, "recompute": recompute}) for it in ("off", "blocks")]

    eager, compiled = (pools(2).run(train, tree, rows_of(24))[0] for tree in trees)

    np.testing.assert_allclose(compiled["losses"], eager["losses"], rtol=1e-6)
    for name, gradient in eager["gradients"][0].items():
        # normalisation layers compute in float32, and a fused kernel adds in another order
        np.testing.assert_allclose(compiled["gradients"][0][name], gradient, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_blocks_tell_what_their_routers_chose(pools: Any, tmp_path: Path, recompute: str) -> None:
    mixtral = tiny_directory(tmp_path / "mixtral", "mixtral", router_aux_loss_coef=0.05)
    trees = [
        settings(str(mixtral), model={"dtype": "float32"}, parallel={"compile": it, "recompute": recompute})
        for it in ("off", "blocks")
    ]

    eager, compiled = (pools(2).run(train, tree, rows_of(24))[0] for tree in trees)

    for line, expected in zip(compiled["metrics"], eager["metrics"], strict=True):
        for name in ("loss", "router/loss", "router/load_max", "router/load_min"):
            assert line[name] == pytest.approx(expected[name], rel=1e-5), name
    for name, gradient in eager["gradients"][0].items():
        np.testing.assert_allclose(compiled["gradients"][0][name], gradient, rtol=1e-3, atol=1e-5, err_msg=name)


def train_with_a_broken_compiler(
    world: World, tree: dict[str, Any], rows: Any, broken: int, place: str, full: str = ""
) -> dict[str, Any]:
    """Train where one rank finds no C++ compiler; return what `train` does, and what was printed of the blocks.

    Args:
        world: Of this rank.
        tree, rows: Of the run.
        broken: The rank.
        place: Of programs, where none are from earlier tests.
        full: A directory without room, where that rank's compiler writes: it has a compiler then.
    """
    torch._dynamo.reset()
    printed, breaks = io.StringIO(), world.rank == broken
    broken_one = torch._inductor.config.patch({"cpp.cxx": ("/nowhere/g++",)} if breaks and not full else {})
    with pytest.MonkeyPatch.context() as variables, broken_one, redirect_stdout(printed):
        variables.setenv("TORCHINDUCTOR_CACHE_DIR", full if breaks and full else place)
        outcome = train(world, tree, rows)
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("blocks: ")]
    return outcome | {"printed": lines}


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_without_a_compiler_lets_all_ranks_run_uncompiled(
    pools: Any, directory: Path, tmp_path: Path, broken: int
) -> None:
    trees = [settings(str(directory), parallel={"compile": it}) for it in ("off", "blocks")]

    eager = pools(2).run(train, trees[0], rows_of(24))[0]
    found = pools(2).run(train_with_a_broken_compiler, trees[1], rows_of(24), broken, str(tmp_path))[0]

    assert found["losses"] == eager["losses"]
    _, line = found["printed"]  # the first says that blocks are compiled now
    assert line.startswith("blocks: not compiled, ")
    assert "InvalidCxxCompiler" in line


def graphs_by_step(world: World, tree: dict[str, Any], rows: Any, steps: int) -> list[int]:
    """Return how many graphs were compiled by the end of each step."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # what earlier tests compiled in this process
    counters.clear()
    run = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows))
    found = []
    for _ in range(steps):
        sft_step(run)
        found.append(int(counters["stats"]["unique_graphs"]))
    return found


def test_fifty_packed_steps_compile_nothing_new(pools: Any, directory: Path) -> None:
    tree = settings(str(directory), parallel={"compile": "blocks"}, data={"tokens_per_micro_batch": 128})

    graphs = pools(2).run(graphs_by_step, tree, rows_of(200), 50)[0]

    assert graphs[0] > 0
    assert graphs[-1] == graphs[4]
