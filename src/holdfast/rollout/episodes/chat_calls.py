"""Calls of an agent in the form of OpenAI's chat completions: what is asked, and what is answered."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.environments.base import MOST_LEVELS, Message, ToolCall, extent_of
from holdfast.files import parse_json
from holdfast.rollout.engine import Sampled
from holdfast.rollout.episodes.calls import FAMILIES
from holdfast.types import Finish

MODEL = "policy"
"""The name of what is sampled; requests may have any."""

_HARMLESS = frozenset({
    "cache_salt", "logprobs", "max_completion_tokens", "max_tokens", "messages", "metadata", "model",
    "parallel_tool_calls", "prompt_cache_key", "return_token_ids", "safety_identifier", "seed", "service_tier", "store",
    "stream_options", "tools", "user",
})  # fmt: skip
"""Fields that are read, or that change nothing of an answer."""
_OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
"""Fields that `rollout` decides: another value would be another policy than the one that is trained."""
_NEUTRAL: Mapping[str, Any] = {
    "n": 1, "stream": False, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "tool_choice": "auto",
    "response_format": {"type": "text"}, "top_logprobs": 0,
}  # fmt: skip
"""Fields with the one value that is answered."""
_ROLES = ("system", "developer", "user", "assistant", "tool")


class CallRefused(Exception):  # noqa: N818 - the name says what happened
    """What an agent asks for is not answered.

    Args:
        message: Why, in a sentence or two.
        status: Of HTTP.
        code: OpenAI's word for it, where it has one.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class ChatCall:
    """What an agent asks for."""

    messages: tuple[Message, ...]
    """As templates are given them: contents are text, arguments of calls are objects, results of tools have names."""
    tools: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    tells_logprobs: bool
    characters: int = 0
    """Of messages and tools, of which a prompt is made."""


def chat_call(body: Any, sampling: SamplingConfig) -> ChatCall:
    """Read the body of a request.

    Raises:
        CallRefused: It asks for something else than a completion that the run's policy samples.
    """
    if not isinstance(body, Mapping):
        raise CallRefused("the body is no JSON object")
    for name, value in body.items():
        _refuse_field(name, value, sampling)
    messages, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(messages, list) or not messages:
        raise CallRefused("messages is missing, or no list with something in it")
    names: dict[str, str] = {}
    read = tuple(_message(message, number, names) for number, message in enumerate(messages))
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise CallRefused("tools is no list of {'type': 'function', 'function': {'name': ..., 'parameters': ...}}")
    characters = _characters([[*message.values()] for message in read], "messages") + _characters(tools, "tools")
    return ChatCall(read, tuple(map(_tool, tools)), _most_tokens(body), bool(body.get("logprobs")), characters)


def _characters(value: object, name: str) -> int:
    extent = extent_of(value)
    if extent.levels > MOST_LEVELS:
        raise CallRefused(f"{name} is too large or nested too deeply, in more than {MOST_LEVELS} levels")
    return extent.characters


def _most_tokens(body: Mapping[str, Any]) -> int | None:
    limits = [body[key] for key in ("max_completion_tokens", "max_tokens") if body.get(key) is not None]
    if not all(type(limit) is int and limit > 0 for limit in limits):
        raise CallRefused("max_tokens is no positive integer")
    return min(limits, default=None)


def _refuse_field(name: str, value: Any, sampling: SamplingConfig) -> None:
    if value is None or name in _HARMLESS:
        return
    if name in _OF_THE_RUN:
        of_run = getattr(sampling, name)
        asked = [value] if name == "stop" and isinstance(value, str) else value
        if asked != (list(of_run) if name == "stop" else of_run):
            raise CallRefused(
                f"{name}={value!r}: completions are drawn as the run is configured, by rollout.{name}={of_run!r}; "
                "leave it out"
            )
    elif name not in _NEUTRAL or value != _NEUTRAL[name]:
        only = f", but for {_NEUTRAL[name]!r}" if name in _NEUTRAL else ""
        why = ": the answer comes whole" if name == "stream" else ""
        raise CallRefused(f"{name}={value!r} is nothing that this endpoint does{only}{why}; leave it out")


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters") or {}, Mapping)
    )


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with parameters: a tool may come without, and a call of it is written with none."""
    function = tool["function"]
    parameters = {"type": "object", "properties": {}} | dict(function.get("parameters") or {})
    return {**tool, "type": "function", "function": {**function, "parameters": parameters}}


def _message(message: Any, number: int, names: dict[str, str]) -> Message:
    """Return a message as templates take it.

    Args:
        message: As the agent sent it.
        number: Which it is.
        names: Of tools by the ids of calls, of the messages before; those of this one are added.
    """
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise CallRefused(f"messages[{number}] has no role of {', '.join(_ROLES)}")
    read: dict[str, Any] = {"role": message["role"], "content": _text(message.get("content"), number)}
    if isinstance(message.get("reasoning_content"), str):
        read["reasoning_content"] = message["reasoning_content"]
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise CallRefused(f"messages[{number}] has tool_calls that are no list")
    if calls:
        read["tool_calls"] = [_called(call, number, names) for call in calls]
    if message["role"] == "tool":
        number_of_call = str(message.get("tool_call_id") or "")
        name = str(message.get("name") or names.get(number_of_call, "unknown"))
        read |= {"tool_call_id": number_of_call, "name": name}
    return read


def _text(content: Any, number: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise CallRefused(f"messages[{number}] has content that is no text, and this policy reads text alone")
    return "".join(map(str, texts))


def _called(call: Any, number: int, names: dict[str, str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    try:
        name, arguments = function["name"], function.get("arguments") or {}  # type: ignore[index,union-attr]
        arguments = parse_json(arguments) if isinstance(arguments, str) else dict(arguments)
    except (TypeError, ValueError, LookupError, AttributeError):
        raise CallRefused(f"messages[{number}] has a call without a name, or whose arguments are no JSON") from None
    number_of_call = str(call.get("id") or "")
    names[number_of_call] = str(name)
    return {"type": "function", "id": number_of_call, "function": {"name": str(name), "arguments": arguments}}


def answer_message(text: str, calls: Sequence[ToolCall], turn: int) -> dict[str, Any]:
    """Return what a policy said, as a client reads it.

    Args:
        text: Without special tokens.
        calls: Those that could be read, if all could; else none.
        turn: Which completion of the session it is, of which ids of calls are made.
    """
    if not calls:
        return {"role": "assistant", "content": text}
    # Nine digits, which is what templates that check the id of a call ask for.
    written = [
        {
            "id": f"{turn % 10**5:05d}{index % 10**4:04d}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for index, call in enumerate(calls)
    ]
    starts = [text.find(family.begin) for family in FAMILIES.values() if family.begin and family.begin in text]
    before = text[: min(starts)].strip() if starts else ""
    return {"role": "assistant", "content": before or None, "tool_calls": written}


def completion_reply(  # noqa: PLR0913 - the parts of a reply
    number: str,
    message: Mapping[str, Any],
    prompt: list[int],
    sampled: Sampled,
    asked: ChatCall,
    decode: Callable[[list[int], bool], str],
) -> dict[str, Any]:
    """Return the body of a reply, with the tokens that were sampled.

    Args:
        number: Of the completion.
        message: Its message.
        prompt: [P], tokens.
        sampled: Its tokens and their log-probabilities.
        asked: What was asked for.
        decode: Tokens to text; with False, special ones are kept.
    """
    tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
    texts = [decode([token], False) for token in tokens]
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, logprobs, strict=True)
    ]
    finish = "length" if sampled.finish is Finish.LENGTH else "stop"
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if "tool_calls" in message else finish,
        "logprobs": {"content": content} if asked.tells_logprobs else None,
        "token_ids": tokens,
        "token_logprobs": logprobs,
    }
    counts = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {**counts, "total_tokens": sum(counts.values())},
        "prompt_token_ids": prompt,
    }


def as_read_again(message: Mapping[str, Any]) -> Message:
    """Return an answer as it is read when an agent sends it back."""
    return _message(message, 0, {})


def same(first: Message, second: Message) -> bool:
    """Return whether two messages say the same, whatever else a client put into them."""
    keys = ("role", "content", "tool_calls", "tool_call_id")
    return all((first.get(key) or "") == (second.get(key) or "") for key in keys)
