"""The rows that a proof is made of: held-out rows of the run or of a file, filled up with fixed prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from holdfast.config.sections.data import SourceConfig
from holdfast.data.content.formats import Conversation, PlainText, PromptCompletion, normalise, prompt_of, row_shape
from holdfast.data.rows.rows import Row, columns_of, open_source
from holdfast.errors import DataError
from holdfast.models.files.origin import TOKENIZER_PROBE

COUNT = 20
"""Rows of a proof, at least; a file of the user's may have more."""
_LONGEST = 512
"""Tokens of a row; longer ones are left out."""
_MOST = 200
_PROMPTS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "What is 17 + 25?",
    "Translate to German: good morning.",
    "Explain in one sentence why the sky is blue.",
    "List the days of the week.",
    "Who wrote Hamlet?",
    "Give a synonym of fast.",
    "What follows 2, 4, 6, 8?",
    "Write a Python function that returns the larger of two numbers.",
    "What does a doctor do?",
    "Complete: once upon a time",
    "Is water heavier than oil?",
    "How many minutes has an hour?",
    "Name an animal that can fly.",
    "What is the opposite of cold?",
    "Describe an apple in five words.",
    "Naïve café, 東京 and 3.14159: repeat this.",
    "Why do people sleep?",
)


@dataclass(frozen=True)
class ProofRow:
    """A row, and the tokens that transformers makes of it; either messages or a text is set."""

    ids: list[int]
    prompt_ids: list[int]
    messages: list[dict[str, str]] | None = None
    prompt_messages: list[dict[str, str]] | None = None
    text: str | None = None
    prompt_text: str | None = None

    def request(self, new_tokens: int) -> dict[str, Any]:
        """Return what a program is asked."""
        return {**asdict(self), "new_tokens": new_tokens}


def proof_rows(tokenizer: Any, settings: Mapping[str, Any], file: str | None) -> tuple[list[ProofRow], str]:
    """Return the rows of a proof, and words that say where they are from.

    One more row is a text whose digits, capitals, spaces and signs another split of words would cut otherwise.

    Args:
        tokenizer: Of the model.
        settings: The run's configuration, whose evaluation sets are read if no file is named.
        file: Rows of the user's.

    Raises:
        DataError: The user's file holds no row that can be used.
    """
    if file is not None:
        source = SourceConfig(path=file, name=file)
        rows = list(islice(_usable(tokenizer, source), _MOST))
        if not rows:
            raise DataError(f"{file} has no row of at most {_LONGEST} tokens that is a text or a conversation.")
        return [*rows, *_probe(tokenizer)], f"{len(rows)} rows of {Path(file).name} and a probe of the tokenizer"
    held_out = list(_of_the_run(tokenizer, settings))
    fixed = [row for prompt in _PROMPTS if (row := _row(tokenizer, _as_content(tokenizer, prompt))) is not None]
    filled = fixed[: max(0, COUNT - len(held_out))]
    words = [f"{len(held_out)} held-out rows of the run"] if held_out else []
    words += [f"{len(filled)} fixed prompts"] if filled else []
    return [*held_out, *filled, *_probe(tokenizer)], ", ".join([*words, "a probe of the tokenizer"])


def _probe(tokenizer: Any) -> Iterator[ProofRow]:
    row = _row(tokenizer, PlainText(TOKENIZER_PROBE))
    if row is not None:
        yield row


def _of_the_run(tokenizer: Any, settings: Mapping[str, Any]) -> Iterator[ProofRow]:
    """Yield rows of the run's evaluation sets; none of a set that is not where the run read it."""
    sets = (settings.get("evaluation") or {}).get("sets") or {}
    for section in sets.values():
        known = {key: value for key, value in section.items() if key in SourceConfig.model_fields and value is not None}
        try:
            yield from islice(_usable(tokenizer, SourceConfig(**known)), max(1, COUNT // len(sets)))
        except (DataError, ValueError):
            continue


def _usable(tokenizer: Any, source: SourceConfig) -> Iterator[ProofRow]:
    opened = open_source(source, Path.cwd())
    columns = columns_of(opened)
    for number, row in enumerate(opened.scan(0)):
        made = _row(tokenizer, _content(row, columns, source, f"row {number}"))
        if made is not None:
            yield made


def _content(row: Row, columns: tuple[str, ...], source: SourceConfig, name: str) -> Any:
    try:
        return normalise(row, row_shape(columns, source.rows), name)
    except DataError:
        prompt = prompt_of(row, name)
        return PlainText(prompt) if isinstance(prompt, str) else prompt


def _as_content(tokenizer: Any, prompt: str) -> Any:
    return Conversation([{"role": "user", "content": prompt}]) if tokenizer.chat_template else PlainText(prompt)


def _row(tokenizer: Any, content: Any) -> ProofRow | None:
    """Return a row; None of one that is too long, or is more than text."""
    match content:
        case Conversation(messages=messages, tools=tools):
            made = None if tools or not tokenizer.chat_template else _conversation(tokenizer, messages)
        case PromptCompletion(prompt=prompt, completion=completion):
            made = _text(tokenizer, prompt + completion, prompt)
        case PlainText(text=text):
            made = _text(tokenizer, text[:1000], text[: max(1, min(len(text), 1000) // 2)])
        case _:
            made = None
    fits = made is not None and 2 <= len(made.ids) <= _LONGEST and made.prompt_ids
    return made if fits else None


def _conversation(tokenizer: Any, messages: Any) -> ProofRow | None:
    if not all(isinstance(message.get("content"), str) and set(message) <= {"role", "content"} for message in messages):
        return None
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    prompt = plain[:-1] if plain[-1]["role"] == "assistant" and plain[1:] else plain
    ids = _rendered(tokenizer, plain, prompt is plain)
    return ProofRow(ids, _rendered(tokenizer, prompt, True), messages=plain, prompt_messages=prompt)  # noqa: FBT003


def retokenised(tokenizer: Any, row: ProofRow) -> tuple[list[int], list[int]]:
    """Return the tokens of a row and of its prompt by another tokenizer."""
    if row.messages is None:
        assert row.text is not None and row.prompt_text is not None
        made = _text(tokenizer, row.text, row.prompt_text)
    elif tokenizer.chat_template:
        again = _conversation(tokenizer, row.messages)
        assert again is not None
        made = again
    else:
        return [], []
    return made.ids, made.prompt_ids


def _rendered(tokenizer: Any, messages: list[dict[str, str]], is_prompt: bool) -> list[int]:  # noqa: FBT001
    made = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=is_prompt, return_dict=False)
    return list(made)


def _text(tokenizer: Any, text: str, prompt: str) -> ProofRow:
    return ProofRow(
        list(tokenizer(text)["input_ids"]), list(tokenizer(prompt)["input_ids"]), text=text, prompt_text=prompt
    )
