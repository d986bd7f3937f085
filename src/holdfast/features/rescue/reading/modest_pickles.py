"""Decide from a pickle's instructions alone whether loading it takes memory and time out of proportion to its size.

Some instructions enlarge the unpickler's memo up to an index that they contain, and others announce how many bytes
follow. Nested tuples that each contain the next one twice have exponential size for code that traverses them; Python
does so when it hashes one as a key of a dictionary. The module therefore simulates the instructions on a stack of sizes
instead of values.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable, Sequence

import numpy as np

_LEAST = 2**20
_PER_BYTE = 16
"""A value, and all keys together, may be as large as this many elements for each byte of the pickle, and `_LEAST`."""

_COUNTED = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_LINES = {"GLOBAL": 2, "INST": 2}
_PUTS, _GETS = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")
_EFFECTS = {
    opcode.name: (len(opcode.stack_before), len(opcode.stack_after))
    for opcode in pickletools.opcodes
    if pickletools.markobject not in (*opcode.stack_before, *opcode.stack_after)
}
"""By instruction that knows no mark: how many values it takes, and how many it leaves."""
_STOP, _BINGET, _LONG_BINPUT = ord(pickle.STOP), ord(pickle.BINGET), ord(pickle.LONG_BINPUT)

_Handler = Callable[[int], int]
"""Follows an instruction whose argument begins at an offset; returns the offset of the next instruction."""
_Effect = Callable[[], object]
"""Does to the stack what an instruction does."""


class _Immodest(Exception):  # noqa: N818 - an answer
    """The pickle would take too much memory or time."""


def _decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) >= 20:
        raise _Immodest
    return int(digits)


def _skipping(length: int, effect: _Effect) -> _Handler:
    def follow(position: int) -> int:
        effect()
        return position + length

    return follow


_MOST_REMEMBERED, _LONG = 2**24, 256
"""Bytes of a pickle that is remembered, for the life of the process, and of a word in it that may differ."""
_followed: tuple[bytes, bytes] = (b"", b"")
"""The last modest pickle, and where its bytes say nothing of sizes (0)."""


def is_modest(data: bytes) -> bool:
    """Return whether a pickle asks for no more memory and time than goes with its length.

    Files of many ranks hold pickles that differ in a few numbers and words: one that differs from the last one only
    where a number or a word stands has the same sizes, and is not followed again.
    """
    global _followed  # noqa: PLW0603 - only to save time
    remembers = len(data) <= _MOST_REMEMBERED
    try:
        before, matters = _followed
        if len(data) == len(before) and not differ_where_it_matters(data, before, matters):
            return True
        sizes = Sizes(data, _LEAST + _PER_BYTE * len(data), marks_constants=remembers)
        sizes.follow()
        if remembers:
            _followed = data, bytes(sizes.matters[: len(data)])
    except _Immodest:
        return False
    except (IndexError, KeyError, ValueError):
        return True  # it cannot be read: whoever reads it says so
    except MemoryError:  # this takes less than what the pickle holds
        return True
    return True


def differ_where_it_matters(data: bytes, followed: bytes, matters: bytes) -> bool:
    """Return whether two pickles of one length differ in more than constants; `matters` is of the followed one."""
    first, second, mask = (np.frombuffer(buffer, dtype=np.uint8) for buffer in (data, followed, matters))
    return bool(((first ^ second) & mask).any())


class Sizes:
    """What an unpickler has on its stack, as numbers of elements; a list, which grows, as a negative number.

    Args:
        data: The pickle.
        most: How large a value, and all keys together, may be.
        marks_constants: Whether `matters` is wanted.
    """

    def __init__(self, data: bytes, most: int, *, marks_constants: bool = False) -> None:
        self._data, self._most = data, most
        self._keys = 0
        self._stack: list[int] = []
        self._marks: list[int] = []
        self._memo: dict[int, int] = {}
        self._lists = [0]
        self.matters = bytearray(b"\xff") * len(data) if marks_constants else bytearray()
        """Zero at the bytes of constants: all sizes stay the same when such a byte changes."""
        effects = self._effects()
        self._handlers = {
            ord(opcode.code): self._handler(opcode, effects.get(opcode.name)) for opcode in pickletools.opcodes
        }

    def follow(self) -> int:
        """Follow the instructions to the last one, and return the size of the result; 0 if they are cut short.

        Headers of a large model have millions of instructions: the two most frequent ones are followed here.

        Raises:
            IndexError, KeyError, ValueError: It cannot be read.
        """
        data, stack, memo, handlers, end = self._data, self._stack, self._memo, self._handlers, len(self._data)
        position = 0
        while position < end:
            code = data[position]
            position += 1
            if code == _LONG_BINPUT and data[position + 3] == 0:  # below 2**24: others go the long way
                index = data[position] | data[position + 1] << 8 | data[position + 2] << 16
                if index > end:
                    raise _Immodest
                memo[index] = stack[-1]
                position += 4
            elif code == _BINGET:
                stack.append(memo[data[position]])
                position += 1
            elif code == _STOP:
                return self._size(stack[-1:])
            else:
                position = handlers[code](position)
        return 0

    def _handler(self, instruction: pickletools.OpcodeInfo, effect: _Effect | None) -> _Handler:
        """Return what skips an instruction's argument and has its effect.

        One without an effect leaves a value of size 1, whatever its argument is: a constant.
        """
        length = 0 if instruction.arg is None else instruction.arg.n
        if instruction.name in (*_PUTS, *_GETS):
            return self._remembering(instruction.name in _PUTS, length)
        if length >= 0:
            return self._constant(length) if effect is None else _skipping(length, effect)
        effect = effect or (lambda: self._stack.append(1))
        if length == pickletools.UP_TO_NEWLINE:
            return self._lined(_LINES.get(instruction.name, 1), effect)
        return self._counted(_COUNTED[length], effect)

    def _constant(self, length: int) -> _Handler:
        append, matters, zeros = self._stack.append, self.matters, bytes(length)

        def follow(position: int) -> int:
            append(1)
            if matters:
                matters[position : position + length] = zeros
            return position + length

        return follow if length else _skipping(0, lambda: append(1))

    def _counted(self, size: int, effect: _Effect) -> _Handler:
        data, end, matters = self._data, len(self._data), self.matters

        def follow(position: int) -> int:
            start = position + size
            length = int.from_bytes(data[position:start], "little")
            if start + length > end:
                raise _Immodest
            if matters and length < _LONG:
                matters[start : start + length] = bytes(length)
            effect()
            return start + length

        return follow

    def _lined(self, lines: int, effect: _Effect) -> _Handler:
        data = self._data

        def follow(position: int) -> int:
            for _ in range(lines):
                position = data.index(b"\n", position) + 1
            effect()
            return position

        return follow

    def _remembering(self, puts: bool, length: int) -> _Handler:
        """Return the handler of an instruction that puts into the memo, or gets from it."""
        data, end, stack, memo = self._data, len(self._data), self._stack, self._memo

        def put(position: int) -> int:
            index = int.from_bytes(data[position : position + length], "little")
            if index > end:
                raise _Immodest
            memo[index] = stack[-1]
            return position + length

        def get(position: int) -> int:
            stack.append(memo[int.from_bytes(data[position : position + length], "little")])
            return position + length

        def follow_line(position: int) -> int:
            stop = data.index(b"\n", position)
            index = _decimal(data[position:stop])
            if puts and index > end:
                raise _Immodest
            if puts:
                memo[index] = stack[-1]
            else:
                stack.append(memo[index])
            return stop + 1

        if length == pickletools.UP_TO_NEWLINE:
            return follow_line
        return put if puts else get

    def _effects(self) -> dict[str, _Effect]:
        """Return what each instruction does to the stack, by its name, but for those that leave a constant."""
        stack, memo = self._stack, self._memo
        simple = {name: self._simple(*counts) for name, counts in _EFFECTS.items() if counts != (0, 1)}
        from_mark = {name: lambda: self._make(self._since_mark()) for name in ("TUPLE", "FROZENSET", "INST", "OBJ")}
        return (
            simple
            | from_mark
            | {
                "MEMOIZE": lambda: memo.__setitem__(len(memo), stack[-1]),
                "MARK": lambda: self._marks.append(len(stack)),
                "POP": self._drop,
                "POP_MARK": self._since_mark,
                "DUP": lambda: stack.append(stack[-1]),
                "BUILD": stack.pop,
                "EMPTY_LIST": lambda: self._make_list(()),
                "LIST": lambda: self._make_list(self._since_mark()),
                "DICT": lambda: self._look_up(self._since_mark()[::2], makes=True),
                "APPEND": lambda: self._grow([stack.pop()]),
                "APPENDS": lambda: self._grow(self._since_mark()),
                "ADDITEMS": lambda: self._look_up(self._since_mark()),
                "SETITEM": lambda: self._look_up([stack.pop(), stack.pop()][1:]),
                "SETITEMS": lambda: self._look_up(self._since_mark()[::2]),
            }
        )

    def _simple(self, popped: int, pushed: int) -> _Effect:
        stack, lists, most = self._stack, self._lists, self._most
        pop = stack.pop
        if pushed == 0:
            return lambda: None

        def make() -> None:
            size = 1
            for _ in range(popped):
                entry = pop()
                size += entry if entry > 0 else lists[-entry]
            if size > most:
                raise _Immodest
            stack.append(size)

        return make

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
        return sum(entry if entry > 0 else self._lists[-entry] for entry in items)

    def _make(self, items: Sequence[int]) -> None:
        size = 1
        for entry in items:
            size += entry if entry > 0 else self._lists[-entry]
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
        """Add the size of keys that are hashed to the total of all keys."""
        self._keys += self._size(keys)
        if self._keys > self._most:
            raise _Immodest
        if makes:
            self._stack.append(1)
