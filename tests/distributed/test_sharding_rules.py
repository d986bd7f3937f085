"""Rules of sharding that fail silently elsewhere: unused parameters, dtypes in dataclasses, sums in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode

from holdfast import checkpoint
from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.batches.packing import Share, pack
from holdfast.errors import RunStopped
from holdfast.models.names import POLICY_PREFIX
from holdfast.objectives.base import Tokens
from holdfast.objectives.supervised import NegativeLogLikelihood
from holdfast.parallel.apply import give_unused_zero_gradients
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_rows, set_last_micro_batch, sharded_parameters
from holdfast.parallel.stream import full_tensor
from holdfast.training.other_models.reference import check_place
from holdfast.training.run import Model
from holdfast.training.setup.begin import Live, build_run
from holdfast.training.step import train_step
from holdfast.types import Example, MiniBatch
from tests.distributed.cases import rows_of, settings
from tests.distributed.toys import Experts, Scale, Toy, shard
from tests.settings import plain_setting
from tests.tiny import tiny_directory


def without_the_rule(module: FSDPModule) -> None:
    """Take back what every unit is given; torch 2.11 has no switch for it."""
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(False)
        return
    group = module._get_fsdp_state()._fsdp_param_group
    if group is not None:
        del group.post_backward


def different_experts(world: World, form: str) -> dict[str, Any]:
    torch.manual_seed(0)
    toy = Toy(Experts())
    weights = {name: value.detach().clone() for name, value in toy.named_parameters()}
    shard(world, toy)
    for module in toy.modules():
        if isinstance(module, FSDPModule) and form != "switch":
            without_the_rule(module)
            if form == "by hand":
                give_unused_zero_gradients(module)
    inputs = torch.arange(6.0).reshape(2, 3) + world.rank
    toy(inputs, world.rank).square().sum().backward()
    gradients = {
        name: full_tensor(value.grad).numpy() if value.grad is not None else None
        for name, value in sharded_parameters(toy).items()
    }
    expected = {}
    for expert in range(2):
        inputs = torch.arange(6.0).reshape(2, 3) + expert
        weight = weights[f"{POLICY_PREFIX}blocks.0.experts.{expert}.weight"]
        expected[f"blocks.0.experts.{expert}.weight"] = (2 * (inputs @ weight.T).T @ inputs).numpy()
    return {"found": gradients, "expected": expected}


@pytest.mark.parametrize("form", ["switch", "by hand"])
def test_ranks_that_use_different_parameters_of_a_unit_get_the_right_gradients(pools: Any, form: str) -> None:
    for outcome in pools(2).run(different_experts, form):
        for name, gradient in outcome["expected"].items():
            np.testing.assert_allclose(outcome["found"][name], gradient, rtol=1e-6)


def test_without_the_rule_fsdp2_mixes_them_up(pools: Any) -> None:
    found = pools(2).run(different_experts, "off")[0]

    name = "blocks.0.experts.0.weight"
    assert found["found"][name] is None or not np.allclose(found["found"][name], found["expected"][name], rtol=1e-3)


def summed_gradient(world: World, reduce: str) -> float:
    toy = Toy(Scale(4, torch.bfloat16))
    plan = shard(world, toy, reduce=reduce)
    for index in range(256):
        set_last_micro_batch(toy, plan, last=index == 255)
        (toy(torch.full((4,), 0.01, dtype=torch.bfloat16)).sum() * 1.0).backward()
    (gradient,) = (value.grad for value in sharded_parameters(toy).values())
    return float(full_tensor(gradient)[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_bfloat16_storage_add_up_in_float32(pools: Any, ranks: int) -> None:
    one = float(torch.tensor(0.01, dtype=torch.bfloat16))
    exact = float(torch.tensor(ranks * 256 * one, dtype=torch.bfloat16))

    assert pools(ranks).run(summed_gradient, "auto")[0] == exact
    assert pools(ranks).run(summed_gradient, "each_micro_batch")[0] != exact  # what the rule protects from


class Recorder(NegativeLogLikelihood):
    """A loss that keeps what it was given."""

    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # noqa: RUF012 - one per process, on purpose

    def token_terms(self, logprobs: torch.Tensor, entropy: torch.Tensor | None, tokens: Tokens) -> torch.Tensor:
        self.seen.append((tokens.weights, tokens.per_token["advantages"], logprobs.detach().clone()))
        return super().token_terms(logprobs, entropy, tokens)


def what_reaches_the_loss(world: World, directory: str) -> dict[str, Any]:
    tree = settings(directory, model={"dtype": "float32"}, parallel={"compute_dtype": "bfloat16"})
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows_of(8)))
    ids = np.arange(2, 14)
    mask = np.arange(12) > 0
    advantages = np.full(12, 1.2345678, dtype=np.float32)
    batch = pack([Example(0, 0, ids, mask, per_token={"advantages": advantages})], [Share(0.7654321, 1.0)])
    Recorder.seen.clear()
    cosines: list[torch.Tensor] = []
    rotary = training.model.module.language_model.model.rotary_emb
    hook = rotary.register_forward_hook(lambda module, args, out: cosines.append(out[0].detach().clone()))
    training.model.module(batch, Recorder())
    hook.remove()
    weights, seen_advantages, logprobs = Recorder.seen[0]
    frequencies = training.model.blueprint.buffers["model.rotary_emb.inv_freq"]
    angles = torch.arange(12.0)[None, :, None] * frequencies
    expected = torch.cat([angles, angles], -1).cos().to(torch.bfloat16)
    return {
        "dtypes": [str(weights.dtype), str(seen_advantages.dtype), str(logprobs.dtype), str(frequencies.dtype)],
        "weights": weights.tolist(),
        "advantages": seen_advantages.tolist(),
        "cosines_equal": torch.equal(cosines[0], expected),
    }


def test_weights_and_advantages_reach_the_loss_in_float32_under_bfloat16_compute(pools: Any, tmp_path: Any) -> None:
    directory = str(tiny_directory(tmp_path / "llama", "llama"))

    for outcome in pools(2).run(what_reaches_the_loss, directory):
        assert outcome["dtypes"] == ["torch.float32"] * 4
        assert set(outcome["weights"]) == {float(np.float32(0.7654321))}
        assert set(outcome["advantages"]) == {float(np.float32(1.2345678))}
        assert outcome["cosines_equal"]


def frozen_base(world: World, directory: str) -> dict[str, Any]:
    tree = settings(
        directory, model={"dtype": "float32", "frozen_dtype": "bfloat16", "freeze": ["self_attn", "embed_tokens"]}
    )
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows_of(8)))
    before = {name: full_tensor(p).clone() for name, p in sharded_parameters(training.model.module).items()}
    mini_batch = training.stream.next(0)
    assert mini_batch is not None
    train_step(training.model, mini_batch, training.evaluation.objective)
    after = {name: full_tensor(p) for name, p in sharded_parameters(training.model.module).items()}
    in_optimizer = {id(p) for group in training.model.optimizer.param_groups for p in group["params"]}
    named = sharded_parameters(training.model.module)
    return {
        "moved": sorted(name for name, value in after.items() if not torch.equal(value, before[name])),
        "bfloat16": sorted(name for name, value in after.items() if value.dtype == torch.bfloat16),
        "optimized": sorted(name for name, value in named.items() if id(value) in in_optimizer),
        "all": sorted(after),
    }


def test_frozen_parameters_keep_their_own_dtype_and_never_move(pools: Any, tmp_path: Any) -> None:
    directory = str(tiny_directory(tmp_path / "llama", "llama", tie_word_embeddings=False))

    found = pools(2).run(frozen_base, directory)[0]

    frozen = [name for name in found["all"] if "self_attn" in name or "embed_tokens" in name]
    assert len(frozen) == 9
    assert found["bfloat16"] == frozen
    assert found["moved"] == found["optimized"] == [name for name in found["all"] if name not in frozen]


class Poison(NegativeLogLikelihood):
    """A loss that is infinite for one sample, wherever it is trained."""

    def token_terms(self, logprobs: torch.Tensor, entropy: torch.Tensor | None, tokens: Tokens) -> torch.Tensor:
        bad = tokens.per_token["bad"].bool()
        return -logprobs * torch.where(bad, float("inf"), 1.0)


def poisoned_steps(world: World, directory: str, bad_steps: list[int]) -> dict[str, Any]:
    tree = settings(directory, optim={"max_nonfinite_steps": 2})
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows_of(8), objective=Poison()))
    skipped, moved, stopped = [], [], ""
    for step in range(4):
        before = {name: full_tensor(p).clone() for name, p in sharded_parameters(training.model.module).items()}
        bad = step in bad_steps and world.rank == 1
        ids, mask = np.arange(2, 10), np.arange(8) > 0
        example = Example(0, 0, ids, mask, per_token={"bad": np.full(8, float(bad))})
        batch = MiniBatch((pack([example], [Share(1.0, 7.0)], dtype=torch.float64),), 14.0, 2, 16, 14)
        try:
            metrics = train_step(training.model, batch, training.evaluation.objective).read().metrics
        except RunStopped as error:
            stopped = str(error)
            break
        skipped.append(metrics["optim/skipped_steps"])
        after = {name: full_tensor(p) for name, p in sharded_parameters(training.model.module).items()}
        moved.append(any(not torch.equal(after[name], before[name]) for name in after))
    return {"skipped": skipped, "moved": moved, "stopped": stopped, "steps": training.model.state.step}


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(pools: Any, tmp_path: Any) -> None:
    directory = str(tiny_directory(tmp_path / "llama", "llama"))

    for outcome in pools(2).run(poisoned_steps, directory, [1]):
        assert outcome["skipped"] == [0.0, 1.0, 1.0, 1.0]
        assert outcome["moved"] == [True, False, True, True]
        assert outcome["stopped"] == ""


def test_too_many_skipped_steps_in_a_row_stop_the_run(pools: Any, tmp_path: Any) -> None:
    directory = str(tiny_directory(tmp_path / "llama", "llama"))

    for outcome in pools(2).run(poisoned_steps, directory, [1, 2]):
        assert outcome["stopped"].startswith(
            "The gradient norm was not finite in 2 updates in a row, the last at step 3."
        )


def empty_step(world: World, directory: str) -> dict[str, Any]:
    training = build_run(from_mapping(settings(directory), SFTConfig), Path.cwd(), world, Live(rows=rows_of(8)))
    before = {name: full_tensor(p).clone() for name, p in sharded_parameters(training.model.module).items()}
    mini_batch = MiniBatch((pack([], [], dtype=torch.float64),) * 2, 0.0, 0, 0, 0)
    metrics = train_step(training.model, mini_batch, training.evaluation.objective).read().metrics
    after = {name: full_tensor(p) for name, p in sharded_parameters(training.model.module).items()}
    return {
        "loss": metrics["loss"],
        "norm": metrics["grad_norm"],
        "same": all(torch.equal(after[name], before[name]) for name in after),
    }


def test_a_batch_without_a_trained_token_has_loss_zero_and_runs_every_collective(pools: Any, tmp_path: Any) -> None:
    directory = str(tiny_directory(tmp_path / "llama", "llama"))

    for outcome in pools(2).run(empty_step, directory):
        assert outcome == {"loss": 0.0, "norm": 0.0, "same": True}


class Tempered(Scale):
    """One weight per element, and a frozen number without a dimension, as CLIP's `logit_scale` is."""

    def __init__(self, size: int) -> None:
        super().__init__(size, torch.float32)
        self.temperature = torch.nn.Parameter(torch.tensor(3.0), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.temperature


def frozen_scalar(world: World, path: str) -> dict[str, Any]:
    toy = Toy(Tempered(4))
    plan = shard(world, toy)
    named = sharded_parameters(toy)
    optimizer = torch.optim.SGD([value for value in named.values() if value.requires_grad], lr=0.1)
    toy(torch.arange(4.0)).sum().backward()
    gradient = full_tensor(named["blocks.0.weight"].grad).tolist()
    scalar = named["blocks.0.temperature"]
    kinds = type(scalar.data).__name__, scalar.grad is None
    checkpoint.save(path, toy, optimizer)
    with torch.no_grad():
        for value in named.values():
            value.fill_(-1.0)
    checkpoint.load(path, toy, optimizer)
    restored = {name: full_tensor(value).tolist() for name, value in sharded_parameters(toy).items()}
    return {"gradient": gradient, "kinds": kinds, "restored": restored, "sharded": plan.sharded}


def test_a_frozen_number_is_whole_on_every_rank_and_comes_back_from_a_checkpoint(pools: Any, tmp_path: Path) -> None:
    for outcome in pools(2).run(frozen_scalar, str(tmp_path / "run")):
        assert outcome["sharded"]
        assert outcome["kinds"] == ("Tensor", True)
        assert outcome["gradient"] == [2 * 3.0 * number for number in range(4)]  # summed over two ranks
        assert outcome["restored"] == {"blocks.0.weight": [1.0] * 4, "blocks.0.temperature": 3.0}


def frozen_twin(world: World, _: str) -> bool:
    toy = Toy(Tempered(4))
    toy.requires_grad_(False)  # noqa: FBT003 - torch's own form
    plan = shard(world, toy)
    run = plain_setting(SFTConfig.model_construct(), world)
    twin: Any = {"run": run, "blueprint": None, "plan": plan, "module": toy}
    check_place(Model(**twin), "reference policy")
    return plan.sharded


def test_a_reference_policy_may_have_a_number_that_is_whole_on_every_rank(pools: Any) -> None:
    assert pools(2).run(frozen_twin, "") == [True, True]


def rows_of_each_rank(world: World) -> list[tuple[int, int]]:
    toy = Toy(Scale(5, torch.float32), Scale(1, torch.float32))
    shard(world, toy)
    return [(rows.start, rows.stop) for rows in (local_rows(value) for value in sharded_parameters(toy).values())]


def test_rows_are_dealt_out_without_gap_or_overlap_even_when_there_are_fewer_than_ranks(pools: Any) -> None:
    found = pools(4).run(rows_of_each_rank)

    assert [rank[0] for rank in found] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert [rank[1] for rank in found] == [(0, 1), (1, 1), (1, 1), (1, 1)]


def gatherings(world: World, directory: str, reshard: bool, separable: bool = True) -> dict[str, Any]:
    """Count what is gathered in passes with and without gradients, and say what is gathered afterwards."""
    tree = settings(directory, parallel={"reshard": reshard})
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows_of(64)))
    model, batch = training.model.module, training.stream.next(0).micro_batches[0]
    objective = NegativeLogLikelihood(separable=separable)
    parts = {"root": "model.norm.weight", "embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}
    shards = type(model.get_parameter(f"{POLICY_PREFIX}{parts['root']}")).__name__
    outcome: dict[str, Any] = {"units": [unit.name for unit in training.model.plan.units]}

    def count(name: str, work: Callable[[], object]) -> None:
        with CommDebugMode() as seen:
            work()
        outcome[name] = sum(n for operation, n in seen.get_comm_counts().items() if "gather" in str(operation))
        left = {part: model.get_parameter(f"{POLICY_PREFIX}{path}") for part, path in parts.items()}
        outcome[f"{name}: gathered"] = {part for part, value in left.items() if type(value).__name__ != shards}

    with torch.no_grad():
        count("evaluation", lambda: model(batch, objective))
    loss: list[Any] = []
    count("forward", lambda: loss.append(model(batch, objective).loss))
    count("backward", loss[0].backward)
    with torch.no_grad():
        count("evaluation after it", lambda: model(batch, objective))
    return outcome


ENDS = {"embedding", "head"}


@pytest.mark.parametrize("reshard", [True, False])
def test_the_root_stays_gathered_for_the_backward_pass_that_begins_with_it(
    pools: Any, tmp_path: Path, reshard: bool
) -> None:
    directory = str(tiny_directory(tmp_path / "model", "llama"))
    for outcome in pools(2).run(gatherings, directory, reshard):
        units = len(outcome["units"])
        assert units > 2 + len(ENDS)
        assert outcome["forward"] == (units if reshard else 0)  # whoever stays was gathered by the evaluation
        assert outcome["backward"] == (units - 1 - len(ENDS) if reshard else 0)
        assert outcome["forward: gathered"] == ({"root"} if reshard else {"root", *ENDS})
        assert outcome["backward: gathered"] == set()
        for name in ("evaluation", "evaluation after it"):
            assert outcome[name] == units
            assert outcome[f"{name}: gathered"] == (set() if reshard else {"root", *ENDS})


def test_a_head_is_gathered_again_where_its_gradients_are_formed_in_the_backward_pass(
    pools: Any, tmp_path: Path
) -> None:
    directory = str(tiny_directory(tmp_path / "model", "llama"))
    for outcome in pools(2).run(gatherings, directory, True, False):
        units = len(outcome["units"])
        assert outcome["forward: gathered"] == {"root"}
        assert outcome["backward"] == units - 2  # all but root and embedding


def test_a_tied_matrix_stays_with_the_root(pools: Any, tmp_path: Path) -> None:
    directory = str(tiny_directory(tmp_path / "model", "llama", tie_word_embeddings=True))
    for outcome in pools(2).run(gatherings, directory, True):
        assert not {"model.embed_tokens", "lm_head"} & set(outcome["units"])
        assert outcome["forward: gathered"] == {"root", *ENDS}
