"""What the reference policy says of all rows, asked once before the first step and kept for later starts.

With kto a row is its sequence and its prompt with another row's answer, and the reference is asked about both.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.hashing import hash_bytes
from holdfast.config.dpo import DPOConfig
from holdfast.config.reference import ServerReferenceConfig
from holdfast.data.assembly import Layout
from holdfast.data.candidates import CandidateReader, Tokenise
from holdfast.data.other_answers import OtherAnswerTokeniser
from holdfast.data.reading import RowReader
from holdfast.data.stream import SampleStream
from holdfast.errors import ConfigError
from holdfast.training.build import Live
from holdfast.training.identity import adapter_mark, filter_hashes, tokenizer_hash, weights_mark
from holdfast.training.reference import build_reference
from holdfast.training.reference_table import ReferenceTable, load_table, save_table, tabulate, with_reference
from holdfast.training.run import Evaluation
from holdfast.training.sources import Accept, OpenedData, filter_of, in_order, one_pass, training_reader
from holdfast.training.together import together
from holdfast.types import Example


@dataclass(frozen=True)
class TableInputs:
    """What a table of the reference's numbers is made from, and looked up by."""

    config: DPOConfig
    base: Path
    measured: Evaluation
    data: OpenedData
    live: Live
    layout: Layout
    tokenise: Tokenise[Example]
    accept: Accept | None
    """The filter of training rows."""

    def tokeniser_of(self, reader: RowReader, accept: Accept | None) -> Tokenise[Example]:
        """Return the function that turns rows into all sequences that the reference is asked about.

        Args:
            reader: Of the same sources in the same order as the stream that the rows come from, whose draws are the
                function's sample ids.
            accept: The filter of those rows.
        """
        if not self.config.fixes_other_answers:
            return self.tokenise
        return OtherAnswerTokeniser(self.tokenise, reader, accept, self.config.data.max_length)


def refuse_without_other_answers(config: DPOConfig, data: OpenedData) -> None:
    """Refuse sources in which no row can be given the answer of another one for good.

    Raises:
        ConfigError: One is streamed, or has a single row.
    """
    if not config.fixes_other_answers:
        return
    named = [(source.name, source) for source in data.training]
    named += [(f"the evaluation set {name}", source) for name, source in data.evaluation.items()]
    for name, source in named:
        if source.size is not None and source.size > 1:
            continue
        what, cure = "has a single row", "Add rows to it"
        if config.data.validation_split:
            cure += ", choose another data.validation_split"
        if source.size is None:
            what, cure = "is streamed, so its rows cannot be read by number", "Set streaming: false for it"
        raise ConfigError(
            f"reference.precompute: true gives every prompt of preference.loss: kto the answer of another row of its "
            f"source, once for the whole run, and {name} {what}. {cure}, or leave reference.precompute out: "
            "such answers are then taken from the rows of each batch."
        )


def with_table(inputs: TableInputs) -> tuple[Tokenise[Example], dict[str, Tokenise[Example]]]:
    """Return what makes sequences of training rows, and of each evaluation set's, with what the reference said.

    Raises:
        ConfigError: The table's file is damaged, is another run's or cannot be written; or the model has no file of its
            own.
        UserError: A row is malformed, or the reference cannot be built.
    """
    config, data = inputs.config, inputs.data
    place = Path(config.reference.cache or Path(config.run.dir) / f".{config.run.name}.reference")
    table = _table(inputs, place)
    training = inputs.tokeniser_of(training_reader(config, data), inputs.accept)
    of_sets = {
        name: inputs.tokeniser_of(RowReader([source], in_order(source)), filter_of(source, inputs.accept))
        for name, source in data.evaluation.items()
    }
    return with_reference(training, table, place), {
        name: with_reference(tokenise, table, place) for name, tokenise in of_sets.items()
    }


def _table(inputs: TableInputs, place: Path) -> ReferenceTable:
    """Return what the reference says of all rows: from the file if it is there, else by asking it once.

    Raises:
        ConfigError: The file is not this run's, or the model has no file of its own.
    """
    config, measured = inputs.config, inputs.measured
    exchange, first = measured.exchange, measured.world.is_first
    if inputs.live.model is not None:
        raise ConfigError(
            "reference.precompute keeps what a model in a directory says, and this one was given in Python. Save it "
            "and name model.path, or leave precompute out."
        )
    about, earlier = together(exchange, lambda: _about_now_and_earlier(inputs))
    known = exchange.agree(place.exists())
    if known:
        table = exchange.agree(together(exchange, lambda: load_table(place, about, earlier) if first else None))
        assert table is not None
    else:
        why = "all rows, once"
        reference = build_reference(measured, inputs.base, inputs.live, config.reference, why=why)
        table = tabulate(measured, reference, _all_rows(inputs))
        del reference
        gc.collect()  # a sharded model is full of cycles, and its memory is wanted now
        together(exchange, lambda: save_table(table, place, about) if first and not config.dry_run else None)
    if first:
        where = f"from {place}" if known else f"now in {place}"
        print(f"reference: log-probabilities of {len(table.logprobs)} answers, {where}", flush=True)
    return table


def _all_rows(inputs: TableInputs) -> Iterator[SampleStream]:
    exchange = inputs.measured.exchange
    filters = [(source, inputs.accept) for source in inputs.data.training]
    filters += [(source, filter_of(source, inputs.accept)) for source in inputs.data.evaluation.values()]
    for source, wanted in filters:
        reader = RowReader([source], in_order(source))
        rows = CandidateReader(reader, inputs.tokeniser_of(reader, wanted), exchange, wanted)
        yield one_pass(inputs.config, rows, exchange, inputs.layout)


def _about_now_and_earlier(inputs: TableInputs) -> tuple[dict[str, str], dict[str, str]]:
    """Return hashes of all that the numbers depend on, and the same as earlier versions wrote them; reads files."""
    mark = weights_mark(inputs.measured.origin, inputs.config.seed)
    return _about(inputs, mark), _about(inputs, mark.split("-")[0])


def _about(inputs: TableInputs, mark: str) -> dict[str, str]:
    """Return hashes of all that the numbers depend on, given the mark of the weights."""
    config, data, origin = inputs.config, inputs.data, inputs.measured.origin
    model = config.model.model_dump_json(exclude={"path", "tokenizer"})
    precision: str = config.parallel.compute_dtype
    if isinstance(config.reference, ServerReferenceConfig):
        precision += f" server {config.reference.model}"
    precision += adapter_mark(config, inputs.base)
    rows = [source.fingerprint for source in (*data.training, *data.evaluation.values())]
    text = {name: getattr(config.data, name) for name in _TEXT}
    found = {
        "model": hash_bytes(f"{mark} {model} {precision}".encode()),
        "tokenizer": tokenizer_hash(origin.tokenizer),
        "rows": hash_bytes(json.dumps(rows).encode()),
        "data": hash_bytes(json.dumps(text, sort_keys=True).encode()),
    }
    if config.fixes_other_answers:  # whose answer a prompt gets depends on which rows are left out
        filters = sorted(filter_hashes(config, inputs.base).items())
        left_out = [config.data.unusable, config.data.filter, filters]
        found["other answers"] = hash_bytes(json.dumps(left_out).encode())
    return found


_TEXT = ("max_length", "overlong", "train_on", "append_eos", "system", "template_kwargs", "chat_template", "format")
"""What decides which tokens a row becomes."""
