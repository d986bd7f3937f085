"""Which sequences beyond a model's positions are refused: of a table, or sampled and trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from holdfast.config.load import from_mapping
from holdfast.config.sections.model import ModelConfig
from holdfast.config.verbs.roots import ROOTS
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.errors import ConfigError
from holdfast.models.setup.model import blueprint
from holdfast.training.setup.model import check_positions
from tests.cli.fixtures import TINY

COUNT = 64
TABLE = {
    "model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": COUNT,
    "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
ANGLES = TINY | {"max_position_embeddings": COUNT}


@pytest.mark.parametrize(
    ("settings", "verb", "max_length", "evaluated", "outcome"),
    [
        (ANGLES, "sft", COUNT, None, ""),
        (ANGLES, "sft", COUNT + 1, None, "note"),
        (ANGLES, "sft", COUNT, 8, "note"),
        (ANGLES, "distill", COUNT, None, ""),
        (ANGLES, "distill", COUNT, 8, "note"),
        (ANGLES, "distill", COUNT + 1, None, "data.max_length"),
        (ANGLES, "distill", COUNT + 1, 8, "evaluation.completions.max_new_tokens"),
        (TABLE, "sft", COUNT, None, ""),
        (TABLE, "sft", COUNT, 8, "evaluation.completions.max_new_tokens"),
        (TABLE, "distill", COUNT, 8, "evaluation.completions.max_new_tokens"),
    ],
)
def test_a_length_beyond_the_positions_is_refused_where_it_has_none_or_is_sampled_for_training(
    settings: dict[str, Any], verb: str, max_length: int, evaluated: int | None, outcome: str
) -> None:
    live = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    section = ModelConfig(path="given", tokenizer="builtin:characters")
    origin = blueprint(section, Path(), seed=0, live=live, tokenizer=character_tokenizer())
    tree: dict[str, Any] = {
        "steps": 1,
        "model": {"path": "given"},
        "data": {"path": "rows.jsonl", "max_length": max_length, "validation_split": 0.5},
        "evaluation": {"completions": {"max_new_tokens": evaluated} if evaluated else None},
    }
    if verb == "distill":
        tree |= {"teacher": {"path": "t"}, "rollout": {"share": 0.5, "max_new_tokens": 8}}
    config = from_mapping(tree, ROOTS[verb])

    try:
        said = check_positions(config, origin).partition(":")[0]
    except ConfigError as error:
        said = str(error).partition(" ")[0]

    assert said == outcome
