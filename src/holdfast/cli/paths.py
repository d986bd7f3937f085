"""Look for what a configuration names before the ranks are started, so that a misspelt path is told in a second.

Only paths are looked at, and nothing heavy is imported; the ranks look again, and at what the files hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast.config.sections.data import SourceConfig
from holdfast.config.verbs.distill import DistillConfig, TeacherConfig
from holdfast.config.verbs.training import TrainingConfig
from holdfast.data.rows.arrow_rows import is_saved_dataset
from holdfast.data.rows.files import files_of_split, find_files, split_off
from holdfast.models.source.places import local_directory
from holdfast.training.observe import find_script


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
    yield from (name for name in named if name is not None and not name.startswith("builtin:"))
