"""The tree of `holdfast distill`: a student, its teachers, and how far apart their predictions are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from holdfast.config.base import (
    ByKind,
    Fraction,
    Mistake,
    NonNegative,
    OneOrSeveral,
    Positive,
    PositiveInt,
    PublicStr,
    Section,
    Seed,
)
from holdfast.config.sections.rollout import EngineConfig
from holdfast.config.sections.server import ServerConfig
from holdfast.config.verbs.training import TrainingConfig


class TeacherConfig(Section):
    """The model that is learned from: frozen, and never saved with the run."""

    path: PublicStr = Field(min_length=1)
    """A local directory with safetensors files, or a hub name. Its size is its own; its tokenizer is the student's."""
    revision: PublicStr | None = None
    """Branch, tag or commit on the hub."""
    tokenizer: PublicStr | None = None
    """Directory or hub name of its tokenizer, which must have the student's tokens; default: that of `path`."""
    kind: Literal["sharded", "offloaded"] = "sharded"
    """`sharded`: like the student; `offloaded`: in host memory, gathered unit by unit."""
    weight: Positive = 1.0
    """Factor of the divergence from it: the loss is the sum over teachers. Weights need not sum to 1."""
    dtype: Literal["same", "float32", "bfloat16"] = "same"
    """Storage of its parameters; `same` follows `model.dtype`."""
    trust_remote_code: bool = False
    """Run Python code that comes with its directory. Off: such a teacher is refused by name."""


class ServerTeacherConfig(ServerConfig):
    """A model behind an OpenAI-compatible endpoint, such as vLLM's, that tells the log-probabilities of given tokens:
    all that `distill.loss: sampled_reverse_kl` asks for.

    Before step 1 its tokenizer is compared with the student's, and it scores a text.
    """


TeacherSection = Annotated[TeacherConfig | ServerTeacherConfig, ByKind("sharded")]


class JSDConfig(Section):
    """Generalised Jensen-Shannon divergence: beta KL(teacher, m) + (1 - beta) KL(student, m), with the mixture
    m = beta teacher + (1 - beta) student (GKD, arXiv:2306.13649, section 2)."""

    kind: Literal["jsd"] = "jsd"
    beta: Fraction = 0.5
    """0 is defined as KL(teacher, student) and 1 as KL(student, teacher): the limits of the divergence over beta, and
    over 1 - beta. The divergence itself is 0 at both ends."""


class ForwardKLConfig(Section):
    """KL(teacher, student): the student covers all that the teacher says (Hinton et al., arXiv:1503.02531)."""

    kind: Literal["forward_kl"] = "forward_kl"


class ReverseKLConfig(Section):
    """KL(student, teacher): the student keeps to what the teacher says (MiniLLM, arXiv:2306.08543)."""

    kind: Literal["reverse_kl"] = "reverse_kl"


class SampledReverseKLConfig(Section):
    """KL(student, teacher) estimated at the tokens that the student sampled: log student - log teacher as the cost of a
    token in a policy gradient. Cheaper by the teacher's and the student's other logits, and noisier."""

    kind: Literal["sampled_reverse_kl"] = "sampled_reverse_kl"


DistillLoss = Annotated[JSDConfig | ForwardKLConfig | ReverseKLConfig | SampledReverseKLConfig, ByKind("jsd")]


class DistillLossConfig(Section):
    """What is made of both predictions of a token."""

    loss: DistillLoss = JSDConfig()
    """The divergence between teacher and student, per trained token."""
    temperature: Positive = 1.0
    """Divides the logits of both in the divergence; it is not multiplied by its square."""
    sft_weight: NonNegative = 0.0
    """Weight of the token's negative log-likelihood (at temperature 1) beside the divergence, on tokens of rows."""


class DistillRolloutConfig(EngineConfig):
    """On-policy distillation: the student completes the prompts of rows, and is compared on what it wrote."""

    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of steps, drawn by the run's seed, that are made of the student's completions; the others are made of the
    rows' answers (lambda in GKD, algorithm 1). At 1 rows need no answers."""
    group_size: PositiveInt = 1
    """Completions per prompt."""
    seed: Seed | None = None
    """Seed of the sampling; default: the run's seed."""
    show_every: PositiveInt = 10
    """Steps between those whose completions are written to samples.jsonl."""


class DistillConfig(TrainingConfig):
    """Distillation of a teacher into a student, on rows, on the student's own completions, or on both."""

    verb = "distill"
    samples = True
    teacher: Annotated[list[TeacherSection], Field(min_length=1, examples=[{"path": "Qwen/Qwen3-8B"}]), OneOrSeveral()]
    """One teacher or several, which all have the student's tokens; the loss sums the weighted divergences from each."""
    distill: DistillLossConfig = DistillLossConfig()
    rollout: DistillRolloutConfig | None = None
    """Leave it out to train on the rows' answers alone."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what sections ask of each other."""
        yield from super().mistakes()
        if self.distill.loss.kind == "sampled_reverse_kl":
            yield from self._of_samples()
        if self.rollout is not None:
            yield from self._of_rollouts(self.rollout)
        if self.has_server:
            yield from self._of_servers()
        yield from self._of_several()

    @property
    def has_server(self) -> bool:
        """Whether a teacher is behind a server."""
        return any(isinstance(each, ServerTeacherConfig) for each in self.teacher)

    def teachers_in_memory(self) -> list[tuple[str, TeacherConfig]]:
        """Return the sections of teachers that the ranks hold, each with its key."""
        several = len(self.teacher) > 1
        return [
            (f"teacher.{number}" if several else "teacher", section)
            for number, section in enumerate(self.teacher)
            if isinstance(section, TeacherConfig)
        ]

    def _of_several(self) -> Iterator[Mistake]:
        if self.distill.loss.kind == "sampled_reverse_kl":
            weighed = any(section.weight != 1.0 for _, section in self.teachers_in_memory())
            if len(self.teacher) > 1 or weighed:
                yield (
                    "teacher",
                    "sampled_reverse_kl compares with one teacher of weight 1; use distill.loss: reverse_kl and "
                    "teachers in memory, or leave the others out",
                )

    def _of_servers(self) -> Iterator[Mistake]:
        for key, metric in self.metrics_of_best().items():
            if metric.startswith("eval/") and metric.endswith(("/divergence", "/agreement")):
                yield (
                    key,
                    f"{metric} takes whole distributions, which a teacher behind a server does not tell; use "
                    "eval/SET/nll",
                )
        kind, temperature = self.distill.loss.kind, self.distill.temperature
        if kind != "sampled_reverse_kl":
            yield (
                "teacher.kind",
                f"a server tells log-probabilities of given tokens, and distill.loss: {kind} takes the teacher's whole "
                "distribution; use distill.loss: sampled_reverse_kl with a rollout section, or a teacher in memory "
                "(kind: sharded or offloaded)",
            )
        sampled = temperature if self.rollout is None else self.rollout.temperature
        for key, value in (("distill.temperature", temperature), ("rollout.temperature", sampled)):
            if value != 1:
                yield (
                    "teacher.kind",
                    f"a server tells log-probabilities at temperature 1, and {key}={value:g}; use a teacher in memory "
                    "(kind: sharded or offloaded), or temperature: 1.0 for both",
                )
                return

    def _of_samples(self) -> Iterator[Mistake]:
        key, kind, rollout = "distill.loss", self.distill.loss.kind, self.rollout
        if rollout is None or rollout.share < 1:
            state = "no rollout section" if rollout is None else f"rollout.share={rollout.share:g}"
            fix = "set rollout: {share: 1}" if self.has_server else "use reverse_kl"
            yield key, f"{kind} is an estimate on tokens that the student sampled, and there is {state}; {fix}"
            return
        if rollout.temperature != self.distill.temperature:
            yield (
                "distill.temperature",
                f"{self.distill.temperature:g}, but tokens are drawn at rollout.temperature={rollout.temperature:g}, "
                f"which biases {kind}; set both alike, or use reverse_kl",
            )
        if rollout.biases():
            yield (
                f"rollout.{rollout.biases()[0]}",
                f"{', '.join(rollout.biases())} draws from another distribution than the student's, which biases "
                f"{kind}; leave it out, or use reverse_kl",
            )

    def _of_rollouts(self, rollout: DistillRolloutConfig) -> Iterator[Mistake]:
        data = self.data
        if rollout.max_new_tokens >= data.max_length:
            yield (
                "rollout.max_new_tokens",
                f"{rollout.max_new_tokens} leaves no room for a prompt in data.max_length={data.max_length}; raise "
                f"data.max_length to {rollout.max_new_tokens} and the longest prompt, or lower it",
            )
        if data.packing == "wrapped":
            yield "data.packing", "wrapped cuts documents anywhere, and rollouts continue prompts; use best_fit"
        if data.overlong == "split":
            yield "data.overlong", "split cuts answers, and rollouts continue prompts; use truncate or drop"
        if data.train_on_prompt:
            yield "data.train_on_prompt", "a rollout continues prompts, and trains what follows them; leave it off"
        if rollout.share == 1 and self.distill.sft_weight > 0:
            yield (
                "distill.sft_weight",
                f"{self.distill.sft_weight:g}, but at rollout.share=1 no answer of a row is trained; lower "
                "rollout.share or leave sft_weight out",
            )
