"""What a chat template writes between turns, and whether it writes a conversation as it was sampled.

Text between two turns is what a rendering of a small conversation has behind its answer, encoded alone. That equals the
whole conversation's tokens only where the template never rewrites what it wrote before, which is looked at by rendering
a conversation turn by turn.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple

from holdfast.data.content.formats import Conversation, Message
from holdfast.data.tokens.chat_template import ChatTemplate, TemplateRefuses

HistoryKind = Literal["prefix", "split", "refused"]

Roles = tuple[str, ...]
"""Of the messages that are observed after a turn."""

_QUESTION = {"role": "user", "content": "holdfast asks?"}
_ANSWER, _OBSERVED, _THOUGHT = "holdfast answers", "holdfast observes", "holdfast thinks"
_BEGIN, _END = "\n\n\n", " \n"
"""Stand at the ends of what is said and observed, as policies and environments write them."""
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
    splits_at: frozenset[str] = frozenset()
    """Of `split`: roles of the messages behind which earlier turns are written otherwise."""
    trims: bool = False
    """Whether it leaves out spaces or line breaks at the ends of an answer."""


def observations_of(tools: Sequence[Mapping[str, Any]], *, answers: bool) -> tuple[Roles, ...]:
    """Return what may be observed after a turn of an environment.

    Args:
        tools: That may be called.
        answers: Whether a turn without calls is answered.
    """
    return ((("tool",),) if tools else ()) + ((("user",),) if answers or not tools else ())


def observations_of_agents(tools: Sequence[Mapping[str, Any]]) -> tuple[Roles, ...]:
    """Return what may be observed after a turn where an agent writes the messages: results, then words of its own."""
    return (("tool",), ("user",), ("tool", "user")) if tools else (("user",),)


def classify(template: ChatTemplate, tools: Sequence[Mapping[str, Any]], observations: Sequence[Roles]) -> History:
    """Render conversations turn by turn, and compare the renderings.

    Args:
        template: The template.
        tools: Schemas of what may be called.
        observations: What may be observed after a turn; every order of them is rendered. A turn whose observation
            begins with a message of role `tool` is a call.
    """
    try:
        opening = template.text(Conversation([_QUESTION], tools), generation_prompt=True)
        if tools and tools[0]["function"]["name"] not in opening:
            return History("refused", "leaves tools out of the prompt")
        # A policy whose prompt opens its thoughts always thinks; any other one may.
        always = opening.rstrip().endswith("<think>")
        renderings = [
            _rendered(template, tools, order, thinks=thinks)
            for thinks in ((True,) if always else (False, True))
            for order in product(observations, repeat=_TURNS)
        ]
    except TemplateRefuses as refusal:
        return History("refused", f"cannot write it: {refusal}")
    worst = max(renderings, key=lambda rendered: ("prefix", "split", "refused").index(rendered.kind))
    splits_at: set[str] = set()
    for roles in sorted({roles for rendered in renderings for roles in rendered.splits_at}, key=len):
        if not splits_at & set(roles):
            splits_at.add(roles[-1])
    return History(worst.kind, worst.reason, frozenset(splits_at), any(rendered.trims for rendered in renderings))


class _Rendered(NamedTuple):
    """What renderings of one conversation, turn by turn, show."""

    kind: HistoryKind
    reason: str = ""
    splits_at: tuple[Roles, ...] = ()
    """Observations behind which earlier turns were written otherwise."""
    trims: bool = False


def _rendered(
    template: ChatTemplate, tools: Sequence[Mapping[str, Any]], order: Sequence[Roles], *, thinks: bool
) -> _Rendered:
    messages: list[Message] = [_QUESTION]
    before = template.text(Conversation(messages, tools), generation_prompt=True)
    reasons: list[str] = []
    splits_at: list[Roles] = []
    trims = False
    for turn, roles in enumerate(order):
        answer, *observed = _exchange(turn, tools, roles, thinks=thinks)
        said = f"{_ANSWER} {turn}{_END}"
        if roles[0] != "tool" and not thinks:
            said = f"{_BEGIN}{said}"
            answer = {**answer, "content": said}
        messages += [answer, *observed]
        text = template.text(Conversation(messages, tools), generation_prompt=True)
        if left_out := _left_out(text, turn, roles):
            return _Rendered("refused", f"leaves out {left_out}")
        if not text.startswith(before):
            reasons.append("writes earlier turns otherwise once another one follows")
            splits_at.append(roles)
        elif thinks and f"{_THOUGHT} {turn}" not in text[len(before) :]:
            reasons.append("drops what the policy thought in earlier turns")
            splits_at.append(roles)
        trims |= roles[0] != "tool" and said not in text
        before = text
    return _Rendered("split" if reasons else "prefix", "".join(reasons[:1]), tuple(splits_at), trims)


def _left_out(text: str, turn: int, roles: Roles) -> str:
    if f"{_ANSWER} {turn}" not in text:
        return "what the policy says" + (" in a call" if "tool" in roles else "")
    lost = [role for role in roles if f"{_OBSERVED} {turn} as {role}" not in text]
    return f"messages of role {lost[0]}" if lost else ""


def _exchange(turn: int, tools: Sequence[Mapping[str, Any]], roles: Roles, *, thinks: bool) -> list[Message]:
    """Return a turn of the policy, and what is observed after it."""
    thought = f"<think>\n{_THOUGHT} {turn}\n</think>\n\n" if thinks else ""
    answer: Message = {"role": "assistant", "content": f"{thought}{_ANSWER} {turn}{_END}"}
    if roles[0] == "tool":
        answer = {"role": "assistant", "content": thought, "tool_calls": [_call(tools, f"{_ANSWER} {turn}")]}
    return [answer, *(_observation(turn, tools, role) for role in roles)]


def _call(tools: Sequence[Mapping[str, Any]], argument: str) -> dict[str, Any]:
    function = tools[0]["function"]
    name = next(iter(function.get("parameters", {}).get("properties", {})), "holdfast")
    return {"type": "function", "id": _CALL_ID, "function": {"name": function["name"], "arguments": {name: argument}}}


def _observation(turn: int, tools: Sequence[Mapping[str, Any]], role: str) -> Message:
    content = f"{_BEGIN}{_OBSERVED} {turn} as {role}{_END}"
    if role != "tool":
        return {"role": role, "content": content}
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
        splits_at: Roles of the messages behind which it writes earlier turns otherwise.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tools: Sequence[Mapping[str, Any]],
        stops: Collection[int],
        splits_at: Collection[str] = (),
    ) -> None:
        self._template, self.tools, self._splits_at = template, tuple(tools), frozenset(splits_at)
        self._stops = {template.decode([token]): token for token in sorted(stops)}
        self._written: dict[str, tuple[int, list[int]]] = {}

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts of the tokens that end a completion."""
        return tuple(self._stops)

    def splits_behind(self, messages: Sequence[Message]) -> bool:
        """Return whether earlier turns may be written otherwise once these messages are observed."""
        return any(message["role"] in self._splits_at for message in messages)

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

    def prove(self, observations: Sequence[Roles]) -> str:
        """Assemble conversations as episodes are assembled, and compare their tokens with those of the whole.

        Args:
            observations: As of `classify`; where earlier turns are written otherwise, nothing is assembled.

        Returns:
            What differs, as a clause; "" where nothing does.

        Raises:
            TemplateRefuses: The template cannot write such a conversation.
        """
        joined = [roles for roles in observations if not self._splits_at & set(roles)]
        return next(filter(None, map(self._difference, product(joined, repeat=_TURNS))), "")

    def _difference(self, order: Sequence[Roles]) -> str:
        opening = self._template.text(Conversation([_QUESTION], self.tools), generation_prompt=True)
        thinks = opening.rstrip().endswith("<think>")
        messages: list[Message] = [_QUESTION]
        tokens = self.opening(messages)
        for turn, roles in enumerate(order):
            before = self._template.text(Conversation(messages, self.tools), generation_prompt=True)
            exchange = _exchange(turn, self.tools, roles, thinks=thinks)
            messages += exchange
            text = self._template.text(Conversation(messages, self.tools), generation_prompt=True)
            said = text[len(before) : text.find(f"{_OBSERVED} {turn}")]
            cuts = [position for end in self._stops if (position := said.find(end)) >= 0]
            if not cuts:
                return "no token that ends a completion stands behind an answer"
            end = next(token for end, token in self._stops.items() if said[min(cuts) :].startswith(end))
            tokens += [*self._encoded(said[: min(cuts)]), end]
            tokens += self.observation(exchange[1:], last_token=end)
            whole = self._template.ids(Conversation(messages, self.tools), generation_prompt=True)
            if tokens != whole:
                return self._named(turn, tokens, whole)
        return ""

    def _named(self, turn: int, tokens: list[int], whole: list[int]) -> str:
        at = next(index for index in range(len(whole) + 1) if tokens[index : index + 1] != whole[index : index + 1])
        return (
            f"turn {turn + 1} is written as {self._template.decode(whole[at : at + 8])!r} in a whole conversation and "
            f"as {self._template.decode(tokens[at : at + 8])!r} when it is joined, from token {at} on"
        )


def _call_answered_by(message: Message) -> dict[str, Any]:
    name, number = message.get("name", "holdfast"), message.get("tool_call_id", _CALL_ID)
    return {"type": "function", "id": number, "function": {"name": name, "arguments": {"argument": _ANSWER}}}
