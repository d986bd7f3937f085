"""Compares a mask with the conversation it is for: what the assistant said is trained, what was said to it is not.

White space does not count, since templates trim it. Tool results do not either: templates quote them in their own way.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.data.content.formats import Conversation
from holdfast.data.content.messages import Message
from holdfast.data.tokens.chat_template import ChatTemplate

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def disagreement(
    template: ChatTemplate, conversation: Conversation, trained: Mapping[int, str], rest: str, *, keeps_reasoning: bool
) -> str | None:
    """Say what is wrong with a mask, or None.

    Args:
        template: Wrote the conversation.
        conversation: What it wrote.
        trained: The trained text of each trained message, by the message's index.
        rest: The text that is not trained.
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
    others = _squeezed(rest)
    for number, message in enumerate(conversation.messages):
        if message["role"] in ("system", "user"):
            for piece in texts_of(message):
                if not _holds(template, others, piece):
                    return f"the {message['role']} message {number} is left out or trained: {_quoted(piece)}"
    return None


def texts_of(message: Message) -> list[str]:
    """Return the text parts of a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content or ()]
    return [part for part in parts if isinstance(part, str)]


def reasoning_of(message: Message) -> list[str]:
    """Return the reasoning that a message holds in a field of its own."""
    return [text for field in REASONING_FIELDS if isinstance(text := message.get(field), str) and text.strip()]


def _called(message: Message) -> list[str]:
    return [str(call.get("function", call)["name"]) for call in message.get("tool_calls") or ()]


def _holds(template: ChatTemplate, squeezed: str, piece: str) -> bool:
    return _squeezed(piece) in squeezed or _squeezed(template.as_tokenised(piece)) in squeezed


def _continues(opening: str, trained: str, piece: str) -> bool:
    """Say whether the generation prompt opens what was said, as with `<think>`, and the trained text goes on."""
    place = (opening + trained).rfind(piece)
    return place >= 0 and place + len(piece) > len(opening)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _quoted(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 60 else text[:57] + "...")
