"""Generated tasks with exact answers: one generator gives SFT rows, preference pairs and verifiable prompts.

Row i is a pure function of (task, seed, i). The numbers come from BLAKE2b and not from a library's generator, whose
stream may change with its version: a run resumed under another version then sees the same rows.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.config.sections.data import SyntheticConfig
from holdfast.errors import DataError

CELL = 16
"""Pixels of a cell, in height and width."""

COLOURS = {"red": (200, 40, 40), "green": (40, 170, 60), "blue": (50, 70, 210), "white": (235, 235, 235)}

Plane = NDArray[np.float64]
SHAPES: dict[str, Callable[[Plane, Plane], NDArray[np.bool_]]] = {
    "circle": lambda x, y: x**2 + y**2 <= 5.5**2,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) <= 5,
    "cross": lambda x, y: np.minimum(abs(x), abs(y)) <= 1.5,
    "bar": lambda x, y: (abs(y) <= 2) & (abs(x) <= 6.5),
}
"""Which pixels a shape covers; x and y count from its centre."""


def paint(shapes: Sequence[tuple[str, str]], below: Callable[[int], int]) -> bytes:
    """Return a PNG file.

    Args:
        shapes: (colour, shape) of each cell, from left to right.
        below: Gives an integer in [0, limit): how far a shape is moved, and how light it is.

    Raises:
        DataError: PIL is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise DataError("The task shapes draws pictures, which needs a package: pip install 'holdfast[vlm]'.") from None
    pixels = np.full((CELL, CELL * len(shapes), 3), 20 + below(60), dtype=np.float64)
    rows, columns = np.mgrid[0:CELL, 0:CELL].astype(np.float64)
    for number, (colour, shape) in enumerate(shapes):
        x, y = columns - 7.5 + below(3) - 1, rows - 7.5 + below(3) - 1
        light = 0.8 + below(41) / 100
        cell = pixels[:, number * CELL : (number + 1) * CELL]
        cell[SHAPES[shape](x, y)] = np.minimum(255, np.array(COLOURS[colour]) * light)
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


Item = TypeVar("Item")
TaskRows = Literal["answers", "pairs", "labels"]
"""What rows of a task have: an answer; a right and a wrong one; or an answer, and a label that says which it is."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DIGITS = "0123456789"
_ADDITION_SLIPS = (-100, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 100)
_TRIES = 32
"""How many wrong answers are drawn before one is made by changing a symbol; `1111` sorted wrongly is still `1111`."""


class KeyedRandom:
    """A generator of uniform integers that depend on a key alone."""

    def __init__(self, *key: object) -> None:
        self._key = ":".join(map(str, key))
        self._block = 0
        self._words: list[int] = []

    def below(self, limit: int) -> int:
        """Return an integer in [0, limit). The bias of taking a remainder of 64 bits is below 2**-50 here."""
        if not self._words:
            digest = hashlib.blake2b(f"{self._key}:{self._block}".encode()).digest()
            self._words = [int.from_bytes(digest[start : start + 8], "little") for start in range(0, 64, 8)]
            self._block += 1
        return self._words.pop() % limit

    def between(self, low: int, high: int) -> int:
        """Return an integer in [low, high]."""
        return low + self.below(high - low + 1)

    def choice(self, items: Sequence[Item]) -> Item:
        """Return one of the items."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """Return the items in a random order (Fisher and Yates)."""
        order = list(items)
        for last in range(len(order) - 1, 0, -1):
            index = self.below(last + 1)
            order[last], order[index] = order[index], order[last]
        return order


@dataclass(frozen=True)
class Question:
    """A prompt with its right answer, a function that draws plausible wrong answers, and columns for a verifier."""

    prompt: str
    answer: str
    guess: Callable[[KeyedRandom], str]
    """A plausible answer that may be wrong."""
    facts: Mapping[str, Any]
    """Further columns of the row."""


class SyntheticSource:
    """The rows of one task: columns `prompt`, `completion`, `answer`, and the facts of the task.

    Rows of `shapes` have `images` besides.

    As pairs: `prompt`, `chosen` and `rejected` (and `images`), swapped in noisy rows. As labels: the columns of
    answers and `label`; half of the answers are wrong, unless the task names another share of noise.
    """

    def __init__(self, config: SyntheticConfig, rows: TaskRows = "answers") -> None:
        if rows == "labels" and config.noise == 0:
            config = config.model_copy(update={"noise": 0.5})
        self._config = config
        self._rows = rows
        self._question = _TASKS[config.task]
        self.name: str = config.task
        self.size: int = config.rows
        mark = "" if rows == "answers" else f":{rows}"
        self.fingerprint: str = xxhash.xxh3_128_hexdigest(f"synthetic/1:{config.model_dump_json()}{mark}".encode())

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.row(index)

    def row(self, index: int) -> Mapping[str, Any]:
        """Return row `index`. A noisy row has a wrong `completion`; `answer` is right in every row."""
        question = self._draw(index)
        # A stream of its own, so that the same questions come with every share of noise.
        noise = self._draws("noise", index)
        is_noisy = noise.below(1 << 53) < self._config.noise * (1 << 53)
        if self._rows == "pairs":
            pair = self.preference_pair(index)
            return {**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]} if is_noisy else pair
        completion = wrong_answer(question, noise) if is_noisy else question.answer
        row = {"prompt": question.prompt, "completion": completion, "answer": question.answer, **question.facts}
        return row | {"label": not is_noisy} if self._rows == "labels" else row

    def scan(self, start: int) -> Iterator[Mapping[str, Any]]:
        """Yield the rows from row `start` on."""
        return map(self.row, range(start, self.size))

    def preference_pair(self, index: int) -> Mapping[str, Any]:
        """Return the question of row `index` with its right answer `chosen` and a wrong one `rejected`."""
        question = self._draw(index)
        rejected = wrong_answer(question, self._draws("rejected", index))
        pair = {"prompt": question.prompt, "chosen": question.answer, "rejected": rejected}
        return pair | {name: question.facts[name] for name in ("images",) if name in question.facts}

    def _draw(self, index: int) -> Question:
        if not 0 <= index < self.size:
            raise IndexError(f"row {index} of {self.size}")
        draws = self._draws("question", index)
        return self._question(draws, draws.between(self._config.min_length, self._config.max_length))

    def _draws(self, purpose: str, index: int) -> KeyedRandom:
        return KeyedRandom(self._config.task, self._config.seed, purpose, index)


def check_answer(row: Mapping[str, Any], completion: str) -> bool:
    """Say whether a completion answers the row's prompt; countdown accepts any right expression."""
    if "numbers" not in row:
        return bool(completion == row["answer"])
    if re.fullmatch(r"[0-9]+([+-][0-9]+)*", completion) is None:
        return False
    terms = [int(term) for term in re.findall(r"[+-]?[0-9]+", completion)]
    return sorted(map(abs, terms)) == sorted(row["numbers"]) and sum(terms) == row["target"]


def wrong_answer(question: Question, draws: KeyedRandom) -> str:
    """Return an answer that `check_answer` refuses."""
    row = {"answer": question.answer, **question.facts}
    for _ in range(_TRIES):
        guess = question.guess(draws)
        if not check_answer(row, guess):
            return guess
    first = question.answer[0]
    symbols = _LETTERS if first in _LETTERS else _DIGITS[1:]
    return symbols[(symbols.find(first) + 1) % len(symbols)] + question.answer[1:]


def _sort(draws: KeyedRandom, length: int) -> Question:
    digits = "".join(draws.choice(_DIGITS) for _ in range(length))
    answer = "".join(sorted(digits))
    return Question(f"sort {digits}=", answer, lambda guess: "".join(guess.shuffled(answer)), {"digits": digits})


def _reverse(draws: KeyedRandom, length: int) -> Question:
    letters = "".join(draws.choice(_LETTERS) for _ in range(length))
    answer = letters[::-1]
    return Question(f"reverse {letters}=", answer, lambda guess: "".join(guess.shuffled(answer)), {"letters": letters})


def _add(draws: KeyedRandom, length: int) -> Question:
    """Two numbers of `length` digits; the sum has one digit more, with leading zeros."""
    first, second = draws.below(10**length), draws.below(10**length)
    total = first + second

    def slip(guess: KeyedRandom) -> str:
        return f"{(total + guess.choice(_ADDITION_SLIPS)) % 10 ** (length + 1):0{length + 1}d}"

    prompt = f"{first:0{length}d}+{second:0{length}d}="
    return Question(prompt, f"{total:0{length + 1}d}", slip, {"terms": [first, second]})


def _countdown(draws: KeyedRandom, length: int) -> Question:
    """Reach a target that is not negative with each number once, by + and -."""
    numbers = [draws.between(1, 9) for _ in range(length)]
    answer, target = _expression(draws, numbers)
    while target < 0:
        answer, target = _expression(draws, numbers)
    facts = {"numbers": numbers, "target": target}
    prompt = f"{','.join(map(str, numbers))}:{target:02d}="
    return Question(prompt, answer, lambda guess: _expression(guess, numbers)[0], facts)


def _expression(draws: KeyedRandom, numbers: Sequence[int]) -> tuple[str, int]:
    """Return the numbers in a random order joined by random signs, and its value."""
    first, *rest = draws.shuffled(numbers)
    text, value = str(first), first
    for number in rest:
        is_sum = draws.below(2) == 0
        text += f"{'+' if is_sum else '-'}{number}"
        value += number if is_sum else -number
    return text, value


def _shapes(draws: KeyedRandom, length: int) -> Question:
    """Say what a picture shows, from left to right."""
    colours, shapes = list(COLOURS), list(SHAPES)
    figures = [(draws.choice(colours), draws.choice(shapes)) for _ in range(length)]

    def mistaken(guess: KeyedRandom) -> str:
        wrong = guess.below(length)
        mistaken_figures = [
            pair if index != wrong else (guess.choice(colours), pair[1]) for index, pair in enumerate(figures)
        ]
        return _description(mistaken_figures)

    facts = {"images": [paint(figures, draws.below)], "shapes": [" ".join(pair) for pair in figures]}
    return Question("<image>shapes:", _description(figures), mistaken, facts)


def _description(figures: Sequence[tuple[str, str]]) -> str:
    return ", ".join(" ".join(pair) for pair in figures)


_TASKS: Mapping[str, Callable[[KeyedRandom, int], Question]] = {
    "sort": _sort,
    "reverse": _reverse,
    "add": _add,
    "countdown": _countdown,
    "shapes": _shapes,
}


CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 +-*/=?:,.()<>|_\n"

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ROLES = ("<system>", "<user>", "<assistant>", "<tool>")

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "<assistant>{% generation %}{{ message.content }}<eos>{% endgeneration %}"
    "{% elif message.role in ['system', 'user', 'tool'] %}"
    "<{{ message.role }}>{{ message.content }}"
    "{% else %}{{ raise_exception('a role is system, user, assistant or tool, not ' + message.role) }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")

_WRITTEN = (
    "{% macro written(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'image' %}" + "".join(VISION) + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
)


def picture_tokenizer() -> Any:
    """Return the tokenizer of single characters with the tokens that Qwen-VL models mark images by, after all others.

    Its template writes contents that are text and contents that are lists of parts.
    """
    tokenizer = character_tokenizer(VISION)
    tokenizer.chat_template = _WRITTEN + TEMPLATE.replace("message.content", "written(message.content)")
    return tokenizer


def character_tokenizer(further: tuple[str, ...] = ()) -> Any:
    """Return a `PreTrainedTokenizerFast` with one token per character.

    `<pad>` is 0 and `<eos>` is 1. It knows lower-case letters, digits, space, newline and `+-*/=?:,.()<>|_`; any other
    character becomes `<unk>`. There is no beginning-of-sequence token, so a prompt is its characters and nothing else.

    Args:
        further: Special tokens after all others. Default: none.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = [PAD, EOS, UNKNOWN, *ROLES, *CHARACTERS, *further]
    model = models.WordLevel({token: number for number, token in enumerate(vocabulary)}, unk_token=UNKNOWN)
    tokenizer = Tokenizer(model)
    # Not Regex("."), which leaves newlines glued to their neighbours.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[*ROLES, *further],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast
