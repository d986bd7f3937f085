"""Build rewards from their configuration sections (plain dicts), in the worker process; imports users' files."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.files import load_module, look_beside
from holdfast.rewards.base import CannotStart, describe_error
from holdfast.rewards.functions.rules import rule, template_columns
from holdfast.rewards.functions.signatures import Bound, ConcurrentCall, PerSampleCall, bind

_SCORER_GRACE_SECONDS = 5.0
"""Beyond a reward's own limits, for starting and ending what it runs."""


@dataclass(frozen=True)
class ReadyReward:
    """A built reward: its name, its function bound to samples, and its time limit."""

    name: str
    bound: Bound
    seconds: float
    """Time limit for one sample."""
    columns: tuple[str, ...] = ()
    """Row columns that it requires."""


def build(section: Mapping[str, Any], name: str, base: Path, seconds: float) -> ReadyReward:
    """Make a reward of its section; a user's file is imported here.

    Raises:
        CannotStart, ConfigError: The reward cannot work in this environment.
    """
    own_seconds = 0.0
    bound: Bound
    match section["kind"]:
        case "path":
            function, wants_kwargs = load_callable(section["path"], base, name, section["kwargs"])
            bound = bind(function, section["kwargs"] if wants_kwargs else {}, name)
        case "math":
            from holdfast.rewards.functions.mathematics import MathReward

            bound = PerSampleCall(MathReward.checked(section["column"], name))
        case "judge":
            from holdfast.rewards.functions.judge import Judge

            judge = Judge.of(section, name)
            bound, own_seconds = ConcurrentCall(judge), judge.endpoint.longest_seconds
        case "code":
            from holdfast.rewards.code.reward import CodeReward
            from holdfast.rewards.processes.folders import remove_abandoned

            code = CodeReward(section["column"], section["grade"], section["timeout_seconds"], section["memory_mib"])
            remove_abandoned()
            bound, own_seconds = PerSampleCall(code), code.timeout_seconds
        case _:
            bound = PerSampleCall(rule(section))
    longest = max(seconds, own_seconds + _SCORER_GRACE_SECONDS) if own_seconds else seconds
    return ReadyReward(name, bound, longest, bound.columns or template_columns(section))


def load_callable(path: str, base: Path, name: str, kwargs: Mapping[str, Any]) -> tuple[Callable[..., Any], bool]:
    """Import `file.py:function`, looked up beside the YAML, then where the run starts, or `package.module:function`.

    Returns:
        The function, and whether the kwargs are still to be given to it; those of a class went to its constructor.

    Raises:
        CannotStart: File, module or function is not there, its code raises or starts threads, or the class refuses.
    """
    function, module_file = load_name(path, base, f"reward {name}")
    function_name = path.rpartition(":")[2]
    if not inspect.isclass(function):
        return function, True
    try:
        instance: Any = function(**kwargs)
    except Exception as error:
        raise CannotStart(
            f"reward {name}: the constructor of {function_name} in {module_file} raises {describe_error(error)}. "
            "Correct it, or its kwargs."
        ) from error
    if not callable(instance):
        raise CannotStart(f"reward {name}: {function_name} in {module_file} has no __call__. Give it one: it scores.")
    return instance, False


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
