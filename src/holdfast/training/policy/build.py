"""Build a policy's run: what can fail before step 1 fails here, on all ranks alike, with nothing written.

The last check walks the way of the first step once, on two tiny groups of which nothing is kept: a model may pass every
comparison of its forward pass and still fail where it is first sampled from, or where several completions share a pack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from holdfast.checkpoint.place.memory import is_out_of_memory
from holdfast.config.sections.reference import ServerReferenceConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.data.batches.candidates import Tokenise
from holdfast.data.batches.prompts import prompt_tokeniser
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import ConfigError, DataError, HoldfastError, ModelError
from holdfast.models.build.model import Blueprint
from holdfast.models.check.forward import plain_tokens
from holdfast.models.layers.expert_choices import why_not_replayed
from holdfast.models.layers.routers import routers_of
from holdfast.objectives.base import Objective
from holdfast.optim.randomness import private_randomness
from holdfast.optim.state_template import twin_of
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.rewards.base import Scored
from holdfast.training.build.begin import Live, Started, begin, begin_evaluation, build_model, run_of
from holdfast.training.build.first_rows import check_first_rows
from holdfast.training.build.losses import policy_objective
from holdfast.training.build.model import image_side_of
from holdfast.training.build.rows import (
    filter_of,
    first_sequences,
    prompt_stream,
    row_filter,
)
from holdfast.training.engines import open_engine, why_no_videos
from holdfast.training.fingerprints import mark_reward_models
from holdfast.training.policy.critic import add_critic, train_critic, with_values
from holdfast.training.policy.experience import pack_rollout, score_rollout, with_advantages
from holdfast.training.policy.groups import share_facts
from holdfast.training.policy.recorder import what_is_deleted
from holdfast.training.policy.reward_columns import refuse_absent_columns
from holdfast.training.policy.rollouts import Rollout, sample_groups
from holdfast.training.policy.run import PolicyEvaluation, PolicyRun, PromptSet, Sampler, Score, check_residency
from holdfast.training.run import PhaseClock, Setting, ShardedModel, Trained
from holdfast.training.scorers.reference import NO_IMAGES, Reference, build_reference, following_of
from holdfast.training.step import train_step
from holdfast.types import Finish, Group, MiniBatch, Prompt

_GROUPS = 2
"""Of each rank."""
_PROMPT_TOKENS = 4
_NEW_TOKENS = 4


class _Walk:
    """Where a walk is, for what is said of an error."""

    def __init__(self) -> None:
        self.phase = "begins"
        self.seconds: dict[str, float] = {}

    @contextmanager
    def through(self, phase: str) -> Iterator[None]:
        """Count the block's time towards a phase, which an error is said to come from."""
        self.phase, start = phase, perf_counter()
        yield
        self.seconds[phase] = perf_counter() - start


def walk_a_step(run: PolicyRun) -> None:
    """Walk through a step, and leave weights, optimizer, counters and generators as they are, bit by bit.

    All ranks call this together.

    Raises:
        ModelError: Something on the way fails, or has no memory; the phase is named.
        HoldfastError: Whatever a part of the step raises of its own, as it would in step 1.
    """
    walk = _Walk()
    try:
        with private_randomness(), _nothing_kept(run):
            _walk(run, walk)
    except Exception as error:
        if isinstance(error, HoldfastError) or run.setting.world.failure.broken_by_peer(error):
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        if is_out_of_memory(error):
            raise ModelError(
                f"A step of this run has no memory left where it {walk.phase}: {why:.600} Two tiny groups showed it "
                "before step 1, and nothing was trained. Use more ranks, set parallel.cpu_offload, or lower "
                "data.tokens_per_micro_batch."
            ) from error
        raise ModelError(
            f"A step of this run would fail where it {walk.phase}: {type(error).__name__}: {why:.600} Two tiny groups "
            f"showed it before step 1, and nothing was trained. If {run.trained.origin.family.name} cannot do that, "
            "please report the architecture."
        ) from error
    if run.setting.world.is_first:
        parts = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in walk.seconds.items())
        print(f"walked one step before step 1: {parts}", flush=True)


def _walk(run: PolicyRun, walk: _Walk) -> None:
    with walk.through("samples"):
        groups = _sampled(run)
    with walk.through("packs"):
        rollout = with_advantages(run, _rollout(run, groups))
        mini_batches = pack_rollout(run, rollout)
    with walk.through("scores"):
        mini_batches = score_rollout(run, run.evaluation.objective, mini_batches)
        if run.critic is not None:
            objective = run.evaluation.objective
            rollout, mini_batches, _ = with_values(run, run.critic, objective, rollout, mini_batches)
    with walk.through("updates"):
        if run.critic is not None:
            train_critic(run, run.critic, mini_batches[:1])
        _update(run, mini_batches)


def _update(run: PolicyRun, mini_batches: list[MiniBatch]) -> None:
    for mini_batch in mini_batches:
        train_step(run.trained, mini_batch, run.evaluation.objective, ends_step=False)


def _sampled(run: PolicyRun) -> list[Group]:
    """Return two groups of this rank, of as many completions as the run's, sampled as the run samples."""
    rollout, first = run.config.rollout, run.setting.world.rank * _GROUPS
    size = rollout.group_size
    sampling = rollout.model_copy(update={"max_new_tokens": min(_NEW_TOKENS, rollout.max_new_tokens)})
    prompts = [_prompt(run, first + number) for number in range(_GROUPS)]
    return sample_groups(
        run.trained,
        run.evaluation.sampler,
        prompts,
        sampling,
        {prompt.prompt_id: tuple(range(size)) for prompt in prompts},
    )


def _prompt(run: PolicyRun, number: int) -> Prompt:
    images = run.evaluation.images if isinstance(run.evaluation.images, ImageSide) else None
    tokens = plain_tokens(run.trained.model, images, _PROMPT_TOKENS, number)
    positions = None if images is None else images.probe(tokens, number).positions
    text, source = run.trained.origin.tokenizer.decode(tokens.tolist()), next(iter(run.common.source_names), "")
    return Prompt(number, tokens, text, {}, source, positions=positions)


def _rollout(run: PolicyRun, groups: list[Group]) -> Rollout:
    """Reward every second completion, and let none be one that was cut, which may not be trained on."""
    rewarded, scored = [], []
    for group in groups:
        trajectories = []
        for place, trajectory in enumerate(group.trajectories):
            reward = float(place % 2)
            parts = {section.label: reward for section in run.config.reward}
            scored.append(Scored(reward, parts))
            trajectories.append(replace(trajectory, reward=reward, rewards=parts, finish=Finish.STOP))
        rewarded.append(replace(group, trajectories=tuple(trajectories)))
    facts = tuple(fact._replace(greedy=0.0) for fact in share_facts(run.setting.ranks, rewarded, scored))
    return Rollout(tuple(rewarded), facts, facts, {}, ())


@contextmanager
def _nothing_kept(run: PolicyRun) -> Iterator[None]:
    """Put back whatever a step changes, of the policy and of its critic."""
    present = [run.trained, *run.common.companions.values()]
    before = [(each, dict(vars(each)), dict(vars(each.state)), _copied(each)) for each in present]
    logs = [(each.setting.log, each.setting.log.clock, [*each.setting.log.messages]) for each in present]
    for each in present:
        each.optimizer = twin_of(each.optimizer, [dict(group) for group in each.optimizer.param_groups])
        each.averages, each.setting.log.clock = None, PhaseClock()
    try:
        yield
    finally:
        run.evaluation.sampler.rest(run.trained)
        run.evaluation.sampler.published = None
        for log, clock, messages in logs:
            log.clock, log.messages[:] = clock, messages
        for each, fields, state, weights in before:
            vars(each).update(fields)
            vars(each.state).update(state)
            with torch.no_grad():
                for name, value in sharded_parameters(each.model).items():
                    value.grad = None
                    if name in weights:
                        local_part(value).copy_(weights[name])


def _copied(trained: Trained) -> dict[str, torch.Tensor]:
    """Return this rank's part of what is trained, in host memory: a device may have no room for it twice."""
    parameters = sharded_parameters(trained.model)
    return {
        name: local_part(value).detach().to("cpu", copy=True)
        for name, value in parameters.items()
        if value.requires_grad
    }


def build_policy_run(  # noqa: PLR0913 - a run's parts, and what rewards need
    config: GRPOConfig,
    base: Path,
    world: World,
    score: Score,
    live: Live | None = None,
    columns: Mapping[str, Sequence[str]] | None = None,
) -> PolicyRun:
    """Return a run that is ready for its first step; nothing has been written.

    Args:
        config: The run.
        base: The YAML's directory.
        world: The ranks.
        score: Scores completions.
        live: Objects in the place of what the configuration names.
        columns: Columns that rewards need, by their names.

    Raises:
        UserError: Anything that can be known now; the same error on all ranks.
    """
    live = live or Live()
    setting = Setting.of(config, base, world)
    started = begin(setting, live)
    objective = _objective(config, started)
    sharded = _sharded(config, started, columns)
    if config.rollout.replay_routing:
        setting.ranks.on_all_ranks(lambda: _replay_routing(sharded))
    images = _images(config, sharded.origin)
    tokenise = _tokeniser(config, sharded, images)
    stream = setting.ranks.on_all_ranks(lambda: prompt_stream(setting, started.data, tokenise))
    if config.rollout.shared_prefix == "on" and sharded.model.padded:
        why = sharded.origin.family.why_not_packed or "data.packing or model.attention says so"
        raise ConfigError(
            f"rollout.shared_prefix: on, but {sharded.origin.family.name} is trained with one sequence per row "
            f"({why}), where nothing can be shared. Use auto."
        )
    mark_reward_models(setting)
    evaluation = PolicyEvaluation(
        sharded=sharded,
        objective=objective,
        sampler=_sampler(config, sharded),
        score=score,
        images=images,
        prompt_sets=_prompt_sets(started, sharded, tokenise),
        stream=stream,
        several_sources=len(started.data.training) > 1,
    )
    reference = _reference(config, sharded, live)
    run = PolicyRun(common=run_of(started, evaluation, stream), evaluation=evaluation, reference=reference)
    run.trained.following = following_of(reference, config.reference)
    if config.critic is not None:
        add_critic(run, config.critic, live)
    check_residency(run)
    walk_a_step(run)
    if world.is_first and (deleted := what_is_deleted(config)):
        print(f"warning: {deleted}", flush=True)
    return run


def build_policy_evaluation(
    config: GRPOConfig, base: Path, world: World, score: Score, columns: Mapping[str, Sequence[str]] | None = None
) -> PolicyEvaluation:
    """Return a policy and what it is evaluated with.

    Raises:
        UserError: As `build_policy_run`.
    """
    started = begin_evaluation(Setting.of(config, base, world))
    objective = _objective(config, started)
    sharded = _sharded(config, started, columns)
    images = _images(config, sharded.origin)
    tokenise = _tokeniser(config, sharded, images)
    return PolicyEvaluation(
        sharded=sharded,
        objective=objective,
        sampler=_sampler(config, sharded),
        score=score,
        images=images,
        prompt_sets=_prompt_sets(started, sharded, tokenise),
    )


def _objective(config: GRPOConfig, started: Started) -> Objective:
    if started.live.objective is not None:
        compares = getattr(started.live.objective, "needs_reference", False)
        for section in config.terms_of_ours():
            if section != "kl" or not compares:  # that of a loss which compares says that there is a reference
                raise ConfigError(
                    f"{section}: a loss of your own (objective=) takes nothing from this section. Write it into the "
                    "loss, and leave the section out."
                )
    setting = started.setting
    return started.live.objective or setting.ranks.on_all_ranks(lambda: policy_objective(config, setting))


def _sharded(config: GRPOConfig, started: Started, columns: Mapping[str, Sequence[str]] | None) -> ShardedModel:
    def look(origin: Blueprint) -> None:
        setting, ranks = started.setting, started.setting.ranks
        ranks.on_all_ranks(lambda: refuse_absent_columns(started.data, columns or {}))
        rows = ranks.on_all_ranks(
            lambda: RowTokeniser(origin.tokenizer, config.data, setting.base, _images(config, origin))
        )
        sees = origin.image_processor is not None
        check_first_rows(setting, started.data, _prompts(config, origin, rows), sees=sees)

    sharded = build_model(started.setting, started.live, look)
    sharded.temperature = config.rollout.temperature
    return sharded


def _sampler(config: GRPOConfig, sharded: ShardedModel) -> Sampler:
    return Sampler(open_engine(sharded, config.rollout, tells_experts=config.rollout.replay_routing))


def _images(config: GRPOConfig, origin: Blueprint) -> ImageSide | str:
    """Return what turns images into tokens; or why no row may have some."""
    if config.rollout.record:
        return "rollout.record keeps no images, so a step with some could not be made again; leave it out"
    if isinstance(config.reference, ServerReferenceConfig) and config.kl.coefficient > 0:
        return NO_IMAGES
    return image_side_of(config, origin)


def _tokeniser(config: GRPOConfig, sharded: ShardedModel, images: ImageSide | str) -> Tokenise[Prompt]:
    setting, tokenizer = sharded.setting, sharded.origin.tokenizer
    rows = setting.ranks.on_all_ranks(lambda: RowTokeniser(tokenizer, config.data, setting.base, images))
    return _prompts(config, sharded.origin, rows, why_no_videos(sharded, config.rollout.engine))


def _prompts(config: GRPOConfig, origin: Blueprint, rows: RowTokeniser, refusal: str = "") -> Tokenise[Prompt]:
    return prompt_tokeniser(rows, origin.tokenizer.decode, config.data, config.longest_prompt, refusal)


def _reference(config: GRPOConfig, policy: ShardedModel, live: Live) -> Reference | None:
    """Return the reference policy, or None where no KL term needs one."""
    kind, coefficient = config.reference.kind, config.kl.coefficient
    if kind == "none" or coefficient == 0:
        return None
    return build_reference(policy, live, config.reference, why=f"kl.coefficient={coefficient:g}")


def _prompt_sets(started: Started, sharded: ShardedModel, tokenise: Tokenise[Prompt]) -> tuple[PromptSet, ...]:
    """Read this rank's share of the evaluation sets now, so that what is wrong with them shows before step 1.

    Raises:
        DataError: A row is malformed, or no prompt is short enough; the same on all ranks.
    """
    setting, limit = sharded.setting, sharded.setting.config.evaluation.limit_samples
    ranks, sets = setting.ranks, []
    accept = ranks.on_all_ranks(lambda: row_filter(setting))
    for name, source in started.data.evaluation.items():
        read = partial(first_sequences, source, tokenise, limit, ranks, filter_of(source, accept))
        prompts = tuple(ranks.on_all_ranks(read))
        if not sum(ranks.gather(len(prompts))):
            raise DataError(
                f"evaluation.sets.{name}: no prompt of {source.name} leaves room for a completion in "
                "data.max_length, or is within data.max_prompt_length. Raise it."
            )
        sets.append(PromptSet(name, prompts))
    return tuple(sets)


def _replay_routing(sharded: ShardedModel) -> None:
    """Have the policy follow the experts of its rollouts.

    Raises:
        ConfigError: Its routers cannot be told, or it has none.
    """
    skeleton = sharded.origin.skeleton
    width = skeleton.config.get_text_config().hidden_size
    why = why_not_replayed([router for router, _ in routers_of(skeleton)], width)
    if why is not None:
        raise ConfigError(f"rollout.replay_routing: {sharded.origin.family.name} cannot: {why}. Leave it out.")
    sharded.model.replay_routing()
