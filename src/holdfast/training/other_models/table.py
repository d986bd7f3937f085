"""A table of the reference policy's log-probabilities for all answers of a run, computed once and stored in a file.

Answers are found by the hash of their tokens and images, so that the order of rows, the number of ranks and the packing
do not matter. The file records hashes of the rows, the model, the tokenizer and its own contents; a file made from
other inputs, or a damaged one, is refused.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from holdfast.checkpoint.place.hashing import hash_bytes
from holdfast.config.sections.reference import ServerReferenceConfig
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.data.batches.assembly import Layout
from holdfast.data.batches.candidates import CandidateReader, Tokenise
from holdfast.data.batches.packing import split_tokens, unpack
from holdfast.data.batches.stream import SampleStream
from holdfast.data.rows.reading import RowReader
from holdfast.data.rows.rows import Row
from holdfast.data.tokens.chat import Tokenised
from holdfast.errors import ConfigError
from holdfast.files import RegularFile
from holdfast.training.fingerprints import (
    adapter_fingerprint,
    tokenizer_hash,
    weights_fingerprint,
)
from holdfast.training.other_models.reference import Reference, build_reference, scored
from holdfast.training.run import Model
from holdfast.training.setup.begin import Live
from holdfast.training.setup.rows import (
    Accept,
    OpenedData,
    filter_of,
    in_order,
    one_pass,
)
from holdfast.types import Example

LOGPROB_COLUMN = "reference_logprobs"
_FORMAT = "1"


@dataclass(frozen=True)
class ReferenceTable:
    """Log-probabilities of answers under the reference policy."""

    keys: NDArray[np.uint64]
    """[S, 2] hashes of sequences, ascending"""
    logprobs: NDArray[np.float64]
    """[S] of their trained tokens, summed"""

    def logprob(self, example: Example) -> float | None:
        """Return the log-probability of a sequence's answer; None if the table does not have it."""
        high, low = _key(example)
        row = int(np.searchsorted(self.keys[:, 0], np.uint64(high)))
        while row < len(self.keys) and int(self.keys[row, 0]) == high:
            if int(self.keys[row, 1]) == low:
                return float(self.logprobs[row])
            row += 1
        return None


def _key(example: Example) -> tuple[int, int]:
    hashed = xxhash.xxh3_128(example.tokens.tobytes() + example.loss_mask.tobytes())
    for name, values in sorted(example.model_inputs.items()):
        hashed.update(f"{name} {values.dtype} {values.shape} ".encode() + values.tobytes())
    digest = hashed.intdigest()
    return digest >> 64, digest & (2**64 - 1)


def with_reference(tokenise: Tokenise[Example], table: ReferenceTable, path: Path) -> Tokenise[Example]:
    """Wrap a tokenising function so that its sequences carry the log-probabilities of the table.

    The whole sum stands at the first trained token: nothing reads it token by token.
    """

    def carrying(row: Row, sample_id: int, source: str, name: str) -> Tokenised[Example]:
        tokenised = tokenise(row, sample_id, source, name)
        return replace(
            tokenised, examples=tuple(_carrying(example, table, path, name) for example in tokenised.examples)
        )

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
    return replace(example, per_token={**example.per_token, LOGPROB_COLUMN: column})


def tabulate(run: Model, reference: Reference, streams: Iterable[SampleStream]) -> ReferenceTable:
    """Score every sequence of some streams; all ranks call this together and have the same table."""
    sums: dict[tuple[int, int], float] = {}
    for stream in streams:
        step = 0
        while (mini_batch := stream.next(step)) is not None:
            judged = scored(run, reference, mini_batch, LOGPROB_COLUMN)
            own_sums = [
                (_key(example), float(values.sum()))
                for before, after in zip(mini_batch.micro_batches, judged.micro_batches, strict=True)
                for example, values in zip(
                    unpack(before),
                    split_tokens(after, after.per_token[LOGPROB_COLUMN].to("cpu", torch.float64)),
                    strict=True,
                )
            ]
            for rank_sums in run.run.ranks.gather(own_sums):
                sums |= dict(rank_sums)
            step += 1
    keys = sorted(sums)
    return ReferenceTable(np.array(keys, np.uint64).reshape(-1, 2), np.array([sums[key] for key in keys], np.float64))


def save_table(table: ReferenceTable, path: Path, about: Mapping[str, str]) -> None:
    """Write a table and the hashes of its inputs atomically.

    Raises:
        ConfigError: The place cannot be written.
    """
    from safetensors.numpy import save_file

    temporary = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(
            {"keys": table.keys, "logprobs": table.logprobs},
            temporary,
            metadata={**about, "format": _FORMAT, "hash": _hash(table)},
        )
        temporary.rename(path)
    except OSError as error:
        raise ConfigError(f"reference.cache: {path} cannot be written ({error}). Name another file.") from error


def load_table(path: Path, about: Mapping[str, str]) -> ReferenceTable:
    """Read a table and verify it.

    Args:
        path: The file.
        about: What it must be of.

    Raises:
        ConfigError: It is damaged, or was made of other things.
    """
    from safetensors import SafetensorError, safe_open

    try:
        RegularFile(path).close()  # the library would wait for a pipe
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            table = ReferenceTable(file.get_tensor("keys"), file.get_tensor("logprobs"))
    except (OSError, SafetensorError) as error:
        raise ConfigError(_damaged(path, str(error))) from error
    if metadata.get("hash") != _hash(table) or metadata.get("format") != _FORMAT:
        raise ConfigError(_damaged(path, "its hash is not that of its content"))
    differing = [name for name in about if metadata.get(name) != about[name]]
    if differing:
        raise ConfigError(
            f"{path} holds log-probabilities of a reference that this run does not have: {_setting_names(differing)} "
            "differ. Delete it, and it is made again; or name another file in reference.cache."
        )
    return table


def _damaged(path: Path, why: str) -> str:
    return f"{path} is not a whole file of reference log-probabilities ({why}). Delete it, and it is made again."


def _setting_names(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _hash(table: ReferenceTable) -> str:
    return str(xxhash.xxh3_128_hexdigest(table.keys.tobytes() + table.logprobs.tobytes()))


@dataclass(frozen=True)
class TableInputs:
    """The inputs that a table of reference log-probabilities is computed from."""

    config: DPOConfig
    measured: Model
    data: OpenedData
    live: Live
    layout: Layout
    tokenise: Tokenise[Example]
    accept: Accept | None
    """The filter of training rows."""


def with_table(inputs: TableInputs) -> tuple[Tokenise[Example], dict[str, Tokenise[Example]]]:
    """Return what makes sequences of training rows, and of each evaluation set's, with what the reference said.

    Raises:
        ConfigError: The table's file is damaged, is another run's or cannot be written; or the model has no file of its
            own.
        UserError: A row is malformed, or the reference cannot be built.
    """
    config = inputs.config
    path = Path(config.reference.cache or Path(config.run.dir) / f".{config.run.name}.reference")
    table = _table(inputs, path)
    answered = with_reference(inputs.tokenise, table, path)
    return answered, dict.fromkeys(inputs.data.evaluation, answered)


def _table(inputs: TableInputs, path: Path) -> ReferenceTable:
    """Return what the reference says of all rows: from the file if it is there, else by asking it once.

    Raises:
        ConfigError: The file is not this run's, or the model has no file of its own.
    """
    config, measured = inputs.config, inputs.measured
    ranks, first = measured.run.ranks, measured.run.world.is_first
    if inputs.live.model is not None:
        raise ConfigError(
            "reference.precompute keeps what a model in a directory says, and this one was given in Python. Save it "
            "and name model.path, or leave precompute out."
        )
    about = ranks.on_all_ranks(lambda: _about(inputs))
    exists = ranks.agree(path.exists())
    if exists:
        table = ranks.on_first_rank(lambda: load_table(path, about))
    else:
        why = "all rows, once"
        reference = build_reference(measured, inputs.live, config.reference, why=why)
        table = tabulate(measured, reference, _all_rows(inputs))
        del reference
        gc.collect()  # a sharded model is full of cycles, and its memory is wanted now
        ranks.on_all_ranks(lambda: save_table(table, path, about) if first and not config.dry_run else None)
    if first:
        location = f"from {path}" if exists else f"now in {path}"
        print(f"reference: log-probabilities of {len(table.logprobs)} answers, {location}", flush=True)
    return table


def _all_rows(inputs: TableInputs) -> Iterator[SampleStream]:
    ranks = inputs.measured.run.ranks
    filters = [(source, inputs.accept) for source in inputs.data.training]
    filters += [(source, filter_of(source, inputs.accept)) for source in inputs.data.evaluation.values()]
    for source, accept in filters:
        reader = RowReader([source], in_order(source))
        rows = CandidateReader(reader, inputs.tokenise, ranks, accept)
        yield one_pass(inputs.config, rows, ranks, inputs.layout)


def _about(inputs: TableInputs) -> dict[str, str]:
    """Return hashes of all that the numbers depend on; reads files."""
    config, data, origin = inputs.config, inputs.data, inputs.measured.blueprint
    mark = weights_fingerprint(origin, config.seed)
    model = config.model.model_dump_json(exclude={"path", "tokenizer"})
    precision: str = config.parallel.compute_dtype
    if isinstance(config.reference, ServerReferenceConfig):
        precision += f" server {config.reference.model}"
    precision += adapter_fingerprint(inputs.measured.run)
    rows = [source.fingerprint for source in (*data.training, *data.evaluation.values())]
    text = {name: getattr(config.data, name) for name in _TEXT}
    return {
        "model": hash_bytes(f"{mark} {model} {precision}".encode()),
        "tokenizer": tokenizer_hash(origin.tokenizer),
        "rows": hash_bytes(json.dumps(rows).encode()),
        "data": hash_bytes(json.dumps(text, sort_keys=True).encode()),
    }


_TEXT = ("max_length", "overlong", "train_on", "append_eos", "system", "template_kwargs", "chat_template", "format")
"""What decides which tokens a row becomes."""
