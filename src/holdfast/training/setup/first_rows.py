"""Compare rows between ranks, tokenise the first ones and look for images before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.data.batches.candidates import Tokenise
from holdfast.data.content.image_files import ImageFiles
from holdfast.data.content.images import Video, held_images
from holdfast.data.rows.rows import Row
from holdfast.data.tokens.chat import S
from holdfast.errors import DataError
from holdfast.training.run import Run
from holdfast.training.setup.rows import OpenedData, filter_of, first_sequences, row_filter, training_reader

_LOOKED_AT = 8
"""Rows of each source that become sequences."""


def check_same_rows(run: Run, data: OpenedData, *, live: bool = False) -> None:
    """Refuse rows that differ between ranks; all ranks call this together.

    Args:
        run: Of the run.
        data: Its rows, as this rank has opened them.
        live: Rows are objects of a Python caller, whose numbers alone are compared.

    Raises:
        DataError: A source has other rows on another rank; the same on all ranks.
    """
    named = [*((source.name, source) for source in data.training), *data.evaluation.items()]
    own = [(name, source.size, "" if live else source.fingerprint) for name, source in named]
    (first_host, first), *others = run.ranks.gather((run.world.host, own))
    for rank, (host, theirs) in enumerate(others, start=1):
        for (name, size, mark), (_, their_size, their_mark) in zip(first, theirs, strict=True):
            if (size, mark) != (their_size, their_mark):
                raise DataError(
                    f"{name} is not the same on all ranks: it has {_counted(size)} on rank 0 ({first_host}) and "
                    f"{_counted(their_size)} on rank {rank} ({host}){', which differ' * (size == their_size)}. Copy "
                    "one file to all machines or name a place that they share, and let nothing write to it meanwhile."
                )


def _counted(size: int | None) -> str:
    return "a stream of rows" if size is None else f"{size} rows"


def check_first_rows(
    run: Run,
    data: OpenedData,
    tokenise: Tokenise[S],
    of_sets: Mapping[str, Tokenise[S]] | None = None,
    *,
    sees: bool = False,
) -> None:
    """Make sequences of the first rows of every source and evaluation set; all ranks call this together.

    What columns, templates and the tokenizer have against each other shows here. With `data.on_bad_row: skip` training
    rows are not looked at: the run says which it leaves out.

    Args:
        run: Of the run.
        data: Its rows.
        tokenise: Of training rows.
        of_sets: Those of evaluation sets by name; default: as training rows.
        sees: Whether the model sees images: then those of the first pass are looked for, and not opened.

    Raises:
        UserError: One of them cannot be read; the same on all ranks.
    """
    ranks, skips = run.ranks, run.config.data.on_bad_row == "skip"
    accept = ranks.on_all_ranks(lambda: row_filter(run))
    with ranks.together():
        for source in () if skips else data.training:
            first_sequences(source, tokenise, _LOOKED_AT, ranks, accept)
        for name, source in data.evaluation.items():
            of_set = tokenise if of_sets is None else of_sets[name]
            first_sequences(source, of_set, _LOOKED_AT, ranks, filter_of(source, accept))
    if sees and data.training:
        _look_for_images(run, data, skips=skips)


def _look_for_images(run: Run, data: OpenedData, *, skips: bool) -> None:
    """Look for the files of a pass's images and films, a share of the rows on each rank.

    Raises:
        DataError: One is not there, and bad rows stop the run; the same on all ranks.
        ConfigError: There are films, and nothing to decode them with.
    """
    ranks = run.ranks
    with ranks.together():
        absent = list(_without_images(run, data, skips=skips))
    lacking = [reason for reasons in ranks.gather(absent) for reason in reasons]
    if lacking:
        run.log.messages.append(
            f"warning: {len(lacking)} rows of the first pass name images that are not there, and are skipped, though "
            f"epochs count them: {lacking[0]}"
        )


def _without_images(run: Run, data: OpenedData, *, skips: bool) -> Iterator[str]:
    """Yield what is wrong with the rows of this rank whose images are not there; the first is raised unless skipped."""
    files = ImageFiles(run.config.data.image_dir, run.base)
    for name, row in _rows_of_first_pass(run, data):
        try:
            for image in held_images(row, name):
                if isinstance(image, Video):
                    files.film(image, name)
                    continue
                path = image.get("path") if isinstance(image, Mapping) and not image.get("bytes") else image
                if isinstance(path, str):
                    files.path(path, name)
        except DataError as error:
            if not skips:
                raise
            yield str(error)


def _rows_of_first_pass(run: Run, data: OpenedData) -> Iterator[tuple[str, Row]]:
    """Yield this rank's share of the rows that can be read and the filter takes, as far as the run comes."""
    reader, config, accept = training_reader(run.config, data), run.config, row_filter(run)
    draws = reader.order.epoch_draws or 0  # what a stream holds shows when it is read
    if config.steps is not None:
        draws = min(draws, config.steps * max([config.data.batch_size, *config.data.batch_size_schedule.values()]))
    for draw in range(run.ranks.rank, draws, run.ranks.size):
        try:
            _, name, row = reader.read(draw)
        except DataError:
            continue  # it says so when it is trained on
        if accept is None or accept(row):
            yield name, row
