"""Build a run on preferences: what can fail before step 1 fails here, on all ranks alike, with nothing written.

But for one file: with `reference.precompute`, what the reference says of all rows is kept for later starts.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from holdfast.checkpoint.hashing import hash_bytes
from holdfast.config.dpo import DPOConfig
from holdfast.config.reference import ServerReferenceConfig
from holdfast.data.assembly import Layout
from holdfast.data.candidates import CandidateReader, Tokenise
from holdfast.data.preferences import preferred_only
from holdfast.data.reading import RowReader
from holdfast.data.stream import SampleStream
from holdfast.data.vision import ImageSide
from holdfast.errors import ConfigError
from holdfast.parallel.mesh import World
from holdfast.training.build import Live, begin, build_model, layout_of, parts_of_run
from holdfast.training.build_sharded import image_side_of
from holdfast.training.identity import adapter_mark, tokenizer_hash, weights_mark
from holdfast.training.losses import preference_objective
from holdfast.training.preference import PreferenceEvaluation, PreferenceRun
from holdfast.training.reference import Reference, build_reference, following_of
from holdfast.training.reference_server import NO_IMAGES
from holdfast.training.reference_table import (
    COLUMN,
    ReferenceTable,
    load_table,
    save_table,
    tabulate,
    with_reference,
)
from holdfast.training.run import Evaluation
from holdfast.training.sources import (
    OpenedData,
    SetReading,
    evaluation_sets,
    filter_of,
    in_order,
    one_pass,
    open_data,
    preference_tokeniser,
    refuse_completions_with_images,
    row_filter,
    training_stream,
)
from holdfast.training.together import first_rank_first, open_exchange, together
from holdfast.types import Example


def build_preference_run(config: DPOConfig, base: Path, world: World, live: Live | None = None) -> PreferenceRun:
    """Return a run that is ready for its first step.

    Raises:
        UserError: Anything that can be known now; the same error on all ranks.
    """
    live = live or Live()
    started = begin(config, base, world, live)
    exchange, data = started.exchange, started.data
    objective = live.objective or together(exchange, lambda: preference_objective(config.preference, base))
    measured = build_model(config, base, world, exchange, live, objective)
    policy, tokenise = _compared_policy(config, base, measured, data, live)
    stream = together(exchange, lambda: training_stream(config, data, tokenise, exchange, policy.layout, base))
    parts = parts_of_run(config, base, policy, started, stream)
    # Its log-likelihood would be that of chosen and rejected answers together, which says nothing.
    parts["source_names"] = ()
    return PreferenceRun(**vars(policy), **parts, following=following_of(policy.reference, config.reference))


def build_preference_evaluation(config: DPOConfig, base: Path, world: World) -> PreferenceEvaluation:
    """Return a policy, its evaluation sets, and what it is compared with.

    Raises:
        UserError: As `build_preference_run`.
    """
    exchange = open_exchange(config)
    needs_training_rows = config.data.validation_split > 0
    data = first_rank_first(exchange, lambda: open_data(config, base, training=needs_training_rows))
    objective = together(exchange, lambda: preference_objective(config.preference, base))
    measured = build_model(config, base, world, exchange, Live(), objective)
    # Of an evaluation alone nothing is kept, and training rows are not scored.
    live_reference = config.reference.model_copy(update={"precompute": False, "cache": None})
    config = config.model_copy(update={"reference": live_reference})
    return _compared_policy(config, base, measured, data, Live())[0]


@dataclass(frozen=True)
class _Parts:
    """What a policy is joined with its reference from."""

    config: DPOConfig
    base: Path
    measured: Evaluation
    data: OpenedData
    live: Live
    layout: Layout
    tokenise: Tokenise[Example]


def _compared_policy(
    config: DPOConfig, base: Path, measured: Evaluation, data: OpenedData, live: Live
) -> tuple[PreferenceEvaluation, Tokenise[Example]]:
    """Return the policy with its reference and evaluation sets, and the function that makes sequences of rows."""
    exchange = measured.exchange
    images = _images(config, measured)
    layout = together(exchange, lambda: _layout(config, measured, images))
    plain = together(exchange, lambda: preference_tokeniser(measured.origin.tokenizer, config, base, images))
    tokenise: Tokenise[Example] = plain
    reference: Reference | None = None
    if config.preference.needs_reference and config.reference.precompute:
        place = Path(config.reference.cache or Path(config.run.dir) / f".{config.run.name}.reference")
        table = _table(_Parts(config, base, measured, data, live, layout, plain), place)
        tokenise = with_reference(plain, table, place)
        layout = replace(layout, columns={COLUMN: np.float64})
    elif config.preference.needs_reference:
        why = f"preference.loss: {', '.join(config.preference.kinds)}"
        reference = build_reference(measured, base, live, config.reference, why=why)
    accept = together(exchange, lambda: row_filter(config, base))
    reading = SetReading(dict.fromkeys(data.evaluation, tokenise), accept, preferred_only(plain))
    sets = evaluation_sets(config, data, reading, exchange, layout)
    together(exchange, lambda: refuse_completions_with_images(config, sets, images))
    parts = vars(measured) | {"config": config, "evaluation_sets": sets}
    return PreferenceEvaluation(**parts, layout=layout, reference=reference), tokenise


def _images(config: DPOConfig, measured: Evaluation) -> ImageSide | str:
    """Return what turns images into tokens; or why no row may have some."""
    if isinstance(config.reference, ServerReferenceConfig) and config.preference.needs_reference:
        return NO_IMAGES
    return image_side_of(config, measured.origin)


def _layout(config: DPOConfig, measured: Evaluation, images: ImageSide | str) -> Layout:
    """Return how pairs, or single answers, are packed.

    Raises:
        ConfigError: Prompts shall be shared, and cannot.
    """
    pairs, padded = config.preference.takes_pairs, measured.policy.padded
    if config.data.shared_prompt == "on" and padded:
        reason = measured.origin.family.why_not_packed or "data.packing or model.attention says so"
        raise ConfigError(
            f"data.shared_prompt: on, but {measured.origin.family.name} is trained with one sequence per row "
            f"({reason}): a prompt stands in each. Use auto."
        )
    return replace(
        layout_of(measured, images),
        whole_draws=pairs,
        shares_heads=pairs and not padded and config.data.shared_prompt != "off",
        columns={} if pairs else {"desirable": np.bool_},
    )


def _table(parts: _Parts, place: Path) -> ReferenceTable:
    """Return what the reference says of all rows: from the file if it is there, else by asking it once.

    Raises:
        ConfigError: The file is not this run's, or the model has no file of its own.
    """
    config, measured = parts.config, parts.measured
    exchange, first = measured.exchange, measured.world.is_first
    if parts.live.model is not None:
        raise ConfigError(
            "reference.precompute keeps what a model in a directory says, and this one was given in Python. Save it "
            "and name model.path, or leave precompute out."
        )
    mark = weights_mark(measured.origin, config.seed)
    about, earlier = (_about(parts, each) for each in (mark, mark.split("-")[0]))
    known = exchange.agree(place.exists())
    if known:
        table = exchange.agree(together(exchange, lambda: load_table(place, about, earlier) if first else None))
        assert table is not None
    else:
        why = "all rows, once"
        reference = build_reference(measured, parts.base, parts.live, config.reference, why=why)
        table = tabulate(measured, reference, _all_rows(parts))
        del reference
        gc.collect()  # a sharded model is full of cycles, and its memory is wanted now
        together(exchange, lambda: save_table(table, place, about) if first and not config.dry_run else None)
    if first:
        where = f"from {place}" if known else f"now in {place}"
        print(f"reference: log-probabilities of {len(table.logprobs)} answers, {where}", flush=True)
    return table


def _all_rows(parts: _Parts) -> Iterator[SampleStream]:
    exchange = parts.measured.exchange
    accept = together(exchange, lambda: row_filter(parts.config, parts.base))
    filters = [(source, accept) for source in parts.data.training]
    filters += [(source, filter_of(source, accept)) for source in parts.data.evaluation.values()]
    for source, wanted in filters:
        rows = CandidateReader(RowReader([source], in_order(source)), parts.tokenise, exchange, wanted)
        yield one_pass(parts.config, rows, exchange, parts.layout)


def _about(parts: _Parts, mark: str) -> dict[str, str]:
    """Return hashes of all that the numbers depend on, given the mark of the weights."""
    config, data, origin = parts.config, parts.data, parts.measured.origin
    model = config.model.model_dump_json(exclude={"path", "tokenizer"})
    precision: str = config.parallel.compute_dtype
    if isinstance(config.reference, ServerReferenceConfig):
        precision += f" server {config.reference.model}"
    precision += adapter_mark(config, parts.base)
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
