"""The `model` section: which weights, which tokenizer, how they are built; adapters; the balance of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from holdfast.config.base import (
    ByKind,
    Mistake,
    NonNegative,
    Pattern,
    Positive,
    PositiveInt,
    PrivateFields,
    ProperFraction,
    PublicStr,
    Section,
)


class AutoRouterLoss(Section):
    """`sequence` where the architecture has a router loss and its configuration a coefficient above 0, else off."""

    kind: Literal["auto"] = "auto"


class NoRouterLoss(Section):
    """Train without a router loss; loads are measured all the same."""

    kind: Literal["off"] = "off"


class _RouterLoss(Section):
    coefficient: NonNegative | None = None
    """Factor of the router loss. Default: the model configuration's router_aux_loss_coef."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a loss without effect."""
        if self.coefficient == 0:
            yield "coefficient", "0 leaves the router loss without effect; write router_loss: off, or a factor above 0"


class SequenceRouterLoss(_RouterLoss):
    """Balance the experts within each sequence: the same result for every split over ranks and micro-batches."""

    kind: Literal["sequence"] = "sequence"


class BatchRouterLoss(_RouterLoss):
    """Balance them over what one forward pass sees, as transformers does; the result depends on the split."""

    kind: Literal["batch"] = "batch"
    allow_split: bool = False
    """Accept several micro-batches or ranks: each balances its own tokens, so ranks and budgets change the result."""
    removed_kinds: ClassVar[Mapping[str, str]] = {
        "global": (
            "it counted loads in one more forward pass. Write sequence, which no split changes either, or batch, "
            "transformers' formula over what one forward pass sees"
        )
    }


RouterLossConfig = Annotated[
    AutoRouterLoss | NoRouterLoss | SequenceRouterLoss | BatchRouterLoss,
    ByKind("auto"),
]


FourBitKind = Literal["nf4", "fp4"]


class LoRAConfig(Section):
    """Train B A beside frozen matrices W, so that a layer computes (W + scale B A) x (Hu et al., arXiv:2106.09685)."""

    rank: PositiveInt = 16
    """Rows of A and columns of B."""
    alpha: Positive = 32.0
    """Scale times rank, or times the root of the rank with `rank_stabilised`."""
    rank_stabilised: bool = False
    """Scale by alpha / sqrt(rank), so that learning does not slow down as the rank grows (arXiv:2312.03732)."""
    dora: bool = False
    """Train the length of each row of W + scale B A apart from its direction (Liu et al., arXiv:2402.09353)."""
    targets: list[Pattern] | Literal["all-linear"] = "all-linear"
    """Linear layers that get an adapter, by name; `all-linear`: those of the language model's blocks."""
    experts: list[Pattern] | Literal["all"] = Field(default_factory=list)
    """Stacks of experts' matrices that get an adapter for each expert, by parameter name, as in
    ["experts.down_proj"]."""
    exclude: list[Pattern] = Field(default_factory=list)
    """Layers and stacks of experts that get no adapter."""
    ranks: dict[Pattern, PositiveInt] = Field(default_factory=dict)
    """Pattern to another rank, as in {"q_proj|v_proj": 64}; the first that matches counts."""
    dropout: ProperFraction = 0.0
    """Dropout rate of the input of A, in training."""
    quantize: FourBitKind | None = None
    """Keep the frozen linear layers of the blocks in 4 bits (QLoRA, arXiv:2305.14314), in blocks of 64 numbers; needs
    `bitsandbytes`."""
    train: list[Pattern] = Field(default_factory=list)
    """Parameters that are trained whole, beside the adapters: norms or embeddings, for example."""
    path: PublicStr | None = None
    """A directory in peft's format to start from; its ranks and targets must be these."""
    any_base: bool = False
    """Accept adapters in `path` that were trained beside other weights than those in `model.path`."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield an empty choice, and what cannot be had together."""
        if self.targets == [] and self.experts == []:
            yield "targets", "no layer is named; name patterns, or use all-linear"
        if self.experts != []:
            yield from self._of_experts()
        if self.dora and self.quantize is not None:
            yield (
                "dora",
                f"peft reads the rows of W for it at every step, and quantize: {self.quantize} packs them; choose "
                "one of the two",
            )
        if self.any_base and self.path is None:
            yield "any_base", "there are no adapters to accept; set path, or leave it out"

    def _of_experts(self) -> Iterator[Mistake]:
        if self.dora:
            yield "dora", "peft has no DoRA for stacks of experts; leave out experts, or dora"
        if self.dropout > 0:
            yield "dropout", "an expert's adapter is added to its matrix, where nothing can be dropped; leave out one"


class HeadConfig(Section):
    """How log-probabilities are computed from hidden states."""

    dtype: Literal["model", "float32"] = "model"
    """Dtype of the head's matrix product, in training and in `rollout.engine: inprocess`. `float32` multiplies and adds
    in full precision even when the body computes in bfloat16 (ScaleRL, arXiv:2510.13786, section 3.2); the matrix
    itself is gathered in the compute dtype. The log-sum-exp is float32 or better in both cases."""

    chunk_tokens: PositiveInt | None = None
    """Tokens scored at once; the logits of one chunk are the only logits in memory. Default on the CPU: as many as fit
    32 MiB of float32 logits. On a GPU 4,096, or as many as fit 2 GiB of logits and a 32nd of the card's memory; where
    torch's operations sweep them instead of the kernels, 512 MiB of float32 logits."""


class ModelConfig(Section):
    """A Hugging Face model: weights from `path`, or a random start from `config`."""

    removed: ClassVar[Mapping[str, str]] = {
        "unfreeze": "a run trains the same parameters from its first step to its last; name what is frozen in freeze, "
        "and after that run go on without it and with checkpoint.resume.unfreeze: [PATTERN]"
    }

    path: PublicStr | None = None
    """A local directory with safetensors files, or a hub name."""

    config: PrivateFields | None = None
    """A transformers configuration with `model_type`; weights start random, the same for every number of ranks."""

    revision: PublicStr | None = None
    """Branch, tag or commit of `path` on the hub; other repositories are taken as they are now."""

    hub: Literal["hf", "modelscope"] = "hf"
    """Where a name that is not a local directory is looked up."""

    tokenizer: PublicStr | None = None
    """Directory or hub name of the tokenizer, or `builtin:characters` for generated tasks (`builtin:pictures` for those
    with images). Default: `model.path`."""

    image_processor: PrivateFields | None = None
    """Settings of the image processor, as preprocessor_config.json holds them, for a random start that sees images.
    Default: the file in `path`, or in the directory of the tokenizer."""

    config_override: PrivateFields = Field(default_factory=dict)
    """Fields of the transformers configuration to replace, such as `rope_scaling`; dotted names reach
    sub-configurations (`text_config.rope_theta`)."""

    attention: Literal["auto", "packed", "sdpa", "eager"] = "auto"
    """`packed` computes attention per document without padding; `sdpa` and `eager` are transformers' own, one
    document per row with padding. `auto` takes `packed` where a check at start shows it to be exact."""

    resize_vocab: bool = False
    """Grow the embedding when the tokenizer knows more tokens than the model; new rows start at the mean."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model directory. Off: such a model is refused by name."""

    freeze: list[Pattern] = Field(default_factory=list)
    """Parameters whose canonical name matches any of these are not trained. Beside patterns there are four words:
    `vision_tower`, `projector` (between tower and language model), `language_model` (with its head), `embeddings`
    (with a head tied to them)."""

    lora: LoRAConfig | None = None
    """Train low-rank adapters and nothing else; needs `peft`. On a GPU the frozen model is stored in bfloat16
    (`frozen_dtype`), and adapters stay in `dtype`."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Storage of trainable parameters (the master weights). `bfloat16` needs `optim.kind: adamw_bf16`."""

    frozen_dtype: Literal["auto", "same", "float32", "bfloat16"] = "auto"
    """Storage of frozen parameters; `same` follows `model.dtype`. `auto`: bfloat16 under `lora` on a GPU that computes
    in bfloat16, otherwise `same`; a run that starts from a checkpoint keeps the value of that."""

    dropout: bool = False
    """Keep the dropout rates of the model's configuration. Off: all of them are 0."""

    check_gradients: bool = True
    """Compare the gradient of every trained parameter with transformers' own before step 1, on a short document."""

    router_loss: RouterLossConfig = AutoRouterLoss()
    """What keeps the experts of a mixture evenly loaded; see docs/moe.md."""

    head: HeadConfig = HeadConfig()

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what leaves the weights or the tokenizer undecided."""
        if self.path is not None and self.config is not None:
            yield "config", "both path (existing weights) and config (random start) are set; keep one of them"
        if self.path is None and self.config is None:
            yield "path", "no model is named; set path (a directory or hub name) or config (a random start)"
        if self.lora is not None and self.freeze:
            yield "freeze", "lora freezes everything but its adapters; name what else is trained in lora.train"
        yield from self._of_random_starts()

    def _of_random_starts(self) -> Iterator[Mistake]:
        if self.image_processor is not None and self.path is not None:
            yield "image_processor", "it is for a random start; that of path comes from its preprocessor_config.json"
        if self.config is not None and "model_type" not in self.config:
            yield "config", "model_type is missing; write for example config: {model_type: llama, hidden_size: 128}"
        if self.config is not None and self.path is None and self.tokenizer is None:
            yield (
                "tokenizer",
                "a random start has no tokenizer of its own; set tokenizer to a directory, a hub name or "
                "builtin:characters",
            )
