"""Prove which tokens of a conversation the assistant wrote: its loss mask.

A template claims the assistant's stretches in one of two forms. Its generation blocks do, where it has some; else an
answer is what the conversation with the answer has beyond its prompt, and must have it as tokens: the tokens of the
prompt begin those of the prompt with its answer, which begin those of the whole.

One proof decides about a claim, whatever its form. It compares the mask with the messages, so that a conversation is
never silently trained completely or not at all:

- no trained stretch begins with the assistant's header, which the policy does not choose;
- the stretch of an answer has the answer's text, its calls and its reasoning;
- the untrained rest has the text of every system and user message.

White space is ignored, since templates trim it, and so are tool results, which templates quote in various ways. A claim
without its proof is refused.

A template that drops earlier reasoning renders an answer differently once another question follows. Such conversations
become one sequence per assistant turn, each rendered as the policy will see it when it answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.data.content.formats import Conversation, Message
from holdfast.data.tokens.chat_template import ChatTemplate, Span, TemplateRefuses
from holdfast.errors import DataError
from holdfast.text.shortening import shortened


@dataclass(frozen=True)
class Masked:
    """The tokens of a conversation and the stretches that are trained, one per trained turn."""

    tokens: list[int]
    spans: list[Span]

    def trained_texts(self, template: ChatTemplate) -> list[str]:
        """Return the text of each span."""
        return [template.decode(self.tokens[start:end]) for start, end in self.spans]

    def untrained_text(self, template: ChatTemplate) -> str:
        """Return the text between the spans."""
        edges = [0, *(edge for span in self.spans for edge in span), len(self.tokens)]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return "".join(template.decode(self.tokens[start:end]) for start, end in gaps)


@dataclass(frozen=True)
class MaskedConversation:
    """The sequences a conversation gives."""

    sequences: list[Masked]
    drops_reasoning: bool
    """The template writes no reasoning, though the messages hold some in a field of its own."""


class _NoMask(Exception):  # noqa: N818  # one claim failed; the next is tried
    """The assistant's tokens are not proved; the message says why."""


def mask_conversation(
    template: ChatTemplate, conversation: Conversation, turns: Sequence[int], row_name: str
) -> MaskedConversation:
    """Tell the assistant's tokens from all others.

    Args:
        template: Writes the conversation.
        conversation: Its messages up to the last of `turns` are used; what follows would train nothing.
        turns: Indices of the assistant's messages to train, ascending, at least one.
        row_name: For errors.

    Raises:
        DataError: The template refuses the conversation, or its assistant's tokens are not proved.
    """
    has_reasoning = any(reasoning_of(conversation.messages[turn]) for turn in turns)
    reasons: list[str] = []
    for keeps_reasoning in (True, False) if has_reasoning else (True,):
        for stops in _stops(turns):
            try:
                sequences = [_mask(template, conversation, stop, keeps_reasoning) for stop in stops]
            except _NoMask as failure:
                reasons.append(str(failure))
            else:
                return MaskedConversation(sequences, drops_reasoning=not keeps_reasoning)
    trained_conversation = _first(conversation, turns[-1] + 1)
    try:
        dropped = template.dropped_roles(trained_conversation)
    except TemplateRefuses as refusal:
        raise DataError(
            f"{row_name}: {template.name} cannot write this conversation: {refusal}. Its roles are "
            f"{', '.join(message['role'] for message in conversation.messages)}. "
            "Change the row, or set data.chat_template to a template that takes it."
        ) from None
    if dropped:
        raise DataError(
            f"{row_name}: {template.name} leaves out messages of the role {' and '.join(dropped)}, so the model would "
            "never see them. Remove them from the rows, or set data.chat_template to a template that writes them."
        )
    raise DataError(
        f"{row_name}: {template.name} does not let us tell the assistant's tokens from the others, and training on "
        f"everything is not what was asked for. {'; '.join(dict.fromkeys(reasons))}. Set data.chat_template to a "
        "template with {% generation %} and {% endgeneration %} around what the assistant writes, its end-of-turn "
        f"token included.{_hint(template)}"
    )


def _hint(template: ChatTemplate) -> str:
    if "think" not in template.opening:
        return ""
    return (
        f" It opens answers with {template.opening.strip()!r}: data.template_kwargs={{enable_thinking: ...}}, true or "
        "false, may make that fit your answers."
    )


def _stops(turns: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    """Yield how to cut a conversation: as one sequence with all its turns, else one sequence per turn."""
    yield [turns]
    if len(turns) > 1:
        yield [[turn] for turn in turns]


def _mask(template: ChatTemplate, conversation: Conversation, turns: Sequence[int], keeps_reasoning: bool) -> Masked:
    """Return the first claim that is proved.

    Raises:
        _NoMask: None is.
    """
    conversation = _first(conversation, turns[-1] + 1)
    reasons = []
    for name, claim in (("Generation block", by_generation_block), ("Turn by turn", by_prefixes)):
        try:
            masked = claim(template, conversation, turns)
            masked = replace(masked, spans=[_without_tail(template, masked.tokens, span) for span in masked.spans])
        except (_NoMask, TemplateRefuses) as failure:
            reasons.append(f"{name}: {failure}")
            continue
        trained = dict(zip(turns, masked.trained_texts(template), strict=True))
        untrained = masked.untrained_text(template)
        wrong = disagreement(template, conversation, trained, untrained, keeps_reasoning=keeps_reasoning)
        if wrong is None:
            return masked
        reasons.append(f"{name}: {wrong}")
    raise _NoMask("; ".join(reasons))


def by_generation_block(template: ChatTemplate, conversation: Conversation, turns: Sequence[int]) -> Masked:
    """Take the tokens inside the template's generation blocks, and the end-of-turn token behind each."""
    marked = template.marked(conversation)
    if marked is None:
        raise _NoMask("there is none")
    tokens, spans = marked
    answers = [number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if len(spans) != len(answers):
        raise _NoMask(f"it marks {len(spans)} stretches in {len(answers)} assistant turns")
    # The conversation stops at an answer, so what follows the last block ends a turn and starts no other.
    end = spans[-1][1]
    end_of_turn = tokens[end] if end < len(tokens) and tokens[end] in template.special_ids else None
    grown = [_with_end(template, tokens, span, end_of_turn) for span in spans]
    return Masked(tokens, [grown[answers.index(turn)] for turn in turns])


def by_prefixes(template: ChatTemplate, conversation: Conversation, turns: Sequence[int]) -> Masked:
    """Take what each answer adds to its prompt."""
    all_tokens = template.ids(conversation)
    spans = []
    for turn in turns:
        prompt = template.prompt(_first(conversation, turn))
        if prompt is None:
            raise _NoMask(f"the assistant's header before message {turn} cannot be told, and would be trained")
        is_last = turn + 1 == len(conversation.messages)
        answered = all_tokens if is_last else template.ids(_first(conversation, turn + 1))
        if all_tokens[: len(answered)] != answered:
            raise _NoMask(f"message {turn} is written differently once others follow")
        if answered[: len(prompt)] != prompt:
            raise _NoMask(f"the prompt for message {turn} is no prefix of the prompt with its answer")
        spans.append((len(prompt) + _header_behind(template, prompt, answered), len(answered)))
    return Masked(all_tokens, spans)


def _header_behind(template: ChatTemplate, prompt: Sequence[int], answered: Sequence[int]) -> int:
    """Return how many tokens of the header a prompt lacks, as of templates that write none behind a tool's result.

    That is known of a header that begins with a special token, which no answer has.
    """
    header, start = template.opening_ids, len(prompt)
    if not header or header[0] not in template.special_ids or list(prompt[-len(header) :]) == header:
        return 0
    return len(header) if list(answered[start : start + len(header)]) == header else 0


def _first(conversation: Conversation, messages: int) -> Conversation:
    return replace(conversation, messages=conversation.messages[:messages])


def _with_end(template: ChatTemplate, tokens: list[int], span: Span, end_of_turn: int | None) -> Span:
    start, end = span
    is_ended = tokens[end - 1] in template.special_ids
    follows = end < len(tokens) and tokens[end] == end_of_turn
    return (start, end + 1) if follows and not is_ended else span


def _without_tail(template: ChatTemplate, tokens: list[int], span: Span) -> Span:
    """Leave out the white space and second end tokens behind the end-of-turn token: the policy has stopped before."""
    start, end = span
    tail = end
    while tail > start:
        token = tokens[tail - 1]
        if token not in template.special_ids and template.decode([token]).strip():
            break
        tail -= 1
    in_tail = [token in template.special_ids for token in tokens[tail:end]]
    if not any(in_tail):
        return span
    first = in_tail.index(True)
    # A tool call may end with a token of its own before the turn does.
    neighbours = next((count for count, special in enumerate(in_tail[first:]) if not special), len(in_tail) - first)
    return start, tail + first + neighbours


REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def disagreement(
    template: ChatTemplate,
    conversation: Conversation,
    trained: Mapping[int, str],
    untrained: str,
    *,
    keeps_reasoning: bool,
) -> str | None:
    """Say what is wrong with a mask, or None.

    Args:
        template: Wrote the conversation.
        conversation: What it wrote.
        trained: The trained text of each trained message, by the message's index.
        untrained: The text that is not trained.
        keeps_reasoning: Whether reasoning in a field of its own must be trained too.
    """
    opening = _squeezed(template.opening)
    for turn, text in trained.items():
        squeezed = _squeezed(text)
        if opening and squeezed.startswith(opening):
            return f"the assistant's header of message {turn} would be trained"
        message = conversation.messages[turn]
        for piece in texts_of(message) + _called(message) + (reasoning_of(message) if keeps_reasoning else []):
            if not _holds(template, squeezed, piece) and not _continues(opening, squeezed, _squeezed(piece)):
                return f"of message {turn} it leaves out {_quoted(piece)}"
    squeezed_untrained = _squeezed(untrained)
    for number, message in enumerate(conversation.messages):
        if message["role"] in ("system", "user"):
            for piece in texts_of(message):
                if not _holds(template, squeezed_untrained, piece):
                    return f"the {message['role']} message {number} is left out or trained: {_quoted(piece)}"
    return None


def texts_of(message: Message) -> list[str]:
    """Return the text parts of a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    texts = [
        content_part.get("text") if isinstance(content_part, Mapping) else content_part
        for content_part in content or ()
    ]
    return [content_part for content_part in texts if isinstance(content_part, str)]


def reasoning_of(message: Message) -> list[str]:
    """Return the reasoning that a message holds in a field of its own."""
    return [text for field in REASONING_FIELDS if isinstance(text := message.get(field), str) and text.strip()]


def _called(message: Message) -> list[str]:
    return [str(call.get("function", call)["name"]) for call in message.get("tool_calls") or ()]


def _holds(template: ChatTemplate, squeezed: str, piece: str) -> bool:
    return _squeezed(piece) in squeezed or _squeezed(template.as_tokenised(piece)) in squeezed


def _continues(opening: str, trained: str, piece: str) -> bool:
    """Say whether the generation prompt opens what was said, as with `<think>`, and the trained text goes on."""
    offset = (opening + trained).rfind(piece)
    return offset >= 0 and offset + len(piece) > len(opening)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _quoted(text: str) -> str:
    return repr(shortened(" ".join(text.split()), 60))
