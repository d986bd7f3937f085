"""The built parts of a distillation, and steps whose texts the student writes itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from holdfast.config.verbs.distill import DistillRolloutConfig
from holdfast.data.batches.assembly import Layout, assemble
from holdfast.data.batches.candidates import Candidates
from holdfast.data.batches.packing import unpack
from holdfast.data.content.model_inputs import going_on
from holdfast.objectives.supervised import Comparison
from holdfast.parallel.collectives import RankGroup
from holdfast.rollout.sampling import mixed
from holdfast.training.evaluate import evaluate, split_at_answer
from holdfast.training.other_models.reference import Reference, scored
from holdfast.training.other_models.teacher import Teacher
from holdfast.training.policy.experience import example_of_trajectory
from holdfast.training.policy.groups import CompletionSummary, GroupFact
from holdfast.training.policy.metrics import length_metrics
from holdfast.training.policy.rollouts import sample_groups
from holdfast.training.policy.run import Sampler
from holdfast.training.preference.run import sequence_facts
from holdfast.training.run import Evaluation, Model, Training
from holdfast.types import Example, Group, MiniBatch, Prompt


@dataclass(kw_only=True)
class DistillEvaluation(Evaluation):
    """A student, and the teachers it is compared with on the answers of rows."""

    objective: Comparison
    teachers: tuple[Teacher, ...]

    @property
    def asked(self) -> Teacher:
        """The teacher of an objective that reads log-probabilities of tokens, of which there is one."""
        return self.teachers[0]


@dataclass(frozen=True)
class StudentSampling:
    """How the student writes texts itself, and what they are compared by."""

    sampler: Sampler
    rollout: DistillRolloutConfig
    seed: int
    """Of completions, and of which steps have some."""
    layout: Layout
    """How texts are packed."""
    objective: Comparison
    """Compares on what the student wrote."""

    def is_due(self, step: int) -> bool:
        """Whether the step after so many is made of completions: a function of seed and step."""
        return self.rollout.share == 1 or mixed(self.seed, step) / 2**63 < self.rollout.share


@dataclass(kw_only=True)
class DistillTraining(Training):
    """The parts of distillation."""

    evaluation: DistillEvaluation
    writing: StudentSampling | None = None
    """None where the student learns from the answers of rows alone."""

    def continued(self) -> None:
        """Give the engine the blocks of keys and values that the run began with."""
        if self.writing is not None:
            self.writing.sampler.follow(self.model)


def completed(training: DistillTraining, writing: StudentSampling, mini_batch: MiniBatch) -> MiniBatch:
    """Replace the answers of rows by the student's completions; all ranks call this together.

    Raises:
        StepAbandoned: A rank was asked to stop; the same on all ranks.
    """
    student = training.model
    run, ranks, step = student.run, student.run.ranks, student.state.step
    prompts = _prompts(ranks, mini_batch)
    indices = range(writing.rollout.group_size)
    seeds = {
        prompt.prompt_id: tuple(mixed(writing.seed, step, prompt.prompt_id, index) for index in indices)
        for prompt in prompts
    }
    groups = sample_groups(student, writing.sampler, prompts, writing.rollout, seeds)
    writing.sampler.release(student)
    rank_facts = ranks.gather([_fact(group, ranks.rank) for group in groups])
    facts = sorted((fact for facts_of_rank in rank_facts for fact in facts_of_rank), key=lambda fact: fact.prompt_id)
    with run.phase("pack"):
        examples = {
            (group.prompt.prompt_id, index): example_of_trajectory(group.prompt, trajectory)
            for group in groups
            for index, trajectory in enumerate(group.trajectories)
        }
        candidates = Candidates(examples, sequence_facts(examples, ranks))
        assembled = assemble(candidates, ranks, run.config.data, writing.layout)
    _tell(student, writing.rollout.show_every, groups)
    return replace(assembled, metrics={**mini_batch.metrics, **assembled.metrics, **length_metrics(facts)})


def compared_with_teacher(
    student: Model, teacher: Reference, objective: Comparison, mini_batch: MiniBatch
) -> MiniBatch:
    """Add a teacher's log-probabilities where the objective reads them; all ranks call this together.

    Raises:
        RunStopped: The teacher's server does not answer, or cannot be used; the same on all ranks.
    """
    if not objective.needs_teacher_logprobs:
        return mini_batch
    with student.run.phase("teacher"):
        return scored(student, teacher, mini_batch, "teacher_logprobs")


def evaluate_distilled(
    evaluation: DistillEvaluation, label: str | None = None, *, interrupted: Callable[[], bool] = lambda: False
) -> dict[str, float]:
    """Return eval/<set>/<metric>, as `evaluate`: the divergence from the teacher on rows, and their likelihood.

    Of a teacher behind a server the likelihoods alone.
    """
    teacher = evaluation.asked.of_sets
    prepare = partial(compared_with_teacher, evaluation.model, teacher, evaluation.objective)
    return evaluate(evaluation, label, interrupted, prepare)


def _prompts(ranks: RankGroup, mini_batch: MiniBatch) -> list[Prompt]:
    """Return what this rank completes: of every row one sequence up to its last answer.

    A row that a template writes as several sequences, perhaps on several ranks, is completed where the longest lies.
    """
    own_examples: dict[int, Example] = {}
    for batch in mini_batch.micro_batches:
        for example in unpack(batch):
            earlier = own_examples.get(example.sample_id)
            if earlier is None or earlier.tokens.size < example.tokens.size:
                own_examples[example.sample_id] = example
    everyone = ranks.gather({sample_id: example.tokens.size for sample_id, example in own_examples.items()})
    longest: dict[int, tuple[int, int]] = {}
    for rank, sizes in enumerate(everyone):
        for sample_id, size in sizes.items():
            longest[sample_id] = max(longest.get(sample_id, (0, 0)), (size, -rank))
    selected = [example for sample_id, example in sorted(own_examples.items()) if longest[sample_id][1] == -ranks.rank]
    return [_prompt_of(example) for example in selected]


def _prompt_of(example: Example) -> Prompt:
    size = len(split_at_answer(example)[0])
    positions = None if example.positions is None else example.positions[:, :size]
    return Prompt(example.sample_id, example.tokens[:size], "", {}, example.source, example.model_inputs, positions)


def _fact(group: Group, rank: int) -> GroupFact:
    completions = tuple(
        CompletionSummary(
            math.nan, {}, trajectory.completion_length, trajectory.tokens.size, trajectory.finish, None, None, {}
        )
        for trajectory in group.trajectories
    )
    return GroupFact(group.prompt.prompt_id, rank, completions)


def _tell(student: Model, every: int, groups: Sequence[Group]) -> None:
    """Every `rollout.show_every` steps, leave all completions to be written; all ranks call this together."""
    step = student.state.step + 1
    if step % every and step != 1:
        return
    decode = student.blueprint.tokenizer.decode
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
    everyone = student.run.ranks.gather_to_first(own_samples)
    samples = [sample for samples_of_rank in everyone for sample in samples_of_rank]
    student.run.log.samples += sorted(samples, key=lambda sample: int(sample["sample_id"]))


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
