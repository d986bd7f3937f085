"""Start a run: check its configuration here, then train in ranks of their own."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from holdfast.cli.paths import check_paths
from holdfast.cli.worker import work
from holdfast.config.load import EXPORTED_CONFIG, LoadedConfig, from_mapping, load_config
from holdfast.config.verbs.roots import ROOTS, load_run, verb_of
from holdfast.config.verbs.training import TrainingConfig, as_plain
from holdfast.config.yaml12 import parse_file
from holdfast.errors import ConfigError
from holdfast.launch.environment import resolve_ranks, under_torchrun
from holdfast.launch.local import launch_local
from holdfast.training.directory import run_directory


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
    from holdfast.cli.first_file import suggest

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


def train_from(verb: str, target: Path, overrides: Sequence[str]) -> int:
    """Run a verb on a run's file or on an exported model."""
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
    """Start the ranks, or be one of them under torchrun."""
    if under_torchrun():
        return work(verb, loaded.config, loaded.base)
    check_paths(verb, loaded.config, loaded.base)
    with tempfile.TemporaryDirectory(prefix="holdfast-config-") as directory:
        file = Path(directory) / "config.json"
        file.write_text(json.dumps(as_plain(loaded.config)), encoding="utf-8")
        command = [sys.executable, "-m", "holdfast.cli.worker", verb, str(file), str(loaded.base)]
        ranks = resolve_ranks(loaded.config.launch)
        return launch_local(command, ranks, loaded.config.launch, run_directory(loaded.config))
