"""A model behind an OpenAI-compatible endpoint as a reward."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.rewards.base import CannotStart, Sample
from holdfast.rewards.rules import FIELD, cell

_TRIED_AGAIN = frozenset({408, 409, 429})
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 4.0
_MOST_ANSWER_BYTES = 1 << 22
_THREADS = 64


class JudgeRefuses(Exception):  # noqa: N818 - the name says what happened
    """The endpoint's answer holds no number, and asking again would not help."""


class JudgeUnwell(Exception):  # noqa: N818 - the name says what happened
    """The endpoint cannot be reached or is overloaded; it may be well in a moment."""


@dataclass(frozen=True)
class Judge:
    """Asks for a number. Threads wait for the answers, so that those of a batch arrive side by side."""

    url: str
    model: str
    prompt: str
    regex: str
    scale: float
    max_tokens: int
    timeout_seconds: float
    attempts: int
    key: str | None

    @classmethod
    def of(cls, section: Mapping[str, Any], name: str) -> Judge:
        """Return the judge of a section.

        Raises:
            CannotStart: The variable of the key is not set.
        """
        return cls(
            section["url"].rstrip("/"),
            section["model"],
            section["prompt"],
            section["regex"],
            section["scale"],
            section["max_tokens"],
            section["timeout_seconds"],
            section["attempts"],
            _key(section["api_key_variable"], name),
        )

    @property
    def seconds(self) -> float:
        """Longest time for one sample, all attempts and the pauses between them included."""
        return self.attempts * (self.timeout_seconds + _LONGEST_PAUSE_SECONDS)

    async def __call__(self, sample: Sample) -> float:
        """Score one sample."""
        answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, self._question(sample))
        numbers = list(re.finditer(self.regex, answer))
        if not numbers:
            raise JudgeRefuses(f"the judge's answer holds no number: {answer[:120]!r}")
        return float(numbers[-1][min(1, numbers[-1].re.groups)]) / self.scale

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS)

    def _question(self, sample: Sample) -> str:
        own = {"prompt": sample.prompt, "completion": sample.completion}
        return FIELD.sub(lambda match: own[match[1]] if match[1] in own else str(cell(sample, match[1])), self.prompt)

    def _ask(self, question: str) -> str:
        """Return what the judge says, asking again where that may help."""
        import tenacity

        again = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.attempts),
            wait=tenacity.wait_exponential(_FIRST_PAUSE_SECONDS, max=_LONGEST_PAUSE_SECONDS),
            retry=tenacity.retry_if_exception_type(JudgeUnwell),
            reraise=True,
        )
        return again(self._request, question)

    def _request(self, question: str) -> str:
        content = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        # The scheme is checked to be http or https where the configuration is.
        request = urllib.request.Request(f"{self.url}/chat/completions", json.dumps(content).encode(), headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_seconds) as response:  # noqa: S310
                received = response.read(_MOST_ANSWER_BYTES)
        except urllib.error.HTTPError as error:
            body = error.read(300).decode(errors="replace")
            if error.code in _TRIED_AGAIN or error.code >= 500:
                raise JudgeUnwell(f"{self.url} answers {error.code} {body}") from error
            raise JudgeRefuses(f"{self.url} answers {error.code} {body}") from error
        except (OSError, http.client.HTTPException) as error:
            raise JudgeUnwell(f"{self.url} cannot be reached: {error}") from error
        try:
            return str(json.loads(received)["choices"][0]["message"]["content"])
        except (ValueError, LookupError, TypeError) as error:
            raise JudgeRefuses(f"{self.url} answers what is no chat completion: {received[:120]!r}") from error


def _key(variable: str | None, name: str) -> str | None:
    if variable is None:
        return None
    # The one secret that may not stand in a YAML; everything else about a run does.
    key = os.environ.get(variable)
    if not key:
        raise CannotStart(
            f"reward {name}: the environment variable {variable} is not set, and it is named as the judge's key. "
            f"Export {variable}, or remove api_key_variable."
        )
    return key
