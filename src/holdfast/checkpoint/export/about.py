"""The file of an export that records its run, its step, the run's parent, and the hashes of its weights.

An export is identified by this file only, not by its path or time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ValidationError

from holdfast.checkpoint.place.hashing import hash_bytes, hash_file
from holdfast.errors import ModelError
from holdfast.files import read_json

ABOUT_FILE = "holdfast_export.json"
_FORMAT = 1


@dataclass(frozen=True)
class Exported:
    """The run and step that an export is of."""

    run_id: str
    """Empty for a run without a directory."""
    run: str
    """Its name."""
    step: int
    """Step of the weights; of several averaged ones, the last."""
    steps: Sequence[int] = ()
    """The steps whose weights were averaged; empty if it is one step's."""
    weights: str = "trained"
    """"trained", or "averages" for the averaged weights of `optim.ema`."""
    parent: Mapping[str, Any] | None = None
    """What the run started from."""
    rating: Mapping[str, Any] | None = None
    """Of a best export: its metric and value."""
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Size and xxh3_128 of each file of weights and of Python code, by name."""
    proof: Mapping[str, Any] | None = None
    """How an export in another format compares with the model; None of one that transformers reads as it was."""

    @property
    def words(self) -> str:
        """Return run and step for a reader."""
        mean = f", the mean of steps {', '.join(map(str, self.steps))}" if self.steps else ""
        which = f" ({self.run_id[:8]})" if self.run_id else ""
        return f"run {self.run}{which}, step {self.step}{mean}"

    @property
    def identity(self) -> dict[str, Any]:
        """Return what tells this export from all others."""
        content = json.dumps(self.files, sort_keys=True).encode()
        return {"run_id": self.run_id, "run": self.run, "step": self.step, "weights": hash_bytes(content)}

    def with_files(self, folder: Path, hashes: Mapping[str, str]) -> Exported:
        """Return the record with size and hash of each file of weights and code, which lie in `folder`."""
        return replace(
            self,
            files={name: {"size": (folder / name).stat().st_size, "xxh3_128": hashes[name]} for name in sorted(hashes)},
        )

    def text(self) -> str:
        """Return the file."""
        values = {"format": _FORMAT, **vars(self), "steps": list(self.steps)}
        if self.proof is None:  # a Holdfast from before proofs reads the file
            del values["proof"]
        return json.dumps(values, indent=2, sort_keys=True) + "\n"


def read_about(directory: Path) -> Exported | None:
    """Return what an export says of itself; None where nothing does.

    Raises:
        ModelError: The file is damaged.
    """
    path = directory / ABOUT_FILE
    if not path.is_file():
        return None
    try:
        written = _Written.model_validate(read_json(path))
    except (OSError, ValueError) as error:
        reason = "a value has another type" if isinstance(error, ValidationError) else error
        raise ModelError(
            f"{path} is not what Holdfast writes ({reason}). Export the model again, or delete the file if you know "
            "what the weights are."
        ) from error
    return Exported(**written.model_dump(exclude={"format"}))


def _is_beside(name: str) -> str:
    if Path(name).name != name or len(name) > 255:
        raise ValueError("a file of an export lies beside it")
    return name


class _File(BaseModel, strict=True, extra="forbid"):
    """A file of weights or code."""

    size: int
    xxh3_128: str


class _Written(BaseModel, strict=True, extra="forbid"):
    """The names and types of the file about an export."""

    format: Literal[1]
    run_id: str
    run: str
    step: int
    steps: list[int]
    weights: str
    parent: dict[str, Any] | None
    rating: dict[str, Any] | None
    files: dict[Annotated[str, AfterValidator(_is_beside)], _File]
    proof: dict[str, Any] | None = None


def check_weights(directory: Path, exported: Exported, *, by_hash: bool) -> None:
    """Compare files of weights and of code with what their export says of them.

    Args:
        directory: The export.
        exported: What it says.
        by_hash: Compare hashes, for which every byte is read; else sizes.

    Raises:
        ModelError: A file is missing or has changed.
    """
    for name, recorded in exported.files.items():
        path = directory / name
        if not path.is_file():
            change = "is missing"
        elif path.stat().st_size != recorded["size"]:
            change = f"has {path.stat().st_size:,} bytes and had {recorded['size']:,}"
        elif by_hash and (digest := hash_file(path)) != recorded["xxh3_128"]:
            change = f"has other bytes: its hash is {digest[:12]} and was {recorded['xxh3_128'][:12]}"
        else:
            continue
        raise ModelError(
            f"{path} {change}, so it is not what {exported.words}, exported. Export the model again; if the change "
            f"is yours, delete {ABOUT_FILE} beside it."
        )
