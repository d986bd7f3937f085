"""Start a run: check that its paths exist, so that a misspelt one is reported within a second, then start the ranks.

Only the existence of paths is checked here; the ranks read what the files contain.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from holdfast import registry
from holdfast.config.base import Section
from holdfast.config.load import LoadedConfig
from holdfast.config.sections.data import SourceConfig
from holdfast.config.sections.metrics import UserTrackerConfig
from holdfast.config.sections.reward import ModelRewardConfig, UserRewardConfig
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.roots import ROOTS, engine_of
from holdfast.config.verbs.training import TrainingConfig, as_plain
from holdfast.config.versions import check_versions
from holdfast.data.rows.arrow_rows import is_saved_dataset
from holdfast.data.rows.files import files_of_split, find_files, split_off
from holdfast.errors import RunStopped
from holdfast.files import python_module
from holdfast.launch.environment import is_first_rank, resolve_ranks, srun_task, under_torchrun
from holdfast.launch.fewer import fewer_ranks
from holdfast.launch.local import launch_local
from holdfast.launch.rank import exit_in_time, work
from holdfast.models.files.places import local_directory
from holdfast.training.directory import count_starts, is_run, run_directory
from holdfast.training.observe import find_script


def start(verb: str, loaded: LoadedConfig[TrainingConfig]) -> int:
    """Start the ranks of a run and return the exit code; under torchrun, run this process's rank.

    A task of `srun` becomes one rank, or torchrun on its node.
    """
    check_versions()
    if not under_torchrun() and srun_task() is not None:
        registry.load(registry.SRUN)(loaded.config.launch, loaded.config.checkpoint.grace_seconds)
    if under_torchrun() and engine_of(loaded.config) is not None:
        registry.load(registry.SERVERS_UNDER_TORCHRUN)(loaded.config)
    directory = run_directory(loaded.config)
    before = count_starts(directory)
    try:
        code = work(verb, loaded.config, loaded.base) if under_torchrun() else _launch(verb, loaded)
    except KeyboardInterrupt:
        raise RunStopped("Ctrl-C: stopped before the first step. The same command starts the run.") from None
    if verb in ROOTS and is_first_rank():
        registry.load(registry.RUN_PAGE)(directory, before, stopped=code == RunStopped.exit_code)
    if under_torchrun():
        exit_in_time(code)
    return code


def _launch(verb: str, loaded: LoadedConfig[TrainingConfig]) -> int:
    ranks = resolve_ranks(loaded.config.launch)
    fewer = fewer_ranks(loaded.config, ranks)
    check_paths(verb, loaded.config, loaded.base)
    with tempfile.TemporaryDirectory(prefix="holdfast-config-") as directory:
        file = Path(directory) / "config.json"
        file.write_text(json.dumps(as_plain(loaded.config)), encoding="utf-8")
        program = python_module("holdfast.launch.rank")
        command = [*program, verb, loaded.config.verb, str(file), str(loaded.base)]
        servers = registry.load(registry.SERVERS)(loaded) if engine_of(loaded.config) is not None else nullcontext()
        with servers:
            launch, run = loaded.config.launch, run_directory(loaded.config)
            return launch_local(command, ranks, launch, run, fewer=fewer)


def check_paths(verb: str, config: TrainingConfig, base: Path) -> None:
    """Check that the rows, models and functions that a run names exist.

    Args:
        verb: For "eval", training rows are checked only where some of them are held out for it.
        config: The run's configuration.
        base: Directory of the YAML, to which paths are relative.

    Raises:
        UserError: A path does not exist, or leads to files that hold no rows.
    """
    try:
        for key, section in _sources(verb, config):
            _check_rows(section, base, key)
        for key, name in _models(config):
            if key != "model.path" or not _may_lack_its_base(config):
                local_directory(name, base, key)
    except OSError:
        return  # the ranks say what the system has against it
    if config.data.filter is not None:
        find_script(config.data.filter, base, "data.filter")
    for path in config.observers:
        find_script(path, base, "observers")
    for key, path in _own_code(config, ""):
        if path.rpartition(":")[0].endswith(".py"):
            find_script(path, base, key)


def _may_lack_its_base(config: TrainingConfig) -> bool:
    """Whether a run may start from a checkpoint without frozen weights; its ranks say which ones are missing then."""
    section = config.checkpoint
    starts = isinstance(section.resume.start, str) or section.init_from is not None or is_run(run_directory(config))
    return starts and (config.model.lora is not None or section.frozen == "skip")


def _sources(verb: str, config: TrainingConfig) -> Iterator[tuple[str, SourceConfig]]:
    """Yield the key and the section of every data source that the verb reads."""
    if verb != "eval" or config.data.validation_split > 0:
        yield from config.data.sources_by_key().items()
    yield from ((f"evaluation.sets.{name}", section) for name, section in config.evaluation.sets.items())


def _check_rows(section: SourceConfig, base: Path, key: str) -> None:
    if section.path is None:
        return
    path, split = split_off(section.path, base)
    paths = find_files(path, base, f"{key}.path")
    if paths and not is_saved_dataset(paths[0]):
        files_of_split(paths, split, path)


def _models(config: TrainingConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys and values that name model directories, which may be names of a hub."""
    model, lora = config.model, config.model.lora
    model_keys = [("model.path", model.path), ("model.tokenizer", model.tokenizer)]
    model_keys += [("model.lora.path", lora.path)] if lora is not None else []
    if isinstance(config, DistillConfig):
        for key, section in config.teachers_in_memory():
            model_keys += [(f"{key}.path", section.path), (f"{key}.tokenizer", section.tokenizer)]
    if isinstance(config, GRPOConfig):
        model_keys += [
            ("reward.path", reward.path) for reward in config.reward if isinstance(reward, ModelRewardConfig)
        ]
        model_keys += [("critic.path", config.critic.path)] if config.critic is not None else []
    yield from ((key, name) for key, name in model_keys if name is not None and not name.startswith("builtin:"))


def _own_code(section: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the key and the path of every section with `kind: path`; keys are worded as the ranks' messages are."""
    if isinstance(section, list | tuple):
        for member in section:
            yield from _own_code(member, key)
    elif isinstance(section, Section):
        if isinstance(section, UserRewardConfig):
            yield f"reward {section.label}", section.path
        elif isinstance(section, UserTrackerConfig):
            yield "metrics.sinks", section.path
        elif getattr(section, "kind", None) == "path":
            yield f"{key}.path", str(getattr(section, "path", ""))
        for name in type(section).model_fields:
            yield from _own_code(getattr(section, name), f"{key}.{name}".lstrip("."))
