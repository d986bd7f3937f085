"""A plugin of pytest that writes which functions each test entered; see `sitecustomize.py`, which marks them."""

from __future__ import annotations

import builtins
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = os.environ.get("HOLDFAST_RECORD")


def pytest_configure() -> None:
    """Let what this process starts mark in its file."""
    file = getattr(builtins, "__holdfast_marks_file__", None)
    if file is not None and ("PYTEST_XDIST_WORKER" in os.environ or "HOLDFAST_ONE_PROCESS" in os.environ):
        os.environ["HOLDFAST_ENTERED"] = file


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: Any) -> Iterator[Any]:
    """Clear the marks before a test, and write down those that it left."""
    marks = getattr(builtins, "__holdfast_marks__", None)
    if marks is None or FOLDER is None:
        return (yield)
    marks[:] = bytes(len(marks))
    start = time.monotonic()
    result = yield
    seconds = time.monotonic() - start
    entered = [number for number, byte in enumerate(marks[:]) if byte]
    with (Path(FOLDER) / f"tests-{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps([item.nodeid, round(seconds, 3), entered]) + "\n")
    return result
