"""The small files that lie in every checkpoint, so that it can be exported where nothing else of the run is left."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from holdfast.checkpoint.export import EXPORTED_CONFIG, write_assets
from holdfast.checkpoint.readable import ExportFailed, check_readable
from holdfast.checkpoint.rehearsal import RehearsalFailed
from holdfast.checkpoint.stored_export import ADAPTERS, PARENT, STORED_HEADERS, headers_json
from holdfast.models.adapter_files import AdapterSource
from holdfast.models.weights_in import StoredSource
from holdfast.training import directory
from holdfast.training.exports import describe_adapters
from holdfast.training.parents import parent_of
from holdfast.training.run import Run


def run_assets(run: Run) -> dict[str, bytes]:
    """Return configuration, tokenizer, chat template, processor and generation settings by file name."""
    if not run.assets:
        with tempfile.TemporaryDirectory(prefix="holdfast-assets-") as folder:
            write_assets(Path(folder), run.origin, getattr(torch, run.config.model.dtype))
            check_readable(Path(folder), run.origin)
            run.assets |= {
                str(file.relative_to(folder)): file.read_bytes()
                for file in sorted(Path(folder).rglob("*"))
                if file.is_file()
            }
        source = run.origin.source
        source = source.base if isinstance(source, AdapterSource) else source
        if isinstance(source, StoredSource):
            run.assets[STORED_HEADERS] = headers_json(dict(source.stored.headers))
        about = describe_adapters(run)
        if about is not None:
            run.assets[ADAPTERS] = json.dumps(asdict(about), sort_keys=True).encode()
        parent = parent_of(run)
        if parent is not None:
            run.assets[PARENT] = json.dumps(parent, sort_keys=True).encode()
        run.assets[EXPORTED_CONFIG] = directory.resolved_yaml(run.config).encode()
    return run.assets


def checked_assets(run: Run) -> dict[str, bytes]:
    """Return the small files of every checkpoint, on rank 0, and refuse what transformers cannot write.

    Raises:
        RehearsalFailed: It cannot; nothing was trained.
    """
    if run.world.is_first:
        parent_of(run)  # outside of what follows: a run.json that cannot be read says nothing against the model's files
    try:
        return run_assets(run) if run.world.is_first else {}
    except ExportFailed as error:
        raise RehearsalFailed(f"{error} Nothing was trained.") from error
    except (AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise RehearsalFailed(
            "Configuration, tokenizer or processor of this model cannot be written, and every checkpoint and "
            f"export holds them: {type(error).__name__}: {error}. Nothing was trained. Mend what model.path or "
            "model.tokenizer names: its save_pretrained must work."
        ) from error
