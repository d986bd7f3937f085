"""Whether a pickle asks for more memory or time than goes with its size, known from its instructions alone.

Two kinds of instruction grow the table of what is remembered up to a number of theirs, and others say how many bytes
follow. And a tuple that has another one twice, which has a third one twice, soon takes for ever to whoever looks at all
of it: Python itself does where it is a key of a dictionary. So the instructions are followed with the size of each
value in the place of the value.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator, Sequence

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


class _Immodest(Exception):  # noqa: N818 - an answer
    """It asks for too much."""


def is_modest(data: bytes) -> bool:
    """Return whether a pickle asks for no more memory and time than goes with its length."""
    sizes = _Sizes(_LEAST + _PER_BYTE * len(data))
    follow = sizes.handlers()
    try:
        for name, number in _instructions(data):
            follow[name](number)
    except _Immodest:
        return False
    except (IndexError, KeyError):
        return True  # it cannot be read: whoever reads it says so
    return True


def _instructions(data: bytes) -> Iterator[tuple[str, int]]:
    """Yield instructions up to the last one, and of those that say where something is remembered the number.

    This walks as pickletools does, several times as fast.
    """
    at, end = 0, len(data)
    while at < end:
        name, length = _LENGTHS[data[at]]
        at += 1
        number = 0
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
                return
        else:
            size = _COUNTED[length]
            count = int.from_bytes(data[at : at + size], "little")
            if count > end - at:
                raise _Immodest
            at += size + count
        if number > end:
            raise _Immodest
        yield name, number
        if name == "STOP":
            return


def _decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) >= 20:
        raise _Immodest
    return int(digits)


class _Sizes:
    """What an unpickler has on its stack, as numbers of elements; a list, which grows, as a negative number."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys = 0
        self._stack: list[int] = []
        self._marks: list[int] = []
        self._memo: dict[int, int] = {}
        self._lists = [0]

    def handlers(self) -> dict[str, Callable[[int], object]]:
        """Return what follows each instruction."""
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
        return handlers | {
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

    def _simple(self, taken: int, left: int) -> Callable[[int], object]:
        stack = self._stack
        if left == 0:
            return lambda _: stack[len(stack) - taken :].clear()
        if taken == 0:
            return lambda _: stack.append(1)

        def take(_: int) -> None:
            items = stack[-taken:]
            del stack[-taken:]
            self._make(items)

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
        size = 1 + self._size(items)
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
