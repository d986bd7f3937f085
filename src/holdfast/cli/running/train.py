"""Start a run: check its configuration and its paths here, so that a misspelt one is told in a second; then train in
ranks of their own. Of paths only their being there is looked at; the ranks look again, and at what the files hold.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast.cli.running.worker import work
from holdfast.config.base import Section
from holdfast.config.load import EXPORTED_CONFIG, LoadedConfig, from_mapping, load_config
from holdfast.config.sections.data import SourceConfig
from holdfast.config.sections.metrics import UserTrackerConfig
from holdfast.config.sections.reward import ModelRewardConfig, UserRewardConfig
from holdfast.config.verbs.distill import DistillConfig, TeacherConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.roots import ROOTS, load_run, verb_of
from holdfast.config.verbs.training import TrainingConfig, as_plain
from holdfast.config.yaml12 import parse_file
from holdfast.data.rows.arrow_rows import is_saved_dataset
from holdfast.data.rows.files import files_of_split, find_files, split_off
from holdfast.errors import ConfigError, RunStopped
from holdfast.features.cluster.slurm import become_launcher, become_rank, check_interfaces, current_step
from holdfast.features.report.run_page import starts, write_at_end
from holdfast.features.vllm.serving import beside, refuse_starting
from holdfast.launch.environment import is_first_rank, resolve_ranks, under_torchrun
from holdfast.launch.local import launch_local
from holdfast.models.files.places import local_directory
from holdfast.training.directory import run_directory
from holdfast.training.observe import find_script


def train(
    verb: str, path: Path | None, overrides: Sequence[str], model: str | None = None, data: str | None = None
) -> int:
    """Run a verb, on a file or on what `holdfast init` would write for a model and rows; return its exit code.

    Raises:
        ConfigError: There is neither, or both.
    """
    if model is None and data is None and path is not None:
        return start(verb, _load(verb, path, overrides))
    # Without a file the first override stands in its place.
    values = [*([] if path is None else [str(path)]), *overrides]
    if model is None or data is None or any("=" not in value for value in values):
        raise ConfigError(
            f"`holdfast {verb}` takes a file, `holdfast {verb} RUN.yaml`, or a model and rows instead of one: "
            f"`holdfast {verb} --model MODEL --data ROWS.jsonl steps=100`."
        )
    from holdfast.cli.run_file.first_file import suggest

    tree = suggest(verb, model, data, Path.cwd(), verb).tree
    del tree["verb"]
    return start(verb, LoadedConfig(from_mapping(tree, ROOTS[verb], "the suggestion", values), Path.cwd()))


def _load(verb: str, path: Path, overrides: Sequence[str]) -> LoadedConfig[TrainingConfig]:
    """Read a verb's file; where it is wrong for this verb and looks like another's, say so first.

    Raises:
        ConfigError: As `load`.
    """
    try:
        return load_config(path, overrides, ROOTS[verb])
    except ConfigError as error:
        try:
            meant = verb_of(parse_file(path).values)
        except ConfigError:
            raise error from None
        if meant == verb:
            raise
        raise ConfigError(
            f"{path} looks like a file for `holdfast {meant}`: `holdfast {meant} {path}` starts it. For `holdfast "
            f"{verb}`:\n{error}"
        ) from None


def train_from(verb: str, target: Path, overrides: Sequence[str]) -> int:
    """Run a verb on a run's file or on an exported model."""
    if not target.exists() and target.suffix not in {".yaml", ".yml", ".json"}:
        local_directory(str(target), Path.cwd())  # says whose export it would be
    if not target.is_dir():
        loaded = load_run(target, overrides)
        return start(verb, loaded)
    path = target / EXPORTED_CONFIG
    if not path.exists():
        raise ConfigError(
            f"{target} has no {EXPORTED_CONFIG}, so it is no export of Holdfast. Evaluate it with a run's file: "
            f"`holdfast eval RUN.yaml model.path={target}`."
        )
    here = [
        f"model.path={target.resolve()}",
        "model.config=null",
        "model.tokenizer=null",
        "model.image_processor=null",
        "model.freeze=[]",
        "model.unfreeze=[]",
        "model.lora=null",
        "model.trust_remote_code=false",  # whoever wrote the export has no say in that
    ]
    loaded = load_run(path, [*here, *overrides])
    return start(verb, loaded)


def start(verb: str, loaded: LoadedConfig[TrainingConfig]) -> int:
    """Start the ranks, or be one of them under torchrun; a task of `srun` is one rank, or torchrun on its node."""
    step = None if under_torchrun() else current_step()
    if step is not None:
        check_interfaces()
        if step.role(loaded.config.launch) == "launcher":
            become_launcher(step, loaded.config.launch, loaded.config.checkpoint.grace_seconds)
        become_rank(step)
    if under_torchrun():
        refuse_starting(loaded.config)
    directory = run_directory(loaded.config)
    before = starts(directory)
    code = work(verb, loaded.config, loaded.base) if under_torchrun() else _launch(verb, loaded)
    if verb in ROOTS and is_first_rank():
        write_at_end(directory, before, stopped=code == RunStopped.exit_code)
    return code


def _launch(verb: str, loaded: LoadedConfig[TrainingConfig]) -> int:
    check_paths(verb, loaded.config, loaded.base)
    with tempfile.TemporaryDirectory(prefix="holdfast-config-") as directory:
        file = Path(directory) / "config.json"
        file.write_text(json.dumps(as_plain(loaded.config)), encoding="utf-8")
        command = [sys.executable, "-m", "holdfast.cli.running.worker", verb, str(file), str(loaded.base)]
        ranks = resolve_ranks(loaded.config.launch)
        with beside(loaded):
            return launch_local(command, ranks, loaded.config.launch, run_directory(loaded.config))


def check_paths(verb: str, config: TrainingConfig, base: Path) -> None:
    """Refuse a run whose rows, models or functions are not where it says.

    Args:
        verb: An evaluation reads no training rows, unless some of them are held out for it.
        config: Of the run.
        base: The YAML's directory.

    Raises:
        UserError: A path leads nowhere, or to files that hold no rows.
    """
    try:
        for key, section in _sources(verb, config):
            _check_rows(section, base, key)
        for key, name in _models(config):
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


def _sources(verb: str, config: TrainingConfig) -> Iterator[tuple[str, SourceConfig]]:
    """Yield the key and the section of every source that is read."""
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
    named = [("model.path", model.path), ("model.tokenizer", model.tokenizer)]
    named += [("model.lora.path", lora.path)] if lora is not None else []
    if isinstance(config, DistillConfig) and isinstance(config.teacher, TeacherConfig):
        named += [("teacher.path", config.teacher.path), ("teacher.tokenizer", config.teacher.tokenizer)]
    if isinstance(config, GRPOConfig):
        named += [("reward.path", reward.path) for reward in config.reward if isinstance(reward, ModelRewardConfig)]
        named += [("critic.path", config.critic.path)] if config.critic is not None else []
    yield from ((key, name) for key, name in named if name is not None and not name.startswith("builtin:"))


def _own_code(section: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the key, as messages of the ranks have it, and the path of every `kind: path` of a configuration."""
    if isinstance(section, list | tuple):
        for each in section:
            yield from _own_code(each, key)
    elif isinstance(section, Section):
        if isinstance(section, UserRewardConfig):
            yield f"reward {section.label}", section.path
        elif isinstance(section, UserTrackerConfig):
            yield "metrics.sinks", section.path
        elif getattr(section, "kind", None) == "path":
            yield f"{key}.path", str(getattr(section, "path", ""))
        for name in type(section).model_fields:
            yield from _own_code(getattr(section, name), f"{key}.{name}".lstrip("."))
