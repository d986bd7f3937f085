"""Reading files that a run appends to, from where an earlier process of the tracker stopped."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.files import open_regular, parse_json, read_json

_CHUNK = 1 << 20
_PAUSE_BETWEEN_NOTES_SECONDS = 1.0


class Followed:
    """The whole lines of a file that grows, without those that a resume went back behind.

    A run writes into metrics.jsonl where it goes back to before it starts its trackers, so all of that is there when
    this one begins; in samples.jsonl that comes with the first sample, and void completions may be sent first. Some
    libraries keep the first value of a step that one process gives them, and must not see what is void.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self.offset = offset if self._begins_a_line(offset) else 0
        """Bytes taken; a file that lost what was taken before, in a power cut, is taken from its beginning."""
        self._rewinds: list[tuple[int, int]] = []
        """Where each is in the file, and the step it goes back to."""
        first = self.offset
        while lines := self.take():
            self._rewinds += [(place, int(line["to"])) for place, line in lines if line.get("event") == "rewind"]
        self.offset = first

    def _begins_a_line(self, offset: int) -> bool:
        if offset == 0:
            return True
        try:
            with open_regular(self._path) as file:
                file.seek(offset - 1)
                return file.read(1) == b"\n"
        except OSError:
            return False

    def size(self) -> int:
        """Return the bytes that are there now."""
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def take(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the next lines, each with the offset at which it begins; none where there are none yet."""
        while whole := self._read():
            lines = []
            for line in whole.splitlines(keepends=True):
                with contextlib.suppress(ValueError):  # not a line of Holdfast's
                    lines.append((self.offset, parse_json(line)))
                self.offset += len(line)
            if counting := [(place, line) for place, line in lines if not self._is_void(place, line)]:
                return counting
        return []

    def _is_void(self, place: int, line: Mapping[str, Any]) -> bool:
        return any(place < later and line.get("step", 0) > step for later, step in self._rewinds)

    def _read(self) -> bytes:
        """Return the next whole lines as they are."""
        data = b""
        if self.size() > self.offset:
            with open_regular(self._path) as file:
                file.seek(self.offset)
                while b"\n" not in data and (piece := file.read(_CHUNK)):
                    data += piece
        return data[: data.rfind(b"\n") + 1]


class FollowedTo:
    """How far a tracker has come, in a file: what was sent so long ago that it stands where a kill cannot take it.

    What came later is sent again by the next process. That is harmless: the last value of a step counts.
    """

    def __init__(self, path: Path, settle_seconds: float) -> None:
        self._path, self._settle_seconds = path, settle_seconds
        self._sent: deque[tuple[float, dict[str, int]]] = deque()
        self._noted_at = 0.0

    @staticmethod
    def read(path: Path) -> Mapping[str, int]:
        """Return the offsets by file; none where there is no cursor, or a kill tore it."""
        try:
            return {str(name): int(offset) for name, offset in read_json(path).items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def sent(self, offsets: Mapping[str, int]) -> None:
        """Take what was sent up to now."""
        self._sent.append((time.monotonic(), dict(offsets)))

    def note(self, *, all_of_it: bool = False) -> None:
        """Write what has settled; everything where the tracker was closed."""
        now, settled = time.monotonic(), None
        if not all_of_it and now - self._noted_at < _PAUSE_BETWEEN_NOTES_SECONDS:
            return
        while self._sent and (all_of_it or now - self._sent[0][0] >= self._settle_seconds):
            settled = self._sent.popleft()[1]
        if settled is not None:
            self._noted_at = now
            temporary = self._path.with_suffix(".new")
            temporary.write_text(json.dumps(settled), encoding="utf-8")
            temporary.replace(self._path)
