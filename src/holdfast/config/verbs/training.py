"""One root per verb, and the rules that join sections. Rules never assign."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from holdfast.config.base import Count, FunctionPath, Mistake, Positive, PositiveInt, PublicStr, Section, Seed
from holdfast.config.sections.algorithm import NLLConfig, SupervisedObjective
from holdfast.config.sections.checkpoint import CheckpointConfig
from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.launch import LaunchConfig
from holdfast.config.sections.measured import PatienceConfig
from holdfast.config.sections.metrics import EvaluationConfig, MetricsConfig, ProfiledSteps
from holdfast.config.sections.model import BatchRouterLoss, ModelConfig
from holdfast.config.sections.optim import AdamWConfig, OptimConfig, PlateauSchedule
from holdfast.config.sections.parallel import ParallelConfig


def _check_run_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(
            f"{name!r} is to name a directory; use letters, digits, '.', '_' and '-', and begin with a letter or digit"
        )
    return name


class RunConfig(Section):
    """Where a run lives: everything it writes stands under dir/name."""

    dir: PublicStr = "runs"
    """Folder of runs; relative to where the command is started."""
    name: Annotated[PublicStr, AfterValidator(_check_run_name)] = "run"
    """Default on the command line: the YAML's file name."""


class _Root(Section):
    run: RunConfig = RunConfig()
    seed: Seed = 0
    """Seed of everything random: initial weights, order, dropout."""
    steps: PositiveInt | None = None
    """Optimizer updates; of a policy, rollouts with their updates."""
    epochs: Positive | None = None
    """Passes over the data, instead of or together with steps: whichever ends first."""
    min_steps: Count = 0
    """Updates before an observer, stop_when or max_minutes may stop the run."""
    stop_when: PatienceConfig | None = None
    """End the run when a metric has not improved for so many measurements, evaluations of eval/SET/METRIC. It ends as
    at its last step: saved, exported, done."""
    max_minutes: Positive | None = None
    """Wall-clock limit of this start of the run, loading and checks included."""
    limit_batches: PositiveInt | None = None
    """Batches per epoch, for short runs over large data."""
    overfit_batches: PositiveInt | None = None
    """Use only the first batches, again and again."""
    dry_run: bool = False
    """Two steps of everything: training, evaluation, export; nothing is kept."""
    determinism: bool = False
    """torch.use_deterministic_algorithms: an operation without a deterministic form raises."""
    observers: list[FunctionPath] = Field(default_factory=list)
    """Functions event -> None | 'stop' | 'save' | 'evaluate', called on rank 0 after every step."""
    parallel: ParallelConfig = ParallelConfig()
    optim: OptimConfig = AdamWConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    profile: ProfiledSteps | None = None
    """The first and the last step, as in [10, 13], of which torch's profiler writes a trace of every rank in profile/,
    on CUDA with a snapshot of memory."""
    evaluation: EvaluationConfig = EvaluationConfig()
    launch: LaunchConfig = LaunchConfig()

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what leaves the run's length undecided, or decides it twice."""
        if self.steps is None and self.epochs is None and not self.dry_run:
            yield from self._without_last_step()
        if self.steps is not None and self.min_steps > self.steps:
            yield "min_steps", f"{self.min_steps} is above steps={self.steps}; lower min_steps or raise steps"
        if self.overfit_batches is not None and self.limit_batches is not None:
            yield "limit_batches", "overfit_batches limits the batches already; keep one of the two"

    def _without_last_step(self) -> Iterator[Mistake]:
        schedule = self.optim.schedule
        if self.max_minutes is None:
            yield "steps", "the run has no end; set steps, epochs or max_minutes"
        elif schedule.needs_last_step:
            wanting = schedule.kind if schedule.follows_last_step else "warmup_ratio"
            yield (
                "optim.schedule",
                f"{wanting} needs to know the last step; set steps or epochs, or use optim.schedule: constant",
            )


_SHARES_ROWS = frozenset({"sft", "dpo", "reward", "grpo", "distill"})
"""Verbs whose ranks may share packed rows."""


class TrainingConfig(_Root):
    """What every verb that trains has."""

    verb: ClassVar[str]
    """What the command line calls it."""
    samples: ClassVar[bool]
    """Whether what is trained may write texts itself, with every token that its head has a row for."""
    scores: ClassVar[bool] = False
    """Whether what is trained scores whole texts; else it predicts tokens."""
    values: ClassVar[bool] = False
    """Whether it scores what precedes each token, as a critic does."""
    model: ModelConfig = Field(examples=[{"path": "Qwen/Qwen3-0.6B"}])
    data: DataConfig = Field(examples=[{"path": "rows.jsonl"}])

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what sections ask of each other."""
        yield from super().mistakes()
        yield from self.storage_mistakes()
        yield from self._metrics()
        yield from self._measured_meanwhile()
        yield from self._routers()
        yield from self._compiled_blocks()
        yield from self._shared_rows()
        if not self.evaluation.sets and self.data.validation_split == 0:
            for name in ("every_steps", "every_epochs", "every_minutes", "completions"):
                if getattr(self.evaluation, name) is not None:
                    fix = "set evaluation.sets or data.validation_split"
                    yield f"evaluation.{name}", f"there is nothing to evaluate on; {fix}"

    def _shared_rows(self) -> Iterator[Mistake]:
        """Yield rows that fit no rank or context group, and what ranks cannot share rows with."""
        data, context = self.data, self.parallel.context
        room = context * data.tokens_per_micro_batch
        if data.max_length > room:
            product = f"parallel.context={context} x " if context > 1 else ""
            more = -(-data.max_length // data.tokens_per_micro_batch)
            yield (
                "data.max_length",
                f"{data.max_length} does not fit {product}tokens_per_micro_batch={data.tokens_per_micro_batch}; raise "
                f"tokens_per_micro_batch to at least {-(-data.max_length // context)}, lower max_length, or let more "
                f"ranks share a row (parallel.context: {more})",
            )
        if context == 1:
            return
        if self.verb not in _SHARES_ROWS:
            yield "parallel.context", f"{context}, but {self.verb} does not split rows over ranks yet; leave it out"
        if data.packing == "none" or self.model.attention in {"sdpa", "eager"}:
            key = "data.packing: none" if data.packing == "none" else f"model.attention: {self.model.attention}"
            yield "parallel.context", f"{context} splits packed rows, and {key} packs none; leave one of the two out"

    def metrics_of_best(self) -> dict[str, str]:
        """Return the metrics that checkpoints and exports are chosen by, each by the key that names it."""
        section = self.checkpoint
        metrics = {
            f"checkpoint.keep.best.{number}.metric": best.metric for number, best in enumerate(section.keep.best)
        }
        if section.export_best is not None:
            metrics["checkpoint.export_best.metric"] = section.export_best.metric
        return metrics

    def _metrics_that_decide(self) -> dict[str, str]:
        """Return the metrics that a run waits for while it goes on, each by the key that names it."""
        metrics = {} if self.stop_when is None else {"stop_when.metric": self.stop_when.metric}
        if isinstance(self.optim.schedule, PlateauSchedule):
            metrics["optim.schedule.metric"] = self.optim.schedule.metric
        return metrics

    def _measured_meanwhile(self) -> Iterator[Mistake]:
        """Yield metrics that decide while the run goes on, and are measured at its end alone."""
        evaluation = self.evaluation
        if self.observers or evaluation.every_steps or evaluation.every_minutes or evaluation.every_epochs:
            return
        for key, metric in self._metrics_that_decide().items():
            if metric.startswith("eval/"):
                yield key, f"{metric} is never measured while the run goes on; set evaluation.every_steps"

    def _metrics(self) -> Iterator[Mistake]:
        """Yield metrics of evaluation sets that do not exist: nothing would ever be kept or exported by them."""
        sets = {*self.evaluation.sets, *(["validation"] if self.data.validation_split > 0 else [])}
        for key, metric in (self.metrics_of_best() | self._metrics_that_decide()).items():
            head, *rest = metric.split("/")
            if head == "eval" and not any(metric.startswith(f"eval/{name}/") for name in sets):
                available = f"there are {', '.join(sorted(sets))}" if sets else "there is none"
                yield key, f"{metric} is of no evaluation set ({available}); write eval/SET/METRIC as in metrics.jsonl"
            elif head != "eval" and not rest and head.startswith(("val", "eval")):
                yield key, f"{metric} is no metric of an evaluation; write eval/SET/METRIC as in metrics.jsonl"

    def _routers(self) -> Iterator[Mistake]:
        """Yield a router loss that the split of a batch would change."""
        loss = self.model.router_loss
        if not isinstance(loss, BatchRouterLoss) or loss.allow_split:
            return
        splits = self._splits()
        if splits:
            yield (
                "model.router_loss",
                f"batch balances what one forward pass sees, and {splits}, so its result would depend on the split. "
                "Use sequence, which does not, or accept it: router_loss: {kind: batch, allow_split: true}",
            )

    def frozen_dtype(self, device: str) -> str:
        """Return `model.frozen_dtype`, and what `auto` means on a device of this type, "cuda" or "cpu"."""
        section = self.model
        if section.frozen_dtype != "auto":
            return section.frozen_dtype
        on_card = device == "cuda" and section.dtype != "float64" and self.parallel.compute_dtype != "float32"
        return "bfloat16" if on_card and section.lora is not None else "same"

    def compiles_blocks(self, device: str) -> bool:
        """Whether blocks are compiled on a device of this type, "cuda" or "cpu"."""
        choice = self.parallel.compile
        return choice == "blocks" or (choice != "off" and device == "cuda" and not self.not_compiled())

    def left_uncompiled(self, device: str) -> str:
        """Return why `auto` compiles no blocks on a GPU, as a sentence without its end; "" elsewhere or if it does."""
        return self.not_compiled() if device == "cuda" and self.parallel.compile != "off" else ""

    def not_compiled(self) -> str:
        """Return what of the run compiled blocks do not do, as a sentence without its end; "" if they do all of it."""
        lora = self.model.lora
        key = "" if lora is None else "experts" if lora.experts else "quantize" if lora.quantize else ""
        if not key:
            return ""
        return (
            f"model.lora.{key} computes with matrices that are made anew in every forward pass, which is not built for "
            "compiled blocks"
        )

    def _compiled_blocks(self) -> Iterator[Mistake]:
        if self.parallel.compile == "blocks" and (reason := self.not_compiled()):
            yield "parallel.compile", f"blocks, but {reason}; use auto"

    def _splits(self) -> str:
        """Return why an update may take more than one forward pass; "" if it cannot."""
        data, ranks = self.data, self.launch.ranks
        rows = max([data.batch_size, *data.batch_size_schedule.values()])
        if isinstance(ranks, int) and ranks > 1:
            return f"launch.ranks={ranks} sees a part of the batch each"
        if self.verb != "sft":
            return f"a batch of {self.verb} is split by what was sampled or by pairs"
        if rows * data.max_length > data.tokens_per_micro_batch:
            return (
                f"{rows} rows of up to data.max_length={data.max_length} tokens do not fit "
                f"data.tokens_per_micro_batch={data.tokens_per_micro_batch}"
            )
        return ""

    def storage_mistakes(self) -> Iterator[Mistake]:
        """Yield what optimizer, dtypes and offloading ask of each other."""
        kind, dtype = self.optim.kind, self.model.dtype
        if dtype == "bfloat16" and kind not in {"adamw_bf16", "path"}:  # what a class of the user's keeps is its own
            yield (
                "model.dtype",
                f"bfloat16 with optim.kind: {kind} loses updates smaller than 1/256 of a weight. Use optim.kind: "
                "adamw_bf16, or model.dtype: float32 (compute stays bfloat16 on a GPU)",
            )
        if kind == "adamw_bf16" and dtype != "bfloat16":
            yield "optim.kind", f"adamw_bf16 needs model.dtype: bfloat16, not {dtype}; set it, or use optim.kind: adamw"
        offloads = self.parallel.offloads
        if kind == "muon" and "optimizer" in offloads:
            yield (
                "parallel.offload",
                "optim.kind: muon gathers whole matrices, and host memory has no group to do so; choose one of the two",
            )
        elif "optimizer" in offloads and "parameters" not in offloads and kind not in {"adamw", "adamw_bf16", "sgd"}:
            yield (
                "parallel.offload",
                f"optimizer without parameters goes with optim.kind: adamw, adamw_bf16 or sgd, not with {kind}, whose "
                "state may depend on where parameters are. Name parameters too, or leave optimizer out",
            )
        if dtype == "float64" and self.parallel.compute_dtype != "auto":
            yield (
                "parallel.compute_dtype",
                f"{self.parallel.compute_dtype} with model.dtype: float64, which computes in float64; leave it at auto",
            )


class SFTConfig(TrainingConfig):
    """Supervised fine-tuning."""

    verb = "sft"
    samples = False
    objective: SupervisedObjective = NLLConfig()
    """The loss that is summed over trained tokens."""
    neftune_alpha: Positive | None = None
    """Noise on the embeddings in training, uniform within alpha / sqrt(tokens x width) for each sequence (NEFTune, Jain
    et al. 2023, arXiv:2310.05914, where alpha is 5 to 15). Evaluation is without it."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield noise that ranks which share a row would not see alike."""
        yield from super().mistakes()
        if self.neftune_alpha is not None and self.parallel.context > 1:
            yield "neftune_alpha", f"parallel.context={self.parallel.context} does not take noise yet; leave it out"


def planned_steps(config: _Root, steps_per_epoch: int | None) -> int | None:
    """Return the number of updates a run makes, or None when only a clock or the data's end stops it.

    Args:
        config: The root.
        steps_per_epoch: Batches in one pass, None for a stream of unknown length.
    """
    if config.dry_run:
        return 2
    limits = [limit for limit in (config.steps, _steps_of_epochs(config, steps_per_epoch)) if limit is not None]
    return min(limits) if limits else None


def _steps_of_epochs(config: _Root, steps_per_epoch: int | None) -> int | None:
    if config.epochs is None or steps_per_epoch is None:
        return None
    # 1.1 * 10 is a little more than 11 in floating point, and must not become 12.
    return max(1, math.ceil(round(config.epochs * steps_per_epoch, 6)))


def end_of_both(config: _Root, steps_per_epoch: int | None) -> str:
    """Return which of `steps` and `epochs` ends a run that has both; "" where one is set, or both mean the same.

    Args:
        config: The root.
        steps_per_epoch: As in `planned_steps`. Rows that turn out to be unusable make the passes shorter.
    """
    if config.steps is None or config.epochs is None or config.dry_run:
        return ""
    by_steps, by_epochs = f"steps={config.steps}", f"epochs={config.epochs:g}"
    last = _steps_of_epochs(config, steps_per_epoch)
    if last is None:
        return f"{by_steps} and {by_epochs} are set: the run ends at whichever comes first"
    if last == config.steps:
        return ""
    if last < config.steps:
        return f"{by_epochs} ends the run, before {by_steps}: {last} steps at most; epochs=null would leave steps alone"
    return f"{by_steps} ends the run, before {by_epochs}: those are {last} steps; steps=null would leave epochs alone"


def as_plain(config: Section) -> dict[str, Any]:
    """Return the tree as JSON-ready values, defaults included."""
    return config.model_dump(mode="json")
