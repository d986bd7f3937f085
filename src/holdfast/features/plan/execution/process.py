"""The process that executes a plan: `python -m holdfast.features.plan.execution.process`.

It reads a request as JSON from standard input and leaves the plan as JSON in a file. Most builds of torch need a device
guard, built once for each version of torch and loaded before torch is imported; hence a process.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from holdfast.config.quiet import hush, leave_out_broken
from holdfast.errors import HoldfastError, UserError
from holdfast.processes.kernel import die_with_parent

SOURCE = Path(__file__).with_name("guard.cpp")
NEWS = "plan: "
"""Begins each line of standard output that says what is going on; the asking process prints it."""
_COMPILERS = ("c++", "g++", "clang++")
_OWN_GUARD_REFUSES = (2, 14)
"""From this version of torch on, a CUDA build differentiates nothing where there is no GPU."""


class NoGuard(UserError):
    """Fake CUDA devices cannot be used on this machine; the message gives the reason."""


def tell(text: str) -> None:
    """Say what is being planned, in a line for whoever waits."""
    print(f"{NEWS}{text}", flush=True)


def load_guard(cache: Path | None = None) -> Path | None:
    """Let this process differentiate fake CUDA tensors, and return the library that was loaded.

    Args:
        cache: Where built guards lie; default: a folder of the user's.

    Returns:
        None where torch is built with CUDA and its own guard does.

    Raises:
        NoGuard: There is no compiler, or it fails.
    """
    if "torch" in sys.modules:
        raise NoGuard("torch is imported already, and a guard must be there before it.")
    torch = _folder_of_torch()
    version = tuple(int(number) for number in importlib.metadata.version("torch").split(".")[:2])
    if any((torch / "lib").glob("libtorch_cuda.*")) and version < _OWN_GUARD_REFUSES:
        return None
    library = guard_library(torch, cache)
    # RTLD_GLOBAL: torch's libraries resolve symbols among those that are loaded already, and so find the guard's first.
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    return library


def guard_library(torch: Path, cache: Path | None = None) -> Path:
    """Return the guard for a torch, built if it is not there yet.

    Raises:
        NoGuard: There is no compiler, or it fails.
    """
    version = importlib.metadata.version("torch")
    digest = hashlib.sha256(SOURCE.read_bytes() + str(torch).encode()).hexdigest()[:12]
    try:
        library = (cache or Path.home() / ".cache" / "holdfast") / f"guard-{version}-{digest}.so"
        return library if library.exists() else _built(torch, library)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise NoGuard(f"The guard of fake devices cannot be stored in the user's cache: {error}.") from error


def _built(torch: Path, library: Path) -> Path:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NoGuard(
            f"No C++ compiler is here (looked for {', '.join(_COMPILERS)}), and this build of torch needs a small "
            "guard compiled before it can execute CUDA branches. Install one, for example with apt install g++."
        )
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output = Path(folder) / library.name
        headers = [f"-I{torch / include}" for include in ("include", "include/torch/csrc/api/include")]
        libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        options = ["-std=c++20", "-O1", "-fPIC", "-shared", *headers]
        done = subprocess.run(
            [compiler, str(SOURCE), "-o", str(output), *options, *libraries],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = (done.stderr.strip() or "it says nothing").splitlines()[0]
            raise NoGuard(f"{compiler} does not build the guard of fake devices ({SOURCE}): {reason}")
        output.replace(library)  # whoever builds it beside us makes the same
    return library


def _folder_of_torch() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise NoGuard("torch is not installed here. Install it, and run this again.")
    return Path(next(iter(spec.submodule_search_locations)))


def main() -> None:
    """Answer the request on standard input."""
    die_with_parent()  # a terminal's SIGTERM ends the command alone, and a plan can take minutes
    hush()
    request = json.load(sys.stdin)
    output = Path(request["output"])
    try:
        answer: dict[str, Any] = {"plan": _planned(request)}
    except HoldfastError as error:
        answer = {"error": str(error), "exit_code": error.exit_code}
    output.write_text(json.dumps(answer), encoding="utf-8")


def _planned(request: dict[str, Any]) -> dict[str, Any]:
    reason = ""
    if request["device"] != "cpu":
        try:
            load_guard()
        except NoGuard as error:
            reason = str(error).rstrip(".")
    leave_out_broken()  # imports torch, before which the guard must be there
    if request["longest"]:
        from holdfast.features.plan.longest import longest

        return longest(request, reason)
    from holdfast.features.plan.request import planned

    return planned(request, reason)


if __name__ == "__main__":
    main()
