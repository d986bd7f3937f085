"""A reward from a judge model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.http import Endpoint, EndpointRefuses, EndpointUnwell, api_key
from holdfast.responses import first_choice
from holdfast.rewards.base import Sample
from holdfast.rewards.functions.rules import FIELD, cell
from holdfast.text.numbers import number_as_text
from holdfast.text.shortening import shortened

_ROUTE = "/chat/completions"
_THREADS = 64
_MOST_ANSWER_BYTES = 1 << 22


@dataclass(frozen=True)
class Judge:
    """Asks a judge model to rate completions with a number; requests of a batch are sent in parallel threads."""

    section: Mapping[str, Any]
    endpoint: Endpoint

    @classmethod
    def of(cls, section: Mapping[str, Any], name: str) -> Judge:
        """Return the judge of a section.

        Raises:
            ConfigError: The variable of the key is not set.
        """
        key = api_key(section["api_key_variable"], f"reward {name}")
        limits = section["timeout_seconds"], section["attempts"], _MOST_ANSWER_BYTES
        return cls(section, Endpoint(section["url"], key, *limits))

    async def __call__(self, sample: Sample) -> float:
        """Score one sample."""
        answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, self._question(sample))
        numbers = list(re.finditer(self.section["regex"], answer))
        number = numbers[-1][min(1, numbers[-1].re.groups)] if numbers else None
        try:
            rating = float(number or "")
        except ValueError as error:
            raise EndpointRefuses(f"the judge's answer holds no number: {shortened(answer, 120)!r}") from error
        return rating / float(self.section["scale"])

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS)

    def _question(self, sample: Sample) -> str:
        fields = {"prompt": sample.prompt, "completion": sample.completion}
        prompt: str = self.section["prompt"]
        return FIELD.sub(
            lambda match: fields[match[1]] if match[1] in fields else str(number_as_text(cell(sample, match[1]))),
            prompt,
        )

    def _ask(self, question: str) -> str:
        content = {
            "model": self.section["model"],
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self.section["max_tokens"],
        }
        try:
            answer = self.endpoint.ask("POST", _ROUTE, content)
            return first_choice(_ROUTE, answer).key("message").key("content").text()
        except (EndpointRefuses, EndpointUnwell) as error:
            raise type(error)(f"{self.endpoint.url} {error}") from error
