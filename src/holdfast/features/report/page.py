"""One self-contained page about one run or several: no network, no account, no second file.

The page may be sent around and hold what a model wrote, so nothing in it can act: its script is allowed by its hash
alone (`default-src 'none'`), and foreign text is printable, escaped by the template, and only ever set as text.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from holdfast.errors import UserError
from holdfast.features.report import tables
from holdfast.features.report.drawn import RULE, page_data
from holdfast.features.report.reading import RunRecord, read_run
from holdfast.files import naming
from holdfast.text.escaping import escaped_paragraph
from holdfast.training.directory import PAGE

MARK = '<meta name="generator" content="holdfast report">'
"""By which a file is known to be such a page, and may be written anew."""
MOST_RUNS = 8
"""Colours that can be told apart."""


def write_page(directories: Sequence[Path], output: Path | None) -> Path:
    """Write a page about runs and return where it is; it appears whole or not at all.

    Args:
        directories: Of the runs.
        output: Where to; None: in the directory of one run, or `report.html` here for several.

    Raises:
        UserError: A directory is none of a run, or the page would replace something else.
    """
    if len(directories) > MOST_RUNS:
        raise UserError(
            f"{len(directories)} runs are more than the {MOST_RUNS} whose curves can be told apart. Name fewer."
        )
    target = output or (directories[0] / PAGE if len(directories) == 1 else Path(PAGE))
    page = page_of([read_run(directory) for directory in directories])
    staging = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        _check_target(target)
        with naming(staging), staging.open("w", encoding="utf-8") as file:
            file.write(page)
        staging.replace(target)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {error.strerror or error}. Name another place with -o."
        ) from error
    finally:
        with suppress(OSError):
            staging.unlink(missing_ok=True)
    return target


def _check_target(target: Path) -> None:
    if not target.exists():
        return
    if target.is_file():
        with target.open("rb") as file:
            if MARK.encode() in file.read(4096):
                return
    raise UserError(f"{target} is not a page of `holdfast report`, so it is not replaced. Name another place with -o.")


def page_of(runs: Sequence[RunRecord]) -> str:
    """Return the page about runs."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def printable(value: Any) -> Any:
        return value if isinstance(value, Markup) else escaped_paragraph(str(value))

    environment = Environment(
        autoescape=True, finalize=printable, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False, "allow_nan": False}
    assets = files("holdfast.features.report")
    template, style, script = (
        assets.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    data = page_data(runs)
    return environment.from_string(template).render(
        runs=runs,
        several=len(runs) > 1,
        title=", ".join(run.name for run in runs),
        tables=tables,
        times=tables.times(runs),
        sampled=any(run.samples.items for run in runs),
        data=data,
        other_metrics=[(name, name) for name in data["others"]],
        run_choices=[(index, run.name) for index, run in enumerate(runs)],
        rule=RULE,
        mark=Markup(MARK),  # noqa: S704 - a constant
        style=Markup(style),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
    )
