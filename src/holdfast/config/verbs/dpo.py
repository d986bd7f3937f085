"""The trees of `holdfast dpo` and `holdfast reward`: pairs of answers, the losses that compare them, the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from holdfast.config.base import ByKind, Mistake, NonNegative, OneOrSeveral
from holdfast.config.sections.data import DataConfig, PairAverage
from holdfast.config.sections.preference import AnyLoss, PreferenceConfig
from holdfast.config.sections.reference import PairReference, PairReferenceConfig, sync_of
from holdfast.config.verbs.training import TrainingConfig


class PairDataConfig(DataConfig):
    """Pairs of answers; `batch_size` counts pairs.

    A row has `prompt`, `chosen` and `rejected`, texts or messages; or `chosen` and `rejected` alone, which begin alike;
    or, for kto, `prompt`, `completion` and `label`.
    """

    overlong: Literal["truncate", "drop", "refuse"] = "truncate"
    """What happens to a pair with a sequence above max_length; each case is counted. Where the prompt alone fills it,
    `truncate` drops the pair."""
    packing: Literal["best_fit", "none"] = "best_fit"
    """`best_fit` lays pairs side by side; `none` pads, one sequence per row."""
    average: PairAverage = "pair_mean"  # type: ignore[assignment]  # an average that no other verb has
    """The loss is the mean over pairs, whatever their lengths."""
    unusable: Literal["refuse", "drop"] = "refuse"
    """What happens to a row whose answers are the same, or of which one is empty; dropped ones are counted."""
    shared_prompt: Literal["auto", "on", "off"] = "auto"
    """Forward the prompt of a pair once; `auto`: where the model's attention allows it. Speed only."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what supervised rows have and pairs have not."""
        yield from super().mistakes()
        if self.train_on_prompt:
            yield "train_on_prompt", "losses compare answers, and a prompt is the same in both; leave it off"
        for index, source in enumerate(self.all_sources()):
            if source.rows != "auto":
                key = f"sources.{index}.rows" if self.sources else "rows"
                yield key, f"{source.rows} is a shape of supervised rows; leave it out, the columns tell"


class DPOConfig(TrainingConfig):
    """Training on preferences: DPO and its kin."""

    verb = "dpo"
    samples = False
    data: PairDataConfig = Field(examples=[{"path": "pairs.jsonl"}])
    preference: PreferenceConfig = Field(examples=[{"loss": "dpo"}])
    reference: PairReference = PairReferenceConfig()

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what sections ask of each other."""
        yield from super().mistakes()
        yield from self._of_reference()
        yield from self._of_batches()
        for name, source in self.evaluation.sets.items():
            if source.rows != "auto":
                key = f"evaluation.sets.{name}.rows"
                yield key, f"{source.rows} is a shape of supervised rows; leave it out, the columns tell"

    def _of_reference(self) -> Iterator[Mistake]:
        losses, reference = ", ".join(self.preference.kinds), self.reference
        if self.preference.needs_reference:
            if reference.kind == "none":
                yield "reference.kind", f"none, but preference.loss: {losses} compares with a reference; use auto"
            lora = self.model.lora
            if reference.kind == "adapter_off" and (lora is None or lora.train or lora.path is not None):
                why = "model.lora is not set" if lora is None else "more is trained, or adapters start trained"
                yield "reference.kind", f"adapter_off is not the model at start, since {why}; use sharded"
            if reference.precompute and not self.preference.takes_pairs:
                yield "reference.precompute", "kto compares with answers of other rows of a batch; leave it out"
            return
        unused_keys = {"kind": reference.kind not in {"auto", "none"}, "precompute": reference.precompute}
        unused_keys["sync"] = sync_of(reference) is not None
        for key, is_asked in unused_keys.items():
            if is_asked:
                yield f"reference.{key}", f"preference.loss: {losses} compares with no reference; leave {key} out"

    def _of_batches(self) -> Iterator[Mistake]:
        data = self.data
        if not self.preference.takes_pairs:
            if min([data.batch_size, *data.batch_size_schedule.values()]) < 2:
                yield "data.batch_size", "kto measures the KL divergence on answers of other rows; use at least 2"
        elif 2 * data.max_length > data.tokens_per_micro_batch * self.parallel.context >= data.max_length:
            yield (
                "data.max_length",
                f"a pair of two sequences of {data.max_length} tokens does not fit tokens_per_micro_batch="
                f"{data.tokens_per_micro_batch}, and a pair is never split; raise tokens_per_micro_batch to "
                f"{-(-2 * data.max_length // self.parallel.context)} or lower max_length",
            )


class BradleyTerryConfig(AnyLoss):
    """-log sigmoid(score_chosen - score_rejected) (Bradley & Terry, 1952; Ouyang et al., arXiv:2203.02155, eq. 1)."""

    needs_reference: ClassVar[bool] = False
    kind: Literal["bradley_terry"] = "bradley_terry"
    center: NonNegative = 0.0
    """Weight of (score_chosen + score_rejected)^2, which keeps scores near 0; pairs alone leave their level open
    (arXiv:2312.09244, appendix A)."""


ScorerLoss = Annotated[BradleyTerryConfig, ByKind("bradley_terry")]


class ScorerPreferenceConfig(PreferenceConfig):
    """What is made of a pair of scores."""

    loss: Annotated[list[ScorerLoss], Field(min_length=1, max_length=1, examples=["bradley_terry"]), OneOrSeveral()]  # type: ignore[assignment]
    """`bradley_terry`; it tells a file of this verb from one of `holdfast dpo`."""


class ScorerConfig(DPOConfig):
    """Training of a reward model: one score for a prompt and its answer."""

    verb = "reward"
    scores = True
    preference: ScorerPreferenceConfig = Field(examples=[{"loss": "bradley_terry"}])

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what policies have and reward models have not."""
        yield from super().mistakes()
        if self.preference.sft:
            yield "preference.sft", "a reward model has no likelihood of an answer; leave it out"
        if self.evaluation.completions is not None:
            yield "evaluation.completions", "a reward model scores answers and writes none; leave it out"
