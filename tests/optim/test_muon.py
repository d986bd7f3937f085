"""Muon against NumPy on whole matrices, on any number of ranks, and who gets which algorithm."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from holdfast import checkpoint
from holdfast.config.load import from_mapping
from holdfast.config.sections.optim import MuonConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.errors import ConfigError
from holdfast.optim.muon import Stack, orthogonalised
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.parallel.stream import full_tensor
from holdfast.training.preference.build import build_preference_run
from holdfast.training.setup.begin import Live, build_run
from holdfast.training.setup.optimizers import build_optimizer
from tests.checkpoint.cases import contents
from tests.distributed.cases import rows_of, settings
from tests.distributed.cases import train as train_model
from tests.distributed.preference_cases import pairs_of
from tests.distributed.preference_cases import settings as preference_settings
from tests.distributed.toys import Toy, shard
from tests.tiny import tiny_directory
from tests.trees import run_from_mapping
from tests.vision import picture_rows, vision_directory

Array = NDArray[np.float64]
LR, ADAMW_LR, DECAY, MOMENTUM, BETAS, EPS = 0.25, 0.125, 0.5, 0.75, (0.5, 0.75), 1e-3
QUINTIC = (3.4445, -4.7750, 2.0315)


class Mixture(nn.Module):
    """A wide matrix, a tall one, three experts with biases and adapters, and vectors; few sides divide by two."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(7, 3, dtype=torch.float64)
        self.tall = nn.Linear(3, 7, bias=False, dtype=torch.float64)
        self.experts = nn.Parameter(torch.randn(3, 7, 5, dtype=torch.float64))
        self.experts_bias = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
        self.adapters_a = nn.Parameter(torch.randn(3 * 2, 7, dtype=torch.float64))
        self.adapters_b = nn.Parameter(torch.randn(5, 2 * 3, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.tall(self.wide(inputs)) + inputs
        spread = (hidden @ self.experts).square().sum((0, 2))
        return hidden * spread.sum(-1, keepdim=True)


def built(world: World, seed: int = 0, **options: Any) -> tuple[Toy, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        toy = Toy(Mixture())
    shard(world, toy)
    config = MuonConfig(
        lr=LR,
        adamw_lr=ADAMW_LR,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        betas=BETAS,
        eps=EPS,
        no_decay=["bias"],
        **options,
    )
    parameters = sharded_parameters(toy)
    stacks = {name: Stack(3, by_columns=name.endswith("b")) for name in parameters if "adapters" in name}
    return toy, build_optimizer(config, parameters, stacks=stacks)


def gradient(name: str, shape: tuple[int, ...], step: int) -> Array:
    return np.random.default_rng([step, *name.encode()]).standard_normal(shape)


def steps(toy: Toy, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    """Make steps with gradients of our own, sharded like the parameters."""
    for number in numbers:
        for name, value in sharded_parameters(toy).items():
            whole = torch.from_numpy(gradient(name, tuple(value.shape), number))
            value.grad = _sharded(whole, value)
        optimizer.step()


def _sharded(whole: Tensor, like: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements) if isinstance(like, DTensor) else whole


def train(world: World, count: int, options: dict[str, Any]) -> dict[str, Array]:
    toy, optimizer = built(world, **options)
    steps(toy, optimizer, range(count))
    return {name: full_tensor(value).numpy().copy() for name, value in sharded_parameters(toy).items()}


def orthogonal(matrix: Array, iterations: int = 5) -> Array:
    flat = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    flat = flat / np.sqrt((flat**2).sum())
    for _ in range(iterations):
        gram = flat @ flat.T
        flat = QUINTIC[0] * flat + QUINTIC[1] * gram @ flat + QUINTIC[2] * gram @ gram @ flat
    return flat.T if matrix.shape[0] > matrix.shape[1] else flat


def apart(matrix: Array, name: str) -> list[Any]:
    """Return where the matrices lie that are orthogonal one by one."""
    if name.endswith("adapters_a"):
        return [np.s_[2 * expert : 2 * expert + 2] for expert in range(3)]
    if name.endswith("adapters_b"):
        return [np.s_[:, expert::3] for expert in range(3)]
    return list(range(len(matrix))) if matrix.ndim == 3 else [np.s_[:]]


def expected(start: dict[str, Array], count: int, scale: str) -> dict[str, Array]:
    """Return the weights after some steps, by the papers' formulas on whole arrays."""
    found = {}
    for name, first in start.items():
        weight, buffer, mean, square = first.copy(), *(np.zeros_like(first) for _ in range(3))
        for step in range(count):
            slope = gradient(name, first.shape, step)
            if name.endswith("bias"):
                mean = BETAS[0] * mean + (1 - BETAS[0]) * slope
                square = BETAS[1] * square + (1 - BETAS[1]) * slope**2
                hat = mean / (1 - BETAS[0] ** (step + 1)), square / (1 - BETAS[1] ** (step + 1))
                weight = weight - ADAMW_LR * hat[0] / (np.sqrt(hat[1]) + EPS)
                continue
            buffer = MOMENTUM * buffer + (1 - MOMENTUM) * slope
            ahead = (1 - MOMENTUM) * slope + MOMENTUM * buffer
            whole = np.empty_like(ahead)
            for part in apart(ahead, name):
                rows, columns = ahead[part].shape
                size = 0.2 * max(rows, columns) ** 0.5 if scale == "adamw_rms" else max(1, rows / columns) ** 0.5
                whole[part] = orthogonal(ahead[part])
            weight = weight * (1 - LR * DECAY) - LR * size * whole
        found[name] = weight
    return found


@pytest.mark.parametrize("scale", ["adamw_rms", "shape"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_three_updates_are_the_unsharded_ones_on_any_number_of_ranks(pools: Any, ranks: int, scale: str) -> None:
    start = pools(ranks).run(train, 0, {})[0]

    found = pools(ranks).run(train, 3, {"scale": scale})

    wanted = expected(start, 3, scale)
    ends = {name.rpartition(".")[2] for name in wanted}
    assert ends == {"weight", "bias", "experts", "experts_bias", "adapters_a", "adapters_b"}
    for values in found:
        for name, value in wanted.items():
            np.testing.assert_allclose(values[name], value, rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_the_iteration_is_numpys_to_the_digits_of_its_dtype(dtype: torch.dtype, tolerance: float) -> None:
    matrix = np.random.default_rng(0).standard_normal((9, 4))

    found = orthogonalised(torch.from_numpy(matrix).to(dtype), 5).double().numpy()

    np.testing.assert_allclose(found, orthogonal(matrix), atol=tolerance)


def test_singular_values_come_near_one() -> None:
    matrix = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    values = torch.linalg.svdvals(orthogonalised(matrix, 5))

    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


def save_halfway(world: World, place: str) -> tuple[dict[str, Any], dict[str, Any]]:
    toy, optimizer = built(world)
    steps(toy, optimizer, range(2))
    checkpoint.rehearse(str(Path(place).parent), toy, optimizer)
    checkpoint.save(place, toy, optimizer)
    saved = contents(toy, optimizer)
    steps(toy, optimizer, range(2, 4))
    return saved, contents(toy, optimizer)


def go_on(world: World, place: str) -> tuple[dict[str, Any], dict[str, Any]]:
    toy, optimizer = built(world, seed=1)
    checkpoint.load(place, toy, optimizer)
    loaded = contents(toy, optimizer)
    steps(toy, optimizer, range(2, 4))
    return loaded, contents(toy, optimizer)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_state_is_saved_by_two_ranks_and_goes_on_on_any_number(pools: Any, tmp_path: Path, ranks: int) -> None:
    place = str(tmp_path / "step-00000002")
    saved, straight = pools(2).run(save_halfway, place)[0]

    loaded, ended = pools(ranks).run(go_on, place)[0]

    assert loaded == saved
    assert any(name.endswith("wide.weight/momentum_buffer") for name in saved)
    if ranks == 2:  # elsewhere matrix products may round otherwise
        assert ended == straight


def algorithms(world: World, tree: dict[str, Any], rows: Any) -> dict[str, str]:
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows))
    names = {id(value): name for name, value in sharded_parameters(training.model.module).items()}
    return {
        names[id(value)]: group["algorithm"]
        for group in training.model.optimizer.param_groups
        for value in group["params"]
    }


MUON: dict[str, Any] = {"kind": "muon", "lr": 0.25, "schedule": "constant", "weight_decay": 0.0}


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_vl"])
def test_matrices_of_a_model_and_nothing_else_are_updated_by_muon(pools: Any, tmp_path: Path, kind: str) -> None:
    if kind == "gpt_oss":
        tree, rows = settings(str(tiny_directory(tmp_path, kind)), optim=MUON), rows_of(8)
    else:
        tree, rows = settings(str(vision_directory(tmp_path, kind)), optim=MUON), picture_rows(8)
        tree["data"]["max_length"] = 128

    (found,) = pools(1).run(algorithms, tree, rows)

    muon = {name for name, algorithm in found.items() if algorithm == "muon"}
    kinds = {re.sub(r"\.\d+\.", ".N.", name).removeprefix("model.") for name in muon}
    attention = {f"layers.N.self_attn.{part}_proj.weight" for part in "qkvo"}
    if kind == "gpt_oss":
        experts = {f"layers.N.mlp.experts.{part}_proj" for part in ("gate_up", "down")}
        assert kinds == attention | experts | {"layers.N.mlp.router.weight"}
    else:
        mlp = {f"layers.N.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
        block = {f"blocks.N.{part}.weight" for part in ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")}
        merger = {f"merger.linear_fc{part}.weight" for part in "12"}
        mergers = merger | {f"deepstack_merger_list.N.{name.removeprefix('merger.')}" for name in merger}
        assert kinds == {f"language_model.{name}" for name in attention | mlp} | {
            f"visual.{name}" for name in block | mergers
        }
    assert {name for name in found if "embed" in name or "lm_head" in name} <= {*found} - muon


def test_the_layer_of_scores_is_no_matrix_of_muons(pools: Any, tmp_path: Path) -> None:
    tree = preference_settings(str(tiny_directory(tmp_path, "llama")), preference={"loss": "bradley_terry"}, optim=MUON)

    (found,) = pools(1).run(algorithms_of_scorer, tree, pairs_of(8))

    assert found["score.weight"] == found["model.embed_tokens.weight"] == "adamw"
    assert found["model.layers.0.mlp.up_proj.weight"] == "muon"


def algorithms_of_scorer(world: World, tree: dict[str, Any], rows: Any) -> dict[str, str]:
    training = build_preference_run(run_from_mapping(tree), Path.cwd(), world, Live(rows=rows))
    names = {id(value): name for name, value in sharded_parameters(training.model.module).items()}
    return {
        names[id(value)]: group["algorithm"]
        for group in training.model.optimizer.param_groups
        for value in group["params"]
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_of_experts_are_taken_one_by_one(pools: Any, tmp_path: Path, ranks: int) -> None:
    tree = settings(str(tiny_directory(tmp_path, "mixtral")), optim=MUON)
    tree["model"]["lora"] = {"rank": 3, "targets": ["q_proj"], "experts": "all"}

    found = pools(ranks).run(train_model, tree, rows_of(8), 1)[0]

    stacks = [name for name in found["gradients"][0] if "experts" in name and "lora_B" in name]
    assert len(stacks) == 4
    for name in stacks:  # which begin at zero
        for expert in range(4):
            slope = found["gradients"][0][name][:, expert::4]
            step = 0.25 * 0.2 * max(slope.shape) ** 0.5 * orthogonal(slope)
            np.testing.assert_allclose(found["parameters"][name][:, expert::4], -step, rtol=0, atol=1e-10, err_msg=name)


def parameters() -> dict[str, nn.Parameter]:
    shapes = {
        "embed.weight": (8, 4),
        "layers.0.q.weight": (4, 4),
        "layers.0.router.weight": (2, 4),
        "norm.weight": (4,),
    }
    return {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}


def test_embeddings_vectors_and_what_is_named_go_to_adamw() -> None:
    named = parameters()

    optimizer = build_optimizer(MuonConfig(adamw=["router"], adamw_lr=0.5), named, {"embed.weight"})

    names = {id(value): name for name, value in named.items()}
    by_algorithm = {
        (group["algorithm"], group["lr"], names[id(value)])
        for group in optimizer.param_groups
        for value in group["params"]
    }
    assert by_algorithm == {
        ("muon", 1e-5, "layers.0.q.weight"),
        ("adamw", 0.5, "layers.0.router.weight"),
        ("adamw", 0.5, "embed.weight"),
        ("adamw", 0.5, "norm.weight"),
    }


def test_a_pattern_without_a_matrix_and_a_model_without_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"optim.adamw: 'norm' names no matrix .* those are layers\.0\.q\.weight"):
        build_optimizer(MuonConfig(adamw=["norm"]), parameters(), {"embed.weight"})
    with pytest.raises(ConfigError, match="none is trained besides embeddings"):
        build_optimizer(MuonConfig(adamw=["layers"]), parameters(), {"embed.weight"})
