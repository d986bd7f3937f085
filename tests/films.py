"""Films as bytes: encoded here by PyAV from frames that a test knows."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

LOSSLESS = {"matroska": ("ffv1", "bgr0", {"level": "3", "slicecrc": "1"}), "mp4": ("libx264rgb", "rgb24", {"qp": "0"})}
"""Container -> codec, format of pixels, options; they give back what was written."""
LOSSY: dict[str, tuple[str, str, dict[str, str]]] = {
    "webm": ("libvpx-vp9", "yuv444p", {"crf": "4"}),
    "avi": ("mjpeg", "yuvj444p", {"qmin": "1", "qmax": "1"}),
    "flv": ("libx264", "yuv444p", {"qp": "1"}),
    "mov": ("libx264", "yuv420p", {"crf": "12"}),
    "mpegts": ("mpeg2video", "yuv420p", {"qmin": "1", "qmax": "1"}),
}
TICKS = 1000


def film(  # noqa: PLR0913 - what a film is made of
    frames: Sequence[NDArray[np.uint8]],
    container: str = "matroska",
    *,
    rate: int = 12,
    milliseconds: Sequence[int] | None = None,
    turned: dict[str, Any] | None = None,
    sound: float = 0.0,
    options: dict[str, str] | None = None,
    title: str | None = None,
) -> bytes:
    """Return a film.

    Args:
        frames: In RGB, [height, width, 3]; none for sound alone.
        container: As FFmpeg calls it.
        rate: Frames of a second, where no times are given.
        milliseconds: When each frame is shown.
        turned: How a player has to turn the frames, as `set_display_rotation` takes it.
        sound: Seconds of silence.
        options: Of the container.
        title: Of the film.
    """
    codec, pixels, how = (LOSSLESS | LOSSY).get(container, ("", "", {}))
    with tempfile.NamedTemporaryFile() as file, av.open(file.name, "w", format=container, options=options) as output:
        if title is not None:
            output.metadata["title"] = title
        pictures: Any = output.add_stream(codec, rate=rate) if frames else None
        silence: Any = output.add_stream("pcm_s16le" if container == "wav" else "aac", rate=8000) if sound else None
        if frames:
            pictures.height, pictures.width = frames[0].shape[:2]
            pictures.pix_fmt, pictures.options = pixels, how
            if milliseconds is not None:
                pictures.codec_context.time_base = pictures.time_base = Fraction(1, TICKS)
            if turned is not None:
                pictures.set_display_rotation(**turned)
        for number, values in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(values, format="rgb24")
            frame.pts = number if milliseconds is None else milliseconds[number]
            frame.time_base = Fraction(1, rate if milliseconds is None else TICKS)
            output.mux(pictures.encode(frame))
        if frames:
            output.mux(pictures.encode())
        if sound:
            samples = av.AudioFrame.from_ndarray(np.zeros((1, int(8000 * sound)), np.int16), layout="mono")
            samples.sample_rate, samples.pts = 8000, 0
            output.mux(silence.encode(samples))
            output.mux(silence.encode())
        output.close()
        return Path(file.name).read_bytes()


def same_frame(count: int, side: int) -> bytes:
    """Return a film of one black JPEG, encoded once and shown again and again, ten times a second."""
    with tempfile.NamedTemporaryFile() as file, av.open(file.name, "w", format="matroska") as output:
        stream: Any = output.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = side, side, "yuvj420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((side, side, 3), np.uint8), format="rgb24")
        frame.pts, frame.time_base = 0, Fraction(1, 10)
        encoded = bytes([*stream.encode(frame), *stream.encode()][0])
        for number in range(count):
            packet = av.Packet(encoded)
            packet.stream, packet.time_base, packet.is_keyframe = stream, Fraction(1, 10), True
            packet.pts = packet.dts = number
            packet.duration = 1
            output.mux(packet)
        output.close()
        return Path(file.name).read_bytes()


def noise(count: int, height: int = 16, width: int = 24, seed: int = 0) -> list[NDArray[np.uint8]]:
    """Return frames of noise, no two alike."""
    return list(np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8))


def smooth(count: int, height: int = 32, width: int = 48) -> list[NDArray[np.uint8]]:
    """Return frames of colours that change slowly, which codecs with losses keep well."""
    down, across = np.mgrid[0:height, 0:width]
    return [
        np.stack([4 * across + 2 * number, 255 - 5 * down, 100 + across + down + 3 * number], -1).astype(np.uint8)
        for number in range(count)
    ]
