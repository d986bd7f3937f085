"""Decide from a pickle's instructions alone whether loading it takes memory and time out of proportion to its size.

Some instructions enlarge the unpickler's memo up to an index that they contain, and others announce how many bytes
follow. Nested tuples that each contain the next one twice have exponential size for code that traverses them; Python
does so when it hashes one as a key of a dictionary, and its recursion in C has no limit but the stack. A call may copy
its arguments, as often as it is repeated. The module therefore follows the instructions, as `pickletools` reads them,
on a stack of sizes instead of values.
"""

from __future__ import annotations

import pickletools
from collections.abc import Sequence
from typing import Any

_LEAST = 2**20
_PER_BYTE = 16
"""A value, all keys together, and all arguments together may be as large as this many elements for each byte of the
pickle, and `_LEAST`."""
_DEEPEST = 200
"""Values may be nested so deep; those of a DTensor are about 20 deep."""
_PUTS, _GETS = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")
_GROWING = {"APPEND", "APPENDS", "ADDITEMS", "SETITEM", "SETITEMS", "BUILD"}
"""Instructions that add what they take to the value below."""
_HASHED = {"SETITEM": 2, "SETITEMS": 2, "DICT": 2, "ADDITEMS": 1, "FROZENSET": 1}
"""Instructions that hash: every such value of those that they take."""
_CALLING = {"REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST", "BUILD"}
"""Instructions that pass what they take to a function, which may copy it."""


class Immodest(Exception):  # noqa: N818 - an answer
    """A pickle would take too much memory or time, or change a class. The message continues a file's name."""


class _Value:
    """A value on the stack."""

    __slots__ = ("constant", "depth", "elements", "is_part", "size")

    def __init__(self, size: int = 1, constant: Any = None, elements: Sequence[_Value] = ()) -> None:
        self.size = size
        """Elements of it and of all that it holds, each as often as it is held."""
        self.depth = 1
        """Values that are nested in it, and itself."""
        self.constant = constant
        """The argument of the instruction that made it."""
        self.elements = elements
        """Those of a tuple."""
        self.is_part = False
        """Whether another value holds it."""

    def size_now(self) -> int:
        """Return the size after lists and dictionaries in a tuple grew."""
        return 1 + sum(value.size_now() for value in self.elements) if self.elements else self.size


class _Class(_Value):
    """A value that a name stands for, which is its constant."""


def names_in(data: bytes, *, in_order: bool = False) -> frozenset[str]:
    """Return the names that a pickle asks for, with their modules.

    Args:
        data: The pickle.
        in_order: Refuse to add to a value that is part of another, as of cycles. The hash of an object whose class has
            one of its own takes as long as the object is large, and its size is known of what was there before it.

    Raises:
        Immodest: It asks for more than goes with its length.
        IndexError, KeyError, ValueError: It cannot be read.
    """
    return PickleInstructions(data, in_order=in_order).names()


class PickleInstructions:
    """The instructions of a pickle, followed on a stack of sizes."""

    def __init__(self, data: bytes, *, in_order: bool = False) -> None:
        self._in_order = in_order
        self._data, self._most, self._keys = data, _LEAST + _PER_BYTE * len(data), 0
        self._passed = 0
        self._stack: list[_Value] = []
        self._marks: list[int] = []
        self._memo: dict[int, _Value] = {}
        self._names: set[str] = set()
        self.size = 0
        """Of the value that the pickle holds, once they were followed."""

    def names(self) -> frozenset[str]:
        """Follow to the end and return all names."""
        argument: Any
        for instruction, argument, _ in pickletools.genops(self._data):
            name = instruction.name
            if name in _PUTS:
                self._remember(argument)
            elif name in _GETS:
                self._stack.append(self._memo[argument])
            elif not instruction.stack_before:
                self._begin(name, argument)
            else:
                self._take(name, instruction)
        return frozenset(self._names)

    def _begin(self, name: str, argument: Any) -> None:
        """Follow an instruction that takes nothing from the stack."""
        if name == "MARK":
            self._marks.append(len(self._stack))
        elif name == "GLOBAL":
            self._name(*argument.split(" ", 1))
        elif name not in {"PROTO", "FRAME"}:
            self._stack.append(_Value(1, argument))

    def _take(self, name: str, instruction: pickletools.OpcodeInfo) -> None:
        """Follow an instruction that takes values, and makes one of them or adds them to the one below."""
        if name == "POP" and self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
            return
        if name == "MEMOIZE":
            self._remember(len(self._memo))
            return
        if name == "DUP":
            self._stack.append(self._stack[-1])
            return
        taken = self._taken(name, instruction)
        if step := _HASHED.get(name):
            self._keys = self._bounded(self._keys + sum(value.size for value in taken[::step]))
        if self._in_order and name in _GROWING and self._stack[-1].is_part:
            raise Immodest("adds to a value that is part of another, which no file needs")
        for value in taken:
            value.is_part = value.is_part or bool(instruction.stack_after)
        if name in _CALLING:
            self._pass(name, taken)
        size = sum(value.size for value in taken)
        if name == "STOP":
            self.size = size
        elif name == "STACK_GLOBAL":
            self._name(*(str(value.constant) for value in taken))
        elif name in _GROWING:
            self._stack[-1].size = self._bounded(self._stack[-1].size + size)
            self._deepen(taken)
        elif instruction.stack_after:
            self._stack.append(_Value(self._bounded(1 + size), elements=taken if name.startswith("TUPLE") else ()))
            self._deepen(taken)

    def _pass(self, name: str, taken: Sequence[_Value]) -> None:
        """Count the arguments of a call, and refuse a function that takes more memory than they have."""
        if name == "BUILD" and isinstance(self._stack[-1], _Class):
            raise Immodest("sets attributes of a class, which no file needs")
        self._passed = self._bounded(self._passed + sum(value.size_now() for value in taken))
        if name == "BUILD" or not taken or not isinstance(taken[0], _Class):
            return
        function, arguments = taken[0].constant, taken[-1].elements
        if function.endswith("Storage"):
            raise Immodest("makes memory instead of referring to a member, which no file needs")
        if function == "_codecs.encode":
            if len(arguments) != 2 or type(arguments[0].constant) is not str or arguments[1].constant != "latin1":
                raise Immodest("encodes text in another way than bytes are written")
            self._passed = self._bounded(self._passed + len(arguments[0].constant))
        if function == "torch._tensor._rebuild_from_type_v2" and not _is_rebuilding(arguments):
            raise Immodest("makes a tensor with a function that makes none")

    def _deepen(self, taken: Sequence[_Value]) -> None:
        """Set the depth of the last value, to which values were added."""
        last = self._stack[-1]
        last.depth = max(last.depth, 1 + max((value.depth for value in taken), default=0))
        if last.depth > _DEEPEST:
            raise Immodest(f"nests values more than {_DEEPEST} deep, which no file needs")

    def _taken(self, name: str, instruction: pickletools.OpcodeInfo) -> Sequence[_Value]:
        """Take from the stack what an instruction does, but for the value below that it adds to."""
        kinds = instruction.stack_before
        if pickletools.markobject in kinds:
            start = self._marks.pop()
        else:
            start = len(self._stack) - len(kinds) + (name in _GROWING)
            if start < 0:
                raise IndexError(name)
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _bounded(self, size: int) -> int:
        if size > self._most:
            raise Immodest("asks for more memory or time than goes with its size")
        return size

    def _remember(self, index: int) -> None:
        self._bounded(self._most + index - len(self._data))
        self._memo[index] = self._stack[-1]

    def _name(self, module: str, name: str) -> None:
        self._names.add(f"{module}.{name}")
        self._stack.append(_Class(1, f"{module}.{name}"))


def _is_rebuilding(arguments: Sequence[_Value]) -> bool:
    """Return whether the first argument is one of torch's functions that rebuild a tensor."""
    return (
        bool(arguments)
        and isinstance(arguments[0], _Class)
        and arguments[0].constant.startswith("torch._utils._rebuild_")
    )
