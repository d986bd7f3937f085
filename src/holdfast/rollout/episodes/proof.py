"""Before step 1: which syntax a template writes calls in, by rendering calls and reading them back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.data.content.formats import Conversation
from holdfast.data.tokens.chat_template import ChatTemplate, TemplateRefuses
from holdfast.environments.base import ToolCall
from holdfast.rollout.episodes.calls import FAMILIES, Parse, parser_of_family, parser_of_tokenizer
from holdfast.rollout.episodes.history import TurnTemplate

_QUESTION = {"role": "user", "content": "holdfast asks?"}
_VALUES: Mapping[str, Any] = {"integer": 7, "number": 2.5, "string": "holdfast's text", "boolean": True, "array": []}


def unwritable_name(template: ChatTemplate, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of a tool that the tokenizer writes otherwise, so that no policy could call it; None if none."""
    names = [str(tool["function"]["name"]) for tool in tools]
    return next((name for name in names if template.as_tokenised(name) != name), None)


def proved_parser(template: ChatTemplate, writer: TurnTemplate, tools: Sequence[Mapping[str, Any]]) -> Parse | None:
    """Return what reads back a call of every tool as the template writes it; None without tools.

    Raises:
        TemplateRefuses: Nothing does.
    """
    if not tools:
        return None
    calls = [_call(tool["function"]) for tool in tools]
    prefix = template.text(Conversation([_QUESTION], tools), generation_prompt=True)
    texts, ends = zip(*(_written(template, writer, tools, call) for call in calls), strict=True)
    own = parser_of_tokenizer(template.tokenizer, tools, prefix, ends[0])
    parsers = ([] if own is None else [own]) + [parser_of_family(family) for family in FAMILIES.values()]
    for parse in parsers:
        if all(parse(text) == (call,) for text, call in zip(texts, calls, strict=True)):
            return parse
    raise TemplateRefuses(
        f"it writes a call as {texts[0]!r}, which none of the syntaxes {', '.join(FAMILIES)} reads back as "
        f"{calls[0].name}({', '.join(calls[0].arguments)})"
    )


def _call(function: Mapping[str, Any]) -> ToolCall:
    properties: Mapping[str, Any] = function["parameters"]["properties"]
    return ToolCall(str(function["name"]), {name: _value(schema) for name, schema in properties.items()})


def _value(schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    return _VALUES.get(str(schema.get("type")), {})


def _written(
    template: ChatTemplate, writer: TurnTemplate, tools: Sequence[Mapping[str, Any]], call: ToolCall
) -> tuple[str, str]:
    """Return what a template writes for a turn that is one call, and the token that ends it."""
    before = template.text(Conversation([_QUESTION], tools), generation_prompt=True)
    function = {"name": call.name, "arguments": dict(call.arguments)}
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "000000000", "function": function}],
    }
    text = template.text(Conversation([_QUESTION, turn], tools))[len(before) :]
    position, end = min(((text.find(end), end) for end in writer.ends if end in text), default=(len(text), ""))
    return text[:position], end
