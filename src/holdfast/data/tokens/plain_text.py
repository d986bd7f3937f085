"""Prompts, completions and plain text as tokens, without a chat template."""

from __future__ import annotations

from typing import Any

from holdfast.data.content.formats import PlainText, PromptCompletion
from holdfast.data.content.lengths import Stretch
from holdfast.errors import DataError


class PlainTokeniser:
    """A tokenizer with the rule for ends: text opens with the tokenizer's special tokens, and we alone close it."""

    def __init__(self, tokenizer: Any, *, append_eos: bool) -> None:
        """Take a tokenizer.

        Args:
            tokenizer: A transformers tokenizer.
            append_eos: End completions and texts with its end-of-sequence token.
        """
        self._tokenizer = tokenizer
        self._append_eos = append_eos

    def opening(self, text: str) -> list[int]:
        """Return the tokens of text at the start of a sequence; an end the tokenizer adds by itself is taken off."""
        plain = self._bare(text)
        tokens: list[int] = list(self._tokenizer(text, verbose=False)["input_ids"])
        ends = (self._tokenizer.eos_token_id, self._tokenizer.sep_token_id)
        if tokens and tokens[-1] in ends and tokens[-1:] != plain[-1:]:
            tokens.pop()
        return tokens

    def text(self, content: PlainText) -> Stretch:
        """Return plain text, all of it trained."""
        tokens = self._ended(self.opening(content.text))
        return Stretch(tokens, [True] * len(tokens))

    def prompt_completion(self, content: PromptCompletion, *, train_on_prompt: bool) -> Stretch:
        """Return a prompt and its completion; the prompt is trained if asked for.

        They become tokens one by one: the policy, too, receives the prompt's tokens before it chooses any of its own.
        """
        prompt = self.opening(content.prompt)
        completion = self._ended(self._bare(content.completion))
        return Stretch(prompt + completion, [train_on_prompt] * len(prompt) + [True] * len(completion))

    def _bare(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _ended(self, tokens: list[int]) -> list[int]:
        if not self._append_eos:
            return tokens
        end = self._tokenizer.eos_token_id
        if end is None:
            raise DataError(
                "The tokenizer has no end-of-sequence token to append. Set data.append_eos=false, or give the "
                "tokenizer an eos_token."
            )
        return tokens if tokens[-1:] == [end] else [*tokens, end]
