"""A table of the reference policy's log-probabilities of all answers of a run, asked for once and kept in a file.

An answer is found by the hash of its tokens and images, so the order of rows, the number of ranks and the packing may
change. The file's metadata has a hash of its content and hashes of the rows, the model and the tokenizer; a file of
other inputs, or a damaged one, is refused.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from holdfast.training.fingerprints import adapter_fingerprint, tokenizer_hash, weights_fingerprint
from holdfast.training.other_models.reference import Reference, build_reference, scored
from holdfast.training.run import Model
from holdfast.training.setup.begin import Live
from holdfast.training.setup.rows import Accept, OpenedData, filter_of, in_order, one_pass
from holdfast.types import Example

LOGPROB_COLUMN = "reference_logprobs"
_FORMAT = "2"
_TEXT = ("max_length", "overlong", "train_on", "append_eos", "system", "template_kwargs", "chat_template", "format")
"""Keys of the data section that decide which tokens a row becomes."""

ReferenceTable = dict[bytes, float]
"""Hash of a sequence -> log-probability of its trained tokens under the reference, summed."""


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


def with_table(inputs: TableInputs) -> Tokenise[Example]:
    """Return the function that makes sequences of rows with the reference's log-probability of each answer.

    All ranks call this together. The table is read from its file, or made and written there.

    Raises:
        ConfigError: The table's file is damaged, is another run's or cannot be written; or the model has no file of its
            own.
        UserError: A row is malformed, or the reference cannot be built.
    """
    config, measured = inputs.config, inputs.measured
    ranks, first = measured.run.ranks, measured.run.world.is_first
    path = Path(config.reference.cache or Path(config.run.dir) / f".{config.run.name}.reference")
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
        reference = build_reference(measured, inputs.live, config.reference, why="all rows, once")
        table = _tabulated(measured, reference, _all_rows(inputs))
        del reference
        gc.collect()  # a sharded model is full of cycles, and its memory is wanted now
        ranks.on_all_ranks(lambda: save_table(table, path, about) if first and not config.dry_run else None)
    if first:
        location = f"from {path}" if exists else f"now in {path}"
        print(f"reference: log-probabilities of {len(table)} answers, {location}", flush=True)

    def carrying(row: Row, sample_id: int, source: str, name: str) -> Tokenised[Example]:
        tokenised = inputs.tokenise(row, sample_id, source, name)
        return replace(tokenised, examples=tuple(_carrying(each, table, path, name) for each in tokenised.examples))

    return carrying


def _carrying(example: Example, table: ReferenceTable, path: Path, name: str) -> Example:
    """Return a sequence with its log-probability at the first trained token: nothing reads it token by token."""
    logprob = table.get(_key(example))
    if logprob is None:
        raise ConfigError(
            f"{path} does not hold the reference log-probability of {name}: it was made when the rows were others. "
            "Delete it, and it is made again."
        )
    column = np.zeros(example.tokens.size)
    column[int(example.loss_mask.argmax())] = logprob
    return replace(example, per_token={**example.per_token, LOGPROB_COLUMN: column})


def _key(example: Example) -> bytes:
    hashed = xxhash.xxh3_128(example.tokens.tobytes() + example.loss_mask.tobytes())
    for name, values in sorted(example.model_inputs.items()):
        hashed.update(f"{name} {values.dtype} {values.shape} ".encode() + values.tobytes())
    return hashed.digest()


def _tabulated(model: Model, reference: Reference, streams: Iterable[SampleStream]) -> ReferenceTable:
    """Score every sequence of some streams; all ranks call this together and have the same table."""
    table: ReferenceTable = {}
    for stream in streams:
        step = 0
        while (mini_batch := stream.next(step)) is not None:
            own: ReferenceTable = {}
            judged = scored(model, reference, mini_batch, LOGPROB_COLUMN)
            for before, after in zip(mini_batch.micro_batches, judged.micro_batches, strict=True):
                logprobs = split_tokens(after, after.per_token[LOGPROB_COLUMN].to("cpu", torch.float64))
                own |= {_key(each): float(values.sum()) for each, values in zip(unpack(before), logprobs, strict=True)}
            for of_rank in model.run.ranks.gather(own):
                table |= of_rank
            step += 1
    return table


def save_table(table: ReferenceTable, path: Path, about: Mapping[str, str]) -> None:
    """Write a table and the hashes of its inputs atomically.

    Raises:
        ConfigError: The place cannot be written.
    """
    from safetensors.numpy import save_file

    temporary = path.with_name(f"{path.name}.part")
    tensors: dict[str, NDArray[Any]] = {
        "keys": np.frombuffer(b"".join(table), np.uint8).reshape(-1, 16),
        "logprobs": np.array(list(table.values()), np.float64),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, {**about, "format": _FORMAT, "hash": _hash(tensors)})
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
            tensors: dict[str, NDArray[Any]] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error
    expected = {**about, "format": _FORMAT}
    if metadata.get("format") != _FORMAT and metadata:
        raise ConfigError(
            f"{path} is a table of reference log-probabilities in another format than this version's. Delete it, and "
            "it is made again."
        )
    differing = [name for name in expected if metadata.get(name) != expected[name]]
    if differing:
        raise ConfigError(
            f"{path} holds log-probabilities of a reference that this run does not have: {', '.join(differing)} "
            "differ. Delete it, and it is made again; or name another file in reference.cache."
        )
    if metadata.get("hash") != _hash(tensors):
        raise _damaged(path, "its hash is not that of its content")
    return dict(zip(map(bytes, tensors["keys"]), tensors["logprobs"].tolist(), strict=True))


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a whole file of reference log-probabilities ({why}). Delete it, and it is made again."
    )


def _hash(tensors: Mapping[str, NDArray[Any]]) -> str:
    parts = (f"{name} {each.dtype} {each.shape} ".encode() + each.tobytes() for name, each in sorted(tensors.items()))
    return hash_bytes(b"".join(parts))


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
