"""A trial step before a policy's first step, on two small groups, of which the run keeps nothing.

A model may pass all comparisons of its forward pass and still fail when it is first sampled from, or when completions
share their prompt in a packed row. In step 1 this would show only after a rollout that may take an hour. Here every
rank samples a few tokens with the run's own engine, packs them as the run will, scores them with reference and critic,
and makes an update by the recipe's own `learn`. Rewards are artificial (`made_up.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch

from holdfast.config.sections.engine import RecordedEngineConfig
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import HoldfastError, ModelError
from holdfast.models.check.forward import plain_tokens
from holdfast.optim.randomness import private_randomness
from holdfast.optim.state_template import twin_of
from holdfast.parallel.failure.classify import is_out_of_memory
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.training.phases import PhaseClock
from holdfast.training.policy.made_up import made_up_rollout
from holdfast.training.policy.rollouts import Rollout, sample_groups
from holdfast.training.policy.run import PolicyTraining
from holdfast.training.run import Logbook, Model
from holdfast.types import Group, Prompt

_GROUPS = 2
"""Of each rank."""
_PROMPT_TOKENS = 4
_NEW_TOKENS = 4


_ACTS = {
    "rollout": "samples",
    "recording": "samples",
    "push": "samples",
    "proof": "samples",
    "data": "samples",
    "advantage": "packs",
    "pack": "packs",
    "values": "scores",
    "reference": "scores",
    "proximal": "scores",
}
"""Phase of a step -> what the run does in it, for messages; in all others it updates."""


class _WalkClock(PhaseClock):
    """A phase clock that records the phase entered last, so that an error message can name it."""

    def __init__(self) -> None:
        super().__init__()
        self.act = "begins"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.act = _ACTS.get(name, "updates")
        with super().phase(name):
            yield

    def seconds(self) -> str:
        """Return the seconds of each act, in the order of a step."""
        totals = dict.fromkeys(["samples", "packs", "scores", "updates"], 0.0)
        for name, seconds in self.read().items():
            if name.startswith("timing/"):
                totals[_ACTS.get(name.removeprefix("timing/"), "updates")] += seconds
        return ", ".join(f"{act} {seconds:.1f} s" for act, seconds in totals.items())


def walk_a_step(training: PolicyTraining, learn: Callable[[PolicyTraining, Rollout], object]) -> None:
    """Make a trial step, and leave models, optimizers, counters, logs and random generators as they were, bit for bit.

    Peaks of memory are the process's and count it. All ranks call this together.

    Args:
        training: Ready for its first step.
        learn: The recipe's own, which updates the policy on a rollout.

    Raises:
        ModelError: Something on the way fails, or has no memory; the phase is named.
        HoldfastError: Whatever a part of the step raises of its own, as it would in step 1.
    """
    if isinstance(training.config.rollout.engine, RecordedEngineConfig):
        return  # the run that recorded has walked, and such tiny groups are not among its completions
    clock = _WalkClock()
    try:
        with private_randomness(), _restoring(training, clock):
            # While the critic warms up it alone would learn, and the policy's update stay unseen.
            warmup_steps = 0 if training.config.critic is None else training.config.critic.warmup_steps
            training.model.state.step = max(training.model.state.step, warmup_steps)
            learn(training, made_up_rollout(_sampled(training), training.config, training.run.ranks))
    except Exception as error:
        training.evaluation.sampler.engine.close()  # there will be no run that does
        if isinstance(error, HoldfastError) or training.run.world.failure.broken_by_peer(error):
            raise
        family = training.model.blueprint.family
        why = " ".join(str(error).split()) or type(error).__name__
        if is_out_of_memory(error):
            raise ModelError(
                f"A step of this run has no memory left where it {clock.act}: {why:.600} Two tiny groups showed it "
                "before step 1, and nothing was trained. Use more ranks, set parallel.offload, or lower "
                "data.tokens_per_micro_batch."
            ) from error
        raise ModelError(
            f"A step of this run would fail where it {clock.act}: {type(error).__name__}: {why:.600} Two tiny groups "
            f"showed it before step 1, and nothing was trained. If {family.name} cannot do that, "
            "please report the architecture; an optimizer of your own (optim.path) may be the cause too."
        ) from error
    if training.run.world.is_first:
        print(f"walked one step before step 1: {clock.seconds()}", flush=True)


def _sampled(training: PolicyTraining) -> list[Group]:
    """Return two groups of this rank, of as many completions as the run's, sampled as the run samples."""
    rollout, first = training.config.rollout, training.run.world.rank * _GROUPS
    size = rollout.group_size
    sampling = rollout.model_copy(update={"max_new_tokens": min(_NEW_TOKENS, rollout.max_new_tokens)})
    prompts = [_prompt(training, first + number) for number in range(_GROUPS)]
    return sample_groups(
        training.model,
        training.evaluation.sampler,
        prompts,
        sampling,
        {prompt.prompt_id: tuple(range(size)) for prompt in prompts},
    )


def _prompt(training: PolicyTraining, number: int) -> Prompt:
    images = training.evaluation.images if isinstance(training.evaluation.images, ImageSide) else None
    tokens = plain_tokens(training.model.module, images, _PROMPT_TOKENS, number)
    positions = None if images is None else images.probe(tokens, number).positions
    text, source = (
        training.model.blueprint.tokenizer.decode(tokens.tolist()),
        next(iter(training.source_names), ""),
    )
    return Prompt(number, tokens, text, {}, source, positions=positions)


@contextmanager
def _restoring(training: PolicyTraining, clock: PhaseClock) -> Iterator[None]:
    """Let a step change copies within the block, and restore what it changes in place when the block ends.

    Counters, optimizers and logs are replaced by copies. Averages and a reference that follows the policy do not move.
    Weights and buffers of the policy and its companions are changed in place and written back.
    """
    present = [training.model, *training.companions.values()]
    fields = [(model, dict(vars(model)), _copied(model)) for model in present]
    logs = [(model.run, model.run.log) for model in present]
    for model in present:
        model.state = deepcopy(model.state)
        model.optimizer = twin_of(model.updater, [dict(group) for group in model.updater.param_groups])
        model.averages = model.following = None
    for run, log in logs:
        run.log = Logbook(clock=clock, peaks=log.peaks)
    try:
        yield
        # Not behind an error, which may be this rank's alone: servers that share GPUs are asked by all ranks together.
        training.evaluation.sampler.release(training.model)
    finally:
        training.evaluation.sampler.published = None
        for run, log in logs:
            run.log = log
        for model, values, tensors in fields:
            vars(model).update(values)
            with torch.no_grad():
                for name, value in _moving(model).items():
                    value.grad = None
                    local_part(value).copy_(tensors[name])


def _moving(model: Model) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that a step may change in place, by name."""
    parameters = sharded_parameters(model.module)
    return {
        **{name: value for name, value in parameters.items() if value.requires_grad},
        **dict(model.module.named_buffers()),
    }


def _copied(model: Model) -> dict[str, torch.Tensor]:
    """Return this rank's part of what may change, in host memory: a device may have no room for it twice."""
    return {name: local_part(value).detach().to("cpu", copy=True) for name, value in _moving(model).items()}
