"""Before step 1: how a template writes turns, and in which syntax calls, by rendering them and reading them back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from holdfast.data.content.formats import Conversation
from holdfast.data.tokens.chat_template import ChatTemplate, TemplateRefuses
from holdfast.environments.base import ToolCall
from holdfast.errors import ConfigError
from holdfast.rollout.episodes.calls import FAMILIES, Parse, parser_of_family, parser_of_tokenizer
from holdfast.rollout.episodes.history import History, Roles, TurnTemplate, classify
from holdfast.rollout.episodes.sessions import Syntax

_QUESTION = {"role": "user", "content": "holdfast asks?"}
_VALUES: Mapping[str, Any] = {"integer": 7, "number": 2.5, "string": "holdfast's text", "boolean": True, "array": []}


def proved_syntax(
    template: ChatTemplate,
    tools: Sequence[Mapping[str, Any]],
    ends: Collection[int],
    observations: Sequence[Roles],
    *,
    splits: bool,
) -> Syntax:
    """Return how turns are written and read, proved on this template.

    Args:
        template: The policy's.
        tools: Schemas of what may be called.
        ends: Tokens that end a completion.
        observations: What may be observed after a turn.
        splits: Whether an episode may be several samples.

    Raises:
        ConfigError: The template cannot write such turns, or no call of a tool can be read back.
    """
    if (name := unwritable_name(template, tools)) is not None:
        raise ConfigError(
            f"environment: the tokenizer writes {name!r}, the name of a tool, as {template.as_tokenised(name)!r}, and "
            "a policy could not call it. Rename the tool."
        )
    try:
        template.check()
        history = classify(template, tools, observations)
        if history.kind == "refused" or (history.kind == "split" and not splits):
            raise _history_mistake(template, history, with_tools=bool(tools))
        writer = TurnTemplate(template, tools, ends, history.splits_at)
        parse = proved_parser(template, writer, tools)
        if difference := writer.prove(observations):
            raise ConfigError(
                f"environment: turns joined token by token differ from the whole conversation by {template.name}: "
                f"{difference}. Set data.chat_template to one whose answers end with a special token."
            )
    except TemplateRefuses as refusal:
        raise ConfigError(
            f"environment: {template.name} cannot write an episode: {refusal}. Set data.chat_template to one that can."
        ) from None
    note = ""
    if history.trims and "user" not in history.splits_at:
        note = (
            f"note: {template.name} leaves out spaces and line breaks at the ends of an answer. Episodes keep them: "
            "the policy reads its earlier turns as it said them, and a server that is asked later would not."
        )
    return Syntax(writer, parse, note)


def _history_mistake(template: ChatTemplate, history: History, *, with_tools: bool) -> ConfigError:
    if history.kind == "refused":
        return ConfigError(
            f"environment: {template.name} {history.reason}, so a policy cannot act by it. Set data.chat_template to a "
            "jinja file that writes " + ("tools, calls and messages of role tool." if with_tools else "several turns.")
        )
    return ConfigError(
        f"environment: {template.name} {history.reason}, so the tokens of an episode would not be those that a server "
        "reads later. Set data.chat_template to a jinja file that writes a conversation turn by turn as it was said, "
        "or environment.history: split, which trains an episode as several samples."
    )


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
