"""The teacher of a distillation behind an endpoint: another model than the student, with the student's tokens."""

from __future__ import annotations

from holdfast.config.verbs.distill import ServerTeacherConfig
from holdfast.errors import ModelError
from holdfast.training.run import Evaluation
from holdfast.training.scorers.server import Role, ScoringServer, meet

_ROLE = Role("teacher", "teacher", "student")


def connect(student: Evaluation, section: ServerTeacherConfig) -> ScoringServer:
    """Return the teacher behind an endpoint, which has scored a text; all ranks call this together.

    Raises:
        ConfigError: It cannot be reached, does not serve what is asked for, or does not give every token of the text a
            log-probability; the same on all ranks.
        ModelError: Its tokenizer or its vocabulary is not the student's, or it cannot be known to be.
    """
    scoring_server, compared = meet(student, section, _ROLE, samples=True)
    probe, model = scoring_server.probe, scoring_server.server.model
    # A reference would be seen to speak of other tokens by its numbers. Of another model no numbers are expected.
    if not all(student.exchange.gather(compared)):
        raise ModelError(
            f"teacher: {model} at {section.url} does not say which tokens it makes of a text, so they cannot be known "
            "to be the student's. Use a server that names tokens by their ids, as vLLM does "
            "(teacher.answers: prompt_logprobs), or a teacher in memory (teacher.kind: sharded)."
        )
    own = probe.told_by(student)
    if student.world.is_first:
        print(
            f"teacher: {model} at {section.url}, with the student's tokenizer; a token of one text takes it "
            f"{-probe.logprobs.mean():.3g} nats, and the student {-own.mean():.3g}. Evaluation sets tell the "
            "likelihoods of both, and no divergence.",
            flush=True,
        )
    return scoring_server
