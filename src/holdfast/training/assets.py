"""The small files that lie in every checkpoint, so that it can be exported where nothing else of the run is left."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from holdfast.checkpoint.export import EXPORTED_CONFIG, write_assets
from holdfast.checkpoint.stored_export import STORED_HEADERS, headers_json
from holdfast.models.weights_in import StoredSource
from holdfast.training import directory
from holdfast.training.run import Run


def run_assets(run: Run) -> dict[str, bytes]:
    """Return configuration, tokenizer, chat template, processor and generation settings by file name."""
    if not run.assets:
        with tempfile.TemporaryDirectory(prefix="holdfast-assets-") as folder:
            write_assets(Path(folder), run.origin, getattr(torch, run.config.model.dtype))
            run.assets |= {
                str(file.relative_to(folder)): file.read_bytes()
                for file in sorted(Path(folder).rglob("*"))
                if file.is_file()
            }
        if isinstance(run.origin.source, StoredSource):
            run.assets[STORED_HEADERS] = headers_json(dict(run.origin.source.stored.headers))
        run.assets[EXPORTED_CONFIG] = directory.resolved_yaml(run.config).encode()
    return run.assets
