"""What rank pools run for whole runs: fit, and look at what it left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.parallel.mesh import World
from holdfast.recipes.evaluation import evaluate_run
from holdfast.recipes.sft import sft


def tree(directory: str, **sections: Any) -> dict[str, Any]:
    """Return a run on generated rows with a random start; sections are merged over the defaults."""
    values: dict[str, Any] = {
        "steps": 4,
        "run": {"dir": directory, "name": "r"},
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": 64,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "tie_word_embeddings": True,
            },
            "tokenizer": "builtin:characters",
        },
        "data": {"synthetic": {"task": "sort", "rows": 200}, "batch_size": 16, "max_length": 32},
        "optim": {"lr": 2e-3, "schedule": "constant"},
        "checkpoint": {"rehearsal": False},
        "metrics": {"progress": "off"},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section if isinstance(section, dict) else section
    return values


def run(world: World, values: dict[str, Any], base: str = ".") -> Any:
    """Run SFT and return its outcome."""
    return sft(from_mapping(values, SFTConfig), Path(base), world)


def evaluate(world: World, values: dict[str, Any]) -> Any:
    """Evaluate and return the metrics."""
    return evaluate_run(from_mapping(values, SFTConfig), Path(), world)
