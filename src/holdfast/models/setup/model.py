"""Build a model on the meta device, with everything that is needed to fill, train and export it.

No parameter is allocated here. Buffers that no file holds, such as rotary frequencies, are uninitialised memory after a
model leaves the meta device, and no loader fills them. They are therefore computed once on the CPU; every materialised
model is filled from these values and compared with them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.config.sections.model import ModelConfig
from holdfast.data.tokens.processor import may_see
from holdfast.errors import ModelError
from holdfast.metrics.throughput import ModelCost
from holdfast.models.adapters.files import AdapterSource, check_base, note_of_base, refuse_other_scale
from holdfast.models.adapters.lora import add_adapters
from holdfast.models.check.shrink import layers_in
from holdfast.models.files.configuration import (
    apply_overrides,
    config_from_values,
    follow_tokenizer,
    keep_routers_still,
    make_trainable,
    maker,
    on_meta,
    reference_buffers,
    refusals,
)
from holdfast.models.files.conversion import Header, plan_incoming
from holdfast.models.files.loading import LiveSource, RandomSource, StoredSource, WeightSource
from holdfast.models.files.origin import load_tokenizer, locate, read_config, read_end_tokens
from holdfast.models.files.processors import processor_settings
from holdfast.models.files.safetensors_files import StoredTensors
from holdfast.models.files.vision import follow_compute_dtype, load_image_processor, set_attention
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.heads.scorer import (
    LAYER,
    ScorerSource,
    is_scorer,
    one_score,
    without_output_layer,
)
from holdfast.models.layers.attention import PACKED, register_attention, upstream_attention
from holdfast.models.layers.family import Family, family_of
from holdfast.models.layers.llama4_output import give_image_outputs
from holdfast.models.names import named_parameters
from holdfast.models.setup.freezing import freeze


@dataclass(frozen=True)
class Blueprint:
    """A model on the meta device, the source of its weights, and what an export needs."""

    model: Any
    """The transformers model on the meta device, to be sharded and filled."""
    skeleton: Any
    """A second model that stays on the meta device and is never wrapped: names and shapes for conversions."""
    original_config: Any
    """The configuration of the files with the user's overrides, for exports."""
    family: Family
    tokenizer: Any
    source: WeightSource
    buffers: dict[str, Tensor]
    """Every buffer, computed on the CPU, by canonical name."""
    used_conversions: tuple[Any, ...] | None
    """transformers' transforms that were applied to the weights; None for a random start."""
    directory: Path | None
    """Directory of the weights and assets; None for a random start or a live model."""
    packed: bool
    """Whether attention is computed per document."""
    notes: tuple[str, ...] = field(default=())
    """Notes for the user, printed at the start of a run."""
    image_processor: Any = None
    """transformers' image processor; None for a model that reads text alone."""
    processor_settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the whole processor's class that the model's files have."""
    image_sides: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """What `training.setup.model.image_side_of` derived, which takes seconds, by the options of `data`."""


def blueprint(  # noqa: PLR0913 - what a model can be made of
    config: ModelConfig, base: Path, *, seed: int, live: Any = None, tokenizer: Any = None, scorer: bool = False
) -> Blueprint:
    """Plan a model from its configuration section.

    Args:
        config: The section.
        base: The directory of the YAML.
        seed: Of a random start.
        live, tokenizer: A transformers model and a tokenizer in memory, instead of the configured ones.
        scorer: Whether it scores whole texts, instead of predicting tokens.

    Raises:
        ModelError: Files are missing or do not fit, a pattern matches nothing, the vocabulary is too small.
    """
    register_attention()
    give_image_outputs()
    directory = None if config.path is None or live is not None else locate(config.path, config, base, weights=True)
    raw_config = _raw_config(config, directory, live)
    directories = _processor_directories(config, raw_config, directory, base, has_tokenizer=tokenizer is not None)
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(config, base)
    vocabulary = _meet_tokenizer(config, raw_config, tokenizer, live)
    if scorer:
        one_score(raw_config, tokenizer)
    notes = _notes(config, *vocabulary)
    run_config = copy.deepcopy(raw_config)
    make_trainable(run_config, keep_dropout=config.dropout)
    make = maker(run_config, config.trust_remote_code, scorer, live)
    with refusals(f"transformers cannot build a {raw_config.model_type} model from its configuration"):
        model, skeleton = (on_meta(make, run_config) for _ in range(2))
        buffers = reference_buffers(make, run_config)
    _end_as_its_origin(skeleton, live, directory if config.tokenizer is None else None)
    _follow_settings(model, config)
    if config.lora is not None:
        notes.append(add_adapters(model, config.lora, storage_of(config)[1]))
    freeze(model, config.freeze)
    source, used = source_of(skeleton, live, directory, vocabulary, seed if scorer or directory is None else None)
    if config.lora is not None:
        source = _with_adapters(config, base, model, source, seed, directory)
        notes += _notes_of_adapters(config, source, directory)
    family = family_of(skeleton)
    return Blueprint(
        model,
        skeleton,
        raw_config,
        family,
        tokenizer,
        source,
        buffers,
        used,
        directory,
        choose_attention(model, family, config.attention, notes),  # it adds a note
        tuple(notes),
        load_image_processor(config, raw_config, directories),
        processor_settings(directories),
    )


def _follow_settings(model: Any, config: ModelConfig) -> None:
    """Apply settings of `model` for which transformers' configuration has no field."""
    follow_compute_dtype(model)
    if not config.dropout:
        keep_routers_still(model)
    if config.dtype == "float64":
        model.set_experts_implementation("eager")  # the grouped product of experts knows no float64


def _end_as_its_origin(skeleton: Any, live: Any, directory: Path | None) -> None:
    """Set the end-of-text tokens from the generation settings of the model's origin, if it has any.

    The configuration names only one such token, which for many chat models is not the one that ends a turn.
    """
    if not hasattr(skeleton, "generation_config"):
        return  # a scorer writes nothing
    if live is not None:
        end_tokens = getattr(live.generation_config, "eos_token_id", None)
    else:
        end_tokens = None if directory is None else read_end_tokens(directory)
    if end_tokens is not None:
        skeleton.generation_config.eos_token_id = end_tokens


def storage_of(config: ModelConfig) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes that trained and frozen parameters are stored in; an `auto` that nobody settled is `same`."""
    trained: torch.dtype = getattr(torch, config.dtype)
    return trained, trained if config.frozen_dtype in {"auto", "same"} else getattr(torch, config.frozen_dtype)


def _with_adapters(  # noqa: PLR0913 - what they lie in, and what they start from
    config: ModelConfig, base: Path, model: Any, source: WeightSource, seed: int, directory: Path | None
) -> AdapterSource:
    """Return a source of a model's tensors and of its adapters.

    Raises:
        ModelError: Adapters to start from are others, count by another factor, or were trained beside other weights.
    """
    lora = config.lora
    assert lora is not None
    at = None if lora.path is None else locate(lora.path, config, base, weights=True)
    adapters = AdapterSource.of(source, model, lora, seed, at, storage_of(config)[1])
    refuse_other_scale(at, lora)
    if adapters.stored is not None and directory is not None:
        check_base(directory, adapters.stored, lora)
    return adapters


def _notes_of_adapters(config: ModelConfig, source: AdapterSource, directory: Path | None) -> list[str]:
    if source.stored is None or source.stored.base is not None or directory is None:
        return []
    note = note_of_base(source.stored.path.parent, str(config.path), directory)
    return [] if note is None else [note]


def _meet_tokenizer(config: ModelConfig, raw_config: Any, tokenizer: Any, live: Any) -> tuple[int, int]:
    """Adapt the configuration to the tokenizer; return the vocabulary's size before and after."""
    if live is None and config.config is not None:
        follow_tokenizer(raw_config, tokenizer, config.config)
    text_config = raw_config.get_text_config()
    before = text_config.vocab_size
    text_config.vocab_size = _vocabulary(before, tokenizer, config.resize_vocab, live)
    return before, text_config.vocab_size


def _processor_directories(
    config: ModelConfig, raw_config: Any, directory: Path | None, base: Path, *, has_tokenizer: bool
) -> list[Path]:
    """Return the directories in which to look for the image processor.

    They hold the weights, or for a random start the tokenizer, unless that is an object (`has_tokenizer`).
    """
    if directory is not None:
        return [directory]
    name = config.tokenizer
    sees = may_see(raw_config) and config.config is not None
    if has_tokenizer or not sees or name is None or name.startswith("builtin:"):
        return []
    return [locate(name, config, base, weights=False)]


def described(config: ModelConfig, base: Path, stored: Mapping[str, Header] | None) -> Blueprint:
    """Describe a model for exports alone, from a directory that holds everything but weights.

    Args:
        config: Names the directory.
        base: As in `blueprint`.
        stored: Names and shapes of the files the weights once came from; None for a model of random start.

    Raises:
        ModelError: transformers cannot build the model.
    """
    raw_config = _raw_config(config, locate(str(config.path), config, base, weights=False), None)
    with refusals(f"transformers cannot build a {raw_config.model_type} model from its configuration"):
        skeleton = on_meta(maker(raw_config, config.trust_remote_code, is_scorer(raw_config)), raw_config)
    used = None if stored is None else plan_incoming(skeleton, stored, str(config.path)).used
    tokenizer, family = load_tokenizer(config, base), family_of(skeleton)
    source = RandomSource(skeleton, 0)  # never asked: the tensors are somewhere else
    return Blueprint(skeleton, skeleton, raw_config, family, tokenizer, source, {}, used, Path(str(config.path)), False)


def configured(config: ModelConfig, base: Path) -> tuple[Any, Any]:
    """Return a model's transformers configuration and its image processor (None if it reads text alone).

    Raises:
        ModelError: As `blueprint`.
    """
    directory = None if config.path is None else locate(config.path, config, base, weights=False)
    raw_config = _raw_config(config, directory, None)
    directories = _processor_directories(config, raw_config, directory, base, has_tokenizer=False)
    return raw_config, load_image_processor(config, raw_config, directories)


def _check_live(live: Any) -> None:
    from transformers import PreTrainedModel

    if not isinstance(live, PreTrainedModel):
        raise ModelError(
            f"The model given in Python is a {type(live).__module__}.{type(live).__qualname__}, and none of "
            "transformers' models, whose class and configuration say how to build and export it. Pass what "
            "AutoModelForCausalLM.from_pretrained returns; of a peft model, what merge_and_unload() returns."
        )


def _raw_config(config: ModelConfig, directory: Path | None, live: Any) -> Any:
    """Return the transformers configuration of whichever origin is given, with the user's overrides.

    Raises:
        ModelError: The live model is none of transformers'.
    """
    if live is not None:
        _check_live(live)
        raw_config = copy.deepcopy(live.config)
    elif directory is not None:
        raw_config = read_config(directory, trust_remote_code=config.trust_remote_code)
    else:
        assert config.config is not None
        raw_config = config_from_values(config.config)
    apply_overrides(raw_config, config.config_override)
    return raw_config


def source_of(
    skeleton: Any, live: Any, directory: Path | None, vocabulary: tuple[int, int], seed: int | None
) -> tuple[WeightSource, tuple[Any, ...] | None]:
    """Return where the tensors come from, and the conversions they come through.

    Args:
        skeleton: The model.
        live: A model in memory, or None.
        directory: Of the files, or None.
        vocabulary: Its size in the files, and in the model.
        seed: Of what is drawn: all of it without files, or the layer of a reward model that files may lack.
    """
    if live is not None:
        return LiveSource(live), None
    if directory is None:
        assert seed is not None
        return RandomSource(skeleton, seed), None
    stored, full_skeleton, (old, new) = StoredTensors(directory), skeleton, vocabulary
    growing: dict[str, int] = {}
    if new != old:
        layers = [skeleton.get_input_embeddings(), skeleton.get_output_embeddings()]
        grown = {id(value) for layer in layers if layer is not None for value in layer.parameters()}
        growing = {name: new for name, value in skeleton.named_parameters() if id(value) in grown}
        config = copy.deepcopy(skeleton.config)
        config.get_text_config().vocab_size = old
        skeleton = on_meta(type(skeleton)._from_config, config)  # noqa: SLF001 - what from_config calls
    if seed is None or LAYER in stored.headers:
        incoming = plan_incoming(skeleton, stored.headers, str(directory))
        return StoredSource(stored, incoming.conversions, growing), incoming.used
    headers = without_output_layer(stored.headers)
    incoming = plan_incoming(skeleton, headers, str(directory), absent=(LAYER,))
    backbone = StoredSource(stored, incoming.conversions, growing)
    return ScorerSource(backbone, RandomSource(full_skeleton, seed)), incoming.used


def _vocabulary(rows: int, tokenizer: Any, may_grow: bool, live: Any) -> int:
    """Return the vocabulary size to train with.

    Raises:
        ModelError: The tokenizer knows more tokens than the embedding has rows.
    """
    needed = max(tokenizer.get_vocab().values(), default=0) + 1
    if needed <= rows:
        return rows
    if not may_grow:
        raise ModelError(
            f"The tokenizer has token ids up to {needed - 1}, the model's embedding has {rows} rows. Use the model's "
            "own tokenizer, or set model.resize_vocab: true to grow the embedding."
        )
    if live is not None:
        raise ModelError(
            f"The tokenizer has token ids up to {needed - 1}, the model in memory has {rows} rows. Call its "
            f"resize_token_embeddings({needed}) first."
        )
    return needed


def _notes(config: ModelConfig, old_size: int, new_size: int) -> list[str]:
    notes = [] if new_size == old_size else [f"vocabulary grown from {old_size} to {new_size}"]
    if config.trust_remote_code:
        notes.append(f"trust_remote_code is on: Python code from {config.path} runs in this process")
    return notes


def set_storage(model: nn.Module, dtype: torch.dtype, frozen_dtype: torch.dtype) -> None:
    """Give the meta parameters the dtypes they are stored in; ties stay ties, buffers stay as they are."""
    stored: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in stored:
                target = dtype if parameter.requires_grad else frozen_dtype
                storage_dtype = target if parameter.is_floating_point() else parameter.dtype
                cast = nn.Parameter(parameter.detach().to(storage_dtype), requires_grad=parameter.requires_grad)
                stored[id(parameter)] = stored[id(cast)] = cast
            module.register_parameter(name, stored[id(parameter)])


def choose_attention(model: Any, family: Family, implementation: str, notes: list[str]) -> bool:
    """Set the attention implementation; return whether it is the packed one.

    Raises:
        ModelError: Packed attention was asked for and cannot be exact.
    """
    reason = family.why_not_packed
    if implementation in {"auto", "packed"} and not reason:
        set_attention(model, PACKED)
        return True
    if implementation == "packed":
        raise ModelError(f"model.attention: packed is not exact for {family.name}: {reason}. Use auto or sdpa.")
    if implementation == "auto":  # what transformers chose: sdpa wherever the model has it
        notes.append(f"attention: one document per row, since {reason}")
        return False
    if implementation == "sdpa" and upstream_attention(model) != "sdpa":
        raise ModelError(f"{family.name} has no sdpa attention that is exact. Use auto or eager.")
    try:
        if model.config._attn_implementation != implementation:  # noqa: SLF001 - what set_attn_implementation sets
            model.set_attn_implementation(implementation)
    except ValueError as error:
        raise ModelError(f"{family.name} has no {implementation} attention: {error}") from error
    if model.config._attn_implementation != implementation:  # noqa: SLF001 - same; it warns and goes on where it cannot
        raise ModelError(f"model.attention: {implementation} cannot be set, {family.name} chooses by itself. Use auto.")
    return False


def cost_of(model: PolicyModel, origin: Blueprint) -> ModelCost:
    """Return the cost of a token in floating-point operations, by the present numbers of trained and frozen weights."""
    text = origin.skeleton.config.get_text_config()
    sizes = {True: 0.0, False: 0.0}
    for name, value in named_parameters(model).items():
        unused = model.routers.unused(name, value.shape) if model.routers is not None else 0.0
        sizes[value.requires_grad] += value.numel() - unused
    return ModelCost(sizes[True], sizes[False], layers_in(origin.skeleton), text.hidden_size)
