"""Settle what the configuration leaves to a default about frozen parameters, before a model is built.

A run that starts from a checkpoint keeps what that recorded: another dtype of the frozen weights is another run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from holdfast.checkpoint.errors import CheckpointCorrupt, NoCheckpoint
from holdfast.checkpoint.format.verification import patiently, read_manifest
from holdfast.checkpoint.keep.find import one
from holdfast.checkpoint.keep.retention import steps
from holdfast.checkpoint.place.storage import Storage, open_storage
from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import UserError
from holdfast.training.directory import checkpoint_place
from holdfast.training.run import ConfiguredRun, Setting
from holdfast.training.saving.resume import saved_settings_of


@dataclass(frozen=True)
class Recorded:
    """What the checkpoint that a run starts from says of frozen parameters."""

    path: str
    frozen_dtype: str


Choices = dict[str, str]
"""Values of keys that were left to a default, by the last part of the key."""


def settle_frozen(setting: Setting) -> None:
    """Put values in the place of defaults that depend on the device or on a checkpoint; all ranks call this together.

    Raises:
        CheckpointUnreadable: The checkpoint that the run starts from cannot be read.
    """
    if setting.config.model.lora is None:
        return
    device = setting.world.device.type
    choices, lines = setting.ranks.on_first_rank(lambda: _choices(setting, device, recorded(setting)))
    setting.config = _with(setting.config, choices)
    if setting.world.is_first:
        for line in lines:
            print(line, flush=True)


def settled_for_plan(run: ConfiguredRun, device: str) -> tuple[TrainingConfig, list[str]]:
    """Return the configuration as a run on such a device would settle it, and what to say of it.

    Args:
        run: The configuration, and where its paths begin.
        device: Its type, "cuda" or "cpu".
    """
    if run.config.model.lora is None:
        return run.config, []
    start = None
    with suppress(UserError):  # a plan is also made where the checkpoints cannot be read
        start = recorded(run)
    choices, lines = _choices(run, device, start)
    return _with(run.config, choices), lines


def _with(config: TrainingConfig, choices: Choices) -> TrainingConfig:
    return config.model_copy(update={"model": config.model.model_copy(update=choices)})


def _choices(run: ConfiguredRun, device: str, start: Recorded | None) -> tuple[Choices, list[str]]:
    """Return what stands for each `auto`, and a line for each that is not as without a default."""
    section, default = run.config.model, run.config.frozen_dtype(device)
    if section.frozen_dtype != "auto":
        return {}, []
    chosen = default if start is None else start.frozen_dtype
    if start is not None and chosen != default:
        line = f"model.frozen_dtype: {chosen}, which {start.path} was saved with; a new run would take {default}"
    else:
        line = "model.frozen_dtype: bfloat16, the default of adapters on a GPU; same would follow model.dtype"
    changes_nothing = chosen == default and default in {"same", section.dtype}
    return {"frozen_dtype": chosen}, [] if changes_nothing else [line]


def recorded(run: ConfiguredRun) -> Recorded | None:
    """Return what the checkpoint recorded that a run will start from; None where it starts from none.

    Raises:
        CheckpointUnreadable: It cannot be read; what it recorded is not known.
    """
    for storage, name in _candidates(run):
        with suppress(CheckpointCorrupt, NoCheckpoint):  # an older one is continued from, or the start says why not
            settings = saved_settings_of(storage, name, read_manifest(storage, name))
            dtype = str(settings.get("model.frozen_dtype", "same"))
            return Recorded(f"{storage.root}/{name}", "same" if dtype == "auto" else dtype)
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
    others = [section.init_from] if run.config.dry_run else [start, section.init_from]
    for path in others if not saved else ():
        if isinstance(path, str):
            with suppress(CheckpointCorrupt, NoCheckpoint):
                checkpoint = one(path)
                yield checkpoint.storage, checkpoint.name
