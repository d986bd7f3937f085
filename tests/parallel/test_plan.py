"""Plans are data: made from names and shapes, refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.config.sections.parallel import ParallelConfig
from holdfast.errors import PlanError
from holdfast.parallel.plan import ROOT, ModelEnds, ParameterInfo, ShardPlan, plan_shards

BLOCKS = [f"model.layers.{index}" for index in range(4)]


def parameters(**changes: Any) -> list[ParameterInfo]:
    found = [ParameterInfo("model.embed.weight", (100, 8), "float32", True, ("lm_head.weight",))]
    for block in BLOCKS:
        found.append(ParameterInfo(f"{block}.mlp.weight", (8, 8), "float32", True))
        found.append(ParameterInfo(f"{block}.norm.weight", (8,), "float32", True))
    return [*found, *changes.get("more", [])]


ENDS = ModelEnds(embedding="model.embed", head="lm_head")


def plan(config: dict[str, Any] | None = None, more: list[ParameterInfo] | None = None, **how: Any) -> ShardPlan:
    modules = ["", "model", "model.embed", "lm_head", *BLOCKS, *(f"{block}.mlp" for block in BLOCKS)]
    options = {"shard": 2, "device": "cpu", "ends": ENDS} | how
    return plan_shards(parameters(more=more or []), modules, BLOCKS, ParallelConfig(**(config or {})), **options)


def test_each_block_is_a_unit_and_the_root_holds_the_rest() -> None:
    made = plan()

    assert [unit.name for unit in made.units] == [*BLOCKS, ROOT]
    assert made.units[0].parameters == ("model.layers.0.mlp.weight", "model.layers.0.norm.weight")
    assert made.units[0].bytes_ == (64 + 8) * 4
    assert made.units[-1].parameters == ("model.embed.weight",)
    assert (made.parameters, made.trainable) == (800 + 4 * 72, 800 + 4 * 72)


def untied() -> list[ParameterInfo]:
    table, *rest = parameters()
    head = ParameterInfo("lm_head.weight", table.shape, "float32", True)
    return [replace(table, aliases=()), *rest, ParameterInfo("model.norm.weight", (8,), "float32", True), head]


def plan_of(members: list[ParameterInfo], config: dict[str, Any], ends: ModelEnds = ENDS) -> ShardPlan:
    modules = ["", "model", "model.embed", "model.norm", "lm_head", *BLOCKS]
    return plan_shards(members, modules, BLOCKS, ParallelConfig(**config), shard=2, device="cpu", ends=ends)


@pytest.mark.parametrize("patterns", [[], [r"layers\.\d+$"], [r"layers\.\d+$", "embed$", "head$"]])
def test_embedding_and_head_are_units_of_their_own_and_the_root_holds_the_norm(patterns: list[str]) -> None:
    made = plan_of(untied(), {"units": patterns})

    units = {unit.name: unit for unit in made.units}
    assert set(units) == {*BLOCKS, "model.embed", "lm_head", ROOT}
    assert {name: unit.in_backward for name, unit in units.items() if unit.in_backward != "gathered"} == {
        "model.embed": "not_read",
        "lm_head": "as_the_loss_says",
    }
    assert units["lm_head"].parameters == ("lm_head.weight",)
    assert units[ROOT].parameters == ("model.norm.weight",)


def test_an_embedding_that_other_modules_read_stays_with_the_root() -> None:
    made = plan_of(untied(), {}, ModelEnds(head="lm_head"))

    assert made.units[-1].parameters == ("model.embed.weight", "model.norm.weight")


def test_a_layer_that_the_root_reads_by_itself_can_be_no_unit() -> None:
    with pytest.raises(PlanError, match=r"a unit of lm_head, and the loss reads lm_head\.weight outside of it"):
        plan_of(untied(), {"units": ["head"]}, ModelEnds(read_by_root="lm_head"))


def test_neighbouring_blocks_can_share_a_unit() -> None:
    made = plan({"blocks_per_unit": 3})

    assert [unit.modules for unit in made.units] == [tuple(BLOCKS[:3]), tuple(BLOCKS[3:]), ()]
    assert made.units[0].name == "model.layers.0..2"


def test_patterns_name_units_and_inner_ones_come_first() -> None:
    made = plan({"units": [r"^model\.layers\.\d+$", r"layers\.1\.mlp$"]})

    assert made.units[0].name == "model.layers.1.mlp"
    assert next(u for u in made.units if u.name == "model.layers.1").parameters == ("model.layers.1.norm.weight",)


def test_a_tower_is_a_unit_without_its_blocks_stored_as_it_is() -> None:
    block = "model.visual.blocks.0"
    frozen = [ParameterInfo(f"{path}.weight", (8, 8), "bfloat16", False) for path in ("model.visual.patch", block)]
    merger = ParameterInfo("model.visual.merger.weight", (4, 8), "float32", True)
    modules = ["", "model", "model.visual", block, *BLOCKS]

    made = plan_shards(
        [*parameters(), *frozen, merger],
        modules,
        [*BLOCKS, block],
        ParallelConfig(),
        shard=2,
        device="cpu",
        towers=["model.visual"],
    )

    units = {unit.name: unit for unit in made.units}
    assert list(units) == [block, *BLOCKS, "model.visual", ROOT]
    assert units["model.visual"].parameters == ("model.visual.patch.weight", "model.visual.merger.weight")
    assert (units["model.visual"].bytes_, units["model.visual"].trainable) == (64 * 2 + 32 * 4, 32)
    assert (units[block].bytes_, units[block].trainable) == (64 * 2, 0)
    assert made.compute_dtype == "float32"


@pytest.mark.parametrize(
    ("patterns", "units"),
    [
        ([r"layers\.\d+$"], {"model.visual.blocks.0", "model.visual.blocks.1", "model.visual"}),
        ([r"layers\.\d+$", r"blocks\.1$"], {"model.visual.blocks.1", "model.visual"}),
        ([r"layers\.\d+$", "visual$"], {"model.visual.blocks.0", "model.visual.blocks.1", "model.visual"}),
    ],
)
def test_a_tower_keeps_its_units_where_others_are_named(patterns: list[str], units: set[str]) -> None:
    seen = ["model.visual.blocks.0", "model.visual.blocks.1"]
    frozen = [ParameterInfo(f"{path}.weight", (8, 8), "float32", False) for path in ("model.visual.patch", *seen)]

    made = plan_shards(
        [*parameters(), *frozen],
        ["", "model", "model.visual", *seen, *BLOCKS],
        [*BLOCKS, *seen],
        ParallelConfig(units=patterns),
        shard=2,
        device="cpu",
        towers=["model.visual"],
    )

    assert {unit.name for unit in made.units} == {*BLOCKS, *units, ROOT}
    assert not any("visual" in name for name in made.units[-1].parameters)


def test_experts_are_units_of_their_own_where_they_are_named() -> None:
    experts = [f"{block}.mlp.experts" for block in BLOCKS]
    more = [ParameterInfo(f"{path}.gate_up_proj", (4, 8, 8), "float32", True) for path in experts]

    made = plan_shards(
        parameters(more=more),
        ["", "model", *BLOCKS, *experts],
        BLOCKS,
        ParallelConfig(units=[r"mlp\.experts$", r"layers\.\d+$"]),
        shard=2,
        device="cpu",
    )

    assert [unit.name for unit in made.units] == [*experts, *BLOCKS, ROOT]
    assert made.units[0].parameters == ("model.layers.0.mlp.experts.gate_up_proj",)
    assert made.units[4].parameters == ("model.layers.0.mlp.weight", "model.layers.0.norm.weight")


def test_every_parameter_has_exactly_one_unit() -> None:
    for config in ({}, {"blocks_per_unit": 2}, {"units": ["mlp$", "layers.[02]$"]}):
        held = [name for unit in plan(config).units for name in unit.parameters]

        assert sorted(held) == sorted(parameter.name for parameter in parameters())


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ({"units": ["nothing"]}, [], r"'nothing' matches no module"),
        ({"units": ["embed$"]}, [], r"tied parameter would lie in two units \(model\.embed\.weight in model\.embed, "),
        ({"units": ["head"]}, [], r"tied parameter would lie in two units \(model\.embed\.weight in \(root\), lm_head"),
        ({}, [ParameterInfo("scale", (), "float32", True)], r"^scale: a trained parameter without dimensions"),
        (
            {},
            [ParameterInfo("model.layers.0.extra", (4,), "bfloat16", True)],
            r"unit model\.layers\.0 have different storage \(model\.layers\.0\.mlp\.weight is float32, "
            r"model\.layers\.0\.extra is bfloat16\)",
        ),
    ],
)
def test_a_plan_that_cannot_work_is_refused_with_the_parameter(
    config: dict[str, Any], more: list[ParameterInfo], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan(config, more)


def test_frozen_parameters_may_have_another_dtype_and_frozen_scalars_are_replicated() -> None:
    made = plan(
        more=[
            ParameterInfo("model.layers.0.base", (8, 8), "bfloat16", False),
            ParameterInfo("model.logit_scale", (), "float32", False),
        ]
    )

    assert "model.layers.0.base" in made.units[0].parameters
    assert made.replicated == ("model.logit_scale",)
    assert all("model.logit_scale" not in unit.parameters for unit in made.units)


def test_compute_and_reduction_follow_storage_and_device() -> None:
    assert plan().compute_dtype == "float32"
    assert plan(device="cuda").compute_dtype == "bfloat16"
    assert plan(device="cuda").reduce_dtype == "float32"
    assert plan({"compute_dtype": "float32"}, device="cuda").compute_dtype == "float32"


@pytest.mark.parametrize(
    ("dtype", "changes", "sharded"),
    [
        ("float32", {}, False),
        ("bfloat16", {}, True),
        ("bfloat16", {"reduce": "each_micro_batch"}, False),
        ("bfloat16", {"trainable": False}, False),
    ],
)
def test_a_rank_alone_leaves_adding_gradients_to_autograd_only_where_that_is_exact(
    dtype: str, changes: dict[str, Any], sharded: bool
) -> None:
    stored = [ParameterInfo("model.layers.0.w", (4, 4), dtype, changes.pop("trainable", True))]
    config = ParallelConfig(**{"compute_dtype": dtype, **changes})

    made = plan_shards(stored, BLOCKS, BLOCKS[:1], config, shard=1, device="cpu")

    assert made.sharded is sharded


def test_bfloat16_storage_reduces_once_per_update() -> None:
    stored = [ParameterInfo("model.layers.0.w", (4, 4), "bfloat16", True)]

    made = plan_shards(stored, BLOCKS, BLOCKS[:1], ParallelConfig(), shard=2, device="cpu")

    assert made.reduce_last_only
    assert made.reduce_dtype == "float32"
    assert not plan().reduce_last_only


def test_recomputation_covers_the_blocks_it_says() -> None:
    assert plan({"recompute": "full"}).recompute == dict.fromkeys(BLOCKS, "full")
    assert plan({"recompute": {"kind": "every_k", "k": 3}}).recompute == {BLOCKS[0]: "full", BLOCKS[3]: "full"}
    assert plan({"recompute": "selective"}).recompute == dict.fromkeys(BLOCKS, "selective")


def test_one_rank_that_computes_in_its_storage_dtype_is_not_sharded() -> None:
    assert not plan(shard=1).sharded
    assert plan(shard=2).sharded


def test_the_description_names_sizes_a_reader_can_check() -> None:
    text = plan().describe()

    assert "1,088 parameters, 1,088 trained, 0 frozen" in text
    assert "5 units over shard=2 replicate=1" in text


@pytest.mark.parametrize(("ranks", "rows"), [(2, 2), (4, 1), (8, 1)])
def test_experts_that_are_fewer_than_ranks_are_counted_with_their_padding(ranks: int, rows: int) -> None:
    experts = ParameterInfo("model.layers.0.mlp.experts.down_proj", (4, 512, 1024), "float32", True)

    made = plan(more=[experts], shard=ranks)

    others = -(-100 // ranks) * 8 + 4 * (8 // ranks * 8 + 8 // ranks)
    assert made.shard_bytes == (rows * 512 * 1024 + others) * 4
    assert ("shards 2.0 MiB per rank, 1.0 MiB of them padding" in made.describe()) == (ranks == 8)
    assert ("padding" in made.describe()) == (ranks == 8)


@pytest.mark.parametrize(
    ("config", "frozen", "how", "expected"),
    [
        pytest.param({}, "", {}, (False, False), id="float32 computes in float32"),
        pytest.param({"compute_dtype": "bfloat16"}, "", {}, (False, True), id="copies"),
        pytest.param({}, "", {"device": "cuda"}, (False, True), id="copies on a GPU by default"),
        pytest.param({"cpu_offload": True}, "", {"device": "cuda"}, (True, False), id="parameters in host memory"),
        pytest.param({"offload": ["optimizer"]}, "", {"device": "cuda"}, (False, True), id="optimizer in host memory"),
        pytest.param({"replicate": 2}, "", {"device": "cuda"}, (True, False), id="two ranks"),
        pytest.param({}, "layers.0", {"device": "cuda"}, (False, True), id="a frozen block"),
        pytest.param({}, "layers", {"device": "cuda"}, (False, True), id="the smaller part is frozen"),
        pytest.param({}, "embed", {"device": "cuda"}, (True, False), id="the larger part is frozen"),
        pytest.param({}, ".", {"device": "cuda"}, (True, False), id="nothing is trained"),
    ],
)
def test_a_rank_alone_reads_copies_where_most_of_them_are_trained(
    config: dict[str, Any], frozen: str, how: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    members = [replace(value, trainable=not frozen or frozen not in value.name) for value in parameters()]
    modules = ["", "model", "model.embed", "lm_head", *BLOCKS]

    made = plan_shards(members, modules, BLOCKS, ParallelConfig(**config), **({"shard": 1, "device": "cpu"} | how))

    assert (made.sharded, made.copied) == expected
    assert made.whole == (expected == (False, False))


def test_parameters_that_are_trained_in_bfloat16_are_not_copied() -> None:
    table, *rest = parameters()
    config = ParallelConfig(reduce="each_micro_batch")

    made = plan_shards([replace(table, dtype="bfloat16"), *rest], [""], BLOCKS, config, shard=1, device="cuda")

    assert (made.sharded, made.copied) == (True, False)


def test_activations_of_blocks_that_train_are_offloaded_where_they_are_named() -> None:
    frozen = [replace(value, trainable=False) for value in parameters()]
    modules = ["", "model", *BLOCKS]

    assert plan().offload_blocks == ()
    assert plan({"cpu_offload": True}).offload_blocks == ()
    assert plan({"offload": ["activations"]}).offload_blocks == tuple(BLOCKS)
    assert "activations of 4 blocks in host memory" in plan({"offload": ["activations"]}).describe()
    of_frozen = plan_shards(frozen, modules, BLOCKS, ParallelConfig(offload=["activations"]), shard=2, device="cpu")
    assert of_frozen.offload_blocks == ()


def test_the_former_key_is_read_as_optimizer_and_parameters() -> None:
    former, listed = ParallelConfig(cpu_offload=True), ParallelConfig(offload=["optimizer", "parameters"])

    assert former.offloads == listed.offloads == {"optimizer", "parameters"}
    assert (plan({"cpu_offload": True}).cpu_offload, plan({"offload": ["optimizer"]}).cpu_offload) == (True, False)
    assert former.of_frozen(in_host_memory=False).offloads == frozenset()
