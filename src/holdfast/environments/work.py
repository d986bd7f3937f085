"""What the worker of an episode does: make the user's environment, and answer for it. Nothing here imports torch."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.environments.agents import AgentSource, load_agent
from holdfast.environments.base import MOST_LEVELS, Malformed, StepResult, extent_of, is_answer
from holdfast.environments.instances import EnvironmentSource, Instance, load
from holdfast.processes.forks import MOST_ANSWER_BYTES, Tell, Work, print_traceback
from holdfast.processes.user_code import describe_error, describe_raised
from holdfast.text.escaping import with_whole_characters


def make_work(setup: Mapping[str, Any], _: Callable[[str], None]) -> Work:
    """Import what a section names.

    Raises:
        CannotStart, ConfigError: It cannot work.
    """
    section, base = setup["section"], Path(setup["base"])
    source = load_agent(section, base) if section["kind"] == "endpoint" else load(section, base)
    ready = {
        "tools": {name: [tool.schema for tool in kind.tools] for name, kind in source.kinds.items()},
        "answering": [name for name, kind in source.kinds.items() if kind.answers],
        "replayable": source.replayable,
    }
    return Work(
        ready,
        partial(_serve, source),
        _is_answer,
        memory_bytes=section["memory_mib"] << 20,
        clear=source.clear if isinstance(source, AgentSource) else None,
        kept=source.servers.kept,
    )


def _is_answer(value: object) -> bool:
    return is_answer(value) and extent_of(value).levels <= MOST_LEVELS


def _serve(source: EnvironmentSource, requests: Iterator[bytes], tell: Tell) -> None:
    """Answer until the episode ends; a request is a pickled pair of its name and its argument."""
    instance: Instance | None = None

    def begin(row: Mapping[str, Any], seed: int) -> StepResult:
        nonlocal instance
        instance = source.instance(row, seed)
        return StepResult(instance.begin())

    def act(name: str, *arguments: Any) -> StepResult:
        if name == "begin":
            return begin(*arguments)
        if isinstance(source, AgentSource):
            return source.run(*arguments)
        assert instance is not None
        return instance.take(*arguments) if name == "turn" else instance.finish()

    for request in requests:
        tell(_answer(act, request))
    if instance is not None:
        instance.close()


def _answer(act: Callable[..., StepResult], request: bytes) -> bytes:
    try:
        return _encoded(act(*pickle.loads(request)))  # noqa: S301 - from our own rank
    except Malformed as error:
        fault = {"fault": "malformed", "message": str(error)}
    except BaseException as error:  # noqa: BLE001 - the process edge: SystemExit is a fault of the environment, too
        print_traceback(error)
        fault = {"fault": "raised", "message": describe_raised(error)}
    return json.dumps(fault).encode()


def _encoded(result: StepResult) -> bytes:
    """Return a result as JSON that any tokenizer takes: an unpaired surrogate is U+FFFD, as where one decodes.

    Raises:
        Malformed: A message has a value that is no JSON or is nested too deeply, or there is too much of it.
    """
    if extent_of({"result": vars(result)}).levels > MOST_LEVELS:
        raise Malformed(
            f"returned a message with a value that is too large or nested too deeply, in more than {MOST_LEVELS} levels"
        )
    values = asdict(result)
    try:
        text = json.dumps({"result": values}, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise Malformed(f"returned a message with a value that is no JSON: {describe_error(error)}") from None
    encoded = with_whole_characters(text).encode()
    if len(encoded) > MOST_ANSWER_BYTES:
        raise Malformed(f"returned {len(encoded)} bytes, and an observation has {MOST_ANSWER_BYTES} at most")
    return encoded
