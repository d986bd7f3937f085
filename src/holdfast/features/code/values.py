"""The protocol between judged code and its judge: values are copied, other objects are referred to by number.

Neither side recreates objects of the other's classes. Numbers, texts and containers arrive as built-in types, whatever
class they had, so that code decides which value it returns but not how the judge compares it. Standard library only.
"""

from __future__ import annotations

import builtins
import importlib
import json
import operator
from collections import deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import Any

from holdfast.processes import framing

MODULES = frozenset(
    ("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
     "json", "math", "operator", "random", "re", "statistics", "string", "time", "typing")
)  # fmt: skip
"""Modules that a side may name to the other, which then imports its own."""
_MOST_BYTES = 1 << 26
_SMALL = 1 << 53
_CONTAINERS: Mapping[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque, "range": lambda arguments: range(*arguments),
    "complex": lambda arguments: complex(*arguments), "Fraction": lambda arguments: Fraction(*arguments),
}  # fmt: skip


class Remote:
    """A proxy of an object in the other process. Its methods run there and their results are copied.

    Operators run in the other process only if both operands are proxies. With a value of this process, Python's
    defaults apply, so that an object of the code cannot claim to be equal to an expected value.
    """

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call it there."""
        return self._peer.ask("call", self, *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __len__(self) -> int:
        return int(self._peer.ask("len", self))

    def __bool__(self) -> bool:
        return self._peer.ask("bool", self) is True

    def __iter__(self) -> Any:
        return self._peer.ask("iter", self)

    def __next__(self) -> Any:
        return self._peer.ask("next", self)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.ask("setitem", self, key, value)

    def __str__(self) -> str:
        return str(self._peer.ask("str", self))

    def __eq__(self, other: object) -> Any:
        return self._peer.ask("eq", self, other) is True if isinstance(other, Remote) else NotImplemented

    def __lt__(self, other: object) -> Any:
        return self._peer.ask("lt", self, other) is True if isinstance(other, Remote) else NotImplemented

    __hash__ = object.__hash__


ACTS: Mapping[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **keywords: function(*arguments, **keywords),
    "getattr": getattr, "setattr": setattr, "len": len, "bool": bool, "iter": iter, "next": next, "str": str,
    "getitem": operator.getitem, "setitem": operator.setitem, "eq": operator.eq, "lt": operator.lt,
}  # fmt: skip
"""What may be asked of judged code; a judge lets nothing but `call` be asked of it."""


class Peer:
    """One end of the connection: it sends requests, and answers those of the other end while it waits.

    Args:
        channel: A socket.
        acts: What the other side may ask.
    """

    def __init__(self, channel: int, acts: Mapping[str, Callable[..., Any]]) -> None:
        self._channel, self._acts = channel, acts
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._errors: dict[int, type[Exception]] = {}

    def ask(self, act: str, *arguments: Any, **keywords: Any) -> Any:
        """Return what the other side answers; containers that it changed are changed here too.

        Raises:
            EOFError: The other side is gone.
            Exception: It raised one whose nearest built-in class this is.
        """
        self.send({"act": act, "arguments": self.encode(list(arguments)), "named": self.encode(keywords)})
        while (message := self.receive()) is not None:
            if "act" in message:
                self._answer(message)
                continue
            if "raised" in message:
                raise self.decode(message["raised"])(self.decode(message["text"]))
            for argument, changed in zip(arguments, self.decode(message["changed"]), strict=True):
                _change(argument, changed)
            return self.decode(message["value"])
        raise EOFError

    def serve(self) -> None:
        """Answer until the other side is gone."""
        while (message := self.receive()) is not None:
            self._answer(message)

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            arguments = self.decode(message["arguments"])
            self._check_callee(message["act"], arguments)
            value = self._acts[message["act"]](*arguments, **self.decode(message["named"]))
            changed = [argument if isinstance(argument, list | dict | set) else None for argument in arguments]
            answer = {"value": self.encode(value), "changed": self.encode(changed)}
        except BaseException as error:  # noqa: BLE001 - SystemExit too is an answer
            answer = {"raised": self.encode(type(error)), "text": _text(error)}
        self.send(answer)

    def _check_callee(self, act: str, arguments: list[Any]) -> None:
        """Let a judge call what its tests handed over: by modules that are named, code would reach all of it.

        Raises:
            ValueError: The other side may only call, and calls something else.
        """
        if act == "call" and len(self._acts) == 1 and not any(arguments[0] is instance for instance in self._objects):
            raise ValueError("no object of this side")

    def send(self, message: dict[str, Any]) -> None:
        """Send a message of plain JSON."""
        framing.write(self._channel, json.dumps(message).encode())

    def receive(self) -> dict[str, Any] | None:
        """Return the next message; None at the end.

        Raises:
            ValueError: The bytes are not message of this protocol.
        """
        payload = framing.read_frame(self._channel, most_bytes=_MOST_BYTES)
        message = None if payload is None else json.loads(payload)
        if message is not None and not isinstance(message, dict):
            raise ValueError("no message")
        return message

    def encode(self, value: Any) -> Any:
        """Return a value as JSON; an object is kept here, and its number sent."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, list):
            return [self.encode(element) for element in value]
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(element)] for key, element in value.items()]}
        if isinstance(value, Remote):
            return {"yours": value._number}
        for kind in (tuple, set, frozenset, deque):
            if isinstance(value, kind):
                return {kind.__name__: [self.encode(element) for element in value]}
        write = next((write for kind, write in _PLAIN.items() if isinstance(value, kind)), self._encode_object)
        return write(value)

    def _encode_object(self, value: Any) -> Any:
        if type(value).__module__ == "numpy" and not isinstance(value, type):  # arrays and scalars
            return self.encode(value.tolist())
        if (name := _name_in_a_module(value)) is not None:
            return {"module": name}
        # Objects stay in the list, so that no other one ever has the same identity.
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            reference = None if value.__module__ == "builtins" else number
            return {"error": [reference, [kind.__name__ for kind in value.__mro__ if kind.__module__ == "builtins"]]}
        return {"object": number}

    def decode(self, value: Any) -> Any:
        """Return a value of JSON.

        Raises:
            Exception: It is not one of this protocol.
        """
        if isinstance(value, list):
            return [self.decode(element) for element in value]
        if not isinstance(value, dict):
            return value
        ((kind, inner),) = value.items()
        if kind in _READ:
            return _READ[kind](inner)
        match kind:
            case "dict":
                return {self.decode(key): self.decode(element) for key, element in inner}
            case "object":
                return Remote(self, int(inner))
            case "yours":
                return self._objects[int(inner)]
            case "error":
                return self._error(*inner)
            case _:
                return _CONTAINERS[kind](self.decode(inner))

    def _error(self, number: int | None, names: list[str]) -> type[Exception]:
        """Return a class for the other side's exceptions: the same one each time, below its nearest built-in one."""
        kinds = [getattr(builtins, name, None) for name in names]
        base = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception)), RuntimeError)
        return base if number is None else self._errors.setdefault(number, type("Raised", (base,), {}))


def _text(error: BaseException) -> str:
    try:
        return str.__str__(str(error))
    except BaseException:  # noqa: BLE001 - what a class of the code does when it is printed
        return ""


def _name_in_a_module(value: Any) -> list[str | None] | None:
    """Return where the other side finds the same module, function or class; None if it is not in one of `MODULES`."""
    if isinstance(value, ModuleType):
        return [value.__name__, None] if value.__name__ in MODULES else None
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if not isinstance(module, str) or module not in MODULES or not isinstance(name, str):
        return None
    return [module, name] if getattr(importlib.import_module(module), name, None) is value else None


def _integer(value: int) -> Any:
    number = int(value)
    return number if abs(number) < _SMALL else {"int": hex(number)}


def _own(module: str, name: str | None) -> Any:
    if module not in MODULES or (name is not None and name.startswith("_")):
        raise ValueError(f"{module}.{name} is not named to others")
    imported = importlib.import_module(module)
    if name is None:
        return imported
    value = getattr(imported, name)
    if getattr(value, "__module__", None) != module:  # `typing.sys` would hand over every module there is
        raise ValueError(f"{module}.{name} is another module's")
    return value


def _change(argument: Any, changed: Any) -> None:
    """Do to a container here what was done to its copy."""
    if type(argument) is type(changed) and argument != changed:
        match argument:
            case list():
                argument[:] = changed
            case dict() | set():
                argument.clear()
                argument.update(changed)


_PLAIN: Mapping[type, Callable[[Any], Any]] = {
    int: _integer,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda value: {"bytes": value.hex()},
    bytearray: lambda value: {"bytes": value.hex()},
    range: lambda value: {"range": [value.start, value.stop, value.step]},
    complex: lambda value: {"complex": [value.real, value.imag]},
    Fraction: lambda value: {"Fraction": [_integer(value.numerator), _integer(value.denominator)]},
    Decimal: lambda value: {"Decimal": str(value)},
}
_READ: Mapping[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "Decimal": Decimal,
    "module": lambda name: _own(*name),
}
