"""Builds the step of every verb from the largest batches that a configuration allows; each row has its full length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from holdfast.config.sections.data import TextConfig
from holdfast.config.sections.reference import ServerReferenceConfig
from holdfast.config.sections.rollout import ReferenceConfig
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.batches.assembly import Layout, assemble
from holdfast.data.batches.candidates import Candidates, SequenceInfo
from holdfast.data.content.lengths import Stretch, example_of
from holdfast.data.tokens.vision import ImageSide
from holdfast.features.plan.counting.kinds import REFERENCE
from holdfast.features.plan.counting.memory import Ledger, follow_model
from holdfast.features.plan.execution.origin import shape_of
from holdfast.features.plan.execution.shapes import WithoutNumbers, place_shapes
from holdfast.models.setup.model import Blueprint, blueprint
from holdfast.objectives.base import Objective
from holdfast.training.distillation.build import objective_of_rows
from holdfast.training.engines import layout_of
from holdfast.training.other_models.reference import (
    AdapterOff,
    decide_place,
    following_of,
    reference_twin,
    scored,
)
from holdfast.training.other_models.teacher import Teacher, teacher_configuration
from holdfast.training.preference.build import pair_layout
from holdfast.training.preference.run import (
    PreferenceEvaluation,
    compared_with_reference,
    divergence,
    with_divergence,
)
from holdfast.training.run import Evaluation, Model, Run, Training
from holdfast.training.setup.begin import Live, give_optimizer
from holdfast.training.setup.losses import preference_objective, supervised_objective
from holdfast.training.setup.model import image_side_of
from holdfast.training.step import train_step
from holdfast.types import Example, MiniBatch

_SIDE = 1024
"""Pixels of a side of an image where `data.max_pixels` does not say; the image processor scales it."""


@dataclass
class PlannedStep:
    """The trained model of a planned run, its further models, and the counter of its memory."""

    run: Run
    ledger: Ledger
    model: Model
    build: Callable[..., Model]
    """Places a model, as `build_policy` does in a run."""
    companions: dict[str, Model] = field(default_factory=dict)
    """Further trained models, by the prefix of their tensors' names in checkpoints."""
    make: Callable[[], object] = lambda: None
    micro_batches: int = 1
    tokens: int = 0
    room: int = 0
    """Bytes that tensors may take on the device."""
    training_peak: int = 0
    """Bytes of tensors in an earlier step, at most, outside of rollouts; 0 before there was one."""
    kept: list[Tensor] = field(default_factory=list)
    """Memory of keys and values that stays until the next rollout."""
    notes: list[str] = field(default_factory=list)

    @property
    def all_trained(self) -> list[Model]:
        """All trained models: the model itself and, for example, a critic."""
        return [self.model, *self.companions.values()]

    @property
    def training(self) -> Training:
        """The run as its checkpoints need it; it writes no metrics and has no rows."""
        absent: Any = None
        return Training(
            evaluation=Evaluation(model=self.model, objective=absent),
            stream=absent,
            source_names=(),
            observers=(),
            identity={},
            companions=self.companions,
        )

    def shortened(self, mini_batch: MiniBatch) -> MiniBatch:
        """Return a mini-batch with its two largest micro-batches."""
        batches = sorted(mini_batch.micro_batches, key=lambda batch: -batch.tokens.numel())
        self.micro_batches = len(batches)
        self.tokens = max(self.tokens, batches[0].tokens.numel())
        return replace(mini_batch, micro_batches=tuple(batches[:2]))


def planned_step(run: Run, ledger: Ledger, without_numbers: WithoutNumbers) -> PlannedStep:
    """Build what a run's step needs.

    Raises:
        UserError: The run could not start.
    """
    config = run.config
    origin = blueprint(config.model, run.base, seed=config.seed, scorer=config.scores)
    build = partial(place_shapes, without_numbers)
    model = build(run, origin)
    follow_model(ledger, model.module)
    with without_numbers():
        give_optimizer(model, config.steps)
    step = PlannedStep(run, ledger, model, build)
    match config:
        case GRPOConfig():
            from holdfast.features.plan.execution.policy_steps import policy_step  # it needs what stands here

            step.make = policy_step(step, config)
        case DistillConfig():
            step.make = _distillation(step, config)
        case DPOConfig():
            step.make = _preferences(step, config)
        case SFTConfig():
            step.make = _supervised(step, config)
    return step


def _supervised(step: PlannedStep, config: SFTConfig) -> Callable[[], object]:
    model, objective = step.model, supervised_objective(config.objective, step.run)
    images = image_side_of(config, model.blueprint)
    mini_batch = step.shortened(_rows(step, layout_of(model, images), images))

    def make() -> object:
        if config.neftune_alpha is None:
            return train_step(model, mini_batch, objective).read()
        with model.module.noisy(config.neftune_alpha, seed=config.seed, step=model.state.step):
            return train_step(model, mini_batch, objective).read()

    return make


def _preferences(step: PlannedStep, config: DPOConfig) -> Callable[[], object]:
    model, section = step.model, config.preference
    images = image_side_of(config, model.blueprint)
    layout = pair_layout(config, model, images)
    objective = preference_objective(section, step.run)
    reference = None
    if section.needs_reference and not config.reference.precompute:
        reference = reference_of(step, config.reference)
    evaluation = PreferenceEvaluation(
        model=model,
        objective=objective,
        sets=(),
        takes_pairs=section.takes_pairs,
        layout=layout,
        reference=reference,
    )
    mini_batch = step.shortened(_answers(step, layout, pairs=section.takes_pairs))
    if section.needs_reference and reference is None:
        batches = [
            replace(batch, per_token={**batch.per_token, "reference_logprobs": batch.weights})
            for batch in mini_batch.micro_batches
        ]
        mini_batch = replace(mini_batch, micro_batches=tuple(batches))

    single_answers = [] if section.takes_pairs else mini_batch.micro_batches
    if not single_answers:

        def make() -> object:
            return train_step(model, compared_with_reference(evaluation, mini_batch), objective).read()

        return make

    def judge() -> object:
        """Do what `compared_with_reference` does of single answers, whose sequences need not be laid anew here."""
        compared = mini_batch
        if reference is not None:
            with step.run.phase("reference"):
                compared = scored(model, reference, mini_batch, "reference_logprobs")
        with step.run.phase("divergence"):
            reference_batch = (
                mini_batch if reference is None else scored(model, reference, mini_batch, "reference_logprobs")
            )
            kl = divergence(model, reference_batch.micro_batches)
        return train_step(model, with_divergence(compared, kl), objective).read()

    return judge


def _distillation(step: PlannedStep, config: DistillConfig) -> Callable[[], object]:
    student = step.model
    teachers: list[Teacher] = []
    for _, section in config.teachers_in_memory():
        twin = teacher_configuration(config, section, student)
        model, notes = shape_of(twin.model, step.run.base)
        step.notes += [f"teacher: {note}" for note in notes]
        origin = blueprint(model, step.run.base, seed=config.seed, tokenizer=student.blueprint.tokenizer)
        run = replace(step.run, config=twin.model_copy(update={"model": model}))
        teacher = frozen(step, run, origin).module
        teachers.append(Teacher(teacher, teacher, "", section.weight))
    objective: Objective = objective_of_rows(config, teachers)
    student.temperature = config.distill.temperature
    mini_batch = step.shortened(_rows(step, layout_of(student, "a distillation reads text alone"), ""))
    decode: Callable[[], object] = dict  # what is called where nothing is sampled
    if config.rollout is not None:
        from holdfast.features.plan.execution.policy_steps import sampling_of

        room = config.data.max_length - config.rollout.max_new_tokens
        decode = sampling_of(step, config.rollout, room, rows=config.data.batch_size, group=config.rollout.group_size)

    def make() -> object:
        decode()
        compared = mini_batch
        if getattr(objective, "needs_teacher_logprobs", False) and teachers:
            with step.run.phase("teacher"):
                compared = scored(student, teachers[0].model, mini_batch, "teacher_logprobs")
        return train_step(student, compared, objective).read()

    return make


def frozen(step: PlannedStep, run: Run, origin: Blueprint) -> Model:
    """Return a model that is not trained, sharded like the run's own."""
    model = step.build(run, origin, trained=False)
    model.module.eval()
    follow_model(step.ledger, model.module, REFERENCE)
    return model


def reference_of(step: PlannedStep, section: ReferenceConfig | ServerReferenceConfig) -> Any:
    """Return the reference policy; None of one behind a server, which takes nothing here."""
    if isinstance(section, ServerReferenceConfig):
        step.notes.append("reference: behind a server, which is not part of this plan")
        return None
    kind, _ = decide_place(step.model, section)
    if kind == "adapter_off":
        return AdapterOff(step.model.module)
    reference = frozen(step, *reference_twin(step.model, Live(), kind)).module
    reference.padded = step.model.module.padded
    step.model.following = following_of(reference, section)
    return reference


def _rows(step: PlannedStep, layout: Layout, images: ImageSide | str) -> MiniBatch:
    """Return an update of rows that are all as long as a row may be."""
    config = step.run.config.data
    example = sequence(config.max_length)
    if isinstance(images, ImageSide):
        example, note = _with_image(example, images, config)
        step.notes.append(note)
    return assembled_batch(step, [[example]] * config.batch_size, layout)


def _with_image(example: Example, images: ImageSide, config: TextConfig) -> tuple[Example, str]:
    """Return a row with the largest image that the run allows and the row has room for, and words on it."""
    from PIL import Image

    side = _SIDE if config.max_pixels is None else max(32, int(config.max_pixels**0.5))
    length = example.tokens.size
    prepared = images.prepare(Image.new("RGB", (side, side)), "a planned image")
    while len(prepared.tokens) > length - 2 and side > 32:
        side //= 2
        prepared = images.prepare(Image.new("RGB", (side, side)), "a planned image")
    text = length - len(prepared.tokens) - 1
    if text < 1:
        return example, "images: none is planned, since the smallest one has no room in data.max_length"
    stretch = Stretch([0, images.image_id, *[0] * text], [False, False, *[True] * text])
    laid = images.expanded(stretch, [prepared])
    with_image = example_of(laid, 0, "", images.positions(laid))
    return replace(with_image, sample_id=0), f"images: one of {side}x{side} pixels in every row"


def _answers(step: PlannedStep, layout: Layout, *, pairs: bool) -> MiniBatch:
    """Return an update of pairs, or of single answers; half of each sequence is its prompt."""
    config = step.run.config.data
    head = config.max_length // 2
    columns = {name: np.zeros(config.max_length, dtype) for name, dtype in layout.columns.items()}
    answer = sequence(config.max_length, head, columns)
    per_draw = 2 if pairs else 1
    return assembled_batch(step, [[answer] * per_draw] * config.batch_size, layout, head=head if pairs else 0)


def sequence(length: int, prompt: int = 1, columns: dict[str, Any] | None = None) -> Example:
    """Return a sequence whose tokens behind the prompt are trained."""
    return Example(0, 0, np.zeros(length, np.int64), np.arange(length) >= max(1, prompt), per_token=dict(columns or {}))


def assembled_batch(
    step: PlannedStep, draws: Sequence[Sequence[Example]], layout: Layout, *, head: int = 0
) -> MiniBatch:
    """Return this rank's micro-batches of an update whose sequences are all at hand."""
    ranks, candidates, examples = step.run.ranks, [], {}
    for draw, sequences in enumerate(draws):
        for position, example in enumerate(sequences):
            examples[draw, position] = replace(example, sample_id=draw * len(sequences) + position, prompt_id=draw)
            inputs = bool(example.model_inputs)
            candidates.append(
                SequenceInfo(draw, position, example.tokens.size, example.trained_tokens, ranks.rank, head, inputs)
            )
    return assemble(Candidates(examples, candidates), ranks, step.run.config.data, layout)
