"""What the reference policy says of every answer of a run, computed once and kept in a file.

An answer is found by the hash of its tokens and images, so the order of rows, the number of ranks and the packing do
not matter. The file says of which rows, model and tokenizer it is, and carries the hash of its own content; one of
other things, or a damaged one, is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from holdfast.data.candidates import Tokenise
from holdfast.data.chat import Tokenised
from holdfast.data.packing import split_tokens, unpack
from holdfast.data.rows import Row
from holdfast.data.stream import SampleStream
from holdfast.errors import ConfigError
from holdfast.files import RegularFile
from holdfast.training.reference import Reference
from holdfast.training.run import Evaluation
from holdfast.training.scoring import scored
from holdfast.types import Example

COLUMN = "reference_logprobs"
_FORMAT = "1"


@dataclass(frozen=True)
class ReferenceTable:
    """Log-probabilities of answers under the reference."""

    keys: NDArray[np.uint64]
    """[S, 2] hashes of sequences, ascending"""
    logprobs: NDArray[np.float64]
    """[S] of their trained tokens, summed"""

    def logprob(self, example: Example) -> float | None:
        """Return the number of a sequence; None if it is not there."""
        high, low = _key(example)
        place = int(np.searchsorted(self.keys[:, 0], np.uint64(high)))
        while place < len(self.keys) and int(self.keys[place, 0]) == high:
            if int(self.keys[place, 1]) == low:
                return float(self.logprobs[place])
            place += 1
        return None


def _key(example: Example) -> tuple[int, int]:
    hashed = xxhash.xxh3_128(example.tokens.tobytes() + example.loss_mask.tobytes())
    for name, values in sorted(example.model_inputs.items()):
        hashed.update(f"{name} {values.dtype} {values.shape} ".encode() + values.tobytes())
    digest = hashed.intdigest()
    return digest >> 64, digest & (2**64 - 1)


def with_reference(tokenise: Tokenise[Example], table: ReferenceTable, path: Path) -> Tokenise[Example]:
    """Return the same function, whose sequences carry what the table says of them.

    The whole sum stands at the first trained token: nothing reads it token by token.
    """

    def carrying(row: Row, sample_id: int, source: str, name: str) -> Tokenised[Example]:
        found = tokenise(row, sample_id, source, name)
        return replace(found, examples=tuple(_carrying(example, table, path, name) for example in found.examples))

    return carrying


def _carrying(example: Example, table: ReferenceTable, path: Path, name: str) -> Example:
    logprob = table.logprob(example)
    if logprob is None:
        raise ConfigError(
            f"{path} does not hold the reference log-probability of {name}: it was made when the rows were others. "
            "Delete it, and it is made again."
        )
    column = np.zeros(example.tokens.size)
    column[int(example.loss_mask.argmax())] = logprob
    return replace(example, per_token={**example.per_token, COLUMN: column})


def tabulate(run: Evaluation, reference: Reference, streams: Iterable[SampleStream]) -> ReferenceTable:
    """Score every sequence of some streams; all ranks call this together and have the same table."""
    found: dict[tuple[int, int], float] = {}
    for stream in streams:
        step = 0
        while (mini_batch := stream.next(step)) is not None:
            judged = scored(run, reference, mini_batch, COLUMN)
            mine = [
                (_key(example), float(values.sum()))
                for before, after in zip(mini_batch.micro_batches, judged.micro_batches, strict=True)
                for example, values in zip(
                    unpack(before), split_tokens(after, after.per_token[COLUMN].to("cpu", torch.float64)), strict=True
                )
            ]
            for told in run.exchange.gather(mine):
                found |= dict(told)
            step += 1
    keys = sorted(found)
    return ReferenceTable(np.array(keys, np.uint64).reshape(-1, 2), np.array([found[key] for key in keys], np.float64))


def save_table(table: ReferenceTable, path: Path, about: Mapping[str, str]) -> None:
    """Write a table and what it was made of, whole or not at all.

    Raises:
        ConfigError: The place cannot be written.
    """
    from safetensors.numpy import save_file

    beside = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(
            {"keys": table.keys, "logprobs": table.logprobs},
            beside,
            metadata={**about, "format": _FORMAT, "hash": _hash(table)},
        )
        beside.rename(path)
    except OSError as error:
        raise ConfigError(f"reference.cache: {path} cannot be written ({error}). Name another file.") from error


def load_table(path: Path, about: Mapping[str, str], earlier: Mapping[str, str] | None = None) -> ReferenceTable:
    """Read a table and verify it.

    Args:
        path: The file.
        about: What it must be of.
        earlier: The same as earlier versions wrote it, if that was otherwise.

    Raises:
        ConfigError: It is damaged, or was made of other things.
    """
    from safetensors import SafetensorError, safe_open

    try:
        RegularFile(path).close()  # the library would wait for a pipe
        with safe_open(path, framework="numpy") as file:
            said = file.metadata() or {}
            table = ReferenceTable(file.get_tensor("keys"), file.get_tensor("logprobs"))
    except (OSError, SafetensorError) as error:
        raise ConfigError(_damaged(path, str(error))) from error
    if said.get("hash") != _hash(table) or said.get("format") != _FORMAT:
        raise ConfigError(_damaged(path, "its hash is not that of its content"))
    others = [name for name in about if said.get(name) not in {about[name], (earlier or about)[name]}]
    if others:
        raise ConfigError(
            f"{path} holds log-probabilities of a reference that this run does not have: {_words(others)} differ. "
            "Delete it, and it is made again; or name another file in reference.cache."
        )
    return table


def _damaged(path: Path, why: str) -> str:
    return f"{path} is not a whole file of reference log-probabilities ({why}). Delete it, and it is made again."


def _words(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _hash(table: ReferenceTable) -> str:
    return str(xxhash.xxh3_128_hexdigest(table.keys.tobytes() + table.logprobs.tobytes()))
