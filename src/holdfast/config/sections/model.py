"""The `model` section: which weights, which tokenizer, how they are built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from holdfast.config.base import Mistake, OneOrSeveral, Pattern, PositiveInt, Section
from holdfast.config.sections.lora import LoRAConfig
from holdfast.config.sections.router import AutoRouterLoss, RouterLossConfig


class HeadConfig(Section):
    """How log-probabilities are computed from hidden states."""

    dtype: Literal["model", "float32"] = "model"
    """Dtype of the head's matrix product, in training and in `rollout.engine: inprocess`. `float32` multiplies and adds
    in full precision even when the body computes in bfloat16 (ScaleRL, arXiv:2510.13786, section 3.2); the matrix
    itself is gathered in the compute dtype. The log-sum-exp is float32 or better in both cases."""

    chunk_tokens: PositiveInt | None = None
    """Tokens scored at once; the logits of one chunk are the only logits in memory. Default: as many as fit 32 MiB
    of float32 logits on the CPU, 512 MiB on a GPU."""


class UnfreezeConfig(Section):
    """Parameters that are frozen at first and trained later."""

    at_step: PositiveInt
    """Steps that are made without them; the one after these is the first that trains them."""

    patterns: Annotated[list[Pattern], Field(min_length=1)]
    """As in `model.freeze`, with its words; each must match something that is frozen until then."""


class ModelConfig(Section):
    """A Hugging Face model: weights from `path`, or a random start from `config`."""

    path: str | None = None
    """A local directory with safetensors files, or a hub name."""

    config: dict[str, Any] | None = None
    """A transformers configuration with `model_type`; weights start random, the same for every number of ranks."""

    revision: str | None = None
    """Branch, tag or commit of `path` on the hub; other repositories are taken as they are now."""

    hub: Literal["hf", "modelscope"] = "hf"
    """Where a name that is no local directory is looked up."""

    tokenizer: str | None = None
    """Directory or hub name of the tokenizer, or `builtin:characters` for generated tasks (`builtin:pictures` for those
    with images). Default: `model.path`."""

    image_processor: dict[str, Any] | None = None
    """Settings of the image processor, as preprocessor_config.json holds them, for a random start that sees images.
    Default: the file in `path`, or in the directory of the tokenizer."""

    config_override: dict[str, Any] = Field(default_factory=dict)
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

    unfreeze: Annotated[list[UnfreezeConfig], OneOrSeveral()] = Field(default_factory=list)
    """What of `freeze` is trained from some step on. Until then it has no gradient and no optimizer state, and it is
    stored in `dtype` from the start."""

    lora: LoRAConfig | None = None
    """Train low-rank adapters and nothing else; needs `peft`. With `frozen_dtype: bfloat16` the model is kept in half
    the memory, and adapters stay in `dtype`."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Storage of trainable parameters (the master weights). `bfloat16` needs `optim.kind: adamw_bf16`."""

    frozen_dtype: Literal["same", "float32", "bfloat16"] = "same"
    """Storage of frozen parameters; `same` follows `model.dtype`."""

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
        if self.lora is not None and self.unfreeze:
            yield (
                "unfreeze",
                "lora trains its adapters for the whole run; name what else is trained in lora.train",
            )
        elif self.unfreeze and not self.freeze:
            yield "unfreeze", "nothing is frozen at first; name in freeze what is to be trained only later"
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
