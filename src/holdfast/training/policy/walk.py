"""Before a policy's first step: the way of that step, once, on two tiny groups of which nothing is kept.

A model may pass every comparison of its forward pass and still fail where it is first sampled from, or where several
completions share their prompt in a pack. That would show in step 1, behind a rollout that may take an hour. Here every
rank samples a few tokens by the run's own engine, lays them out as the run will, lets reference and critic score them,
and makes an update. Rewards are made up: functions of a user want rows of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter

import torch

from holdfast.checkpoint.place.memory import is_out_of_memory
from holdfast.config.sections.engine import RecordedEngineConfig
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import HoldfastError, ModelError
from holdfast.models.check.forward import plain_tokens
from holdfast.optim.randomness import private_randomness
from holdfast.optim.state_template import twin_of
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.rewards.base import Scored
from holdfast.training.phases import PhaseClock
from holdfast.training.policy.critic import train_critic, with_values
from holdfast.training.policy.experience import pack_rollout, score_rollout, with_advantages
from holdfast.training.policy.groups import share_facts
from holdfast.training.policy.rollouts import Rollout, sample_groups
from holdfast.training.policy.run import PolicyRun
from holdfast.training.run import Trained
from holdfast.training.step import train_step
from holdfast.types import Finish, Group, Prompt

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
    if isinstance(run.config.rollout.engine, RecordedEngineConfig):
        return  # the run that recorded has walked, and such tiny groups are not among its completions
    walk = _Walk()
    try:
        with private_randomness(), _nothing_kept(run):
            _walk(run, walk)
    except Exception as error:
        run.evaluation.sampler.engine.close()  # there will be no run that does
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
        run.evaluation.sampler.release(run.trained)
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
