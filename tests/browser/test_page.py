"""The page in Chromium: nothing is asked for, nothing complains, what is drawn is the log, and it can be used."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from holdfast.features.report.page import write_page
from holdfast.metrics.sink import read_metrics
from tests.browser.driver import AXE, Browser, driving, missing
from tests.features.report.cases import RunFolder, killed_run, long_run, run_that_goes_back
from tests.features.report.test_samples import saved_image

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "-")]

SAMPLES = 64
"""Completions of the killed run that count."""
WIDTHS, THEMES = (380, 800, 1400), ("light", "dark")
HERE = Path(__file__).parent
OVERLAPS = (HERE / "overlaps.js").read_text()
DRAWN = (HERE / "drawn.js").read_text()
CONTRAST = (HERE / "contrast.js").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with driving() as browser:
        yield browser


@pytest.fixture
def quiet(browser: Browser) -> Iterator[Browser]:
    """Return the browser; after the test nothing may have been asked for and nothing may have complained."""
    browser.size(1400)
    browser.prefer("light")
    yield browser
    requests = [address for address in browser.requests() if not address.startswith(("file:", "data:"))]
    assert requests == []
    assert browser.console() == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    run = killed_run(tmp_path_factory.mktemp("killed"))
    write_page([run.place], None)
    return run


def open_page(browser: Browser, run: RunFolder) -> None:
    browser.open(run.place / "report.html")


def test_what_is_drawn_is_the_effective_log_and_every_mark(quiet: Browser, run: RunFolder) -> None:
    open_page(quiet, run)
    quiet.draw_all()

    drawn: dict[str, list[dict[str, Any]]] = quiet.run(DRAWN)

    lines = read_metrics(run.place / "metrics.jsonl")
    curves = [trace for chart, traces in drawn.items() if chart.startswith("chart-") for trace in traces]
    of_log = [trace for trace in curves if trace["kind"] in {"curve", "evaluation"}]
    assert len(of_log) >= 7
    for trace in of_log:
        logged = [(line["step"], line[trace["metric"]]) for line in lines if trace["metric"] in line]
        points = [(step, value) for step, value in logged if value is not None]
        assert trace["x"] == [step for step, _ in points]
        assert trace["y"] == [pytest.approx(value, abs=trace["resolution"]) for _, value in points]
        assert trace["joined"] == (trace["kind"] == "curve")
        if trace["joined"]:  # a line begins anew after steps without a number
            assert trace["starts"] == [
                step for (_, before), (step, value) in pairwise([(0, None), *logged]) if before is None is not value
            ]
    raw = (run.place / "metrics.jsonl").read_text().splitlines()
    rewinds = sum('"event"' in line for line in raw)
    marks = Counter({trace["kind"]: len(trace["x"]) for trace in drawn["timeline"]})
    evaluated = len({line["step"] for line in lines if any(name.startswith("eval/") for name in line)})
    assert (marks["resumed"], marks["failed"], marks["evaluated"]) == (rewinds, rewinds, evaluated)
    assert (marks["saved"], marks["alarm"], marks["exported"]) == (6, 1, 1)
    lost = [trace for trace in curves if trace["kind"] == "lost" and trace["metric"] == "reward"]
    assert [(trace["x"][0], trace["x"][-1]) for trace in lost] == [(11, 14), (31, 37), (51, 52)]


def test_a_filter_is_typed_and_a_group_opened_by_the_keyboard_alone(quiet: Browser, run: RunFolder) -> None:
    open_page(quiet, run)
    focus = "const e = document.activeElement; return e.id || e.tagName + ' ' + e.textContent.slice(0, 30)"

    quiet.press("Tab")
    first = quiet.run(focus)
    seen = []
    for _ in range(60):
        quiet.press("Tab")
        seen.append(quiet.run(focus))
        if seen[-1] == "search":
            break
    quiet.press(*"with tok")
    quiet.wait_for("return document.getElementById('count').textContent.startsWith('1 of ')")
    for _ in range(3):
        quiet.press("Tab")
    quiet.press("Enter")
    quiet.wait_for("return document.querySelector('#list details[open] article pre.completion')")

    assert first == "A Skip to the curves"
    assert {"theme", "logarithmic", "metric", "search"} <= set(seen)
    text = quiet.run("return document.querySelector('#list details[open] pre.completion').textContent")
    tokens = quiet.run(
        "return [...document.querySelectorAll('#list .token')].map((e) => [e.textContent, e.style.backgroundColor])"
    )
    assert text == "plain answer"
    assert [words for words, _ in tokens] == ["plain", " ans", "wer"]
    assert tokens[0][1] != tokens[1][1] != tokens[2][1]
    assert quiet.run("return document.getElementById('count').textContent") == f"1 of {SAMPLES} completions in 1 groups"


def test_orders_sort_by_reward_and_more_is_shown_on_request(quiet: Browser, run: RunFolder) -> None:
    open_page(quiet, run)

    quiet.run(
        "const order = document.getElementById('order'); order.value = 'high'; order.dispatchEvent(new Event('change'))"
    )

    read = "return [...document.querySelectorAll('#list article .numbers')].map((e) => e.textContent)"
    rewards = [float(text.partition("reward ")[2].split("advantage")[0]) for text in quiet.run(read)]
    assert len(rewards) == 25
    assert rewards == sorted(rewards, reverse=True)
    quiet.run("document.getElementById('more').click()")
    quiet.run("document.getElementById('more').click()")
    assert len(quiet.run(read)) == SAMPLES
    assert quiet.run("return document.getElementById('more').hidden")


def test_hostile_completions_are_text(quiet: Browser, run: RunFolder) -> None:
    open_page(quiet, run)
    quiet.run("window.alert = (words) => { document.title = 'attacked ' + words }")

    quiet.run("for (const box of document.querySelectorAll('#list details')) box.open = true")
    quiet.wait_for("return document.querySelectorAll('#list article').length > 50")

    completions = "return [...document.querySelectorAll('#list pre.completion')].map((e) => e.textContent)"
    texts = quiet.run(completions)
    assert "</script><script>alert(1)</script>" in texts
    assert "<img src=x onerror=alert(2)>" in texts
    assert quiet.run("return document.querySelectorAll('#list img, #list script').length") == 0
    assert "attacked" not in quiet.run("return document.title")
    longest = max(texts, key=len)
    assert len(longest) == 300
    quiet.run("[...document.querySelectorAll('#list article button')].at(-1).click()")
    assert max(map(len, quiet.run(completions))) == 5000


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_boxes_overlap_and_text_can_be_read(quiet: Browser, run: RunFolder, width: int, theme: str) -> None:
    quiet.size(width)
    quiet.prefer(theme)
    open_page(quiet, run)
    quiet.run("for (const box of [...document.querySelectorAll('details')].slice(-3)) box.open = true")
    quiet.run("document.querySelector('#list details').open = true")
    quiet.draw_all()

    assert quiet.run("return document.documentElement.dataset.theme") == theme
    assert quiet.run(OVERLAPS) == []
    if not AXE.exists():
        pytest.skip("axe-core is not installed: tools/install_browser.sh")
    quiet.run(AXE.read_text() + "; window.axe = axe;")
    found = quiet.run_async(CONTRAST)
    assert found["violations"] == []
    assert found["contrasts"] > 100


BOX = """
    const chart = document.getElementById(arguments[0]);
    chart.scrollIntoView({ block: "center" });
    const { x, y, width, height } = chart.querySelector("svg").getBoundingClientRect();
    return [x, y, width, height];
"""
TIP = """
    const tip = document.getElementById(arguments[0]).querySelector(".tip:not([hidden])");
    return tip ? [...tip.childNodes].map((line) => line.textContent) : [];
"""


def point_at(browser: Browser, kind: str, chart: str, across: float, down: float = 0.5, **more: object) -> None:
    """Do something with the pointer at a part of a chart's width and height."""
    x, y, width, height = browser.run(BOX, chart)
    values = {"type": kind, "x": x + across * width, "y": y + down * height}
    browser.devtools("Input.dispatchMouseEvent", values | more)


def test_values_under_the_pointer_are_those_of_the_log(quiet: Browser, run: RunFolder) -> None:
    open_page(quiet, run)
    quiet.draw_all()
    reward = quiet.run("return 'chart-' + page.charts.findIndex((chart) => chart.name === 'reward')")

    point_at(quiet, "mouseMoved", reward, 0.5)
    step, *values = quiet.run(TIP, reward)
    point_at(quiet, "mouseMoved", reward, 0.5, 2.0)
    outside = quiet.run(TIP, reward)

    number = int(step.removeprefix("step "))
    assert 20 < number < 40
    assert f"■{1 - 1 / number:.5g}  reward" in values
    assert outside == []


def test_steps_that_are_dragged_over_are_shown_alone_in_every_chart(quiet: Browser, run: RunFolder) -> None:
    open_page(quiet, run)
    quiet.draw_all()
    whole = quiet.run(DRAWN)
    ranges = (
        "return [...document.querySelectorAll('.chart svg')].map((svg) => svg.dataset.steps.split(',').map(Number))"
    )

    point_at(quiet, "mousePressed", "chart-0", 0.4, button="left", clickCount=1)
    point_at(quiet, "mouseMoved", "chart-0", 0.6, button="left")
    point_at(quiet, "mouseReleased", "chart-0", 0.6, button="left", clickCount=1)

    (first, last), *others = quiet.run(ranges)
    assert all(each == [first, last] for each in others)
    assert 15 < first < 30 < last < 45
    marks = [step for each in quiet.run(DRAWN)["timeline"] for step in each["x"]]
    assert marks
    assert all(first <= step <= last for step in marks)
    assert not quiet.run("return document.getElementById('all-steps').hidden")
    quiet.run("document.getElementById('all-steps').click()")
    assert quiet.run(DRAWN) == whole


def test_a_logarithmic_axis_has_every_positive_value_in_its_place(quiet: Browser, run: RunFolder) -> None:
    open_page(quiet, run)
    quiet.draw_all()

    quiet.run("document.getElementById('logarithmic').click()")

    lines = read_metrics(run.place / "metrics.jsonl")
    reward = [each for chart in quiet.run(DRAWN).values() for each in chart if each["metric"] == "reward"][-1]
    points = [(line["step"], line["reward"]) for line in lines if line.get("reward", 0) > 0]
    assert reward["x"] == [step for step, _ in points]
    assert reward["y"] == [pytest.approx(math.log10(value), abs=reward["resolution"]) for _, value in points]


def test_a_theme_is_switched_and_charts_follow(quiet: Browser, run: RunFolder) -> None:
    open_page(quiet, run)
    quiet.draw_all()
    colours = (
        "return ['text', '.line', '.grid'].map((part) => getComputedStyle(document.querySelector('#chart-0 ' + part)))"
        ".map((style) => style.fill + style.stroke)"
    )
    before = quiet.run(colours)

    quiet.run("document.getElementById('theme').click()")

    assert quiet.run("return document.documentElement.dataset.theme") == "dark"
    assert all(new != old for new, old in zip(quiet.run(colours), before, strict=True))


def test_a_printed_page_has_every_chart(quiet: Browser, run: RunFolder) -> None:
    open_page(quiet, run)

    data = quiet.devtools("Page.printToPDF", {"printBackground": True})["data"]

    assert base64.b64decode(data).startswith(b"%PDF")
    drawn = quiet.run(DRAWN)
    charts = quiet.run("return page.charts.length")
    assert {f"chart-{place}" for place in range(charts)} <= set(drawn)


def test_two_runs_are_drawn_in_two_colours(quiet: Browser, tmp_path: Path) -> None:
    one, two = killed_run(tmp_path, "one"), killed_run(tmp_path, "two")
    page = write_page([one.place, two.place], tmp_path / "both.html")
    quiet.open(page)
    quiet.draw_all()

    drawn = quiet.run(DRAWN)

    curves = [each for each in drawn["chart-0"] if each["kind"] == "curve"]
    assert len({each["color"] for each in curves}) == len(curves) == 2
    assert "phases" not in drawn
    assert quiet.run(OVERLAPS) == []


def test_a_group_shows_the_images_of_its_prompt(quiet: Browser, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.steps(1, 3)
    run.samples(2, "see", ["a", "b"], images=saved_image(run, 1))
    write_page([run.place], None)
    open_page(quiet, run)

    quiet.run("document.querySelector('#list details').open = true")
    quiet.wait_for("return document.querySelector('#list .images img')?.complete")

    shown = (
        "const image = document.querySelector('#list .images img'); return [image.naturalWidth, image.naturalHeight]"
    )
    assert quiet.run(shown) == [24, 16]


def test_odd_names_and_the_largest_numbers_are_drawn(quiet: Browser, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step, sign in enumerate((1, -1, 1), 1):
        numbers = {"loss": sign * 1e308, "reward": 0.5, "constructor": float(step), "toString": 2.0}
        run.append("metrics.jsonl", {"step": step, **numbers})
    run.steps(4, 5)
    write_page([run.place], None)
    open_page(quiet, run)
    quiet.draw_all()
    choose = "const e = document.getElementById('metric'); e.value = arguments[0]; e.dispatchEvent(new Event('change'))"

    shown = {}
    for name in ("constructor", "toString", "reward"):
        quiet.run(choose, name)
        shown[name] = [trace["x"] for trace in quiet.run(DRAWN)["other"]]
    loss = quiet.run("return 'chart-' + page.charts.findIndex((chart) => chart.name === 'loss')")
    path = quiet.run("return document.querySelector('#' + arguments[0] + ' .line').getAttribute('d')", loss)

    assert shown == {"constructor": [[1, 2, 3]], "toString": [[1, 2, 3]], "reward": [[1, 2, 3, 4, 5]]}
    assert "Infinity" not in path
    assert "NaN" not in path
    assert len({y for _, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)}) == 3


def test_a_mark_is_under_the_pointer_after_a_rewind(quiet: Browser, tmp_path: Path) -> None:
    run = run_that_goes_back(tmp_path)
    write_page([run.place], None)
    open_page(quiet, run)
    quiet.draw_all()
    box = quiet.run("return document.querySelector('#timeline svg').dataset.box.split(',').map(Number)")
    first, last = quiet.run("return document.querySelector('#timeline svg').dataset.steps.split(',').map(Number)")
    width, height = quiet.run(
        "return ['clientWidth', 'clientHeight'].map((side) => document.getElementById('timeline')[side])"
    )
    row = box[3] + (box[2] - box[3]) * 0.6 / 2.2  # the upper one of two

    tips = []
    for step in (20, 35, 50):
        x = box[0] + (step - first) / (last - first) * (box[1] - box[0])
        point_at(quiet, "mouseMoved", "timeline", x / width, row / height)
        tips += quiet.run(TIP, "timeline")

    assert [tip.split(":")[0] for tip in tips] == ["step 20", "step 35", "step 50"]


def test_a_range_too_short_to_hold_a_step_is_not_shown(quiet: Browser, run: RunFolder) -> None:
    open_page(quiet, run)
    quiet.draw_all()

    for _ in range(40):
        for kind, across in (("mousePressed", 0.5), ("mouseReleased", 0.52)):
            point_at(quiet, kind, "chart-0", across, button="left", clickCount=1)
    first, last = quiet.run("return document.querySelector('#chart-0 svg').dataset.steps.split(',').map(Number)")

    assert 0.01 <= last - first < 1
    assert quiet.run("return ticks(3, 3 + 1e-15, 6).length") <= 14


def test_a_run_of_100_000_steps_opens_in_three_seconds(quiet: Browser, tmp_path: Path) -> None:
    run = long_run(tmp_path, steps=100_000, samples=20_000, metrics=12)
    page = write_page([run.place], None)
    quiet.open(page)
    quiet.wait_for("return document.querySelector('#chart-0 svg') && document.querySelector('#list details')")

    seconds = quiet.work_seconds()
    quiet.draw_all()
    most = max(len(each["x"]) for each in quiet.run(DRAWN)["chart-0"])

    assert page.stat().st_size <= 15e6
    assert seconds <= 3.0
    assert 500 <= most <= 1200
    assert quiet.run("return document.getElementById('count').textContent").startswith("20,000 of 20,000 completions")
