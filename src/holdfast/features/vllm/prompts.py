"""Prompts as vLLM servers get them: tokens, and the files of images, which the server's own processor expands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.errors import RunStopped
from holdfast.features.vllm.responses import prompt_tokens_of
from holdfast.http import EndpointRefuses
from holdfast.rollout.engine import Request


@dataclass(frozen=True)
class ServedPrompt:
    """A prompt as a server gets it, whose own processor reads the images."""

    tokens: Sequence[int]
    """Those of images included."""
    marked: Sequence[int] = ()
    """The prompt with one mark for each image, where it has some."""
    urls: Sequence[str] = ()
    """The images."""

    @classmethod
    def of(cls, request: Request) -> ServedPrompt:
        """Return the prompt of a request.

        Raises:
            DataError: An image cannot be read any more.
            RunStopped: Images of the prompt are there as inputs of a model alone.
        """
        tokens, images = request.prompt.tolist(), request.images
        if request.model_inputs and images is None:
            raise RunStopped(
                "A prompt has images, and this recipe keeps what the model makes of them, not their files, which "
                "servers are sent. Use rollout.engine: auto, which samples in this process."
            )
        return cls(tokens) if images is None else cls(tokens, images.prompt.tokens.tolist(), images.urls)

    @cached_property
    def content(self) -> dict[str, Any]:
        """What a request says of the prompt."""
        if not self.urls:
            return {"token_ids": list(self.tokens)}
        images = [{"type": "image_url", "url": url} for url in self.urls]
        return {"token_ids": list(self.marked), "content_parts": images, "return_token_ids": True}

    def check(self, answer: Any) -> None:
        """Compare the tokens that a server made of a prompt with images with the trainer's.

        Raises:
            EndpointMistaken: It does not say which.
            EndpointRefuses: They are others.
        """
        if not self.urls:
            return
        tokens = prompt_tokens_of(answer)
        if tokens != list(self.tokens):
            differs = next(
                (index for index, pair in enumerate(zip(tokens, self.tokens, strict=False)) if pair[0] != pair[1]),
                min(len(tokens), len(self.tokens)),
            )
            raise EndpointRefuses(
                f"reads a prompt with images as {len(tokens)} tokens, the trainer as "
                f"{len(self.tokens)}, and they differ from token {differs} on: its processor has other settings, or "
                "its vLLM other rules for this model. Start servers by `holdfast serve`, which gives them the "
                "trainer's; where that is so already, use rollout.engine: auto"
            )
