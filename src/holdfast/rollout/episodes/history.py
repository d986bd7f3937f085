"""What a chat template writes between turns, and whether it writes a conversation as it was sampled.

Text between two turns is what a rendering of a small conversation has behind its answer, encoded alone. That equals the
whole conversation's tokens only where the template never rewrites what it wrote before, which is looked at by rendering
a conversation turn by turn.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from holdfast.data.content.formats import Conversation, Message
from holdfast.data.tokens.chat_template import ChatTemplate, TemplateRefuses

HistoryKind = Literal["prefix", "split", "refused"]

_QUESTION = {"role": "user", "content": "holdfast asks?"}
_ANSWER, _OBSERVED, _THOUGHT = "holdfast answers", "holdfast observes", "holdfast thinks"
_TURNS = 3
_CALL_ID = "000000000"
"""Nine digits, which is what templates that check the id of a call ask for."""
_MOST_WRITTEN = 4096
"""Observations whose tokens are remembered."""


class History(NamedTuple):
    """How a template writes a conversation of several turns."""

    kind: HistoryKind
    """`prefix`: each turn extends what was there; `split`: an earlier turn is written otherwise once another follows;
    `refused`: it cannot write such a conversation."""
    reason: str = ""
    """Of `split` and `refused`: a clause whose subject is the template."""


def classify(template: ChatTemplate, tools: Sequence[Mapping[str, Any]] = ()) -> History:
    """Render a conversation turn by turn, and compare the renderings.

    Args:
        template: The template.
        tools: Schemas; with some, turns are calls and observations are messages of role `tool`, else `user`.
    """
    try:
        opening = template.text(Conversation([_QUESTION], tools), generation_prompt=True)
        if tools and tools[0]["function"]["name"] not in opening:
            return History("refused", "leaves tools out of the prompt")
        # A policy whose prompt opens its thoughts always thinks; any other one may.
        always = opening.rstrip().endswith("<think>")
        for thinks in (True,) if always else (False, True):
            history = _of_conversation(template, tools, thinks=thinks)
            if history.kind != "prefix":
                return history
    except TemplateRefuses as refusal:
        return History("refused", f"cannot write it: {refusal}")
    return History("prefix")


def _of_conversation(template: ChatTemplate, tools: Sequence[Mapping[str, Any]], *, thinks: bool) -> History:
    messages: list[Message] = [_QUESTION]
    before = template.text(Conversation(messages, tools), generation_prompt=True)
    for turn in range(_TURNS):
        messages += [_turn(turn, tools, thinks=thinks), _observation(turn, tools)]
        text = template.text(Conversation(messages, tools), generation_prompt=True)
        if f"{_ANSWER} {turn}" not in text:
            return History("refused", "leaves out what the policy says" + (" in a call" if tools else ""))
        if f"{_OBSERVED} {turn}" not in text:
            return History("refused", f"leaves out messages of role {messages[-1]['role']}")
        if not text.startswith(before):
            return History("split", "writes earlier turns otherwise once another one follows")
        if thinks and f"{_THOUGHT} {turn}" not in text[len(before) :]:
            return History("split", "drops what the policy thought in earlier turns")
        before = text
    return History("prefix")


def _turn(turn: int, tools: Sequence[Mapping[str, Any]], *, thinks: bool) -> Message:
    thought = f"<think>\n{_THOUGHT} {turn}\n</think>\n\n" if thinks else ""
    if not tools:
        return {"role": "assistant", "content": f"{thought}{_ANSWER} {turn}"}
    return {"role": "assistant", "content": thought, "tool_calls": [_call(tools, f"{_ANSWER} {turn}")]}


def _call(tools: Sequence[Mapping[str, Any]], argument: str) -> dict[str, Any]:
    function = tools[0]["function"]
    name = next(iter(function.get("parameters", {}).get("properties", {})), "holdfast")
    return {"type": "function", "id": _CALL_ID, "function": {"name": function["name"], "arguments": {name: argument}}}


def _observation(turn: int, tools: Sequence[Mapping[str, Any]]) -> Message:
    content = f"{_OBSERVED} {turn}"
    if not tools:
        return {"role": "user", "content": content}
    return {"role": "tool", "name": tools[0]["function"]["name"], "tool_call_id": _CALL_ID, "content": content}


@dataclass(frozen=True)
class _Between:
    """What stands behind an answer of a small conversation."""

    end: int
    """The token that ends the answer."""
    text: str
    """What follows it."""


class TurnTemplate:
    """Writes an episode's prompt and what is observed between its turns.

    Args:
        template: The policy's chat template.
        tools: Schemas of what may be called.
        stops: Tokens that end a completion.
        splits: Whether it writes earlier turns otherwise once another one follows.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tools: Sequence[Mapping[str, Any]],
        stops: Collection[int],
        *,
        splits: bool = False,
    ) -> None:
        self._template, self.tools, self.splits = template, tuple(tools), splits
        self._stops = {template.decode([token]): token for token in sorted(stops)}
        self._written: dict[str, tuple[int, list[int]]] = {}

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts of the tokens that end a completion."""
        return tuple(self._stops)

    def is_end(self, token: int) -> bool:
        """Return whether a token ends a completion."""
        return token in self._stops.values()

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a prompt, with the opening of an answer behind it.

        Raises:
            TemplateRefuses: The template cannot write it.
        """
        return self._template.ids(Conversation(messages, self.tools), generation_prompt=True)

    def observation(self, messages: Sequence[Message], *, last_token: int | None) -> list[int]:
        """Return the tokens behind a turn: the rest of its end, what is observed, and the opening of the next turn.

        The end of the turn is one of them where the policy did not choose it: it was cut, or stopped at a text.

        Args:
            messages: What is observed.
            last_token: The last token of the turn.

        Raises:
            TemplateRefuses: The template cannot write the messages.
        """
        key = json.dumps(list(messages), sort_keys=True, default=str)
        if key not in self._written:
            between = self._between(messages)
            if len(self._written) >= _MOST_WRITTEN:
                self._written.clear()
            self._written[key] = between.end, self._encoded_behind(between)
        end, tokens = self._written[key]
        return list(tokens) if last_token is not None and self.is_end(last_token) else [end, *tokens]

    def _between(self, messages: Sequence[Message]) -> _Between:
        tool_messages = [message for message in messages if message["role"] == "tool"]
        turn: Message = {"role": "assistant", "content": _ANSWER}
        if tool_messages:
            calls = [_call_answered_by(message) for message in tool_messages]
            turn = {"role": "assistant", "content": "", "tool_calls": calls}
        text = self._template.text(Conversation([_QUESTION, turn, *messages], self.tools), generation_prompt=True)
        start = text.find(_ANSWER)
        found = [(position, end) for end in self._stops if (position := text.find(end, max(start, 0))) >= 0]
        if start < 0 or not found:
            ends = ", ".join(map(repr, self._stops))
            raise TemplateRefuses(f"it ends an answer by no token that ends a completion ({ends})")
        position, end = min(found)
        return _Between(self._stops[end], text[position + len(end) :])

    def _encoded_behind(self, between: _Between) -> list[int]:
        """Return the tokens of a text as they follow the end of a turn: some tokenizers treat a text's start apart."""
        end = self._template.decode([between.end])
        tokens = self._encoded(end + between.text)
        return tokens[1:] if tokens[:1] == [between.end] else self._encoded(between.text)

    def _encoded(self, text: str) -> list[int]:
        return list(self._template.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prove(self) -> str:
        """Assemble a conversation as episodes are assembled, and compare its tokens with those of the whole.

        Returns:
            What differs, as a clause; "" where nothing does.

        Raises:
            TemplateRefuses: The template cannot write such a conversation.
        """
        opening = self._template.text(Conversation([_QUESTION], self.tools), generation_prompt=True)
        thinks = opening.rstrip().endswith("<think>")
        messages: list[Message] = [_QUESTION]
        tokens = self.opening(messages)
        for turn in range(_TURNS):
            before = self._template.text(Conversation(messages, self.tools), generation_prompt=True)
            observation = _observation(turn, self.tools)
            messages += [_turn(turn, self.tools, thinks=thinks), observation]
            text = self._template.text(Conversation(messages, self.tools), generation_prompt=True)
            said = text[len(before) : text.find(f"{_OBSERVED} {turn}")]
            cuts = [position for end in self._stops if (position := said.find(end)) >= 0]
            if not cuts:
                return "no token that ends a completion stands behind an answer"
            end = next(token for end, token in self._stops.items() if said[min(cuts) :].startswith(end))
            tokens += [*self._encoded(said[: min(cuts)]), end]
            tokens += self.observation([observation], last_token=end)
            whole = self._template.ids(Conversation(messages, self.tools), generation_prompt=True)
            if tokens != whole:
                at = next(
                    index for index in range(len(whole) + 1) if tokens[index : index + 1] != whole[index : index + 1]
                )
                return (
                    f"turn {turn + 1} is written as {self._template.decode(whole[at : at + 8])!r} in a whole "
                    f"conversation and as {self._template.decode(tokens[at : at + 8])!r} when it is joined, from token "
                    f"{at} on"
                )
        return ""


def _call_answered_by(message: Message) -> dict[str, Any]:
    name, number = message.get("name", "holdfast"), message.get("tool_call_id", _CALL_ID)
    return {"type": "function", "id": number, "function": {"name": name, "arguments": {"argument": _ANSWER}}}
