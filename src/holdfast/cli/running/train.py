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
        raise ConfigError(f"{path} looks like a file for `holdfast {meant}`; for `holdfast {verb}`:\n{error}") from None


def evaluate(target: str, overrides: Sequence[str], data: str | None = None) -> int:
    """Evaluate by a run's file, or an export by what its run said, or any model on rows; return the exit code.

    Raises:
        ConfigError: A model is no export, and no rows are named; or rows are named beside a file that names some.
    """
    path = Path(target)
    if data is not None:
        if path.is_file():
            raise ConfigError(
                f"{target} is a file, which names its evaluation sets itself. Give a model's directory or hub name "
                f"with --data, or leave --data out."
            )
        return start("eval", LoadedConfig(_on_rows(target, data, overrides), Path.cwd()))
    if not path.is_dir():
        return start("eval", load_run(path, overrides))
    file = path / EXPORTED_CONFIG
    if not file.exists():
        raise ConfigError(
            f"{target} has no {EXPORTED_CONFIG}, so it is no export of Holdfast and names no rows. Evaluate it with "
            f"rows, `holdfast eval {target} --data ROWS.jsonl`, or with a run's file, `holdfast eval RUN.yaml "
            f"model.path={target}`."
        )
    here = [
        f"model.path={path.resolve()}",
        "model.config=null",
        "model.tokenizer=null",
        "model.image_processor=null",
        "model.freeze=[]",
        "model.unfreeze=[]",
        "model.lora=null",
        "model.trust_remote_code=false",  # whoever wrote the export has no say in that
    ]
    return start("eval", load_run(file, [*here, *overrides]))


def _on_rows(model: str, data: str, overrides: Sequence[str]) -> TrainingConfig:
    """Return what `holdfast init` would write for a model and rows, with all rows as the evaluation set."""
    from holdfast.cli.run_file.first_file import suggest

    tree = suggest(None, model, data, Path.cwd(), "eval").tree
    verb, section = tree.pop("verb"), tree["data"]
    section.pop("validation_split", None)
    tree["model"].pop("lora", None)  # nothing is trained
    columns = {name: section[name] for name in ("path", "columns") if name in section}
    tree["evaluation"] = {"sets": {"rows": columns}}
    return from_mapping(tree, ROOTS[verb], "the suggestion", overrides)


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
        for section in _sources(verb, config):
            _check_rows(section, base)
        for name in _models(config):
            local_directory(name, base)
    except OSError:
        return  # the ranks say what the system has against it
    if config.data.filter is not None:
        find_script(config.data.filter, base, "data.filter")
    for path in config.observers:
        find_script(path, base, "observers")
    for key, path in _own_code(config, ""):
        if path.rpartition(":")[0].endswith(".py"):
            find_script(path, base, key)


def _sources(verb: str, config: TrainingConfig) -> Iterator[SourceConfig]:
    if verb != "eval" or config.data.validation_split > 0:
        yield from config.data.all_sources()
    yield from config.evaluation.sets.values()


def _check_rows(section: SourceConfig, base: Path) -> None:
    if section.path is None:
        return
    path, split = split_off(section.path, base)
    paths = find_files(path, base)
    if paths and not is_saved_dataset(paths[0]):
        files_of_split(paths, split, path)


def _models(config: TrainingConfig) -> Iterator[str]:
    """Yield the names of model directories, which may be names of a hub."""
    model, lora = config.model, config.model.lora
    named = [model.path, model.tokenizer, None if lora is None else lora.path]
    if isinstance(config, DistillConfig) and isinstance(config.teacher, TeacherConfig):
        named += [config.teacher.path, config.teacher.tokenizer]
    if isinstance(config, GRPOConfig):
        named += [reward.path for reward in config.reward if isinstance(reward, ModelRewardConfig)]
        named += [config.critic.path] if config.critic is not None else []
    yield from (name for name in named if name is not None and not name.startswith("builtin:"))


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
