"""Survey all rows of a source (`holdfast data`): lengths, truncation, untrained rows, duplicates, mistakes.

Only a fingerprint of eight bytes per row and a histogram of lengths are kept, so that a million rows take 9 MB.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from holdfast.data.content.lengths import TEMPLATE
from holdfast.data.tokens.chat import S, Tokenised

_SHOWN = 5
"""Mistakes that are shown in full."""
_BARS, _WIDEST = 12, 40
_ROUND = 64
"""A suggested length is a multiple of this many tokens."""
_CUT = ("truncated", "split", "overlong_dropped")


@dataclass
class ImageCounts:
    """The images of rows, as many as could be prepared."""

    images: int = 0
    tokens: int = 0
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How many images have a width and a height in pixels."""
    largest: tuple[int, str] = (0, "")
    """Tokens of the image with the most, and its name."""

    def add(self, image: Any, tokens: int, name: str) -> None:
        """Count one image, in PIL."""
        size = (image.width, image.height)
        self.images += 1
        self.tokens += tokens
        self.sizes[size] += 1
        self.largest = max(self.largest, (tokens, f"{name} of {size[0]}x{size[1]} pixels"), key=lambda item: item[0])

    def as_plain(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        if not self.images:
            return {"images": 0}
        widths, heights = ([size[axis] for size in self.sizes] for axis in (0, 1))
        return {
            "images": self.images,
            "tokens": self.tokens,
            "sizes": len(self.sizes),
            "width": [min(widths), max(widths)],
            "height": [min(heights), max(heights)],
            "largest_tokens": self.largest[0],
            "largest": self.largest[1],
        }

    def lines(self) -> Iterator[str]:
        """Yield what is printed; nothing without an image."""
        if not self.images:
            return
        plain = self.as_plain()
        (thin, wide), (low, high) = plain["width"], plain["height"]
        sizes = f"{thin} to {wide} pixels wide and {low} to {high} high"
        yield f"  images: {self.images:,} of {self.tokens:,} tokens, {sizes}"
        yield f"  largest image: {self.largest[1]}, {self.largest[0]:,} tokens"


@dataclass
class VideoCounts:
    """The videos of rows, as many as could be prepared."""

    videos: int = 0
    frames: int = 0
    tokens: int = 0
    longest: tuple[int, str] = (0, "")
    """Frames of the video with the most, and its name."""

    def add(self, frames: Sequence[Any], tokens: int, name: str) -> None:
        """Count one video, of frames in PIL."""
        self.videos += 1
        self.frames += len(frames)
        self.tokens += tokens
        described = f"{name} of {frames[0].width}x{frames[0].height} pixels, {tokens:,} tokens"
        self.longest = max(self.longest, (len(frames), described), key=lambda item: item[0])

    def as_plain(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        if not self.videos:
            return {"videos": 0}
        counts = {"videos": self.videos, "frames": self.frames, "tokens": self.tokens}
        return {**counts, "longest_frames": self.longest[0], "longest": self.longest[1]}

    def lines(self) -> Iterator[str]:
        """Yield what is printed; nothing without a video."""
        if self.videos:
            yield f"  videos: {self.videos:,} of {self.frames:,} frames and {self.tokens:,} tokens"
            yield f"  longest video: {self.longest[0]:,} frames, {self.longest[1]}"


@dataclass
class Survey:
    """The rows of one source, counted one after the other."""

    source: str
    max_length: int
    """Tokens a sequence may have, or a prompt."""
    rows: int = 0
    filtered: int = 0
    """Rows that `data.filter` leaves out."""
    sequences: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Sums of `Tokenised.counts`."""
    rows_with: Counter[str] = field(default_factory=Counter)
    """Rows that something of `counts` happened to; a row may be counted there several times."""
    mistakes: list[str] = field(default_factory=list)
    """The first ones in full."""
    mistaken_rows: int = 0
    skips: bool = False
    """Whether a run leaves out rows with mistakes, and goes on."""
    images: ImageCounts = field(default_factory=ImageCounts)
    videos: VideoCounts = field(default_factory=VideoCounts)
    _of_length: Counter[int] = field(default_factory=Counter)
    """How many sequences have a length, before anything is cut."""
    _fingerprints: array[int] = field(default_factory=lambda: array("Q"))
    """Fingerprint of each row's prompt, or of all its tokens."""

    def add(self, tokenised: Tokenised[S], mistake: str = "") -> None:
        """Count what one row gives, and what is wrong with it if something is."""
        self.rows += 1
        if mistake:
            self._note(mistake)
        if tokenised.counts:  # most rows have none, and an update takes longer than the rest
            self.counts.update(tokenised.counts)
            self.rows_with.update(tokenised.counts.keys())
        for length in tokenised.lengths:
            self._of_length[length] += 1
        text = xxhash.xxh3_64()
        for example in tokenised.examples:
            self.sequences += 1
            self.tokens += example.tokens.size
            self.trained_tokens += example.trained_tokens
            text.update(example.tokens.tobytes())
        if tokenised.examples:
            self._fingerprints.append(text.intdigest())

    def leave_out(self) -> None:
        """Count a row that the filter does not take."""
        self.rows += 1
        self.filtered += 1

    def add_mistake(self, text: str) -> None:
        """Count a row that a run would be refused for."""
        self.rows += 1
        self._note(text)

    def _note(self, text: str) -> None:
        self.mistaken_rows += 1
        if len(self.mistakes) < _SHOWN:
            self.mistakes.append(text)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, before any was cut; 0 if there is none."""
        return max(self._of_length, default=0)

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence in the mean, before any was cut; 0 if there is none."""
        return sum(length * number for length, number in self._of_length.items()) / max(1, self.measured)

    @property
    def measured(self) -> int:
        """Sequences before any was cut or left out."""
        return self._of_length.total()

    @property
    def cut(self) -> int:
        """Sequences that are longer than allowed."""
        return sum(self.counts[name] for name in _CUT)

    @property
    def duplicates(self) -> int:
        """Rows that say what an earlier row says."""
        ordered = np.sort(np.asarray(self._fingerprints, dtype=np.uint64))
        return int(np.count_nonzero(ordered[1:] == ordered[:-1]))

    def quantile(self, share: float) -> int:
        """Return the shortest length that so many of all sequences have at most; 0 if there is none."""
        below, least = 0, share * self.measured
        for length in sorted(self._of_length):
            below += self._of_length[length]
            if below >= least:
                return length
        return self.longest

    def length_for(self, share: float) -> int:
        """Return the shortest length, a multiple of 64 tokens, that so many of all sequences fit in."""
        return -(-max(self.quantile(share), 1) // _ROUND) * _ROUND

    def histogram(self) -> list[tuple[int, int, int]]:
        """Return up to 12 bars as (shortest, longest, sequences), of equal width and from the shortest on."""
        if not self._of_length:
            return []
        low, high = min(self._of_length), self.longest
        width = -(-(high - low + 1) // _BARS)
        numbers = [0] * ((high - low) // width + 1)
        for length, number in self._of_length.items():
            numbers[(length - low) // width] += number
        starts = range(low, high + 1, width)
        return [(start, min(start + width - 1, high), number) for start, number in zip(starts, numbers, strict=True)]

    def as_plain(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        quantiles = {name: self.quantile(share) for name, share in _QUANTILES.items() if self._of_length}
        return {
            "source": self.source,
            "rows": self.rows,
            "filtered": self.filtered,
            "mistaken_rows": self.mistaken_rows,
            "mistakes": self.mistakes,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "max_length": self.max_length,
            "cut": self.cut,
            "counts": dict(self.counts),
            "duplicates": self.duplicates,
            "images": self.images.as_plain(),
            "videos": self.videos.as_plain(),
            "lengths": quantiles,
            "histogram": self.histogram(),
            "length_for_99_percent": self.length_for(0.99),
            "length_for_all": self.length_for(1.0),
        }


_QUANTILES: Mapping[str, float] = {"median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}

_SAYS = {
    "truncated": "longer than {limit} tokens and lose their end",
    "split": "longer than {limit} tokens and are split",
    "overlong_dropped": "longer than {limit} tokens and are left out",
    "untrained": "sequences left out since no token of them is trained",
    **TEMPLATE,
    "split_by_turn": "conversations that the chat template writes as one sequence per turn",
    "reasoning_dropped": "rows whose reasoning the chat template does not write",
    "without_chat_template": "prompts of plain text, which skip the tokenizer's chat template",
    "alike_dropped": "rows left out since their two answers are the same",
    "empty_dropped": "rows left out since an answer is empty",
}
"""What a count of `Tokenised` says, behind its number."""


def report_lines(survey: Survey, *, prompts: bool, room_for: int = 0, limit: str = "data.max_length") -> Iterator[str]:
    """Yield the lines of a survey.

    Args:
        survey: Of one source.
        prompts: Whether its sequences are prompts that a policy continues.
        room_for: Tokens that are written after a prompt.
        limit: The key that bounds them.
    """
    noun = "prompts" if prompts else "sequences"
    trained = "" if prompts else f", {survey.trained_tokens:,} of them trained"
    yield f"{survey.source}: {_rows(survey.rows)}, {survey.sequences:,} {noun} of {survey.tokens:,} tokens{trained}"
    if survey.filtered:
        yield f"  {_rows(survey.filtered)} left out by data.filter"
    bars = survey.histogram()
    if bars:
        yield "  tokens: " + ", ".join(f"{name} {value:,}" for name, value in survey.as_plain()["lengths"].items())
        yield from (f"  {bar}" for bar in _bars(bars))
    yield from survey.images.lines()
    yield from survey.videos.lines()
    read = survey.rows - survey.filtered
    for name, number in survey.counts.items():
        description = _SAYS.get(name, name).format(limit=survey.max_length)
        yield f"  {number:,} ({survey.rows_with[name] / read:.1%} of rows): {description}"
    if survey.cut:
        most, every = survey.length_for(0.99) + room_for, survey.length_for(1.0) + room_for
        yield f"  {limit}: {most} fits 99 % of them, {every} all"
    if survey.duplicates:
        alike = "the prompt" if prompts else "all tokens"
        yield f"  {_rows(survey.duplicates)} with {alike} of an earlier one"
    if survey.mistaken_rows:
        yield from _mistakes(survey)


def _mistakes(survey: Survey) -> Iterator[str]:
    yield f"  {_rows(survey.mistaken_rows)} that a run {'skips' if survey.skips else 'stops at'}:"
    yield from (f"    {mistake}" for mistake in survey.mistakes)
    if survey.mistaken_rows > len(survey.mistakes):
        yield f"    and {survey.mistaken_rows - len(survey.mistakes):,} more"


def _rows(number: int) -> str:
    return f"{number:,} row" if number == 1 else f"{number:,} rows"


def _bars(histogram: list[tuple[int, int, int]]) -> Iterator[str]:
    single = all(low == high for low, high, _ in histogram)
    most = max(number for _, _, number in histogram)
    digits = len(str(histogram[-1][1]))
    for low, high, number in histogram:
        bar = "#" * -(-number * _WIDEST // most)
        span = f"{low:>{digits}}" if single else f"{low:>{digits}} to {high:>{digits}}"
        yield f"{span}  {bar:<{_WIDEST}}  {number:,}"
