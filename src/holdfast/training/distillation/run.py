"""The built parts of a distillation, and steps whose texts the student writes itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.config.verbs.distill import DistillConfig, DistillRolloutConfig
from holdfast.data.batches.assembly import Layout, assemble
from holdfast.data.batches.candidates import Candidates
from holdfast.data.batches.packing import unpack
from holdfast.data.tokens.vision import going_on
from holdfast.objectives.supervised import Comparison
from holdfast.rollout.sampling import mixed
from holdfast.training.evaluate import evaluate, split_at_answer
from holdfast.training.policy.groups import CompletionSummary, GroupFact
from holdfast.training.policy.metrics import length_metrics
from holdfast.training.policy.rollouts import sample_groups
from holdfast.training.policy.run import SamplingEvaluation, rest
from holdfast.training.policy.trajectories import example_of_trajectory
from holdfast.training.preference.kto import known_of
from holdfast.training.run import Evaluation, Run
from holdfast.training.scorers.reference import Reference
from holdfast.training.scorers.scoring import scored
from holdfast.training.scorers.teacher import Teacher
from holdfast.types import Example, Group, MiniBatch, Prompt


@dataclass(kw_only=True)
class DistillEvaluation(Evaluation):
    """A student, and the teacher it is compared with."""

    config: DistillConfig
    objective: Comparison
    teacher: Teacher
    of_rows: Comparison
    """Compares on the answers of rows: in training, and in every evaluation."""


@dataclass(kw_only=True)
class DistillRun(DistillEvaluation, Run):
    """Everything a step touches."""


@dataclass(kw_only=True)
class SampledDistillRun(DistillRun, SamplingEvaluation):
    """Likewise, where the student writes texts itself."""

    rollout: DistillRolloutConfig
    layout: Layout
    """How texts are packed."""
    of_samples: Comparison
    """Compares on what the student wrote."""

    @property
    def sampling_seed(self) -> int:
        """Seed of completions, and of which steps have some."""
        return self.config.seed if self.rollout.seed is None else self.rollout.seed

    @property
    def samples_now(self) -> bool:
        """Whether the step that comes next is made of completions: a function of seed and step."""
        drawn = mixed(self.sampling_seed, self.state.step) / 2**63
        return self.rollout.share == 1 or drawn < self.rollout.share


def completed(run: SampledDistillRun, mini_batch: MiniBatch) -> MiniBatch:
    """Put the student's completions in the place of answers; all ranks call this together.

    Raises:
        StepAbandoned: A rank was asked to stop; the same on all ranks.
    """
    prompts = _prompts(run, mini_batch)
    seeds = {prompt.prompt_id: _seeds(run, prompt.prompt_id) for prompt in prompts}
    groups = sample_groups(run, prompts, run.rollout, seeds)
    rest(run)
    rank_facts = run.ranks.gather([_fact(group, run.world.rank) for group in groups])
    facts = sorted((fact for part in rank_facts for fact in part), key=lambda fact: fact.prompt_id)
    with run.phase("pack"):
        examples = {
            (group.prompt.prompt_id, place): example_of_trajectory(group.prompt, trajectory)
            for group in groups
            for place, trajectory in enumerate(group.trajectories)
        }
        made = assemble(Candidates(examples, known_of(examples, run.ranks)), run.ranks, run.config.data, run.layout)
    _tell(run, groups)
    return replace(made, metrics={**mini_batch.metrics, **made.metrics, **length_metrics(facts)})


def compared_with_teacher(run: DistillEvaluation, mini_batch: MiniBatch, teacher: Reference | None = None) -> MiniBatch:
    """Add the teacher's log-probabilities where the objective reads them; all ranks call this together.

    Args:
        run: Of which the objective is the one that comes next.
        mini_batch: What is compared.
        teacher: Who is asked; default: the teacher of steps.

    Raises:
        RunStopped: The teacher's server does not answer, or cannot be used; the same on all ranks.
    """
    if not run.objective.needs_teacher_logprobs:
        return mini_batch
    with run.phase("teacher"):
        return scored(run, run.teacher.model if teacher is None else teacher, mini_batch, "teacher_logprobs")


def evaluate_distilled(
    run: DistillEvaluation, label: str | None = None, *, interrupted: Callable[[], bool] = lambda: False
) -> dict[str, float]:
    """Return eval/<set>/<metric>, as `evaluate`: the divergence from the teacher on rows, and their likelihood.

    Of a teacher behind a server the likelihoods alone.
    """
    run.objective = run.of_rows
    return evaluate(
        run, label, interrupted, lambda mini_batch: compared_with_teacher(run, mini_batch, run.teacher.of_sets)
    )


def _prompts(run: SampledDistillRun, mini_batch: MiniBatch) -> list[Prompt]:
    """Return what this rank completes: of every row one sequence up to its last answer.

    A row that a template writes as several sequences, perhaps on several ranks, is completed where the longest lies.
    """
    own_examples: dict[int, Example] = {}
    for batch in mini_batch.micro_batches:
        for example in unpack(batch):
            earlier = own_examples.get(example.sample_id)
            if earlier is None or earlier.tokens.size < example.tokens.size:
                own_examples[example.sample_id] = example
    everyone = run.ranks.gather({sample_id: example.tokens.size for sample_id, example in own_examples.items()})
    longest: dict[int, tuple[int, int]] = {}
    for rank, sizes in enumerate(everyone):
        for sample_id, size in sizes.items():
            longest[sample_id] = max(longest.get(sample_id, (0, 0)), (size, -rank))
    selected = [
        example for sample_id, example in sorted(own_examples.items()) if longest[sample_id][1] == -run.world.rank
    ]
    return [_prompt_of(example) for example in selected]


def _prompt_of(example: Example) -> Prompt:
    size = len(split_at_answer(example)[0])
    positions = None if example.positions is None else example.positions[:, :size]
    return Prompt(example.sample_id, example.tokens[:size], "", {}, example.source, example.model_inputs, positions)


def _seeds(run: SampledDistillRun, prompt_id: int) -> tuple[int, ...]:
    places = range(run.rollout.group_size)
    return tuple(mixed(run.sampling_seed, run.state.step, prompt_id, place) for place in places)


def _fact(group: Group, rank: int) -> GroupFact:
    completions = tuple(
        CompletionSummary(math.nan, {}, one.completion_length, one.tokens.size, one.finish, None, None, {})
        for one in group.trajectories
    )
    return GroupFact(group.prompt.prompt_id, rank, completions)


def _tell(run: SampledDistillRun, groups: Sequence[Group]) -> None:
    """Every `rollout.show_every` steps, leave all completions to be written; all ranks call this together."""
    step = run.state.step + 1
    if step % run.rollout.show_every and step != 1:
        return
    decode = run.origin.tokenizer.decode
    own_samples = [
        {
            "step": step,
            "sample_id": trajectory.sample_id,
            "prompt": decode(group.prompt.tokens.tolist()),
            "completion": trajectory.completion,
            "finish": trajectory.finish.value,
        }
        for group in groups
        for trajectory in group.trajectories
    ]
    samples = [sample for part in run.ranks.gather(own_samples) for sample in part]
    if run.world.is_first:
        run.samples += sorted(samples, key=lambda sample: int(sample["sample_id"]))


def prompt_alone(prompt: Prompt, filler: int) -> Example:
    """Return a prompt as a sequence whose answer is one token that nobody reads, for a stream of sequences."""
    tokens = np.append(prompt.tokens, filler)
    return Example(
        sample_id=prompt.prompt_id,
        prompt_id=prompt.prompt_id,
        tokens=tokens,
        loss_mask=np.arange(tokens.size) == tokens.size - 1,
        source=prompt.source,
        model_inputs=prompt.model_inputs,
        positions=None if prompt.positions is None else going_on(prompt.positions, 1),
    )
