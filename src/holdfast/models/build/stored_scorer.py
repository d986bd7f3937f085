"""A reward model as its files have it, to be sharded and asked: nothing of it is drawn, grown or trained."""

from __future__ import annotations

import copy
from pathlib import Path

from holdfast.config.sections.model import ModelConfig
from holdfast.models.build.model import Blueprint, choose_attention
from holdfast.models.heads.scorer import (
    LAYER,
    check_layer,
    not_trained_to_score,
    without_output_layer,
)
from holdfast.models.layers.attention import register_attention
from holdfast.models.layers.family import family_of
from holdfast.models.source.configuration import make_trainable, maker, on_meta, reference_buffers, refusals
from holdfast.models.source.origin import load_tokenizer, locate, read_config
from holdfast.models.source.vision import follow_compute_dtype
from holdfast.models.weights.conversion import plan_incoming
from holdfast.models.weights.loading import StoredSource
from holdfast.models.weights.safetensors_files import StoredTensors


def stored_scorer(config: ModelConfig, base: Path) -> Blueprint:
    """Plan a reward model from its directory, with its outputs, its tokenizer and its padding.

    Args:
        config: Names the directory.
        base: The directory of the YAML.

    Raises:
        ModelError: Files are missing or do not fit, it was not trained to score, or its class scores by another rule.
    """
    register_attention()
    assert config.path is not None
    directory = locate(config.path, config, base, weights=True)
    raw_config = read_config(directory, trust_remote_code=False)
    tokenizer = load_tokenizer(config, base)
    run_config = copy.deepcopy(raw_config)
    make_trainable(run_config, keep_dropout=False)  # without dropout and caches, that is
    make = maker(run_config, trust_remote_code=False, scorer=True)
    with refusals(f"transformers cannot build a {raw_config.model_type} model from its configuration"):
        model, skeleton = (on_meta(make, run_config) for _ in range(2))
        buffers = reference_buffers(make, run_config)
    check_layer(skeleton)
    follow_compute_dtype(model)
    stored = StoredTensors(directory)
    if LAYER not in stored.headers:
        raise not_trained_to_score(directory, LAYER)
    # Some files keep the language model's output layer beside the score, and transformers passes over it.
    incoming = plan_incoming(skeleton, without_output_layer(stored.headers), str(directory))
    family = family_of(skeleton)
    notes: list[str] = []
    packed = choose_attention(model, family, config.attention, notes)
    return Blueprint(
        model,
        skeleton,
        raw_config,
        family,
        tokenizer,
        StoredSource(stored, incoming.conversions, {}),
        buffers,
        incoming.used,
        directory,
        packed,
        tuple(notes),
    )
