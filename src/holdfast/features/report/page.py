"""One self-contained page about one run or several: no network, no account, no second file.

The page may be sent around and hold what a model wrote, so nothing in it can act: scripts are allowed by their hash
alone (`default-src 'none'`), and foreign text is printable, escaped, and only ever set as text.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from holdfast.errors import UserError
from holdfast.features.report import sections
from holdfast.features.report.chart_data import as_script, page_data
from holdfast.features.report.curves import do_nothing
from holdfast.features.report.html import section, tag, text
from holdfast.features.report.metrics import leading, metric_label
from holdfast.features.report.reading import RunRecord, read_run
from holdfast.features.report.thinning import RULE
from holdfast.files import naming
from holdfast.training.directory import PAGE

MARK = '<meta name="generator" content="holdfast report">'
"""By which a file is known to be such a page, and may be written anew."""
_SCRIPTS = ("plot.js", "charts.js", "samples.js", "page.js")
MOST_RUNS = 8
"""Colours that can be told apart."""


def write_page(directories: Sequence[Path], output: Path | None, between: Callable[[], None] = do_nothing) -> Path:
    """Write a page about runs and return where it is; it appears whole or not at all.

    Args:
        directories: Of the runs.
        output: Where to; None: in the directory of one run, or `report.html` here for several.
        between: Called now and then; what it raises ends the work, and no page is left.

    Raises:
        UserError: A directory is none of a run, or the page would replace something else.
    """
    if len(directories) > MOST_RUNS:
        raise UserError(
            f"{len(directories)} runs are more than the {MOST_RUNS} whose curves can be told apart. Name fewer."
        )
    target = output or (directories[0] / PAGE if len(directories) == 1 else Path(PAGE))
    _check_target(target)
    page = page_of([read_run(directory, between) for directory in directories], between)
    staging = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with naming(staging), staging.open("w", encoding="utf-8") as file:
            file.write(page)
        between()
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
    try:
        if not target.exists():
            return
        if target.is_file():
            with target.open("rb") as file:
                if MARK.encode() in file.read(4096):
                    return
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {error.strerror or error}. Name another place with -o."
        ) from error
    raise UserError(f"{target} is not a page of `holdfast report`, so it is not replaced. Name another place with -o.")


def page_of(runs: Sequence[RunRecord], between: Callable[[], None] = do_nothing) -> str:
    """Return the page about runs."""
    assets = files("holdfast.features.report")
    scripts = [assets.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS]
    theme = assets.joinpath("theme.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash_source, [theme, *scripts]))}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    between()
    title = ", ".join(run.name for run in runs)
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        MARK,
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        tag("title", text(f"{title} · holdfast")),
        f"<script>{theme}</script>",
        f"<style>{assets.joinpath('page.css').read_text(encoding='utf-8')}</style>",
    ]
    data = f'<script type="application/json" id="data">{as_script(page_data(runs))}</script>'
    between()
    body = [_top(runs, title), tag("main", *_main(runs)), data, *(f"<script>{script}</script>" for script in scripts)]
    head_text, body_text = "\n".join(head), "\n".join(body)
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head_text}\n</head>\n<body>\n{body_text}\n</body>\n</html>\n'


def _hash_source(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _top(runs: Sequence[RunRecord], title: str) -> str:
    links = {"curves": "Curves", "time": "Time", "checkpoints": "Checkpoints", "samples": "Samples", "events": "Events"}
    links |= {"configuration": "Configuration", "environment": "Environment"}
    available = {
        name: label for name, label in links.items() if name != "samples" or any(run.samples.items for run in runs)
    }
    if not any("step_time" in run.curves.columns for run in runs):
        del available["time"]
    items = "".join(tag("li", tag("a", text(label), href=f"#{name}")) for name, label in available.items())
    button = tag("button", text("Dark"), id="theme", type="button", aria_label="Switch between light and dark")
    head = tag("div", tag("h1", text(title)), button, class_="title")
    skip = tag("a", text("Skip to the curves"), href="#curves", class_="skip")
    return tag(
        "header",
        skip,
        head,
        sections.summary_section(runs),
        tag("nav", tag("ul", items), aria_label="Parts of the page"),
    )


def _main(runs: Sequence[RunRecord]) -> list[str]:
    return [
        sections.notes_section(runs),
        _curves(runs),
        sections.times_section(runs),
        sections.checkpoints_section(runs),
        _samples(runs),
        sections.events_section(runs),
        sections.configuration_section(runs),
        sections.environment_section(runs),
        tag("footer", tag("p", text("Written by holdfast report. This page loads nothing and sends nothing."))),
    ]


def _curves(runs: Sequence[RunRecord]) -> str:
    names = list(leading({name for run in runs for name in run.curves.columns}))
    every = sorted({name for run in runs for name in run.curves.columns})
    if not every:
        return section("curves", "Curves", tag("p", text("There is no number to draw yet.")))
    legend = tag(
        "ul", *(tag("li", text(run.name), class_=f"run run-{index}") for index, run in enumerate(runs)), class_="runs"
    )
    timeline = tag(
        "div",
        id="timeline",
        class_="chart",
        role="img",
        aria_label="What happened, by step; the events below name each",
    )
    figures = [_figure(runs, name, index) for index, name in enumerate(names)]
    options = "".join(tag("option", text(name), value=name) for name in every)
    choose = tag("label", text("Any other metric "), tag("select", options, id="metric"))
    log = tag("label", '<input type="checkbox" id="logarithmic">', text(" logarithmic axes"))
    every_step = tag("button", text("All steps"), id="all-steps", type="button", hidden=True)
    metric_figure = tag(
        "figure",
        tag("figcaption", choose),
        tag("div", id="other", class_="chart", role="img", aria_label="The metric that was chosen"),
    )
    return section(
        "curves",
        "Curves",
        legend if len(runs) > 1 else "",
        tag(
            "div",
            log,
            every_step,
            tag("span", text("Drag over a chart to see some steps alone."), class_="hint"),
            class_="controls",
        ),
        tag("figure", tag("figcaption", tag("h3", text("What happened, by step"))), timeline, class_="wide"),
        tag("div", *figures, metric_figure, class_="charts"),
        tag("p", text(f"{RULE} Numbers have seven digits."), class_="rule"),
        tag(
            "noscript",
            tag("p", text("Curves and completions are drawn by the page's own scripts, which are off here.")),
        ),
    )


def _figure(runs: Sequence[RunRecord], name: str, index: int) -> str:
    label = metric_label(name, runs[0].verb)
    sentences = [
        f"{run.name}: {sections.curve_words(run, name)}" if len(runs) > 1 else sections.curve_words(run, name)
        for run in runs
    ]
    sentence = ". ".join(filter(None, sentences)) + "."
    chart = tag("div", id=f"chart-{index}", class_="chart", role="img", aria_label=f"{label.title} by step. {sentence}")
    caption = tag("figcaption", tag("h3", text(label.title)), tag("p", class_="legend", id=f"legend-{index}"))
    return tag("figure", caption, chart, tag("p", text(sentence), class_="words"))


def _samples(runs: Sequence[RunRecord]) -> str:
    if not any(run.samples.items for run in runs):
        return ""
    orders = {
        "group": "groups, newest step first",
        "oldest": "groups, oldest step first",
        "high": "reward, highest first",
        "low": "reward, lowest first",
        "advantage": "advantage, largest first",
    }
    order = "".join(tag("option", text(label), value=value) for value, label in orders.items())
    colours = {"logprob": "log-probability", "advantage": "advantage", "none": "nothing"}
    colour = "".join(tag("option", text(label), value=value) for value, label in colours.items())
    controls = [
        tag("label", text("Search "), '<input type="search" id="search" autocomplete="off" spellcheck="false">'),
        tag("label", text("Order "), tag("select", order, id="order")),
        tag("label", text("Colour tokens by "), tag("select", colour, id="colour")),
    ]
    if len(runs) > 1:
        names = "".join(tag("option", text(run.name), value=str(index)) for index, run in enumerate(runs))
        controls.insert(0, tag("label", text("Run "), tag("select", names, id="run")))
    rules = dict.fromkeys(run.samples.rule for run in runs if run.samples.items)
    return section(
        "samples",
        "Samples",
        tag("div", *controls, class_="controls"),
        tag("p", id="count", role="status", aria_live="polite"),
        tag("div", id="list"),
        tag("button", text("Show more"), id="more", type="button", hidden=True),
        *(tag("p", text(rule), class_="rule") for rule in rules),
    )
