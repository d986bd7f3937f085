"""The `optim` section: optimizer, schedule, clipping, and what happens to a non-finite gradient."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from holdfast.config.base import (
    ByKind,
    Count,
    Fraction,
    Kwargs,
    Mistake,
    NonNegative,
    Pattern,
    Positive,
    PositiveInt,
    ProperFraction,
    PublicStr,
    Section,
)
from holdfast.config.sections.measured import PatienceConfig


class _Schedule(Section):
    follows_last_step: ClassVar[bool] = True
    """Whether its shape after warm-up depends on the number of steps."""
    warmup_steps: Count = 0
    """Steps over which the rate rises linearly from lr / warmup_steps to lr."""
    warmup_ratio: Fraction = 0.0
    """Warm-up as a share of all steps, instead of warmup_steps."""

    @property
    def needs_last_step(self) -> bool:
        """Whether no rate is known before the number of steps is."""
        return self.follows_last_step or self.warmup_ratio > 0

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a warm-up that is given twice."""
        if self.warmup_steps and self.warmup_ratio:
            yield (
                "warmup_steps",
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio} both set the warm-up; "
                "keep one of them",
            )


class ConstantSchedule(_Schedule):
    """lr, after warm-up."""

    follows_last_step = False
    kind: Literal["constant"] = "constant"


class LinearSchedule(_Schedule):
    """A straight line from lr to final_ratio x lr at the last step."""

    kind: Literal["linear"] = "linear"
    final_ratio: Fraction = 0.0
    """Rate of the last update, as a share of lr."""


class CosineSchedule(_Schedule):
    """Half a cosine from lr to final_ratio x lr at the last step (Loshchilov & Hutter, arXiv:1608.03983)."""

    kind: Literal["cosine"] = "cosine"
    final_ratio: Fraction = 0.0
    """Rate of the last update, as a share of lr."""


class CosineRestartsSchedule(_Schedule):
    """Half cosines of equal length from lr to final_ratio x lr, each beginning at lr again (Loshchilov & Hutter,
    arXiv:1608.03983, warm restarts with T_mult = 1)."""

    kind: Literal["cosine_with_restarts"] = "cosine_with_restarts"
    cycles: PositiveInt = 2
    """Half cosines between the end of warm-up and the last update; 1 is `cosine`."""
    final_ratio: Fraction = 0.0
    """Rate of the last update, as a share of lr; the other cycles end just above it."""


class PolynomialSchedule(_Schedule):
    """From lr to final_ratio x lr as (share of the steps that is left) ** power."""

    kind: Literal["polynomial"] = "polynomial"
    power: Positive = 2.0
    """1 is `linear`; the larger it is, the sooner the rate falls."""
    final_ratio: Fraction = 0.0
    """Rate of the last update, as a share of lr."""


class InverseSqrtSchedule(_Schedule):
    """lr x sqrt(timescale / (timescale + steps since warm-up)), which needs no last step (Vaswani et al.,
    arXiv:1706.03762, section 5.3)."""

    follows_last_step = False
    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    timescale: PositiveInt | None = None
    """After 3 x timescale steps more the rate is half of lr. Default: the steps of warm-up."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a rate that falls at no known speed."""
        yield from super().mistakes()
        if self.timescale is None and not self.warmup_steps and not self.warmup_ratio:
            yield "timescale", "it follows the warm-up, and there is none; set timescale, warmup_steps or warmup_ratio"


class WarmupStableDecaySchedule(_Schedule):
    """Constant, then a straight line to final_ratio x lr over the last decay_ratio of all steps
    (Hu et al., MiniCPM, arXiv:2404.06395)."""

    kind: Literal["wsd"] = "wsd"
    decay_ratio: Fraction = 0.2
    final_ratio: Fraction = 0.0
    """Rate of the last update, as a share of lr."""


class PlateauSchedule(_Schedule, PatienceConfig):
    """lr, lowered by a factor whenever a metric has not improved for `patience` measurements.

    As torch's ReduceLROnPlateau, whose patience is one less. Where the metric stands is saved with the run.
    """

    follows_last_step = False
    kind: Literal["plateau"] = "plateau"
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """What the rate is multiplied by."""
    cooldown: Count = 0
    """Measurements after a reduction that are not counted."""
    final_ratio: Fraction = 0.0
    """The rate never falls below this share of lr."""


Schedule = Annotated[
    ConstantSchedule
    | LinearSchedule
    | CosineSchedule
    | CosineRestartsSchedule
    | PolynomialSchedule
    | InverseSqrtSchedule
    | WarmupStableDecaySchedule
    | PlateauSchedule,
    ByKind("cosine"),
]


class ParameterGroupConfig(Section):
    """Parameters with a rate or a decay of their own."""

    match: Pattern
    """Canonical names, or patterns of them, of the group's parameters. A parameter that several groups match belongs to
    the first of them.
    """
    lr: Positive | None = None
    """Peak learning rate; default: `optim.lr`. The schedule scales it like the others."""
    weight_decay: NonNegative | None = None
    """Weight decay of the group's parameters that `no_decay` does not name; default: `optim.weight_decay`."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a group that changes nothing."""
        if self.lr is None and self.weight_decay is None:
            yield "match", "the group has neither lr nor weight_decay, so it changes nothing; give it one of them"


class EMAConfig(Section):
    """An exponential moving average of the trained weights, sharded and saved with them; training never sees it."""

    decay: ProperFraction = 0.999
    """Share of the average that stays at every update."""
    start_step: Count = 0
    """Until so many steps are done, the average is the weights."""
    evaluate: bool = False
    """Evaluate the average instead of the weights."""
    export: Literal["beside", "instead", "none"] = "beside"
    """Whether exports/NAME-ema holds the average beside exports/NAME, or exports/NAME holds it."""


def _check_group_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name in {"rest", "adamw"}:
        raise ValueError(
            f"{name!r} is to name a group of parameters; use letters, digits, '.', '_', '-', and not rest or adamw"
        )
    return name


class _Rates(Section):
    removed_kinds: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("adamw_4bit", "adamw_fp8"),
            "quantised moments have 8 bits, which is adamw_8bit, at 6 bytes per parameter; write it instead. What the "
            "other kind has saved cannot be continued: a new run starts from the weights of its checkpoint, with "
            "another run.name and checkpoint.init_from",
        ),
        **dict.fromkeys(("adamw_hf", "adamw_torch", "adamw_torch_fused"), "AdamW in float32 is adamw; write it"),
    }
    lr: Positive = 1e-5
    """Peak learning rate."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of the parameters that `no_decay` does not name."""
    groups: dict[Annotated[PublicStr, AfterValidator(_check_group_name)], ParameterGroupConfig] = Field(
        default_factory=dict
    )
    """Rates and decays of parameters chosen by name, as in `groups: {vision: {match: visual, lr: 1e-6}}`. What no group
    matches has `lr` and `weight_decay`."""
    schedule: Schedule = CosineSchedule(warmup_ratio=0.03)
    """The rate over the steps. A schedule that is written out has the warm-up that is written with it, none else."""
    clip_norm: Positive | None = 1.0
    """Largest global gradient norm; null: no clipping (the norm is still computed and logged)."""


class _Optim(_Rates):
    no_decay: list[Pattern] = Field(default_factory=lambda: [r"bias$", r"norm", r"\bln_"])
    """Parameters without weight decay, by canonical name."""
    ema: EMAConfig | None = None
    """Keep an average of the weights; 4 bytes more per trained parameter (8 for float64)."""
    max_nonfinite_steps: PositiveInt = 5
    """Updates in a row that may be skipped for a non-finite gradient norm before the run stops."""


class AdamWConfig(_Optim):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) on the storage dtype, float32 by default."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[ProperFraction, ProperFraction] = (0.9, 0.999)
    """Decay of the first and the second moment."""
    eps: Positive = 1e-8
    """Number that is added to the root of the second moment."""


class AdamWBF16Config(_Optim):
    """AdamW with bfloat16 weights, moments and a Kahan compensation term: 8 bytes per parameter."""

    kind: Literal["adamw_bf16"] = "adamw_bf16"
    betas: tuple[ProperFraction, ProperFraction] = (0.9, 0.999)
    """Decay of the first and the second moment."""
    eps: Positive = 1e-8
    """Number that is added to the root of the second moment."""


class AdamW8bitConfig(_Optim):
    """AdamW with moments of 8 bits (arXiv:2110.02861) on float32 weights: 6 bytes per parameter instead of 12.

    Needs `pip install holdfast[lowbit]`.
    """

    kind: Literal["adamw_8bit"] = "adamw_8bit"
    betas: tuple[ProperFraction, ProperFraction] = (0.9, 0.999)
    """Decay of the first and the second moment."""
    eps: Positive = 1e-8
    """Number that is added to the root of the second moment."""
    compile: bool | None = None
    """Compile the update. null: on a GPU, where it gives the same numbers and was faster in all three timings before
    step 1. On a CPU the compilation takes minutes."""


class SGDConfig(_Optim):
    """Stochastic gradient descent (torch.optim.SGD); weight decay is added to the gradient, not decoupled."""

    kind: Literal["sgd"] = "sgd"
    momentum: Fraction = 0.0
    """Share of the last step that the next one goes on with."""
    dampening: Fraction = 0.0
    """Share of the gradient that momentum leaves out."""
    nesterov: bool = False
    """Look ahead along the momentum (Sutskever et al., 2013)."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what means nothing without momentum, or not together."""
        if self.nesterov and not self.momentum:
            yield "nesterov", "looks ahead along a momentum that is 0; set momentum, or leave nesterov out"
        if self.nesterov and self.dampening:
            yield "nesterov", f"is defined for dampening: 0, not {self.dampening:g}; keep one of them"
        if self.dampening and not self.momentum:
            yield "dampening", "changes nothing where momentum is 0; set momentum, or leave dampening out"


class MuonConfig(_Optim):
    """Muon (Jordan et al., 2024) for matrices; AdamW for embeddings, the head, and what is not a matrix.

    An update is orthogonalised as a whole matrix, on any number of ranks; experts of a mixture one by one.
    """

    kind: Literal["muon"] = "muon"
    momentum: ProperFraction = 0.95
    """Momentum of the average of gradients that is orthogonalised."""
    nesterov: bool = True
    """Look ahead along the momentum."""
    iterations: PositiveInt = 5
    """Newton-Schulz steps."""
    iterate_in: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of these steps; float64 weights use float64."""
    scale: Literal["adamw_rms", "shape"] = "adamw_rms"
    """Factor of a matrix's update: 0.2 x sqrt(longer side), so that rates of AdamW fit (arXiv:2502.16982), or
    sqrt(rows / columns) where that is above 1 (the original; its rates are near 0.02)."""
    adamw: list[Pattern] = Field(default_factory=list)
    """Matrices that AdamW updates too, by canonical name."""
    adamw_lr: Positive | None = None
    """Peak rate of AdamW's parameters; default: `lr`. Groups with a rate of their own keep it."""
    betas: tuple[ProperFraction, ProperFraction] = (0.9, 0.999)
    """AdamW's decay of the first and the second moment."""
    eps: Positive = 1e-8
    """Number that AdamW adds to the root of the second moment."""


def _check_class_path(path: str) -> str:
    module, colon, name = path.rpartition(":")
    is_module = all(identifier.isidentifier() for identifier in module.split("."))
    if not colon or not (module.endswith(".py") or is_module) or not name.isidentifier():
        raise ValueError(f"{path!r} must name a class, as in my_file.py:MyOptimizer or torch.optim:RMSprop")
    return path


class UserOptimizerConfig(_Optim):
    """Any torch.optim.Optimizer: torch's others, an installed package's, or one from a file of the user's own.

    It is rehearsed on small parameters before step 1: saved, restored, and on whole parameters where ranks share them.
    """

    kind: Literal["path"] = "path"
    path: Annotated[PublicStr, AfterValidator(_check_class_path)]
    """`file.py:Class`, a relative file looked up beside the YAML, or `package.module:Class`."""
    kwargs: Kwargs = Field(default_factory=dict)
    """Its constructor's arguments besides lr and weight_decay."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield arguments that have a key of their own."""
        for name in ("lr", "weight_decay"):
            if name in self.kwargs:
                yield f"kwargs.{name}", f"write optim.{name}, which groups and the schedule follow"
        if "params" in self.kwargs:
            yield "kwargs.params", "the parameters are the model's; leave it out"


OptimConfig = Annotated[
    AdamWConfig | AdamWBF16Config | AdamW8bitConfig | SGDConfig | MuonConfig | UserOptimizerConfig, ByKind("adamw")
]


class CriticOptimConfig(_Rates):
    """AdamW or SGD for a critic; what has no key here is as in `optim` by default."""

    removed: ClassVar[Mapping[str, str]] = {
        "ema": "nothing evaluates or exports averages of a critic; leave it out",
        **dict.fromkeys(
            ("eps", "no_decay", "max_nonfinite_steps", "momentum", "dampening", "nesterov", "compile"),
            "a critic has the default of optim; leave it out",
        ),
    }
    kind: Literal["adamw", "adamw_bf16", "adamw_8bit", "sgd"] = "adamw"
    """As in `optim.kind`."""
    betas: tuple[ProperFraction, ProperFraction] = (0.9, 0.999)
    """AdamW's decay of the first and the second moment."""
    schedule: Annotated[ConstantSchedule | LinearSchedule | CosineSchedule, ByKind("cosine")] = CosineSchedule(
        warmup_ratio=0.03
    )
    """The rate over the steps."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield moments that SGD does not have."""
        if self.kind == "sgd" and self.betas != (0.9, 0.999):
            yield "betas", "kind sgd has no moments; leave it out"

    def as_optim(self) -> OptimConfig:
        """Return the section `optim` that says the same."""
        values = {name: value for name, value in self if name != "betas" or self.kind != "sgd"}
        return TypeAdapter[OptimConfig](OptimConfig).validate_python(values)
