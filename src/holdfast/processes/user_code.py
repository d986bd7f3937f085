"""Import what a configuration names in a user's file, and describe what users' code raises."""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.files import load_module, look_beside
from holdfast.text.escaping import error_words
from holdfast.text.shortening import shortened

_SHOWN = 200
_LIBRARY, _PACKAGES = str(Path(traceback.__file__).parent), "site-packages"


def seed_generators(seed: int | str, array_seed: int) -> None:
    """Seed Python's and NumPy's generators, so that what draws numbers draws the same in any process."""
    random.seed(seed)
    # NumPy is seeded only if it has been imported; an import here would take time and memory in every worker.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(array_seed % 2**32)


class CannotStart(Exception):  # noqa: N818 - the name says what happened
    """Code of a user that cannot work in this environment; the message is a paragraph for the user."""


def describe_error(error: BaseException) -> str:
    """Return an exception's name and text, cut to a line."""
    return shortened(error_words(error), _SHOWN)


def describe_raised(error: BaseException) -> str:
    """Return what a call raised, and in which line of whose file."""
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost line that is not in a library: the one its author knows.
    user_frames = [
        frame for frame in frames if not frame.filename.startswith(("<", _LIBRARY)) and _PACKAGES not in frame.filename
    ]
    origin = f" ({Path(user_frames[-1].filename).name}:{user_frames[-1].lineno})" if user_frames else ""
    return f"raised {describe_error(error)}{origin}"


def load_name(path: str, base: Path, subject: str, also: type | tuple[()] = ()) -> tuple[Any, str]:
    """Import `file.py:name`, looked up beside the YAML, then where the run starts, or `package.module:name`.

    Args:
        path: Of a function or a class.
        base: The YAML's directory.
        subject: What a message is about, such as `reward short`.
        also: A type that is taken besides functions and classes.

    Returns:
        The function or class, and the file it is in.

    Raises:
        CannotStart: File, module or name is not there, or its code raises or starts threads.
    """
    source, _, name = path.rpartition(":")
    module = _in_file(source, base, subject) if source.endswith(".py") else _installed(source, base, subject)
    module_file = module.__file__ or source
    value: Any = getattr(module, name, None)
    if not (callable(value) or isinstance(value, also)):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise CannotStart(f"{subject}: {module_file} has no function {name}. It has {', '.join(names) or 'none'}.")
    return value, module_file


def _in_file(file: str, base: Path, subject: str) -> ModuleType:
    script = next((path for path in (base / file, Path(file)) if path.is_file()), None)
    if script is None:
        raise CannotStart(
            f"{subject}: there is no file {file} beside the YAML ({base}) or in {Path.cwd()}. Correct its path."
        )
    module_file = script.resolve()
    digest = hashlib.sha256(str(module_file).encode()).hexdigest()[:8]
    module_name = f"holdfast_reward_{module_file.stem}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    with _importing(str(module_file), subject):
        return load_module(module_file, module_name)


def _installed(module: str, base: Path, subject: str) -> ModuleType:
    look_beside(base)
    with _importing(module, subject):
        return importlib.import_module(module)


@contextmanager
def _importing(source: str, subject: str) -> Iterator[None]:
    """Import a file or a module within the block.

    Raises:
        CannotStart: It raises, or starts threads.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise CannotStart(
            f"{subject}: {source} raises when it is imported: {describe_error(error)}{_line_in(source, error)}. "
            "Correct the file, or install what it needs in this environment."
        ) from error
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        raise CannotStart(
            f"{subject}: {source} starts a thread when it is imported ({threads[0]}), and workers are forks of the "
            "process that imports it, in which threads are gone. Start it on the first call."
        )


def _line_in(file: str, error: BaseException) -> str:
    lines = [entry.lineno for entry in traceback.extract_tb(error.__traceback__) if entry.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno)
    return f" (line {lines[-1]})" if lines else ""
