"""Build a sharded model: plan, shard, load, and compare its outputs and gradients with transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from holdfast.config.verbs.critic import RewardScoring
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import TrainingConfig
from holdfast.data.batches.packing import Share, pack, to_device
from holdfast.data.tokens.processor import attends_both_ways, may_see
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import ConfigError
from holdfast.models.check.agreement import Agreement
from holdfast.models.check.forward import CheckResult, Sides, check_forward
from holdfast.models.check.spans import check_spans
from holdfast.models.check.witness import witness_of
from holdfast.models.files.vision import image_side, video_options
from holdfast.models.heads.policy import PolicyModel, without_dropout
from holdfast.models.heads.scorer import ScoreModel, StoredScoreModel, ValueModel
from holdfast.models.heads.student import StudentModel
from holdfast.models.layers.attention import upstream_attention
from holdfast.models.layers.family import positions_of
from holdfast.models.layers.rotary import AngleChange, angle_changes
from holdfast.models.layers.routers import RouterLoss, choose_router_loss
from holdfast.models.setup.model import Blueprint, set_storage, storage_of
from holdfast.parallel.apply import apply_plan
from holdfast.parallel.compiler import BlockCompiler
from holdfast.parallel.context import join_context
from holdfast.parallel.forms import Forms
from holdfast.parallel.mesh import World, build_mesh
from holdfast.parallel.plan import ShardPlan
from holdfast.parallel.shards import materialise
from holdfast.parallel.threads import choose_threads
from holdfast.processor import WORTH_IT, bfloat16_gain, bfloat16_unit
from holdfast.training.run import Model, Run
from holdfast.training.setup.compiled import check_compiled
from holdfast.training.setup.gradient_check import Gradients, check_gradients
from holdfast.training.setup.head import check_head_form, choose_head_form
from holdfast.training.setup.shard_plan import make_plan
from holdfast.types import Example, Scores


def build_policy(run: Run, origin: Blueprint, *, trained: bool = True) -> Model:
    """Plan, shard, fill and check a model; one that is not `trained` is stored like it, and all of it is frozen.

    Raises:
        UserError: The plan cannot work, a tensor is missing, or the forward pass is not the model's own.
    """
    unplaced = plan_model(run, origin, trained=trained)
    return place_model(unplaced, trained=trained)


@dataclass(frozen=True)
class UnplacedModel:
    """A model with its plan, whose parameters have no memory yet."""

    model: Model
    mesh: DeviceMesh
    images: ImageSide | None
    """Makes tokens of images; None where the model sees none."""
    router_note: str


def plan_model(run: Run, origin: Blueprint, *, trained: bool = True) -> UnplacedModel:
    """Plan a model without reading a weight; all ranks call this together.

    Raises:
        UserError: The plan cannot work.
    """
    config, world = run.config, run.world
    with run.ranks.together():
        mesh = build_mesh(config.parallel, world)
    with run.ranks.together():
        images = image_side_of(config, origin)
        module, router_note = unplaced_policy(run, origin, trained=trained)
        compiled = config.compiles_blocks(world.device.type)
        plan = make_plan(config, module, mesh.size(1), world.device.type, compiled=compiled)
    with run.ranks.together():
        join_context(config, world, origin, module)
    forms = _forms_of(run, plan, trained=trained)
    model = Model(run=run, blueprint=origin, plan=plan, module=module, forms=forms)
    return UnplacedModel(model, mesh, images if isinstance(images, ImageSide) else None, router_note)


def place_model(unplaced: UnplacedModel, *, trained: bool = True) -> Model:
    """Shard a planned model, read its weights and compare it with transformers' own; all ranks call this together.

    Raises:
        UserError: A tensor is missing, or the forward pass is not the model's own.
    """
    model, images = unplaced.model, unplaced.images
    run, plan, origin = model.run, model.plan, model.blueprint
    if trained:
        _settle_threads(model)
    no_kernels = choose_head_form(run, model.module, plan)
    compiler = BlockCompiler()
    apply_plan(model.module, plan, unplaced.mesh, compiler.compile)
    with run.ranks.together():
        materialise(model.module, origin.source, origin.buffers, run.world.device, offload=plan.cpu_offload)
    if plan.compile_blocks and run.world.is_first:
        count = len(plan.compile_blocks)
        print(f"blocks: {count} are compiled now, which takes minutes where torch's cache lacks them", flush=True)
    checked = check_compiled(model, compiler, lambda: check_model(model, images), images)
    head_line = check_head_form(model, images, no_kernels)
    if run.world.is_first:
        lines = [*plan.describe().splitlines(), *origin.notes, unplaced.router_note, *checked]
        for line in filter(None, [*lines, *([head_line, _advice_on_dtype(model)] if trained else [])]):
            print(line, flush=True)
    return model


def _settle_threads(model: Model) -> None:
    """Choose the threads of each rank with the first trained model of a run; all ranks call this together."""
    run = model.run
    world = run.world
    if run.chose_threads or world.device.type != "cpu":
        return
    run.chose_threads = True
    before = None if world.forms is None or not run.trains else world.forms.get("threads", 0)
    standing = choose_threads(model.forms, run.ranks, world.host, named=world.threads, before=before)
    if standing is not None and world.is_first:
        print(standing, flush=True)


def _advice_on_dtype(model: Model) -> str:
    """Return what bfloat16 would give a model that computes in float32 on a processor that multiplies both."""
    unit = bfloat16_unit() if model.run.world.device.type == "cpu" and model.plan.compute_dtype == "float32" else ""
    if not unit:
        return ""
    gain = bfloat16_gain()
    if gain < WORTH_IT:
        return ""
    return (
        f"compute: products are {gain:.1f} times as fast in bfloat16 ({unit}) as in float32, by "
        "parallel.compute_dtype: bfloat16"
    )


def _forms_of(run: Run, plan: ShardPlan, *, trained: bool) -> Forms:
    world = run.world
    # Without a checkpoint of its own, a frozen model has nowhere to record what was faster at a start.
    timed = trained and run.trains and world.device.type == "cuda"
    forms = Forms(run.ranks.gather, timed=timed, rank=world.rank if world.size > 1 else None)
    if plan.copied:
        forms.note("copies", 1)
    return forms


def unplaced_policy(run: Run, origin: Blueprint, *, trained: bool = True) -> tuple[PolicyModel, str]:
    """Return the policy as it is before its parameters have memory, and what to say of its routers.

    Raises:
        ConfigError: Its routers' loss cannot be computed on these ranks.
    """
    config = run.config
    storage, frozen = storage_of(config.model)
    set_storage(origin.model, storage, frozen)
    if not trained:
        origin.model.requires_grad_(False)  # noqa: FBT003 - torch's own form
    if storage is torch.float64:  # torch's grouped products of experts exist for 32 and 16 bits only
        origin.model.set_experts_implementation("eager")
    router_loss, router_note = (None, "")
    if trained:
        router_loss, router_note = _router_loss(config, origin, run.world)
    return policy_model(config, origin, router_loss), router_note


def policy_model(config: TrainingConfig, origin: Blueprint, router_loss: RouterLoss | None) -> PolicyModel:
    """Return the model of a configuration as a policy, a scorer or a student, on the meta device."""
    packed = origin.packed and config.data.packing != "none"
    if not packed and origin.packed:
        eager = config.model.attention == "eager"
        origin.model.set_attn_implementation("eager" if eager else upstream_attention(origin.model))
    head = config.model.head
    spec = origin.family.head_spec(float32_product=head.dtype == "float32", chunk_tokens=head.chunk_tokens)
    model_class = _model_class(config)
    return model_class(origin.model, origin.family, spec, padded=not packed, router_loss=router_loss)


def _model_class(config: TrainingConfig) -> type[PolicyModel]:
    if config.values:
        return ValueModel
    if config.scores:
        return StoredScoreModel if isinstance(config, RewardScoring) else ScoreModel
    return StudentModel if isinstance(config, DistillConfig) else PolicyModel


def _router_loss(config: TrainingConfig, origin: Blueprint, world: World) -> tuple[RouterLoss | None, str]:
    section = config.model.router_loss
    if section.kind == "batch" and not section.allow_split and world.size > config.parallel.context:
        raise ConfigError(
            f"model.router_loss: batch balances what one forward pass sees, and each of {world.size} ranks sees a part "
            "of the batch, so its result would depend on their number. Use sequence, which does not, or accept it: "
            "router_loss: {kind: batch, allow_split: true}."
        )
    return choose_router_loss(section, origin.skeleton)


def image_side_of(config: TrainingConfig, origin: Blueprint) -> ImageSide | str:
    """Return what turns the images of rows into tokens; or why there is nothing that does.

    Raises:
        ModelError: Image processor, tokenizer and model do not belong together.
    """
    raw_config = origin.original_config
    if may_see(raw_config) and attends_both_ways(raw_config) and config.data.packing != "none":
        return f"{origin.family.name} attends within an image in both directions, and packs do not; packing: none does"
    data = config.data
    options = (data.min_pixels, data.max_pixels, data.video_fps, data.video_min_pixels, data.video_max_pixels)
    if options not in origin.image_sides:
        origin.image_sides[options] = image_side(
            origin.image_processor,
            origin.tokenizer,
            raw_config,
            settings=origin.processor_settings,
            min_pixels=data.min_pixels,
            max_pixels=data.max_pixels,
            videos=video_options(data, origin.directory),
        )
    side: ImageSide | str = origin.image_sides[options]
    return side


@torch.no_grad()
def probe_logprobs(model: PolicyModel, tokens: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return [L - 1] log-probabilities of all tokens but the first; all ranks call this together."""
    example = Example(0, 0, tokens, np.arange(tokens.size) > 0)
    batch = to_device(pack([example], [Share(1.0, 1.0)], padded=model.padded), device)
    with without_dropout(model):
        scores = model(batch)
    assert isinstance(scores, Scores)
    return scores.logprobs


def check_positions(config: TrainingConfig, origin: Blueprint, *, reads_only: bool = False) -> str:
    """Return what a user should know of sequences that go beyond the model's positions; "" if none does.

    Args:
        config: The run.
        origin: The model.
        reads_only: Whether it samples nothing though the run does.

    Raises:
        ConfigError: There is nothing beyond: the positions are rows of a table, or completions of that length are
            trained on, or they would cross to other rotary angles.
    """
    positions = positions_of(origin.skeleton)
    key, tokens = _longest(config, reads_only=reads_only)
    name, samples = origin.family.name, _samples(config) and not reads_only
    changes, completes = angle_changes(origin.skeleton.config), samples or key == _EVALUATED
    if completes:
        _refuse_crossing(key, tokens, name, changes)
    if positions is None or tokens <= positions.count:
        return ""
    if any(change.by_length for change in changes):
        return (
            f"note: {key} allows sequences of {tokens} tokens. Those beyond {positions.count} "
            f"(max_position_embeddings) follow rotary angles of their own length, each by {name}'s dynamic scaling."
        )
    beyond = (
        f"{key} allows sequences of {tokens} tokens, and {name} has {positions.count} positions "
        "(max_position_embeddings)"
    )
    lower = "data.max_length or max_new_tokens" if completes else "data.max_length"
    if positions.in_a_table:
        raise ConfigError(f"{beyond}. Lower {lower}.")
    if samples and config.data.max_length > positions.count:
        raise ConfigError(f"{beyond}. Lower {lower}, or set model.config_override.max_position_embeddings.")
    return (
        f"note: {beyond}: longer ones take it where it was never trained. If that is meant, say so in "
        "model.config_override (max_position_embeddings, rope_scaling); else lower data.max_length."
    )


def _refuse_crossing(key: str, tokens: int, name: str, changes: Sequence[AngleChange]) -> None:
    """Refuse a policy whose completions may cross to other rotary angles, with its two ways out."""
    change = next((change for change in changes if change.length < tokens), None)
    if change is None:
        return
    if change.by_length:
        rule = "every longer text has angles of its own (dynamic scaling)"
        override, result = f"{{max_position_embeddings: {tokens}}}", "those of short ones"
    else:
        rule = "all longer texts follow a second set of factors (LongRoPE)"
        override = "{rope_parameters: {short_factor: [...]}} with the numbers of its long_factor"
        result = "those of long ones"
    raise ConfigError(
        f"{key} allows sequences of {tokens} tokens, and {name} changes its rotary angles beyond {change.length}: "
        f"{rule}. A completion that crosses that length would be sampled under some angles and trained under others. "
        f"Lower data.max_length or max_new_tokens until no sequence is longer than {change.length}, or give texts of "
        f"all lengths the same angles, {result}, by model.config_override: {override}."
    )


def _samples(config: TrainingConfig) -> bool:
    return isinstance(config, GRPOConfig) or (isinstance(config, DistillConfig) and config.rollout is not None)


_EVALUATED = "evaluation.completions.max_new_tokens"


def _longest(config: TrainingConfig, *, reads_only: bool) -> tuple[str, int]:
    """Return the longest sequence that is allowed, and the key that allows it."""
    needed = {"data.max_length": config.data.max_length}
    evaluates = bool(config.evaluation.sets) or config.data.validation_split > 0
    if evaluates and config.evaluation.completions is not None and not reads_only:
        # The answer that a completion is compared with has a token at least.
        needed[_EVALUATED] = config.data.max_length - 1 + config.evaluation.completions.max_new_tokens
    if isinstance(config, GRPOConfig) and evaluates:
        prompt = config.data.max_length - config.rollout.max_new_tokens
        sampled = config.evaluation.sampling.max_new_tokens or 0
        needed["evaluation.sampling.max_new_tokens"] = prompt + sampled
    key = max(needed, key=lambda name: needed[name])
    return key, needed[key]


def check_model(model: Model, images: ImageSide | None) -> list[str]:
    """Check a model that is sharded and filled; return what to print. All ranks call this together.

    Raises:
        ModelError: Its outputs or gradients are not those of the model in its files; the same on all ranks.
    """
    start = perf_counter()
    config, origin, ranks = model.run.config, model.blueprint, model.run.ranks
    policy, plan = model.module, model.plan
    witness = witness_of(type(origin.skeleton), origin.original_config)
    sides = Sides(policy, witness, getattr(torch, plan.compute_dtype), model.run.world.device, images)
    may_fall_back = config.model.attention == "auto" and policy.context is None
    all_raise = model.run.whether_all_raise()
    agreement = Agreement(lambda agrees: all(ranks.gather(agrees)), ranks.on_all_ranks, all_raise)
    result, note = ranks.on_all_ranks(lambda: check_forward(sides, may_fall_back=may_fall_back, agreement=agreement))
    if policy.context is not None:
        ranks.on_all_ranks(lambda: check_spans(sides, result.spread))
    forward, gradients = perf_counter(), None
    if config.model.check_gradients and any(value.requires_grad for value in policy.parameters()):
        gradients = ranks.on_all_ranks(lambda: check_gradients(sides, plan, dropout=config.model.dropout))
    compared = "scores" if config.scores else "log-probabilities"
    difference = result.difference * result.spread
    summaries = [_forward_summary(result, forward - start), _gradient_summary(gradients, perf_counter() - forward)]
    return [
        note,
        f"forward check: {compared} agree with transformers to {difference:.1e}",
        f"checked against transformers: {'; '.join(summary for summary in summaries if summary)}",
    ]


def _forward_summary(result: CheckResult, seconds: float) -> str:
    sentence = "forward passes"
    if not result.head_seen:
        sentence += " (not the rule of the head apart from them, which this model does not show)"
    if result.lengths.checked:
        sentence += f", lengths up to and beyond {', '.join(map(str, result.lengths.checked))}"
    if result.lengths.too_long:
        sentence += f" (not {', '.join(map(str, result.lengths.too_long))}, which would take too long)"
    if result.features:
        sentence += f", features of images ({', '.join(map(str, result.features))}, as many as tokens)"
    return f"{sentence} {seconds:.1f} s"


def _gradient_summary(gradients: Gradients | None, seconds: float) -> str:
    if gradients is None:
        return ""
    sentence = f"gradients of {gradients.parameters} parameters {seconds:.1f} s"
    return f"{sentence} (of {gradients.name} off by {gradients.worst:.0e} of its norm, none by more)"
