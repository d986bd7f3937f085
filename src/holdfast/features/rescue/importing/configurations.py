"""Compares the model configuration in another system's checkpoint with that of the run which will continue it.

Names and shapes do not show every difference: with another rms_norm_eps or rope_theta all weights fit and the model is
another one. The same is true of an adapter's scale.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.errors import CheckpointMismatch
from holdfast.config.sections.model import LoRAConfig, ModelConfig
from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import ConfigError, ModelError
from holdfast.features.rescue.reading.record import ForeignCheckpoint
from holdfast.files import read_json
from holdfast.models.setup.model import configured
from holdfast.text.shortening import shortened
from holdfast.training.run import Training

_MEANS_NOTHING = re.compile(
    r"(^|\.)(_.*|transformers_version|(torch_)?dtype|architectures|use_cache|\w+_token_id|initializer_range|output_\w+"
    r"|return_dict|problem_type|(id2label|label2id|num_labels|auto_map|task_specific_params)(\..*)?|tokenizer_class"
    r"|chunk_size_feed_forward|max_position_embeddings|\w*(dropout|pdrop|drop_path_rate)|router_aux_loss_coef)$"
)
"""Keys that change no number of a forward pass, and those of training alone, which a run sets for itself."""
_MOST = 4
"""Differences that are named."""
_ADAPTERS = "adapter_config.json"


def compare_configurations(checkpoint: ForeignCheckpoint, training: Training) -> list[str]:
    """Compare configurations, and of adapters their scale; return what cannot be compared and matters.

    Raises:
        CheckpointMismatch: The run would compute something else with these weights.
    """
    lora = training.run.config.model.lora
    notes = [] if lora is None else _compare_adapters(checkpoint, lora)
    if checkpoint.model_files is None:
        return notes
    try:
        source_config, _ = configured(ModelConfig(path=str(checkpoint.model_files)), checkpoint.model_files)
    except (ModelError, OSError, RuntimeError, ValueError):
        return notes  # a finding says so already
    differing = list(_differences(source_config.to_dict(), training.model.blueprint.original_config.to_dict()))
    if differing:
        more = f"; and {len(differing) - _MOST} more" if len(differing) > _MOST else ""
        raise CheckpointMismatch(
            f"{checkpoint.model_files}/config.json is of another model than model.path: "
            f"{'; '.join(differing[:_MOST])}{more}. Its weights would fit and compute something else. Name the model "
            "that it was trained from, or mend the configuration that is wrong. Nothing was written."
        )
    return notes


def refuse_without_weights(checkpoint: ForeignCheckpoint, config: TrainingConfig, base: Path) -> None:
    """Refuse a run whose model is the folder beside the checkpoint that has configuration and tokenizer alone.

    Raises:
        ConfigError: It is.
    """
    folder = checkpoint.model_files
    named = [] if folder is None or config.model.path is None else [Path(config.model.path), base / config.model.path]
    if folder is None or any(folder.glob("*.safetensors")):
        return
    if any(path.is_dir() and path.samefile(folder) for path in named):
        raise ConfigError(
            f"model.path: {folder} has configuration and tokenizer, and no weights: {checkpoint.system} keeps these in "
            f"the ranks' files. Make a model of them, and name it in model.path:\n  holdfast checkpoint import "
            f"{checkpoint.path} --export OUT\nNothing was written."
        )


def _differences(foreign: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield keys that both have, and that differ."""
    for key in sorted(foreign.keys() & ours.keys(), key=str):
        name, foreign_value, our_value = f"{prefix}{key}", foreign[key], ours[key]
        if _MEANS_NOTHING.search(name) or foreign_value == our_value:
            continue
        if isinstance(foreign_value, Mapping) and isinstance(our_value, Mapping):
            yield from _differences(foreign_value, our_value, f"{name}.")
        else:
            yield f"{name} is {shortened(repr(foreign_value), 60)} there and {shortened(repr(our_value), 60)} here"


def _compare_adapters(checkpoint: ForeignCheckpoint, lora: LoRAConfig) -> list[str]:
    if not any(".lora_A." in name for name in checkpoint.weights):
        return []
    settings = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rank_stabilised}
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    file = folder / _ADAPTERS
    try:
        stored = read_json(file) if file.is_file() and not file.is_symlink() else None
    except (OSError, ValueError):
        stored = None
    if not isinstance(stored, dict):
        return [
            f"no {_ADAPTERS} states the scale of its adapters: model.lora.alpha of this run, {lora.alpha:g}, must be it"
        ]
    differing = [
        f"{key} is {shortened(repr(stored[key]), 60)} there and {value!r} here"
        for key, value in settings.items()
        if key in stored and stored[key] != value
    ]
    if differing:
        raise CheckpointMismatch(
            f"{file} is of other adapters than model.lora: {'; '.join(differing)}. Set model.lora as it was there. "
            "Nothing was written."
        )
    return []
