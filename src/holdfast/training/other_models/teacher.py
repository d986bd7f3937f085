"""The teachers of a distillation: frozen models with the student's tokenizer.

Each is built and sharded like the student, or served by an endpoint (features/served_models).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast import registry
from holdfast.config.sections.model import ModelConfig
from holdfast.config.verbs.distill import DistillConfig, ServerTeacherConfig, TeacherConfig
from holdfast.errors import ConfigError, ModelError
from holdfast.models.files.origin import load_tokenizer
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.setup.model import Blueprint, blueprint
from holdfast.training.fingerprints import fingerprint_once, weights_fingerprint
from holdfast.training.other_models.reference import ServedModel, build_frozen
from holdfast.training.run import Model, Run
from holdfast.training.setup.model import check_positions


@dataclass(frozen=True)
class Teacher:
    """A teacher that is ready to score batches."""

    model: PolicyModel | ServedModel
    of_sets: PolicyModel | ServedModel
    """The teacher for evaluation sets, whose rows repeat: a server's answers for them are cached."""
    mark: str
    """Identifies the teacher's weights: the hash of the files, or the name of the served model."""
    weight: float = 1.0
    """Factor of the divergence from it."""


def marks(teachers: Sequence[Teacher]) -> str:
    """Return what identifies the weights of all teachers, and their factors in the loss."""
    return ", ".join(each.mark if each.weight == 1.0 else f"{each.weight!r} {each.mark}" for each in teachers)


def build_teachers(student: Model) -> tuple[Teacher, ...]:
    """Return the teachers of a freshly built student.

    Raises:
        ModelError: One has other tokens than the student, its files do not fit, or it is not where its plan puts it.
        ConfigError: It cannot read the student's batches, or its server cannot be used.
    """
    config = student.run.config
    assert isinstance(config, DistillConfig)
    return tuple(_built(student, config, section) for section in config.teacher)


def _built(student: Model, config: DistillConfig, section: TeacherConfig | ServerTeacherConfig) -> Teacher:
    match section:
        case ServerTeacherConfig():
            served: ServedModel = registry.load(registry.SERVED_TEACHER)(student, section)
            return Teacher(served, served.remembering(), f"server {served.name}")
        case TeacherConfig():
            return _in_memory(student, config, section)


def _in_memory(student: Model, config: DistillConfig, section: TeacherConfig) -> Teacher:
    base, ranks = student.run.base, student.run.ranks
    twin = teacher_configuration(config, section, student)
    tokenizer = ranks.first_rank_first(lambda: _tokenizer(section, twin.model, student.run))
    ranks.on_all_ranks(lambda: check_tokens(student.blueprint.tokenizer, tokenizer, section.path))
    origin = ranks.first_rank_first(lambda: blueprint(twin.model, base, seed=config.seed, tokenizer=tokenizer))
    note = ranks.on_all_ranks(lambda: _checked(twin, origin, student))
    teacher = build_frozen(replace(student.run, config=twin), origin, f"teacher {section.path}")
    if note and student.run.world.is_first:
        print(note, flush=True)
    fingerprint_once(origin.directory, ranks)
    return Teacher(teacher.module, teacher.module, weights_fingerprint(origin, config.seed), section.weight)


def teacher_configuration(config: DistillConfig, section: TeacherConfig, student: Model) -> DistillConfig:
    """Return the run's configuration as the teacher's: its files, in the student's precision, place and layout."""
    student_model = config.model
    model = ModelConfig(
        path=section.path,
        revision=section.revision,
        hub=student_model.hub,
        tokenizer=section.tokenizer,
        attention=student_model.attention,
        trust_remote_code=section.trust_remote_code,
        dtype=student_model.dtype,
        frozen_dtype=section.dtype,
        head=student_model.head,
    )
    offload = "parameters" in config.parallel.offloads or section.kind == "offloaded"
    changed: dict[str, Any] = {
        "model": model,
        "parallel": config.parallel.of_frozen(in_host_memory=offload),
    }
    if student.module.padded:
        changed["data"] = config.data.model_copy(update={"packing": "none"})
    return config.model_copy(update=changed)


def _tokenizer(section: TeacherConfig, model: ModelConfig, run: Run) -> Any:
    try:
        return load_tokenizer(model, run.base)
    except ModelError as error:
        raise ModelError(
            f"teacher.path {section.path}: {error} Of the teacher, the key is teacher.tokenizer: its tokens "
            "must be known to be the student's."
        ) from error


def check_tokens(student: Any, teacher: Any, name: str) -> None:
    """Refuse a teacher that reads other tokens than the student writes.

    Args:
        student: Its tokenizer.
        teacher: Likewise.
        name: What the message calls the teacher.

    Raises:
        ModelError: With the tokens that differ.
    """
    student_ids, teacher_ids = student.get_vocab(), teacher.get_vocab()
    if student_ids == teacher_ids:
        return
    differ = sorted(
        (
            token
            for token in student_ids.keys() | teacher_ids.keys()
            if student_ids.get(token) != teacher_ids.get(token)
        ),
        key=lambda token: (min(ids.get(token, len(ids)) for ids in (student_ids, teacher_ids)), token),
    )
    examples = "; ".join(
        f"{token!r} is {_token_name(student_ids, token)} here and {_token_name(teacher_ids, token)} there"
        for token in differ[:3]
    )
    raise ModelError(
        f"The teacher {name} has other tokens than the student ({len(teacher_ids)} against {len(student_ids)}; "
        f"{len(differ)} differ: {examples}), so its predictions speak of other texts. "
        "Use a teacher and a student of one tokenizer."
    )


def _token_name(ids: dict[str, int], token: str) -> str:
    return f"token {ids[token]}" if token in ids else "no token"


def _checked(twin: DistillConfig, origin: Blueprint, student: Model) -> str:
    """Return what a user should know of the teacher; "" if there is nothing.

    Raises:
        ConfigError: It reads one sequence per row, and the student reads packs; or sequences are too long for it.
        ModelError: The student may write a token that the teacher's head has no row for.
    """
    if not origin.packed and not student.module.padded:
        why = origin.family.why_not_packed or "model.attention says so"
        raise ConfigError(
            f"The teacher {twin.model.path} ({origin.family.name}) reads one sequence per row, since {why}, and the "
            "student reads several. Set data.packing: none."
        )
    rows = [int(model.skeleton.config.get_text_config().vocab_size) for model in (student.blueprint, origin)]
    notes = [check_positions(twin, origin, reads_only=True)]
    if twin.rollout is not None and rows[0] > rows[1]:
        raise ModelError(
            f"The student's head has {rows[0]} rows and that of the teacher {twin.model.path} {rows[1]}: the student "
            "may write a token that the teacher says nothing of. Leave out the rollout section, to compare on rows, "
            "or cut the student's head and embeddings to the teacher's size before the run."
        )
    if rows[0] != rows[1]:
        notes.append(
            f"note: the student's head has {rows[0]} rows and the teacher's {rows[1]}; both are compared over the "
            f"first {min(rows)}, which hold all tokens"
        )
    return "\n".join(note for note in notes if note)
