"""A whole checkpoint that does not fit is refused before anything live is touched; a declared deviation is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import checkpoint
from holdfast.checkpoint.loading.matching import Declared
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import Block, build, contents, optimizer_of, refused_save, save_after, step
from tests.distributed.toys import Toy, shard

WEIGHT = "blocks.0.trained.weight"


class Adapted(Block):
    """A block with a low-rank adapter beside its matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_a = nn.Linear(5, 2, bias=False)
        self.lora_b = nn.Linear(2, 5, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.lora_b(self.lora_a(inputs))


class CountsInFloats(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())


def changed(world: World, what: str) -> tuple[Toy, torch.optim.Optimizer]:
    """Return a model and an optimizer that differ in one thing from those of `save_after`."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        kinds = {"adapter added": Adapted, "counter in floats": CountsInFloats}
        kind = kinds.get(what, Block)
        width = 7 if what == "wider" else 5
        toy = Toy(*(kind(width) if kind is Block else kind() for _ in range(1 if what == "layer dropped" else 2)))
    for block in toy.language_model.blocks:
        if what == "frozen":
            block.trained.weight.requires_grad_(False)  # type: ignore[union-attr]
        if what == "unfrozen":
            block.frozen.weight.requires_grad_(True)  # type: ignore[union-attr]
    if what == "bfloat16":
        toy.to(torch.bfloat16)
    shard(world, toy)
    return toy, optimizer_of(toy, "sgd" if what == "SGD" else "adamw")


def try_to_load(world: World, path: str, what: str, declared: Declared) -> dict[str, Any]:
    """Load with live gradients; return the error, or what was loaded, and whether a refusal left all as it was."""
    toy, optimizer = changed(world, what)
    inputs = torch.ones(2, 7 if what == "wider" else 5, dtype=next(toy.parameters()).dtype)
    toy(inputs).float().sum().backward()
    before = contents(toy, optimizer)
    gradients = [parameter.grad.clone() for parameter in toy.parameters() if parameter.grad is not None]
    try:
        restored = checkpoint.load(path, toy, optimizer, declared=declared)
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        after = [parameter.grad for parameter in toy.parameters() if parameter.grad is not None]
        same = all(torch.equal(one.to_local(), two.to_local()) for one, two in zip(gradients, after, strict=True))  # type: ignore[attr-defined]
        untouched = contents(toy, optimizer) == before and same
        return {"error": type(error).__name__, "message": str(error), "untouched": untouched}
    loaded = contents(toy, optimizer)
    optimizer.zero_grad()
    if what not in {"bfloat16", "wider"}:
        step(world, toy, optimizer, 9)
    return {"loaded": loaded, "before": before, "notes": restored.notes}


@pytest.fixture(scope="module")
def saved(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    path = str(tmp_path_factory.mktemp("run") / "step-00000002")
    return path, pools(2).run(save_plain, path)[0]


def save_plain(world: World, path: str) -> dict[str, Any]:
    toy = build(world)
    optimizer = optimizer_of(toy)
    step(world, toy, optimizer, 0)
    checkpoint.save(path, toy, optimizer)
    return contents(toy, optimizer)


CHANGES = [
    pytest.param(
        "adapter added",
        Declared(add=["lora_"]),
        "blocks.0.lora_a.weight is in the model and not in the checkpoint (allow it with resume.add)",
        id="29-adapter added",
    ),
    pytest.param(
        "layer dropped",
        Declared(drop=[r"^blocks\.1\."]),
        "blocks.1.calls is in the checkpoint and not in the model (allow it with resume.drop)",
        id="30-layer dropped",
    ),
    pytest.param(
        "bfloat16",
        Declared(cast=["."]),
        "blocks.0.frozen.weight is float32 there and bfloat16 here (allow it with resume.cast)",
        id="32-bfloat16 model",
    ),
    pytest.param(
        "counter in floats",
        Declared(cast=["calls"]),
        "blocks.0.calls is int64 there and float32 here (allow it with resume.cast)",
        id="32-integers into floats",
    ),
    pytest.param(
        "unfrozen",
        Declared(unfreeze=["frozen"]),
        "blocks.0.frozen.weight was frozen then and is trained now (allow it with resume.unfreeze)",
        id="34-frozen then, trained now",
    ),
    pytest.param(
        "frozen",
        Declared(freeze=[r"trained\.weight"]),
        "blocks.0.trained.weight was trained then and is frozen now (allow it with resume.freeze)",
        id="34-trained then, frozen now",
    ),
]


@pytest.mark.parametrize(("what", "declared", "message"), CHANGES)
def test_a_changed_model_is_refused_before_anything_is_touched(
    pools: Any, saved: tuple[str, dict[str, Any]], what: str, declared: Declared, message: str
) -> None:
    found = pools(2).run(try_to_load, saved[0], what, Declared())

    assert found[0] == found[1]
    assert found[0]["error"] == "CheckpointMismatch"
    assert f"does not fit this run: {message}" in found[0]["message"]
    assert found[0]["message"].endswith("Nothing was changed.")
    assert found[0]["untouched"]


@pytest.mark.parametrize(("what", "declared", "message"), CHANGES)
def test_a_declared_change_is_loaded_and_everything_else_bit_for_bit(
    pools: Any, saved: tuple[str, dict[str, Any]], what: str, declared: Declared, message: str
) -> None:
    path, expected = saved

    found = pools(2).run(try_to_load, path, what, declared)[0]

    loaded, before = found["loaded"], found["before"]
    assert message.replace("(allow it with ", "(") in found["notes"]
    same = {name for name in loaded if loaded[name] == expected.get(name)}
    match what:
        case "adapter added":
            assert set(loaded) - same == {name for name in loaded if "lora_" in name}
            assert all(loaded[name] == before[name] for name in loaded if "lora_" in name)
        case "layer dropped":
            assert set(loaded) == same == {name for name in expected if name.startswith("blocks.0.")}
        case "bfloat16":
            state = {name for name in loaded if "/" in name or name.endswith("calls")}
            assert state <= same  # the moments keep the dtype they were saved in
            assert all(loaded[name][1] == "torch.bfloat16" for name in set(loaded) - state)
        case "counter in floats":
            assert set(loaded) - same == {"blocks.0.calls", "blocks.1.calls"}
            assert loaded["blocks.0.calls"][1] == "torch.float32"
        case "unfrozen":
            assert set(loaded) == same == set(expected)
        case "frozen":
            assert set(loaded) == same
            assert {name for name in expected if "trained.weight/" in name} == set(expected) - set(loaded)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        pytest.param(
            "SGD", "its optimizer is torch.optim.adamw.AdamW, this run's is torch.optim.sgd.SGD", id="31-AdamW to SGD"
        ),
        pytest.param("wider", "blocks.0.frozen.weight is [5, 5] there and [7, 7] here", id="35-another shape"),
    ],
)
def test_another_optimizer_and_another_shape_are_refused_whatever_is_declared(
    pools: Any, saved: tuple[str, dict[str, Any]], what: str, message: str
) -> None:
    everything = Declared(add=["."], drop=["."], cast=["."], freeze=["."], unfreeze=["."])

    found = pools(2).run(try_to_load, saved[0], what, everything)

    assert found[0] == found[1]
    assert found[0]["error"] == "CheckpointMismatch"
    assert message in found[0]["message"]
    assert found[0]["untouched"]


def continue_with_and_without_gradients(world: World, path: str) -> list[dict[str, Any]]:
    found = []
    for live in (False, True):
        toy = build(world, seed=1)
        optimizer = optimizer_of(toy)
        if live:
            toy(torch.ones(2, 5)).sum().backward()
        checkpoint.load(path, toy, optimizer)
        optimizer.zero_grad()
        step(world, toy, optimizer, 1)
        found.append(contents(toy, optimizer))
    return found


@pytest.mark.parametrize("ranks", [pytest.param(2, id="36-load while gradients are live")])
def test_live_gradients_do_not_keep_optimizer_state_from_being_restored(
    pools: Any, saved: tuple[str, dict[str, Any]], ranks: int
) -> None:
    without, with_gradients = pools(ranks).run(continue_with_and_without_gradients, saved[0])[0]

    assert with_gradients == without
    assert f"{WEIGHT}/exp_avg" in with_gradients


def save_odd_groups(world: World, path: str) -> dict[str, Any]:
    toy = build(world)
    optimizer = optimizer_of(toy, betas=(0.8, 0.95))
    optimizer.param_groups[0] |= {"state_dtype": torch.bfloat16, "name": "all", "limits": (0.1, None, 3)}
    step(world, toy, optimizer, 0)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)
    checkpoint.save(path, toy, optimizer)
    return contents(toy, optimizer)


def load_odd_groups(world: World, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    toy = build(world, seed=1)
    optimizer = optimizer_of(toy)
    checkpoint.load(path, toy, optimizer, hyperparameters="checkpoint")
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return contents(toy, optimizer), group


@pytest.mark.parametrize("ranks", [1, 2], ids="33-mixed dtypes and a dtype in a param group, {} ranks".format)
def test_mixed_dtypes_of_state_and_odd_hyperparameters_come_back_as_they_were(
    pools: Any, tmp_path: Path, ranks: int
) -> None:
    path = str(tmp_path / "step-00000001")
    expected = pools(2).run(save_odd_groups, path)[0]

    found, group = pools(ranks).run(load_odd_groups, path)[0]

    assert found == expected
    assert expected[f"{WEIGHT}/exp_avg"][1] == "torch.bfloat16"
    assert group["state_dtype"] is torch.bfloat16
    assert (group["betas"], group["limits"], group["name"]) == ((0.8, 0.95), (0.1, None, 3), "all")


def save_differing(world: World, path: str, what: str) -> None:
    toy = build(world, blocks=1 + (what == "model" and world.rank == 1))
    optimizer = optimizer_of(toy)
    extra: Any = {"position": 1000 + world.rank} if what == "extra" else None
    if what == "buffer":
        toy.language_model.blocks[0].calls += world.rank  # type: ignore[operator]
    checkpoint.save(path, toy, optimizer, extra=extra)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        pytest.param("extra", "ranks 0 and 1 give different shared state. What differs", id="38-object of a rank"),
        pytest.param("buffer", "blocks.0.calls is replicated, and rank 1 holds other", id="38-tensor of a rank"),
        pytest.param("model", "ranks 0 and 1 disagree on model.blocks.1.calls: absent", id="39-key of one rank"),
    ],
)
def test_per_rank_state_under_one_key_is_refused_when_it_is_saved(
    pools: Any, tmp_path: Path, what: str, message: str
) -> None:
    assert message in refused_save(pools, tmp_path, save_differing, what)


def load_more_on_one_rank(world: World, path: str) -> None:
    toy = build(world, seed=1, blocks=2 + world.rank)
    checkpoint.load(path, toy, optimizer_of(toy))


@pytest.mark.parametrize("ranks", [pytest.param(2, id="39-one rank asks for a key that others do not")])
def test_a_key_that_one_rank_alone_asks_for_is_refused_on_all(
    pools: Any, saved: tuple[str, dict[str, Any]], ranks: int
) -> None:
    errors = pools(ranks).errors(load_more_on_one_rank, saved[0])

    assert errors[0] == errors[1]
    assert errors[0][0] == "CheckpointMismatch"
    assert "blocks.2.calls is in the model and not in the checkpoint" in errors[0][1]


def save_weights(world: World, path: str) -> None:
    checkpoint.save(path, build(world))


def test_weights_alone_are_no_checkpoint_to_resume_from(pools: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "step-00000001")
    pools(2).run(save_weights, path)

    found = pools(2).run(try_to_load, path, "nothing", Declared())

    assert found[0]["error"] == "CheckpointMismatch"
    assert "has no optimizer state (it holds model, trainer, rank)" in found[0]["message"]
    assert "set init_from instead of resuming" in found[0]["message"]
    assert found[0]["untouched"]


def test_state_of_tensors_is_saved_in_mixed_dtypes(pools: Any, tmp_path: Path) -> None:
    expected = pools(2).run(save_after, str(tmp_path / "step-00000001"), 1)[0]

    assert {value[1] for name, value in expected.items() if name.endswith("/exp_avg")} == {"torch.bfloat16"}
