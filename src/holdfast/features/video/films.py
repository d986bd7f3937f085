"""Decode films into frames with times, by PyAV.

A film becomes a list of frames: images in RGB, upright, and the number of them that belongs to a second. Which frames
are taken follows from the file and the options alone, so that every rank and every resume has the same ones: one
thread decodes, colours are converted by exact arithmetic, and times are compared as fractions.

The file is opened under a list of containers, since others are playlists that name further files and addresses.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.data.content.images import Frames
from holdfast.errors import ConfigError, DataError
from holdfast.files import PASSING

FEWEST_FRAMES, MOST_FRAMES = 4, 768
"""How many frames are taken of a film at least, if it has them, and at most without `data.max_frames`; those of
transformers' video processors for Qwen2-VL."""
MOST_BYTES = 2**33
"""Bytes that the frames of one film may take in memory."""
_PIXEL_BYTES = 4
"""Of an image in RGB, as Pillow has it in memory."""
_CONTAINERS = "mov,matroska,webm,avi,gif,mpegts,mpeg,flv,asf,ogg"
_SLACK_SECONDS = Fraction(1, 10)
"""The length that a container tells is rounded, and sound may end after the last frame."""
_EXCERPT = 2**20
_CUT = "it ends before its last frame"


@dataclass(frozen=True)
class FilmFile:
    """A film that is not decoded yet.

    Raises:
        ConfigError: PyAV is not installed. It is no fault of a row, so that `data.on_bad_row: skip` does not hide it.
    """

    file: Path | bytes
    """A file, or its bytes."""
    name: str
    """What an error calls it."""

    def __post_init__(self) -> None:
        """Look for the decoder."""
        try:
            import av  # noqa: F401
        except ImportError:
            raise ConfigError(
                "Rows name films (files of videos), and decoding them needs a package: pip install 'holdfast[video]'. "
                "Or write the frames as images, and name them in a list."
            ) from None

    def frames(self, fps: float, most: int | None) -> Frames:
        """Return frames at a steady rate, from the film's first frame on.

        The frame taken at a time is the one that a player shows then. A rate that would take fewer than
        `FEWEST_FRAMES` is raised, one that would take more than `most` lowered, and no film gives more frames than it
        has.

        Args:
            fps: Frames of a second that are wanted.
            most: Most frames; None: `MOST_FRAMES`.

        Raises:
            DataError: It does not decode to its end, has no pictures or no times, or its frames would take too much
                memory.
        """
        with _named(self):
            shown = _shown(self.file)
            length = shown.end - shown.first
            count, rate = frames_of(length, shown.count, fps, MOST_FRAMES if most is None else most)
            times = [shown.first + number / rate for number in range(count)]
            return Frames(tuple(_images(_pixels(self.file, times))), float(rate))

    def first_frame(self) -> Any:
        """Return the first frame, in PIL.

        Raises:
            DataError: As `frames`.
        """
        with _named(self):
            return next(_images(_pixels(self.file, [Fraction(-(2**63))])))  # films may begin before 0

    def excerpt(self) -> bytes:
        """Return what tells a film from others: its size, and its first and last bytes.

        Raises:
            OSError: The file cannot be read.
        """
        with io.BytesIO(self.file) if isinstance(self.file, bytes) else self.file.open("rb") as content:
            size = content.seek(0, io.SEEK_END)
            content.seek(0)
            first = content.read(_EXCERPT)
            content.seek(max(len(first), size - _EXCERPT))
            return f"{size} ".encode() + first + content.read()


@dataclass(frozen=True)
class _Shown:
    """When the frames of a film are shown, in seconds."""

    first: Fraction
    end: Fraction
    """When the last frame has been shown."""
    count: int
    """How many frames there are."""


class _Packet(NamedTuple):
    """What a container says of a piece of one of its streams; not the piece."""

    stream: int
    time: int
    duration: int
    """In ticks of the stream's clock, as `time`; 0 where it is not told."""
    end: Fraction
    """In seconds."""
    is_timed: bool
    is_shown: bool


def frames_of(length: Fraction, count: int, fps: float, most: int) -> tuple[int, Fraction]:
    """Return how many frames are taken of a film, and how many of them belong to a second.

    Args:
        length: Of the film, in seconds.
        count: Frames that it has.
        fps: Frames of a second that are wanted.
        most: Most frames.
    """
    rate = Fraction(fps)
    wanted = max(1, round(length * rate))
    taken = min(max(wanted, FEWEST_FRAMES), most, count)
    return taken, rate if taken == wanted or length <= 0 else taken / length


@contextmanager
def _named(film: FilmFile) -> Iterator[None]:
    """Make one paragraph of an error of a film, and none of an error of this machine that may pass."""
    from av.error import FFmpegError

    description = f"{len(film.file)} bytes" if isinstance(film.file, bytes) else str(film.file)
    try:
        yield
    except MemoryError:  # PyAV's is an FFmpegError too
        raise
    except (OSError, ValueError, EOFError, ArithmeticError, FFmpegError) as error:
        if getattr(error, "errno", None) in PASSING and not isinstance(error, FFmpegError):
            raise
        reason = error.strerror if isinstance(error, FFmpegError) else str(error)
        raise DataError(
            f"{film.name} ({description:.120}) cannot be read as a film: {reason or type(error).__name__}. Write it "
            "anew, as in `ffmpeg -i FILM -an -c:v libx264 NEW.mp4`, or remove the row."
        ) from None


@contextmanager
def _opened(file: Path | bytes, **options: str) -> Iterator[tuple[Any, Any]]:
    """Open a film with options of its container; yield the container and its stream of pictures.

    Raises:
        ValueError: It has none, or of an unknown codec.
    """
    from av.stream import Disposition

    # FFmpeg says EIO of damaged bytes too; of a file that Python reads, errors of the file system are Python's.
    source = io.BytesIO(file) if isinstance(file, bytes) else file.absolute().open("rb")
    options |= {"format_whitelist": _CONTAINERS, "protocol_whitelist": "file"}
    with source, _container(source, options) as container:
        streams: list[Any] = [
            stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic
        ]
        if not streams:
            kind = "sound alone, and audio is not trained on" if container.streams.audio else "no pictures"
            raise ValueError(f"it has {kind}")
        if streams[0].codec_context is None or streams[0].time_base is None:
            raise ValueError("its codec is not known here")
        yield container, streams[0]


def _container(source: Any, options: dict[str, str]) -> Any:
    """Open a container.

    Raises:
        ValueError: FFmpeg finds no memory for what its tables tell of, although there is more than such a file needs.
    """
    import av

    try:
        # Titles are in any encoding, and are not looked at.
        return av.open(source, container_options=options, metadata_errors="replace")
    except MemoryError:
        np.empty(2**26 + 2 * source.seek(0, io.SEEK_END), np.uint8)  # which raises where memory lacks
        raise ValueError("it tells of more frames than its bytes could be") from None


def _shown(file: Path | bytes) -> _Shown:
    """Return when frames are shown, from the container and without decoding.

    Raises:
        ValueError: The film is cut off, or says no times.
    """
    with _opened(file) as (container, stream):
        packets = list(_packets(container))
        of_stream = [packet for packet in packets if packet.stream == stream.index]
        if not all(packet.is_timed for packet in of_stream):
            raise ValueError("it does not say when its frames are shown")
        shown = sorted((packet.time, packet.duration) for packet in of_stream if packet.is_shown)
        if not shown:
            raise ValueError("it has no frames")
        (first, _), (last, duration) = shown[0], shown[-1]
        if first == last and len(shown) > 1:
            raise ValueError(f"its {len(shown)} frames are all shown at the same time")
        gaps = [after - before for (before, _), (after, _) in pairwise(shown)]
        end = max(packet.end for packet in packets if packet.is_timed)
        _refuse_cut(file, container, stream, of_stream, end + max(gaps, default=0) * stream.time_base)
        duration = duration or (last - first) // max(1, len(gaps))
        return _Shown(first * stream.time_base, (last + duration) * stream.time_base, len(shown))


def _packets(container: Any) -> Iterator[_Packet]:
    for packet in container.demux():
        if packet.size and packet.time_base is not None:  # the end of a stream is a packet of nothing
            time, duration = packet.dts if packet.pts is None else packet.pts, packet.duration or 0
            end = Fraction(0) if time is None else (time + duration) * packet.time_base
            yield _Packet(packet.stream.index, time or 0, duration, end, time is not None, not packet.is_discard)


def _refuse_cut(file: Path | bytes, container: Any, stream: Any, packets: Sequence[_Packet], end: Fraction) -> None:
    """Raise where a container tells of more frames, or of a longer time, than it has.

    MPEG-TS and GIF tell neither.

    Args:
        file, container, stream: Of the film.
        packets: Of its stream of pictures.
        end: When the last packet of any stream ends, in seconds, and what that may be wrong by.

    Raises:
        ValueError: It tells of more.
    """
    if stream.frames:
        count = len(packets)
        if count < stream.frames:
            count = _with_unseen(file, container.format.name, stream, packets)
        if count < stream.frames:
            raise ValueError(f"{_CUT}: it has {count} of {stream.frames}")
    elif container.duration is not None:
        told = Fraction(container.duration + (container.start_time or 0), 1_000_000)
        if end + _SLACK_SECONDS < told:
            raise ValueError(f"{_CUT}: it tells of {float(told):.3f} seconds and has {float(end):.3f}")


def _with_unseen(file: Path | bytes, container_name: str, stream: Any, packets: Sequence[_Packet]) -> int:
    """Return how many frames a film has with those that its container counts and does not give out."""
    if container_name == "avi":
        # Where a picture stays, AVI has pieces of nothing, which it counts: one for each tick of its clock. Where no
        # length of a picture is known, the last one is taken to stay as long as the one that stays shortest.
        times = sorted({packet.time for packet in packets})
        shortest = min((after - before for before, after in pairwise(times)), default=1)
        return max(len(packets), *(packet.time + (packet.duration or shortest) for packet in packets))
    if "mov" in container_name:  # what an edit list leaves out is there too
        with _opened(file, ignore_editlist="1") as (whole, _):
            return sum(packet.stream == stream.index for packet in _packets(whole))
    return len(packets)


def _pixels(file: Path | bytes, times: Sequence[Fraction]) -> Iterator[NDArray[np.uint8]]:
    """Yield the frame shown at each time, [height, width, 3], upright.

    Args:
        file: The film.
        times: In seconds, ascending.

    Raises:
        ValueError: A frame is damaged or has no time, or as `_refuse_large`.
    """
    from PIL import Image

    with _opened(file) as (container, stream):
        context, largest = stream.codec_context, Image.MAX_IMAGE_PIXELS or 2**31 - 1
        context.thread_type, context.thread_count = "NONE", 1
        context.options = {"err_detect": "crccheck+bitstream+buffer+explode", "max_pixels": str(largest)}
        _refuse_large(context, len(times), largest)
        tick, waiting = stream.time_base, deque(times)
        shown: Any = None
        for frame in container.decode(stream):
            if frame.is_corrupt or frame.pts is None:
                raise ValueError("one of its frames is damaged, or does not say when it is shown")
            _refuse_large(frame, len(times), largest)  # films may change their size
            # Containers round times to ticks of their clock.
            while shown is not None and waiting and frame.pts * tick > waiting[0] + tick / 2:
                waiting.popleft()
                yield _upright(shown)
            if not waiting:
                return
            shown = frame
        if shown is None:
            raise ValueError(_CUT)
        for _ in waiting:
            yield _upright(shown)


def _refuse_large(sized: Any, count: int, largest: int) -> None:
    """Raise where frames are too large.

    Args:
        sized: A frame, or what the container says of all of them.
        count: Frames that are taken.
        largest: Pixels that an image may have.

    Raises:
        ValueError: One is larger than an image may be, or all of them take too much memory.
    """
    size = f"{sized.width}x{sized.height} pixels"
    if sized.width * sized.height > largest:
        raise ValueError(f"it has frames of {size}, and an image may have {largest:,}")
    if _PIXEL_BYTES * sized.width * sized.height * count > MOST_BYTES:
        raise ValueError(
            f"{count} frames of {size} take more than {MOST_BYTES // 2**30} GiB in memory; lower data.max_frames or "
            "data.video_fps, or make the film smaller"
        )


def _images(pixels: Iterator[NDArray[np.uint8]]) -> Iterator[Any]:
    from PIL import Image

    return (Image.fromarray(values) for values in pixels)


def _upright(frame: Any) -> NDArray[np.uint8]:
    """Return a frame's pixels in RGB, turned and mirrored as the file says.

    Raises:
        ValueError: It is to be turned by another angle than a right one.
    """
    from av.sidedata.sidedata import Type
    from av.video.reformatter import Interpolation

    # Without these flags colours are converted by whatever instructions the processor has, and differ by one.
    exact = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.BITEXACT | Interpolation.FULL_CHR_H_INT
    pixels: NDArray[np.uint8] = frame.reformat(format="rgb24", interpolation=exact, threads=1).to_ndarray()
    stored = frame.side_data.get(Type.DISPLAYMATRIX)
    if stored is None:
        return pixels
    across, across_down, down_across, down = np.frombuffer(bytes(stored), dtype=np.int32)[[0, 1, 3, 4]].tolist()
    if across and down and not across_down and not down_across:
        turned, mirrored = pixels, (down < 0, across < 0)
    elif across_down and down_across and not across and not down:
        turned, mirrored = pixels.swapaxes(0, 1), (across_down < 0, down_across < 0)
    else:
        raise ValueError("its frames are to be turned by another angle than a right one")
    return np.ascontiguousarray(turned[:: -1 if mirrored[0] else 1, :: -1 if mirrored[1] else 1])
