"""The pixels of an image: as a file for a server, and as a hash."""

from __future__ import annotations

import base64
import io
from typing import Any

import xxhash


def png_url(image: Any) -> str:
    """Return a PIL image as a PNG file, which loses nothing, within a URL."""
    bare = image.copy()
    bare.info = {}  # a colour profile or a transparency would be written too, and may make a file that nobody reads
    file = io.BytesIO()
    bare.save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def pixel_digest(image: Any) -> str:
    """Return xxh3_128, in hexadecimal, of the size and the pixels of a PIL image."""
    return xxhash.xxh3_128_hexdigest(f"{image.mode} {image.size} ".encode() + image.tobytes())
