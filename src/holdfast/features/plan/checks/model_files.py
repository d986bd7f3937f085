"""The checks of `holdfast doctor` on weights: file headers are compared with sizes, index and configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast.config.sections.reward import ModelRewardConfig
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import TrainingConfig
from holdfast.features.plan.checks.findings import Finding, ok, unknown
from holdfast.files import size_words
from holdfast.models.adapters.files import WEIGHTS
from holdfast.models.files.places import local_directory
from holdfast.models.files.safetensors_files import StoredTensors, read_header, tensor_bytes
from holdfast.models.setup.model import blueprint

MODEL = "model"


def look_at_weights(config: TrainingConfig, base: Path, *, runs_code: bool) -> Iterator[Finding]:
    """Read the headers of every model's files as a run does before it reads a tensor.

    Args:
        config: Of the run.
        base: The directory of its YAML.
        runs_code: Whether code that comes with the model may build it, to compare names and shapes.

    Raises:
        ModelError: What the run itself would raise.
    """
    section = config.model
    if section.path is None:
        blueprint(section, base, seed=config.seed, scorer=config.scores)
        yield ok(MODEL, "model.config can be built, and its weights are drawn: there are no files")
    else:
        yield _looked("model.path", section.path, base)
        fits = local_directory(section.path, base) is not None and (runs_code or not section.trust_remote_code)
        if fits:
            blueprint(section, base, seed=config.seed, scorer=config.scores)
            yield ok(MODEL, "model.path: names and shapes of its tensors are those of its configuration")
    if section.lora is not None and section.lora.path is not None:
        yield _looked("model.lora.path", section.lora.path, base, adapters=True)
    for key, path in _others(config):
        yield _looked(key, path, base)


def _others(config: TrainingConfig) -> Iterator[tuple[str, str]]:
    """Yield key and path of every model that a run reads besides its own."""
    if isinstance(config, DistillConfig):
        yield from ((f"{key}.path", section.path) for key, section in config.teachers_in_memory())
    if isinstance(config, GRPOConfig):
        if config.critic is not None and config.critic.path is not None:
            yield "critic.path", config.critic.path
        for number, reward in enumerate(config.reward):
            if isinstance(reward, ModelRewardConfig):
                yield f"reward[{number}].path", reward.path


def _looked(key: str, path: str, base: Path, *, adapters: bool = False) -> Finding:
    directory = local_directory(path, base)
    if directory is None:
        return unknown(MODEL, f"{key}: {path} is a name on a hub, and its weights are not looked at here")
    headers = read_header(directory / WEIGHTS) if adapters else StoredTensors(directory).headers
    size = size_words(sum(map(tensor_bytes, headers.values())))
    return ok(MODEL, f"{key}: {len(headers)} tensors, {size}, by headers that fit the sizes of the files")
