"""Whether a pickle asks for more memory or time than goes with its size, known from its instructions alone.

Two kinds of instruction grow the table of what is remembered up to a number of theirs, and others say how many bytes
follow. And a tuple that has another one twice, which has a third one twice, soon takes for ever to whoever looks at all
of it: Python itself does where it is a key of a dictionary. So the instructions are followed with the size of each
value in the place of the value.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Sequence

_LEAST = 2**20
_PER_BYTE = 16
"""A value, and all keys together, may be as large as this many elements for each byte of the pickle, and `_LEAST`."""

_LENGTHS = {ord(each.code): (each.name, 0 if each.arg is None else each.arg.n) for each in pickletools.opcodes}
"""By the byte of an instruction: its name, and how long its argument is, or how that is known (negative)."""
_COUNTED = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_TWO_LINES = {"GLOBAL", "INST"}
_MEMO = {"PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET"}
_EFFECTS = {
    each.name: (len(each.stack_before), len(each.stack_after))
    for each in pickletools.opcodes
    if pickletools.markobject not in (*each.stack_before, *each.stack_after)
}
"""By instruction that knows no mark: how many values it takes, and how many it leaves."""

_CODES = {each.name: ord(each.code) for each in pickletools.opcodes}
_BINGET, _LONG_BINPUT, _STOP = (_CODES[name] for name in ("BINGET", "LONG_BINPUT", "STOP"))
_CONSTANTS = {
    code: length
    for code, (name, length) in _LENGTHS.items()
    if length >= 0 and name not in _MEMO and _EFFECTS.get(name) == (0, 1) and name not in {"EMPTY_LIST"}
}
"""By the byte of an instruction that leaves a value which holds no other: how long its argument is."""


class _Immodest(Exception):  # noqa: N818 - an answer
    """It asks for too much."""


def _decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) >= 20:
        raise _Immodest
    return int(digits)


def is_modest(data: bytes) -> bool:
    """Return whether a pickle asks for no more memory and time than goes with its length."""
    try:
        Sizes(data, _LEAST + _PER_BYTE * len(data)).follow()
    except _Immodest:
        return False
    except (IndexError, KeyError):
        return True  # it cannot be read: whoever reads it says so
    except MemoryError:  # this takes less than what the pickle holds
        return True
    return True


class Sizes:
    """What an unpickler has on its stack, as numbers of elements; a list, which grows, as a negative number.

    Args:
        data: The pickle.
        most: How large a value, and all keys together, may be.
    """

    def __init__(self, data: bytes, most: int) -> None:
        self._data, self._most = data, most
        self._keys = 0
        self._stack: list[int] = []
        self._marks: list[int] = []
        self._memo: dict[int, int] = {}
        self._lists = [0]
        self._handlers = self._made_handlers()

    def follow(self) -> int:
        """Follow the instructions to the last one, and return the size of the result; 0 if they are cut short.

        Headers of a large model have millions of instructions: the most frequent ones are followed here.

        Raises:
            IndexError, KeyError: It cannot be read.
        """
        data, stack, memo, end = self._data, self._stack, self._memo, len(self._data)
        at = 0
        while at < end:
            code = data[at]
            at += 1
            if code == _BINGET:
                stack.append(memo[data[at]])
                at += 1
            elif code == _LONG_BINPUT:
                number = int.from_bytes(data[at : at + 4], "little")
                if number > end:
                    raise _Immodest
                memo[number] = stack[-1]
                at += 4
            elif code in _CONSTANTS:
                stack.append(1)
                at += _CONSTANTS[code]
            elif code == _STOP:
                return self._size(stack[-1:])
            else:
                at = self._follow_one(code, at)
        return 0

    def _follow_one(self, code: int, at: int) -> int:
        """Follow an instruction whose argument begins at a place; return where the next one begins."""
        data, end, number = self._data, len(self._data), 0
        name, length = _LENGTHS[code]
        if length >= 0:
            if name in _MEMO:
                number = int.from_bytes(data[at : at + length], "little")
            at += length
        elif length == pickletools.UP_TO_NEWLINE:
            stop = data.find(b"\n", at)
            if name in _MEMO:
                number = _decimal(data[at:stop])
            at = data.find(b"\n", stop + 1) + 1 if name in _TWO_LINES else stop + 1
            if stop < 0 or at == 0:
                raise IndexError
        else:
            size = _COUNTED[length]
            count = int.from_bytes(data[at : at + size], "little")
            if count > end - at:
                raise _Immodest
            at += size + count
        if number > end:
            raise _Immodest
        self._handlers[code](number)
        return at

    def _made_handlers(self) -> dict[int, Callable[[int], object]]:
        """Return what follows each instruction, by its byte."""
        stack, memo = self._stack, self._memo
        handlers: dict[str, Callable[[int], object]] = {
            name: self._simple(taken, left) for name, (taken, left) in _EFFECTS.items()
        }
        for name in ("GET", "BINGET", "LONG_BINGET"):
            handlers[name] = lambda number: stack.append(memo[number])
        for name in ("PUT", "BINPUT", "LONG_BINPUT"):
            handlers[name] = lambda number: memo.__setitem__(number, stack[-1])
        for name in ("TUPLE", "FROZENSET", "INST", "OBJ"):
            handlers[name] = lambda _: self._make(self._since_mark())
        handlers |= {
            "MEMOIZE": lambda _: memo.__setitem__(len(memo), stack[-1]),
            "MARK": lambda _: self._marks.append(len(stack)),
            "POP": lambda _: self._drop(),
            "POP_MARK": lambda _: self._since_mark(),
            "DUP": lambda _: stack.append(stack[-1]),
            "BUILD": lambda _: stack.pop(),
            "EMPTY_LIST": lambda _: self._make_list(()),
            "LIST": lambda _: self._make_list(self._since_mark()),
            "DICT": lambda _: self._look_up(self._since_mark()[::2], makes=True),
            "APPEND": lambda _: self._grow([stack.pop()]),
            "APPENDS": lambda _: self._grow(self._since_mark()),
            "ADDITEMS": lambda _: self._look_up(self._since_mark()),
            "SETITEM": lambda _: self._look_up([stack.pop(), stack.pop()][1:]),
            "SETITEMS": lambda _: self._look_up(self._since_mark()[::2]),
        }
        return {_CODES[name]: handler for name, handler in handlers.items()}

    def _simple(self, taken: int, left: int) -> Callable[[int], object]:
        stack = self._stack
        if left == 0:
            return lambda _: stack[len(stack) - taken :].clear()
        if taken == 0:
            return lambda _: stack.append(1)
        if taken == 1:
            return lambda _: self._make((stack.pop(),))

        def take(_: int) -> None:
            self._make([stack.pop() for _ in range(taken)])

        return take

    def _since_mark(self) -> list[int]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _drop(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def _size(self, items: Sequence[int]) -> int:
        return sum(each if each > 0 else self._lists[-each] for each in items)

    def _make(self, items: Sequence[int]) -> None:
        size = 1
        for each in items:
            size += each if each > 0 else self._lists[-each]
        if size > self._most:
            raise _Immodest
        self._stack.append(size)

    def _make_list(self, items: Sequence[int]) -> None:
        self._stack.append(-len(self._lists))
        self._lists.append(1 + self._size(items))

    def _grow(self, items: Sequence[int]) -> None:
        """Add to a list; whatever else appends keeps the size it was made with."""
        top = self._stack[-1]
        if top < 0:
            self._lists[-top] += self._size(items)
            if self._lists[-top] > self._most:
                raise _Immodest

    def _look_up(self, keys: Sequence[int], *, makes: bool = False) -> None:
        """Count what it takes to look keys up."""
        self._keys += self._size(keys)
        if self._keys > self._most:
            raise _Immodest
        if makes:
            self._stack.append(1)
