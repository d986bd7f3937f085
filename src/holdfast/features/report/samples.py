"""Chooses the completions of a run that a page shows, and those that it shows with all text and tokens.

Every completion of the steps that are shown is there with its first characters. Files are read once from front to back;
the texts that are shown whole are read a second time, so that no run is too long to be looked at.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.features.report.curves import LineReader, finite_number, is_step, parsed
from holdfast.files import RegularFile, read_bytes
from holdfast.metrics.sink import SAMPLE_FOLDER, SAMPLE_IMAGES, SAMPLES
from holdfast.text.escaping import escaped_paragraph
from holdfast.text.shortening import shortened

SHOWN_CHARACTERS = 300
WHOLE = 500
"""Completions that are there whole, with their tokens where the run recorded some."""
_WHOLE_CHARACTERS = 8_000
_WHOLE_TOKENS = 2_000
_WHOLE_TURNS = 200
_IMAGE = re.compile(r"\b[0-9a-f]{16}\.jpg\b")
_JPEG = b"\xff\xd8"
_MOST_IMAGES, _MOST_BYTES = 500, 1 << 16
"""Images of a page, and bytes of each."""
MOST_SAMPLES = 20_000
_LAST_BYTES = 1 << 16
SAMPLE_RULE = (
    f"Of each up to {SHOWN_CHARACTERS} characters are here. {WHOLE} are here whole: of up to {WHOLE // 4} steps "
    "spread evenly over the run, the first and the last among them, the best and the worst, and those whose tokens "
    "were recorded; then the newest."
)


@dataclass
class ShownSample:
    """One completion on a page."""

    step: int
    sample_id: int
    prompt: str
    """The first characters, printable."""
    completion: str
    reward: float | None
    function_rewards: dict[str, float | None]
    advantage: float | None
    finish: str
    trained: bool
    offset: int
    """Byte offset of its line in samples.jsonl; -1 for a row of a table file."""
    has_tokens: bool = False
    is_cut: bool = False
    """Whether the text is longer than what is here."""
    images: tuple[str, ...] = ()
    """Names of the files of its prompt's images."""
    full: dict[str, Any] | None = None
    """Prompt, completion, tokens as [text, log-probability, advantage], and messages of an episode as [role, name of a
    tool, text], where all of it is shown."""


@dataclass
class Samples:
    """The completions of a run, without those of steps that were made again."""

    items: list[ShownSample] = field(default_factory=list)
    total: int = 0
    """Completions that were written and count."""
    unread: int = 0
    images: dict[str, str] = field(default_factory=dict)
    """Files of images in base64, by name."""

    @property
    def rule(self) -> str:
        """Return the rule by which these were chosen, in sentences."""
        if self.total <= len(self.items):
            return SAMPLE_RULE
        steps = len({item.step for item in self.items})
        spread = f"those of {steps:,} steps, spread evenly over the run, are here"
        return f"Of {self.total:,} completions {spread}. {SAMPLE_RULE}"


def read_samples(directory: Path, most: int = MOST_SAMPLES) -> Samples:
    """Return the completions of a run's training steps that a page shows.

    Args:
        directory: Of the run.
        most: Beyond so many, whole steps are left out evenly.

    Raises:
        OSError: They cannot be read.
    """
    samples = Samples()
    path = directory / SAMPLES
    thinner = _Thinner(most)
    for offset, line in LineReader(path).new(to_end=True):
        if isinstance(line, dict) and line.get("event") == "rewind" and is_step(line.get("to")):
            thinner.rewind(line["to"])
        elif (sample := sample_of(line, offset)) is not None:
            thinner.take(sample)
        else:
            samples.unread += 1
    for sample in _in_tables(directory / SAMPLE_FOLDER):
        thinner.take(sample)
    samples.items, samples.total = thinner.selection()
    _read_full(path, choose_full(samples.items))
    samples.images = _read_images(directory / SAMPLE_IMAGES, samples.items)
    return samples


def last_samples(directory: Path) -> Samples:
    """Return the completions of the last step that are at the end of samples.jsonl, by their first characters."""
    lines = (sample_of(line, offset) for offset, line in LineReader(directory / SAMPLES, _LAST_BYTES).new())
    items = [sample for sample in lines if sample is not None]
    return Samples([sample for sample in items if sample.step == items[-1].step])


def sample_of(line: Any, offset: int) -> ShownSample | None:
    """Return a line of samples.jsonl; None if it is none."""
    if not isinstance(line, dict) or not is_step(line.get("step")) or not isinstance(line.get("completion"), str):
        return None
    prompt, completion = str(line.get("prompt", "")), line["completion"]
    rewards = line.get("rewards")
    return ShownSample(
        step=line["step"],
        sample_id=line["sample_id"] if isinstance(line.get("sample_id"), int) else 0,
        prompt=escaped_paragraph(shortened(prompt, SHOWN_CHARACTERS)),
        completion=escaped_paragraph(shortened(completion, SHOWN_CHARACTERS)),
        reward=finite_number(line.get("reward")),
        function_rewards={str(name): finite_number(value) for name, value in rewards.items()}
        if isinstance(rewards, dict)
        else {},
        advantage=finite_number(line.get("advantage")),
        finish=str(line.get("finish", "")),
        trained=line.get("trained") is not False,
        offset=offset,
        has_tokens=bool(line.get("tokens")),
        images=tuple(_IMAGE.findall(str(line.get("images") or ""))),
        is_cut=len(prompt) > SHOWN_CHARACTERS or len(completion) > SHOWN_CHARACTERS,
    )


class _Thinner:
    """Holds at most twice as many completions as requested; beyond that, every second step is dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._steps: dict[int, list[ShownSample]] = {}
        self._counts: dict[int, int] = {}
        self._stride = 1
        self._size = 0

    def take(self, sample: ShownSample) -> None:
        step = sample.step
        if step not in self._counts:
            self._counts[step] = 0
            if (len(self._counts) - 1) % self._stride == 0:
                self._steps[step] = []
        self._counts[step] += 1
        if step in self._steps:
            self._steps[step].append(sample)
            self._size += 1
            if self._size > 2 * self._most:
                self._halve()

    def _halve(self) -> None:
        if len(self._steps) < 2:
            return
        self._stride *= 2
        self._steps = dict(list(self._steps.items())[::2])
        self._size = sum(map(len, self._steps.values()))

    def rewind(self, step: int) -> None:
        self._counts = {sampled_step: count for sampled_step, count in self._counts.items() if sampled_step <= step}
        self._steps = {sampled_step: items for sampled_step, items in self._steps.items() if sampled_step <= step}
        self._size = sum(map(len, self._steps.values()))

    def selection(self) -> tuple[list[ShownSample], int]:
        while self._size > self._most and len(self._steps) > 1:
            self._halve()
        items = [item for step in sorted(self._steps) for item in self._steps[step]]
        return items[: 2 * self._most], sum(self._counts.values())


def choose_full(items: Sequence[ShownSample]) -> list[ShownSample]:
    """Return the completions that are shown whole, by `SAMPLE_RULE`."""
    steps: dict[int, list[ShownSample]] = {}
    for sample in items:
        steps.setdefault(sample.step, []).append(sample)
    order = list(steps)
    count = min(len(order), WHOLE // 4)
    spread = [order[round(number * (len(order) - 1) / max(1, count - 1))] for number in range(count)]
    samples: dict[int, ShownSample] = {}
    for step in spread:
        scored = [sample for sample in steps[step] if sample.reward is not None]
        ranked = sorted(scored, key=lambda sample: sample.reward or 0.0)
        best = [ranked[-1], ranked[0]] if ranked else []
        for sample in (*best, *(sample for sample in steps[step] if sample.has_tokens)):
            if len(samples) < WHOLE:
                samples[id(sample)] = sample
    for sample in reversed(items):
        if len(samples) >= WHOLE:
            break
        samples[id(sample)] = sample
    return list(samples.values())


def _read_full(path: Path, samples: Sequence[ShownSample]) -> None:
    """Read all of the text and the tokens of some completions."""
    in_file = sorted((sample for sample in samples if sample.offset >= 0), key=lambda sample: sample.offset)
    if not in_file:
        return
    with RegularFile(path) as file:
        for sample in in_file:
            file.seek(sample.offset)
            line = parsed(_line_of(file))
            if isinstance(line, dict):
                sample.full = full_sample(line)


def _read_images(folder: Path, samples: Sequence[ShownSample]) -> dict[str, str]:
    """Return files of images in base64, those of the newest completions first; none that is not there."""
    images: dict[str, str] = {}
    for name in dict.fromkeys(name for sample in reversed(samples) for name in sample.images):
        if len(images) == _MOST_IMAGES:
            break
        with suppress(OSError, ValueError):
            data = read_bytes(folder / name, _MOST_BYTES)
            if data.startswith(_JPEG):
                images[name] = base64.b64encode(data).decode()
    return images


def _line_of(file: RegularFile) -> bytes:
    data = b""
    while b"\n" not in data and (block := file.read(1 << 14)):
        data += block
    return data.partition(b"\n")[0]


def full_sample(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return prompt, completion and tokens of a line of samples.jsonl, printable, cut beyond reason."""
    tokens = line.get("tokens")
    return {
        "prompt": _cut(str(line.get("prompt", ""))),
        "completion": _cut(str(line.get("completion", ""))),
        "tokens": [
            [escaped_paragraph(str(token[0])), finite_number(token[1]), finite_number(token[2])]
            for token in (tokens[:_WHOLE_TOKENS] if isinstance(tokens, list) else ())
            if isinstance(token, list) and len(token) == 3
        ],
        "turns": _turns(line.get("messages")),
    }


def _turns(messages: Any) -> list[list[str]]:
    """Return the conversation of an episode, cut beyond reason; [] of a single answer."""
    turns: list[list[str]] = []
    left = _WHOLE_CHARACTERS
    for message in messages[:_WHOLE_TURNS] if isinstance(messages, list) else ():
        if isinstance(message, dict) and left > 0:
            role, name, text = (str(message.get(key) or "") for key in ("role", "name", "content"))
            turns.append([escaped_paragraph(role[:40]), escaped_paragraph(name[:80]), _cut(text, left)])
            left -= len(text)
    return turns


def _cut(text: str, most: int = _WHOLE_CHARACTERS) -> str:
    excess = len(text) - most
    suffix = f"\n... and {excess:,} characters more" if excess > 0 else ""
    return escaped_paragraph(text[:most]) + suffix


def _in_tables(folder: Path) -> Iterator[ShownSample]:
    """Yield completions that were written as parquet, a file for each step."""
    if not folder.is_dir():
        return
    from pyarrow import ArrowException  # type: ignore[import-untyped]  # has no stubs
    from pyarrow.parquet import read_table  # type: ignore[import-untyped]  # has no stubs

    for path in sorted(folder.glob("step-*.parquet")):
        try:
            rows = read_table(path).to_pylist()
        except (OSError, ArrowException):
            continue
        for row in rows:
            rewards = {
                name.removeprefix("rewards/"): value for name, value in row.items() if name.startswith("rewards/")
            }
            sample = sample_of({**row, "rewards": rewards}, -1)
            if sample is not None:
                sample.full = full_sample(row) if sample.is_cut or row.get("messages") else None
                yield sample
