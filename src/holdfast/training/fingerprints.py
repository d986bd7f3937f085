"""Fingerprints of what a checkpoint depends on without containing it: rows, user files, tokenizer, reward models.

They are compared at a resume. A run that continues with other rows or another loss is a different run, and this must be
declared.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from holdfast.checkpoint.place.hashing import hash_bytes, hash_file
from holdfast.config.base import Section
from holdfast.config.public import HASHED, public_configuration, public_section
from holdfast.config.sections.advantage import UserAdvantageConfig
from holdfast.config.sections.algorithm import UserObjectiveConfig
from holdfast.config.sections.environment import AgentConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.optim import UserOptimizerConfig
from holdfast.config.sections.preference import UserLossConfig
from holdfast.config.sections.reference import sync_of
from holdfast.config.sections.reward import MathConfig, ModelRewardConfig, UserRewardConfig
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import SFTConfig, TrainingConfig
from holdfast.data.batches.stream import BatchStream
from holdfast.data.content.image_files import ImageFiles, images_fingerprint
from holdfast.data.tokens.chat_template import template_text
from holdfast.errors import ModelError
from holdfast.files import read_bytes
from holdfast.models.files.origin import files_fingerprint, locate, remember_fingerprint
from holdfast.models.files.vision import VIDEO_FILE
from holdfast.models.setup.model import Blueprint
from holdfast.parallel.collectives import RankGroup
from holdfast.rewards.functions.mathematics import MATH_RULES
from holdfast.training.run import ConfiguredRun, Identity, Run

_ORDER = ("shuffle", "shuffle_buffer", "validation_split", "packing", "filter")
_TEXT = ("system", "template_kwargs", "train_on", "train_on_prompt", "append_eos", "max_length", "overlong")
_OF_POLICIES = ("reward", "rewards", "advantage", "groups", "kl", "entropy", "correction", "off_policy_mask", "updates")
_SAMPLED_BY = {
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "group_size", "seed",
}  # fmt: skip
_IMAGES = "images of source "
IMAGE_RULES = "rules for images"
_NOT_THE_MODEL = {"transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache"}


def identity(
    setting: ConfiguredRun,
    stream: BatchStream[Any, Any],
    origin: Blueprint,
    marks: Mapping[str, str],
    image_rules: Mapping[str, Any] = MappingProxyType({}),
) -> Identity:
    """Return hashes of everything a resumed run must find unchanged.

    Args:
        setting: Of the run.
        stream: The training rows.
        origin: The model and its tokenizer.
        marks: Of images, as `image_fingerprints` returns them.
        image_rules: What the model's processor was found to make of images.
    """
    config = setting.config
    data = {f"rows of source {index}": mark for index, mark in enumerate(stream.fingerprint)}
    data |= marks
    rows = public_section(type(config.data), config.data.model_dump(mode="json", include={*_ORDER, *_TEXT}), HASHED)
    data |= {f"data.{name}": json.dumps(rows[name], sort_keys=True) for name in (*_ORDER, *_TEXT)}
    data["data.on_bad_row"] = config.data.on_bad_row
    data["data.seed"] = str(config.seed if config.data.seed is None else config.data.seed)
    data["data.rows"] = json.dumps([source.rows for source in config.data.all_sources()])
    data["data.sources weights"] = json.dumps([source.weight for source in config.data.all_sources()])
    model = origin.original_config.to_dict()
    model = {name: model[name] for name in sorted(model) if name not in _NOT_THE_MODEL}
    if config.model.lora is not None:
        model["model.lora"] = _text(config.model.lora)
    if _starts_from_files(config):
        model["model.path"] = weights_fingerprint(origin, config.seed)
    if _has_reference(config) and (mark := adapter_fingerprint(setting)):
        model["model.lora.path"] = mark
    rules = {IMAGE_RULES: json.dumps(dict(image_rules), sort_keys=True)} if image_rules else {}
    return {
        "data": data,
        "files": user_files(setting) | reward_model_hashes(setting),
        "tokenizer": {"tokenizer": tokenizer_hash(origin.tokenizer)} | _image_settings(config, origin) | rules,
        "model": {name: json.dumps(value, sort_keys=True, default=str) for name, value in model.items()}
        | {"model.dropout": str(config.model.dropout)},
        "objective": _loss(config),
    }


def _text(section: Section, **options: Any) -> str:
    """Return a section in JSON, with hashes in the place of what could be secret."""
    text = section.model_dump_json(**options)
    values = json.loads(text)
    public = public_section(type(section), values, HASHED)
    return text if public == values else json.dumps(public, sort_keys=True)


def _starts_from_files(config: TrainingConfig) -> bool:
    """Whether every start of the run reads the weights it began with: those of a reference, or frozen ones."""
    lora = config.model.lora
    packed = lora is not None and lora.quantize is not None
    return packed or config.checkpoint.frozen == "skip" or _has_reference(config)


def _image_settings(config: TrainingConfig, origin: Blueprint) -> dict[str, str]:
    """Return what decides how images become tokens."""
    if origin.image_processor is None:
        return {}
    settings = {key: value for key, value in origin.image_processor.to_dict().items() if not key.startswith("_")}
    bounds: dict[str, Any] = {"data.min_pixels": config.data.min_pixels, "data.max_pixels": config.data.max_pixels}
    videos = ("video_fps", "video_min_pixels", "video_max_pixels", "max_frames")
    bounds |= {f"data.{key}": getattr(config.data, key) for key in videos}
    file = None if origin.directory is None else origin.directory / VIDEO_FILE
    if file is not None and file.exists():
        bounds["video processor"] = hash_file(file)
    text = json.dumps(settings, sort_keys=True, default=str)
    return {"image processor": hash_bytes(text.encode())} | {key: str(value) for key, value in bounds.items()}


def image_fingerprints(setting: ConfiguredRun, stream: BatchStream[Any, Any], origin: Blueprint) -> dict[str, str]:
    """Return marks of the images that rows hold or name, for a model that sees them; reads files."""
    if origin.image_processor is None:
        return {}
    files = ImageFiles(setting.config.data.image_dir, setting.base)
    marks = {f"{_IMAGES}{index}": images_fingerprint(source, files) for index, source in enumerate(stream.sources)}
    return {key: mark for key, mark in marks.items() if mark is not None}


def _loss(config: TrainingConfig) -> dict[str, str]:
    """Return what the loss is made of."""
    loss: dict[str, str] = {"data.average": config.data.average}
    if isinstance(config, SFTConfig | GRPOConfig):
        loss["objective"] = _text(config.objective)
    if isinstance(config, SFTConfig) and config.neftune_alpha is not None:
        loss["neftune_alpha"] = str(config.neftune_alpha)
    if isinstance(config, DPOConfig):
        loss |= {"preference": _text(config.preference), "data.unusable": config.data.unusable}
    if isinstance(config, DPOConfig | GRPOConfig):
        sync = sync_of(config.reference)
        loss["reference.sync"] = "null" if sync is None else _text(sync)
    return loss | (_loss_of_policy(config) if isinstance(config, GRPOConfig) else {})


def _loss_of_policy(config: GRPOConfig) -> dict[str, str]:
    # Neither moves a number.
    moved: dict[str, Any] = {"rewards": {"step_timeout_seconds"}, "reward": {"__all__": {"place"}}}
    tree = public_configuration(config.model_dump(mode="json", exclude=moved), HASHED)
    loss = {name: json.dumps(tree[name], sort_keys=True) for name in _OF_POLICIES}
    loss["data.max_prompt_length"] = str(config.data.max_prompt_length)
    loss["rollout"] = _text(config.rollout, include=_SAMPLED_BY)
    loss["rollout.seed"] = str(config.seed if config.rollout.seed is None else config.rollout.seed)
    if any(isinstance(reward, MathConfig) for reward in config.reward):
        loss["rules of kind math"] = MATH_RULES
    if config.environment is not None:
        # How many live at a time moves no number, as above; the other keys tell the kind.
        loss["environment"] = _text(config.environment, exclude={"instances", "kind"})
    if config.critic is not None:
        loss["critic"] = _text(config.critic, include={"value_clip", "warmup_steps"})
    return loss


def _has_reference(config: TrainingConfig) -> bool:
    match config:
        case GRPOConfig():
            return config.kl.coefficient > 0
        case DPOConfig():
            return config.preference.needs_reference
        case _:
            return False


def weights_fingerprint(origin: Blueprint, seed: int) -> str:
    """Return a fingerprint of the weights in a model's directory.

    A reference policy, and parameters that checkpoints leave out, are loaded from there at every start: with other
    weights it is another run.
    """
    if origin.directory is None:
        return f"random start of seed {seed}"
    return files_fingerprint(origin.directory)


def adapter_fingerprint(setting: ConfiguredRun) -> str:
    """Return what tells the adapter that a policy starts from, and its reference is, from others; "" without one."""
    section = setting.config.model
    if section.lora is None or section.lora.path is None:
        return ""
    files = sorted(locate(section.lora.path, section, setting.base, weights=True).glob("*.safetensors"))
    return hash_bytes("\n".join(hash_file(file) for file in files).encode())


def user_files(setting: ConfiguredRun) -> dict[str, str]:
    """Return the hashes of the user's files, of what they import from beside them, and of a template in place."""
    hashes: dict[str, str] = {}
    for key, name in _code_files(setting.config):
        hashes |= _code_hashes(key, name, setting)
    hashes |= filter_hashes(setting)
    for key in ("data.format", "data.chat_template"):
        value = getattr(setting.config.data, key.removeprefix("data."))
        if value:
            text = template_text(value, setting.base, key)
            hashes[f"{key} {'written in place' if text == value else value}"] = hash_bytes(text.encode())
    return hashes


def filter_hashes(setting: ConfiguredRun) -> dict[str, str]:
    """Return the hashes of the file that says which rows are taken, and of what it imports from beside it."""
    name = setting.config.data.filter
    return {} if name is None else _code_hashes("data.filter", name, setting)


def _code_hashes(key: str, name: str, setting: ConfiguredRun) -> dict[str, str]:
    """Return the hashes of the file that a key's value FILE:NAME lies in, and of what it imports from beside it."""
    file = name.rpartition(":")[0]
    source_file = next((path for path in (setting.base / file, Path(file)) if path.is_file()), None)
    if source_file is None:  # a module: the user's own if it lies beside the YAML, else that of an installed package
        modules = [] if file.endswith(".py") else [*_modules(setting.base, file)]
        return {f"{key} {file}{IMPORTS}{module.relative_to(setting.base)}": hash_file(module) for module in modules}
    return {f"{key} {file}": hash_file(source_file)} | helper_hashes(f"{key} {file}", source_file)


def _code_files(config: TrainingConfig) -> list[tuple[str, str]]:
    """Return the keys that name code of the user's, but for the filter of rows, with what they name."""
    paths: list[tuple[str, str]] = [("observers", path) for path in config.observers]
    if isinstance(config, SFTConfig | GRPOConfig) and isinstance(config.objective, UserObjectiveConfig):
        paths.append(("objective.path", config.objective.path))
    if isinstance(config, DPOConfig):
        paths += [("preference.loss", loss.path) for loss in config.preference.loss if isinstance(loss, UserLossConfig)]
    if isinstance(config, GRPOConfig):
        if isinstance(config.advantage, UserAdvantageConfig):
            paths.append(("advantage.path", config.advantage.path))
        paths += _environment_files(config)
        paths += [("reward", reward.path) for reward in config.reward if isinstance(reward, UserRewardConfig)]
    if isinstance(config.optim, UserOptimizerConfig):
        paths.append(("optim.path", config.optim.path))
    return paths


def _environment_files(config: GRPOConfig) -> list[tuple[str, str]]:
    if config.environment is None:
        return []
    section = config.environment
    if isinstance(section, AgentConfig):
        return [] if section.run is None else [("environment.run", section.run)]
    named = [("path", section.path), ("action", section.action), *(("tools", tool) for tool in section.tools)]
    return [(f"environment.{key}", path) for key, path in named if path is not None]


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the hash of a tokenizer's words, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    template = json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True)
    special = json.dumps({key: str(value) for key, value in tokenizer.special_tokens_map.items()}, sort_keys=True)
    return hash_bytes("\n".join((vocabulary, template, special)).encode())


def fingerprint_once(directory: Path | None, ranks: RankGroup) -> None:
    """Have `files_fingerprint` answer at once on every rank; all ranks call this together."""
    if directory is None:
        return
    mark = ranks.on_first_rank(lambda: files_fingerprint(directory))
    if ranks.rank:
        remember_fingerprint(directory, mark)


def fingerprint_base_of_adapters(run: Run) -> None:
    """Mark the weights that adapters of a file will be laid beside, before every rank compares their marks.

    Raises:
        ModelError: There is no such model.
    """
    section, ranks = run.config.model, run.ranks
    if section.path is None or section.lora is None or section.lora.path is None or section.lora.any_base:
        return
    name = section.path
    fingerprint_once(ranks.first_rank_first(lambda: locate(name, section, run.base, weights=True)), ranks)


def mark_reward_models(run: Run) -> None:
    """Mark the models that score; all ranks call this together."""
    for directory in run.ranks.on_all_ranks(lambda: reward_models(run)).values():
        fingerprint_once(directory, run.ranks)


def is_fingerprinted(config: TrainingConfig) -> bool:
    """Return whether checkpoints or exports of a run keep the mark of the weights it began with."""
    compares = isinstance(config, DPOConfig) or (isinstance(config, GRPOConfig) and config.kl.coefficient > 0)
    return config.model.lora is not None or config.checkpoint.frozen == "skip" or compares


IMPORTS, REWARD_MODEL = " imports ", "reward model "
_TEXTS = {".json", ".jinja", ".model", ".txt", ".bin"}
"""What a model directory holds beside safetensors: its configuration, its tokenizer, weights of the old format."""


def helper_hashes(prefix: str, file: Path) -> dict[str, str]:
    """Return the hashes of the modules in a file's folder that it imports, and that these import.

    Read from the import statements, wherever they stand. What is imported by other means is not seen.
    """
    root = file.resolve().parent
    modules: dict[Path, None] = {file.resolve(): None}
    waiting = [*modules]
    while waiting:
        new = [module for module in _imported(waiting.pop(), root) if module not in modules]
        modules |= dict.fromkeys(new)
        waiting += new
    helpers = [*modules][1:]
    return {f"{prefix}{IMPORTS}{helper.relative_to(root)}": hash_file(helper) for helper in helpers}


def _imported(file: Path, root: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(read_bytes(file))
    except (SyntaxError, ValueError):
        return  # whoever imports it says so
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for name in names:
                    yield from _modules(root, name.name)
            case ast.ImportFrom(module=module, names=names, level=level):
                folder = file.parents[level - 1] if 0 < level <= len(file.parents) else root
                for name in names:
                    dotted = f"{module}.{name.name}" if module else name.name
                    yield from (path for path in _modules(folder, dotted) if path.is_relative_to(root))


def _modules(folder: Path, dotted: str) -> Iterator[Path]:
    """Yield the files behind a dotted name: its packages, and its module."""
    for component in dotted.split("."):
        yield from (path for path in (folder / f"{component}.py", folder / component / "__init__.py") if path.is_file())
        folder /= component


def reward_models(setting: ConfiguredRun) -> dict[str, Path]:
    """Return the directories of the models that score, by the names they have in the configuration."""
    directories = {}
    for section in getattr(setting.config, "reward", ()):
        if isinstance(section, ModelRewardConfig):
            try:
                directories[section.path] = locate(
                    section.path, ModelConfig(path=section.path), setting.base, weights=True
                )
            except ModelError:
                continue  # a run that scores has refused it; a replay does without
    return directories


def reward_model_hashes(setting: ConfiguredRun) -> dict[str, str]:
    """Return what tells the models that score from others: their weights, and the files that say how they read text."""
    hashes = {}
    for name, directory in reward_models(setting).items():
        texts = sorted(file for file in directory.iterdir() if file.suffix in _TEXTS and file.is_file())
        lines = "\n".join(f"{file.name} {hash_file(file)}" for file in texts)
        hashes[f"{REWARD_MODEL}{name} weights"] = files_fingerprint(directory)
        hashes[f"{REWARD_MODEL}{name} configuration and tokenizer"] = hash_bytes(lines.encode())
    return hashes
