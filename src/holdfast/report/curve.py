"""One line plot as an SVG file, without any library: for the first look at a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT, _MARGIN = 720, 360, 48
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700")


def line_plot(title: str, curves: Mapping[str, Points], *, horizontal: str, low: float = 0.0, high: float = 1.0) -> str:
    """Return an SVG document with one line per named curve.

    Args:
        title: Above the plot.
        curves: Points from left to right; at least one curve has two.
        horizontal: Name of the horizontal axis, which starts at 0.
        low, high: Ends of the vertical axis.
    """
    longest = max((x for points in curves.values() for x, _ in points), default=1.0) or 1.0

    def place(x: float, y: float) -> str:
        across = _MARGIN + x / longest * (_WIDTH - 2 * _MARGIN)
        up = _HEIGHT - _MARGIN - (min(max(y, low), high) - low) / (high - low) * (_HEIGHT - 2 * _MARGIN)
        return f"{across:.1f},{up:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_MARGIN}" y="24" font-size="16">{escape(title)}</text>',
        f'<text x="{_WIDTH // 2}" y="{_HEIGHT - 8}">{escape(horizontal)}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = low + share * (high - low)
        start, end = place(0, value), place(longest, value)
        parts.append(f'<polyline points="{start} {end}" stroke="#d0d7de" fill="none"/>')
        parts.append(f'<text x="8" y="{float(start.split(",")[1]) + 4:.1f}">{value:g}</text>')
    for number, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        joined = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline points="{joined}" stroke="{colour}" stroke-width="2" fill="none"/>')
        below = 40 + 16 * number
        parts.append(f'<text x="{_WIDTH - 200}" y="{below}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])
