"""Open files that other programs may have written: regular files only, never blocking, with the path in every error.

If a pipe, a socket or a device stands where a file is expected, a plain `open` may block forever. Python's errors of
reads, writes and flushes carry no path; files opened here add it.
"""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from holdfast import patience

T = TypeVar("T")

REGULAR = "a regular file"
MOST_TEXT_BYTES = 2**30
"""No configuration, tokenizer, index or manifest is larger; a sparse file may claim any size."""
PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN}
"""Errors that a network file system may get over; they say nothing about the bytes."""

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISREG, REGULAR),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotRegular(OSError):  # noqa: N818 - the name says what is wrong
    """A directory, pipe, socket or device was found where a regular file is expected."""

    def __str__(self) -> str:
        """Return path and kind; the `[Errno 22]` that OSError would print helps nobody."""
        return f"{self.filename}: {self.strerror}"


def expanded(path: str) -> Path:
    """Return a path with `~` or `~name` replaced by that home; as it is where nobody has that name."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def file_kind(path: Path, within: Path | None = None) -> str:
    """Describe the kind of file at a path; `REGULAR` for a regular file or a link to one.

    Args:
        path: The path to examine.
        within: A directory that a symbolic link must not lead out of.

    Raises:
        OSError: Nothing exists at the path, or it cannot be examined.
    """
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        if within is not None and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(within)):
            return "a link that leads out of its directory"
        try:
            mode = path.stat().st_mode
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                raise
            return "a link that leads nowhere"
    return _kind(mode)


def is_there(path: Path) -> bool:
    """Return whether a path leads to something.

    Raises:
        OSError: The path cannot be examined, for example for lack of a permission. `Path.exists` returns False then;
            from Python 3.14 on it does so for every error.
    """
    try:
        path.stat()
    except OSError as error:
        raise_unless_absent(error)
        return False
    return True


def raise_unless_absent(error: OSError) -> None:
    """Raise an error that pathlib and os.walk would ignore: a directory that cannot be read is not an empty one."""
    if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:  # the last: a link to itself leads nowhere
        raise error


def _kind(mode: int) -> str:
    return next((description for is_kind, description in _KINDS if is_kind(mode)), "something unknown")


def _refuse_others(mode: int, path: object) -> None:
    if not stat.S_ISREG(mode):
        raise NotRegular(errno.EINVAL, f"it is {_kind(mode)}, not a regular file", str(path))


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Add the path to errors of the block, since the system's errors for a file descriptor carry none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


class RegularFile(io.FileIO):
    """The unbuffered file at a path, which must be a regular one.

    Raises:
        NotRegular: It is something else; the call did not block.
        OSError: It cannot be opened; every error has the path, also those of later reads and writes.
    """

    def __init__(self, path: Path, mode: str = "rb") -> None:
        self.path = path
        super().__init__(str(path), mode, opener=_open)

    def readinto(self, buffer: Any) -> int:  # never None: a regular file does not block
        """Read into a buffer."""
        with naming(self.path):
            return super().readinto(buffer) or 0

    def read(self, size: int | None = -1) -> bytes:
        """Read up to so many bytes."""
        with naming(self.path):
            return super().read(-1 if size is None else size) or b""

    def readall(self) -> bytes:
        """Read to the end."""
        with naming(self.path):
            return super().readall() or b""

    def write(self, data: Any) -> int:
        """Write data; as with `io.FileIO.write`, possibly only the first bytes of it. Return how many."""
        with naming(self.path):
            return super().write(data) or 0

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        with naming(self.path):
            os.fsync(self.fileno())


def _open(path: str, flags: int) -> int:
    """Open without waiting: for a pipe nobody may ever come, and a device may act when it is opened."""
    try:
        _refuse_others(os.stat(path).st_mode, path)  # noqa: PTH116 - a text is what FileIO gives
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    # O_NONBLOCK: opening a pipe for reading otherwise waits for a writer. O_NOCTTY: opening a terminal device
    # would make it the controlling terminal of a session leader that has none, whose SIGHUP would then end us.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    try:
        _refuse_others(os.fstat(descriptor).st_mode, path)  # again: names can change between two calls
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: As `RegularFile`.
    """
    return io.BufferedReader(RegularFile(path))


def read_bytes(path: Path, at_most: int = MOST_TEXT_BYTES) -> bytes:
    """Return a regular file's bytes.

    Raises:
        OSError: As `RegularFile`, or there are more bytes than such a file may have.
    """
    with RegularFile(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > at_most:
            raise NotRegular(
                errno.EFBIG, f"it has {size:,} bytes, more than the {at_most:,} of any such file", str(path)
            )
        return file.readall()


def read_text(path: Path, at_most: int = MOST_TEXT_BYTES) -> str:
    """Return a regular file's text.

    Raises:
        OSError: As `read_bytes`.
        UnicodeDecodeError: It is not UTF-8.
    """
    return read_bytes(path, at_most).decode("utf-8")


def read_json(path: Path) -> Any:
    """Return what a regular file of JSON holds.

    Raises:
        OSError: As `read_bytes`.
        ValueError: It is not JSON, or nested beyond reason.
    """
    return parse_json(read_bytes(path))


def parse_json(data: bytes | str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value that a JSON text encodes.

    Args:
        data: The text.
        pairs: Called with the keys and values of each JSON object, in order; default: make a dictionary.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(data, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


_LFS = b"version https://git-lfs.github.com/spec/"
_MOST_LFS_BYTES = 1024


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is the text that git keeps in the place of a file whose contents git-lfs has."""
    try:
        return path.stat().st_size <= _MOST_LFS_BYTES and read_bytes(path).startswith(_LFS)
    except OSError:
        return False


def read_end(path: str | os.PathLike[str], most_bytes: int, start: int = 0) -> str:
    """Return up to the last `most_bytes` of a text file, nothing before offset `start`; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a PathLike is all that is asked of the caller
            file.seek(max(start, file.seek(0, os.SEEK_END) - most_bytes))
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""


def append_text(path: Path, text: str) -> None:
    """Append to a regular file, which is created if missing; passing errors are retried by `again`."""

    def append() -> None:
        with RegularFile(path, "ab") as file:
            write_all(file, text.encode())

    again(append)


def write_all(file: RegularFile, data: bytes) -> None:
    """Append all bytes or none: after an error, what was written of them is truncated again.

    Raises:
        OSError: The write failed; the error has the path.
    """
    end = os.fstat(file.fileno()).st_size
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError:
        with naming(file.path):
            # A disk that fills up leaves half a line, to which the next append would be joined.
            os.ftruncate(file.fileno(), end)
        raise


def again(ask: Callable[[], T]) -> T:
    """Return the result of `ask`, retrying up to three times after errors that a network file system may get over."""
    for seconds in patience.current.file_retries_seconds:
        try:
            return ask()
        except OSError as error:
            if not (isinstance(error, TimeoutError) or error.errno in PASSING):
                raise
        time.sleep(seconds)
    return ask()


def size_words(count: float) -> str:
    """Return a number of bytes in the unit that shows it: 300 bytes, 12.5 KiB, 3 GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f}".removesuffix(".0") + f" {unit}"
    return f"{count:,.0f} bytes"


def python_module(name: str) -> list[str]:
    """Return the command that runs a module of ours in a new Python.

    `-P` keeps the current directory from the front of the path: a user's math.py there would stand for the library's.
    """
    return [sys.executable, "-P", "-m", name]


def look_beside(folder: Path) -> None:
    """Let modules be imported from a folder, then from the current directory, after all others.

    A file called random.py there shadows nothing. Both stay in `sys.path` for good, in a Python caller's process too:
    what is imported from them may import its siblings later.
    """
    for place in (folder.absolute(), Path.cwd()):
        if str(place) not in sys.path:
            sys.path.append(str(place))


def load_module(file: Path, name: str) -> ModuleType:
    """Import a file of the user's under a name of its own, and its siblings by theirs; raises whatever it raises.

    `sys.path` and `sys.modules` keep what `look_beside` and the import add.
    """
    look_beside(file.parent)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up by name
    spec.loader.exec_module(module)
    return module


def machine() -> list[str]:
    """Return a boot identifier and a PID namespace: where both are equal, a process number means the same process.

    Host names cannot tell, since machines and containers may share one. Empty where the system offers neither.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    return [boot.read_text().strip(), str(space.readlink())] if boot.exists() and space.is_symlink() else []


def is_of_here(holder: Mapping[str, Any]) -> bool:
    """Return whether a process that recorded its `machine` runs, or ran, on this one."""
    here = machine()
    return bool(here) and holder.get("machine") == here


def started(pid: int) -> float | None:
    """Return when a process of this machine started, in seconds since its boot; None if it has ended, or is hidden.

    A process that has ended and whose parent has not yet asked for its exit code has ended here.
    """
    try:
        # The name of the program, in parentheses, may itself hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19]) / os.sysconf("SC_CLK_TCK")


def died_here(holder: Mapping[str, Any]) -> bool:
    """Return whether a process that recorded its `pid` and `machine` ran on this machine and has ended.

    Where it recorded its start as `started`, another process that has its number by now is told from it.
    """
    pid, since = holder.get("pid"), holder.get("started")
    if not is_of_here(holder) or not isinstance(pid, int):
        return False
    now = started(pid)
    if now is None:
        return not _is_hidden(pid)
    return since is not None and since != now


def _is_hidden(pid: int) -> bool:
    """Return whether a process of this number exists and /proc does not show it, as a mount with hidepid does."""
    if Path(f"/proc/{pid}").exists():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
