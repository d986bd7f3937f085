"""Render conversations with a tokenizer's chat template, as text and as tokens, and detect the template's habits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from holdfast.data.content.formats import Conversation
from holdfast.data.rows.files import local_places
from holdfast.errors import DataError
from holdfast.files import read_text

RENDERING_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError
)  # fmt: skip
"""What a template can raise: jinja's own errors, and those of the Python operations it performs on its values."""


class PromptFormat:
    """The template of `data.format`: a row's columns in, the user's prompt out.

    `content` is the prompt that the row has already, if that is text, unless a column has this name.
    """

    def __init__(self, value: str, base: Path) -> None:
        """Load the template from the file that `value` names, or take it as it is written there.

        Raises:
            DataError: There is no such file, or it is not a jinja template.
        """
        environment = ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        self.source = template_text(value, base, "data.format")
        self._name = "data.format" if self.source == value else f"data.format={value}"
        try:
            self._template = environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"{self._name}, line {error.lineno}: {error.message}.") from None

    def render(self, row: Mapping[str, Any], row_name: str) -> str:
        """Return the prompt.

        Raises:
            DataError: The template names a column that the row lacks, or fails on its values.
        """
        prompt = next((row[column] for column in ("prompt", "instruction") if isinstance(row.get(column), str)), None)
        try:
            return self._template.render({**({} if prompt is None else {"content": prompt}), **row})
        except RENDERING_ERRORS as error:
            raise DataError(
                f"{row_name}: {self._name} cannot be rendered: {error}. The row's columns are: {', '.join(row)}."
            ) from None


def read_template(path: str, base: Path, key: str) -> str:
    """Return the text of a template file, looked up from the current directory, then beside the YAML.

    Raises:
        DataError: There is no such file; `key` says which option named it.
    """
    tried = local_places(path, base)
    for file in tried:
        if file.is_file():
            try:
                return read_text(file)
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{key}={path}: {file} cannot be read as UTF-8 text ({error}).") from None
    raise DataError(f"{key}={path}: no such file. Tried {' and '.join(map(str, tried))}.")


def template_text(value: str, base: Path, key: str) -> str:
    """Return a template that is written in the configuration itself, or read the file it names."""
    return value if "{{" in value or "{%" in value else read_template(value, base, key)


_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")

_QUESTION = {"role": "user", "content": "holdfast?"}
_ANSWER = {"role": "assistant", "content": "holdfast!"}
"""Messages that show how a template writes; nothing in a template looks like them."""
_WRITTEN_PART = re.compile(r"""(['"])type\1:\s*(['"])text\2""")
"""A part of a content in Python or JSON, as a template that takes contents for text writes one."""

Span = tuple[int, int]
"""Tokens start..end-1."""


class TemplateRefuses(Exception):  # noqa: N818  # a finding about one conversation, which the caller turns into an error
    """The template cannot write this conversation."""


class ChatTemplate:
    """One template with its tokenizer and variables."""

    def __init__(self, tokenizer: Any, source: str | None, variables: Mapping[str, Any], name: str) -> None:
        """Take a template.

        Args:
            tokenizer: Writes the tokens; its own template is used where `source` is None.
            source: A jinja template.
            variables: Passed to the template.
            name: What an error calls the template.
        """
        self.tokenizer = tokenizer
        self.name = name
        self._source = source
        self._variables = dict(variables)
        self._written_roles: set[str] = set()

    @property
    def source(self) -> Any:
        """The jinja text; where the tokenizer has several templates, all of them by name."""
        return self._source or self.tokenizer.chat_template

    def check(self) -> None:
        """See that there is a template.

        Raises:
            TemplateRefuses: The tokenizer has none, or several without a default.
        """
        if self._source is not None:
            return
        if not self.tokenizer.chat_template:
            raise TemplateRefuses("its chat_template is not set")
        try:
            self.tokenizer.get_chat_template()
        except ValueError as error:
            raise TemplateRefuses(str(error)) from None

    def text(self, conversation: Conversation, *, generation_prompt: bool = False) -> str:
        """Return the conversation as text.

        Raises:
            TemplateRefuses: As `ids`.
        """
        return str(self._apply(conversation, tokenize=False, add_generation_prompt=generation_prompt))

    def ids(self, conversation: Conversation, *, generation_prompt: bool = False) -> list[int]:
        """Return the conversation as token ids, with the opening of an answer behind it if asked for.

        Raises:
            TemplateRefuses: The template raises an error; roles that must alternate are the common case.
        """
        encoded = self._apply(conversation, add_generation_prompt=generation_prompt, return_dict=True)
        return list(encoded["input_ids"])

    def marked(self, conversation: Conversation) -> tuple[list[int], list[Span]] | None:
        """Return the tokens and the stretches inside the template's generation blocks; None where it has no block.

        Raises:
            TemplateRefuses: As `ids`.
        """
        source = self.tokenizer.get_chat_template(self._source, tools=list(conversation.tools) or None)
        if not self.tokenizer.is_fast or _GENERATION_BLOCK.search(source) is None:
            return None
        encoded = self._apply(conversation, return_dict=True, return_assistant_tokens_mask=True)
        mask = [0, *encoded["assistant_masks"], 0]
        edges = [position for position, (before, after) in enumerate(pairwise(mask)) if before != after]
        return list(encoded["input_ids"]), list(zip(edges[::2], edges[1::2], strict=True))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def as_tokenised(self, text: str) -> str:
        """Return text as it survives the tokenizer, which may lower case or normalise it."""
        return self.decode(self._tokenised(text))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that no ordinary text makes, such as the end of a turn."""
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset(self.tokenizer.all_special_ids) | {number for number, token in added if token.special}

    @cached_property
    def opening(self) -> str:
        """What `add_generation_prompt` writes; empty where the template ignores it."""
        question = Conversation([_QUESTION])
        try:
            return self.text(question, generation_prompt=True).removeprefix(self.text(question))
        except TemplateRefuses:
            return ""

    @cached_property
    def opening_ids(self) -> list[int]:
        """The tokens of `opening`."""
        return self._tokenised(self.opening)

    @cached_property
    def _header(self) -> str | None:
        """What stands between a question and its answer, for templates that ignore `add_generation_prompt`.

        It is part of the prompt, since the policy does not choose it; None where it cannot be told.
        """
        try:
            question = self.text(Conversation([_QUESTION]))
            answered = self.text(Conversation([_QUESTION, _ANSWER]))
        except TemplateRefuses:
            return ""
        header, answer, _ = answered.removeprefix(question).partition(_ANSWER["content"])
        if not header.strip() and answer:
            return ""
        return header if answer and answered.startswith(question) else None

    def prompt(self, conversation: Conversation) -> list[int] | None:
        """Return what an answer follows, as tokens, with the assistant's header; None where that cannot be told.

        Raises:
            TemplateRefuses: As `ids`.
        """
        header = self.opening or self._header
        if not conversation.messages:  # transformers renders none; an answer that begins is preceded by its header
            before, answer, _ = self.text(replace(conversation, messages=[_ANSWER])).partition(_ANSWER["content"])
            return self._tokenised(before) if answer and header and before.endswith(header) else None
        if self.opening or header == "":
            return self.ids(conversation, generation_prompt=True)
        return None if header is None else self._tokenised(self.text(conversation) + header)

    def _tokenised(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def dropped_roles(self, conversation: Conversation) -> list[str]:
        """Return the roles, the assistant's aside, of messages of which the template writes nothing.

        A role that was written once is not looked for again.

        Raises:
            TemplateRefuses: As `ids`.
        """
        unseen = [
            number
            for number, message in enumerate(conversation.messages)
            if message["role"] not in {"assistant", *self._written_roles} and message.get("content")
        ]
        if not unseen:
            return []
        text, dropped = self.text(conversation), []
        for number in unseen:
            messages = list(conversation.messages)
            role = str(messages[number]["role"])
            messages[number] = {**messages[number], "content": _QUESTION["content"]}
            if self.text(replace(conversation, messages=messages)) == text:
                dropped.append(role)
            else:
                self._written_roles.add(role)
        return list(dict.fromkeys(dropped))

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether contents must be lists of parts, as in templates of models that see images."""
        for message, is_list in ((_QUESTION, False), (_in_parts(_QUESTION), True)):
            try:
                rendered = self._render([message], None, tokenize=False)
                if _QUESTION["content"] in rendered:
                    return is_list and _WRITTEN_PART.search(rendered) is None
            except RENDERING_ERRORS:
                continue
        return False

    def _apply(self, conversation: Conversation, **how: Any) -> Any:
        messages = [dict(message) for message in conversation.messages]
        if self._wants_parts:
            messages = [_in_parts(message) for message in messages]
        tools = [dict(tool) for tool in conversation.tools] or None
        try:
            return self._render(messages, tools, **how)
        except RENDERING_ERRORS as error:
            refusal = TemplateRefuses(str(error) or type(error).__name__)
        try:
            # Some templates put arguments into the text as they are, and so want them written as JSON.
            return self._render([_with_written_arguments(message) for message in messages], tools, **how)
        except RENDERING_ERRORS:
            raise refusal from None

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **how: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=self._source, **how, **self._variables
        )


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(message)


def _with_written_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        written = {**function, "arguments": json.dumps(function.get("arguments", {}), ensure_ascii=False)}
        calls.append({**call, "function": written} if "function" in call else written)
    return {**message, "tool_calls": calls} if calls else dict(message)
