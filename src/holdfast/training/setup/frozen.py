"""Settle what the configuration leaves to a default about frozen parameters, before a model is built.

A run that starts from a checkpoint keeps what that recorded: their dtype, and whether checkpoints hold them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from holdfast.checkpoint.errors import CheckpointCorrupt, NoCheckpoint
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.snapshot import TRAINED
from holdfast.checkpoint.format.verification import patiently, read_manifest
from holdfast.checkpoint.keep.find import one
from holdfast.checkpoint.keep.retention import steps
from holdfast.checkpoint.loading.base import located_base, recorded_base
from holdfast.checkpoint.place.storage import Storage, open_storage
from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import ConfigError, ModelError, UserError
from holdfast.models.files.places import local_directory
from holdfast.training.directory import checkpoint_place, is_run
from holdfast.training.run import ConfiguredRun, Run
from holdfast.training.saving.resume import saved_settings_of

Frozen = Literal["save", "skip"]


@dataclass(frozen=True)
class Recorded:
    """The checkpoint that a run starts from, and what it says of frozen parameters."""

    path: str
    manifest: Manifest
    frozen_dtype: str
    is_own: bool
    """Whether the run that starts has written it."""

    @property
    def frozen(self) -> Frozen:
        """Return whether its frozen parameters were saved."""
        return "skip" if TRAINED in self.manifest.contents else "save"


class Choices(NamedTuple):
    """What stands for the defaults, and what to say of it."""

    frozen_dtype: str
    frozen: str
    lines: tuple[str, ...]


def settle_frozen(run: Run, *, live: bool, trains: bool = True) -> None:
    """Put values in the place of defaults that depend on the device or on a checkpoint; all ranks call this together.

    Args:
        run: Of the run; its configuration is replaced.
        live: Whether the model is an object in memory.
        trains: Whether the run continues from its checkpoint.

    Raises:
        CheckpointUnreadable: The checkpoint that the run starts from cannot be read.
        CheckpointMismatch: It leaves out frozen weights, and they are not where the model comes from.
    """
    config = run.config
    if config.model.lora is None and config.checkpoint.frozen != "skip":
        run.config = _with(config, _choices(run, run.world.device.type, None, live=live))
        return

    def choose() -> Choices:
        start = recorded(run)
        if start is not None and trains and not live:
            _refuse_other_base(run, start)
        return _choices(run, run.world.device.type, start, live=live)

    choices = run.ranks.on_first_rank(choose)
    run.config = _with(config, choices)
    if run.world.is_first:
        for line in choices.lines:
            print(line, flush=True)


def settled_for_plan(run: ConfiguredRun, device: str) -> tuple[TrainingConfig, list[str]]:
    """Return the configuration as a run on such a device would settle it, and what to say of it.

    Args:
        run: The configuration, and where its paths begin.
        device: Its type, "cuda" or "cpu".
    """
    start = None
    if run.config.model.lora is not None:
        with suppress(UserError):  # a plan is also made where the checkpoints cannot be read
            start = recorded(run)
    choices = _choices(run, device, start, live=False)
    return _with(run.config, choices), list(choices.lines)


def _with(config: TrainingConfig, choices: Choices) -> TrainingConfig:
    model = config.model.model_copy(update={"frozen_dtype": choices.frozen_dtype})
    checkpoint = config.checkpoint.model_copy(update={"frozen": choices.frozen})
    return config.model_copy(update={"model": model, "checkpoint": checkpoint})


def _choices(run: ConfiguredRun, device: str, start: Recorded | None, *, live: bool) -> Choices:
    dtype, of_dtype = _chosen_dtype(run, device, start)
    frozen, of_frozen = _chosen_frozen(run, start, live=live)
    return Choices(dtype, frozen, tuple(line for line in (of_dtype, of_frozen) if line))


def _chosen_dtype(run: ConfiguredRun, device: str, start: Recorded | None) -> tuple[str, str]:
    """Return the value of `model.frozen_dtype`, and a line where a default changed something."""
    section, default = run.config.model, run.config.frozen_dtype(device)
    if section.frozen_dtype != "auto":
        return section.frozen_dtype, ""
    if start is not None and start.frozen_dtype != default:
        words = f"which {start.path} was saved with; a new run would take {default}"
        return start.frozen_dtype, f"model.frozen_dtype: {start.frozen_dtype}, {words}"
    if default in {"same", section.dtype}:
        return default, ""
    words = "the default of adapters on a GPU; same would follow model.dtype"
    return default, f"model.frozen_dtype: {default}, {words}"


def _chosen_frozen(run: ConfiguredRun, start: Recorded | None, *, live: bool) -> tuple[str, str]:
    """Return the value of `checkpoint.frozen`, and a line where a default changed or kept something."""
    section = run.config.checkpoint
    if section.frozen != "auto" or live or run.config.model.lora is None:
        return ("save" if section.frozen == "auto" else section.frozen), ""
    name = run.config.model.path
    danger = "" if name is None else _why_saved(run, name)
    default = "save" if name is None or danger else "skip"
    if start is not None and start.frozen != default:
        return start.frozen, f"checkpoint.frozen: {start.frozen}, as in {start.path}; a new run would take {default}"
    if danger:
        return "save", f"checkpoint.frozen: save, since {danger}"
    words = "checkpoints leave out what a resume reads from model.path again; save would keep it"
    return default, "" if name is None else f"checkpoint.frozen: skip, {words}"


_COMMIT = re.compile(r"[0-9a-f]{40}")


def _why_saved(run: ConfiguredRun, name: str) -> str:
    """Return why the model may not be what it is at a later start; "" where nothing says so."""
    section, place = run.config.model, checkpoint_place(run.directory, run.config)
    try:
        directory = local_directory(name, run.base)
    except ModelError:  # which the run is refused with
        return f"model.path: {name} is not there"
    if directory is None:
        pinned = section.revision is not None and _COMMIT.fullmatch(section.revision)
        return "" if pinned else "model.revision is not the hash of a commit (40 hex digits)"
    directory = directory.resolve()
    if owner := next((above for above in (directory, *directory.parents) if is_run(above)), None):
        return f"model.path lies in the run {owner}, which renames and deletes its own files"
    if "://" in str(place):
        return "model.path is a local directory, and checkpoints are in an object store that outlives it"
    temporary = Path(tempfile.gettempdir()).resolve()
    if directory.is_relative_to(temporary) and not Path(place).resolve().is_relative_to(temporary):
        return f"model.path lies in {temporary}, which may be emptied, and checkpoints do not"
    return ""


def _refuse_other_base(run: ConfiguredRun, start: Recorded) -> None:
    """Refuse a start whose frozen weights would be others than those beside which its adapters were trained.

    Raises:
        CheckpointMismatch: With both hashes.
        ConfigError: A resume would read others than this start does.
    """
    declared = "model" in run.config.checkpoint.resume.changed
    is_compared = start.is_own and (declared or recorded_base(start.manifest) is not None)
    if run.config.checkpoint.frozen == "skip" and start.frozen == "save" and not is_compared:
        raise ConfigError(
            f"checkpoint.frozen: skip, but frozen weights come from {start.path}, and a resume would read those of "
            "model.path. Use checkpoint.frozen: save."
        )
    from_files = start.frozen == "skip" and recorded_base(start.manifest) is not None and run.config.model.path
    if from_files and not declared:
        advice = "in model.path. To go on beside other weights, declare it: checkpoint.resume.changed: [model]."
        located_base(start.path, start.manifest, run.config.model, run.base, advice=advice)


def recorded(run: ConfiguredRun) -> Recorded | None:
    """Return the checkpoint that a run will start from, and what it recorded; None where it starts from none.

    Raises:
        CheckpointUnreadable: It cannot be read; what it recorded is not known.
    """
    for storage, name in _candidates(run):
        with suppress(CheckpointCorrupt, NoCheckpoint):  # an older one is continued from, or the start says why not
            manifest = read_manifest(storage, name)
            settings = saved_settings_of(storage, name, manifest)
            dtype = str(settings.get("model.frozen_dtype", "same"))
            is_own = storage.root == open_storage(checkpoint_place(run.directory, run.config)).root
            return Recorded(f"{storage.root}/{name}", manifest, "same" if dtype == "auto" else dtype, is_own)
    return None


def _candidates(run: ConfiguredRun) -> Iterator[tuple[Storage, str]]:
    """Yield the checkpoints that a run may start from, the likeliest first."""
    section = run.config.checkpoint
    start, saved = section.resume.start, dict[int, str]()
    if not run.config.dry_run:
        storage = open_storage(checkpoint_place(run.directory, run.config))
        saved = patiently(str(storage.root), lambda: steps(storage))
        first = [saved[start]] if isinstance(start, int) and start in saved else []
        yield from ((storage, name) for name in dict.fromkeys((*first, *reversed(saved.values()))))
    init = None if section.init_from is None else section.init_from.path
    others = [init] if run.config.dry_run else [start, init]
    for path in others if not saved else ():
        if isinstance(path, str):
            with suppress(CheckpointCorrupt, NoCheckpoint):
                checkpoint = one(path)
                yield checkpoint.storage, checkpoint.name
