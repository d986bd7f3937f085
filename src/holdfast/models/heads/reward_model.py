"""Sequence-classification models that score texts: how each reads one, and the model that is whole on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.reward import ModelRewardConfig
from holdfast.data.content.formats import Conversation, prompt_of
from holdfast.errors import ModelError
from holdfast.models.heads.scorer import not_trained_to_score
from holdfast.models.layers.rotary import RotaryAngles
from holdfast.models.source.origin import load_tokenizer, locate
from holdfast.models.weights.safetensors_files import read_header, weight_files

TextTokens = Sequence[int]
"""The tokens of a text."""


def bytes_of(section: ModelRewardConfig, base: Path) -> int:
    """Return what the weights of a reward model take in its dtype; 0 where its files do not say it.

    Raises:
        ModelError: There is no such model, or a file of it is damaged.
    """
    directory = locate(section.path, ModelConfig(path=section.path), base, weights=True)
    if not any(directory.glob("*.safetensors")):
        return 0
    headers = [read_header(file).values() for file in set(weight_files(directory).values())]
    dtype: torch.dtype = getattr(torch, section.dtype)
    return sum(prod(header.shape) for file_headers in headers for header in file_headers) * dtype.itemsize


class Reading:
    """How a reward model reads: which tokens, and which of its numbers is the reward.

    Args:
        section: Which model, and which of its outputs.
        tokenizer: Its own.
        config: Its transformers configuration, as its files have it.
        directory: Of its files.

    Raises:
        ModelError: The model has several outputs and `section` chooses none, or one that it does not have.
    """

    def __init__(self, section: ModelRewardConfig, tokenizer: Any, config: Any, directory: Path) -> None:
        outputs = int(config.num_labels)
        if section.output is None and outputs != 1:
            raise ModelError(f"{directory} has {outputs} outputs, and a reward is one of them. Name it by output.")
        if section.output is not None and section.output >= outputs:
            raise ModelError(f"{directory} has {outputs} outputs, numbered from 0.")
        # transformers scores the last token that is not this one; a text alone, of a model without one, its very last.
        pad = config.get_text_config().pad_token_id
        self.pad: int | None = None if pad is None or pad < 0 else pad  # below 0 in old LLaMA configurations: no token
        self.batch_size = section.batch_size
        self._known = int(config.get_text_config().vocab_size)
        self._section, self._tokenizer = section, tokenizer
        self._tokenizer.truncation_side = "left"

    @property
    def note(self) -> str | None:
        """What a user should read at start."""
        if self.pad is None or self.pad != self._tokenizer.eos_token_id:
            return None
        return (
            f"reward {self._section.label}: its config.json calls the end of text, token {self.pad}, padding, so its "
            "score of a text is that of the token before the end, here as in plain transformers. If it was trained "
            'to score the end, as `holdfast reward` does, write "pad_token_id": null into its config.json.'
        )

    def text(self, prompt: str, completion: str, row: Mapping[str, Any]) -> str:
        """Return what is scored: a conversation in the model's template if the row's prompt is one, else the text."""
        asked = prompt_of(row, "a row") if {"prompt", "messages", "conversations", "instruction"} & set(row) else prompt
        if isinstance(asked, Conversation) and self._tokenizer.chat_template is not None:
            answered = [*asked.messages, {"role": "assistant", "content": completion}]
            return str(self._tokenizer.apply_chat_template(answered, tokenize=False))
        return prompt + completion + (self._tokenizer.eos_token if self._section.append_eos else "")

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, cut to `max_length`; what is cut is the beginning.

        Raises:
            ValueError: A token is not in the model's vocabulary.
        """
        read = self._tokenizer(text, truncation=True, max_length=self._section.max_length, add_special_tokens=False)
        tokens = [int(token) for token in read["input_ids"]]
        if max(tokens, default=0) >= self._known:
            raise ValueError(f"its tokenizer makes token {max(tokens)} of the text, and it knows {self._known}")
        return tokens

    def numbers(self, outputs: Tensor) -> list[float]:
        """Return [N] numbers of [N, outputs]."""
        chosen = outputs.double()[:, self._section.output or 0]
        scores: list[float] = (chosen.sigmoid() if self._section.sigmoid else chosen).tolist()
        return scores


class TextScorer(Protocol):
    """A model that scores texts, wherever it lies."""

    reading: Reading

    def scores(self, rows: Sequence[TextTokens]) -> list[float]:
        """Return one number per row of tokens, none of which is empty; all ranks call this, each with its own."""
        ...


def batches_of(rows: Sequence[TextTokens], size: int) -> list[list[int]]:
    """Return the places of at most `size` rows per forward pass, rows of like length together."""
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    return [order[start : start + size] for start in range(0, len(order), size)]


def scores_of(
    rows: Sequence[TextTokens], batches: Iterable[Sequence[int]], numbers: Callable[[list[TextTokens]], list[float]]
) -> list[float]:
    """Return one number per row, asked for batch by batch."""
    scores: dict[int, float] = {}
    for members in batches:
        scores |= zip(members, numbers([rows[place] for place in members]), strict=True)
    return [scores[place] for place in range(len(rows))]


class RewardModel:
    """Scores texts by plain transformers: whole on every rank, frozen, and nobody's policy.

    Args:
        section: Which model, and which of its outputs.
        base: The YAML's directory.
        device: Where it computes.

    Raises:
        ModelError: There is no such model, a tensor of it is missing, or it has several outputs and none is chosen.
    """

    def __init__(self, section: ModelRewardConfig, base: Path, device: torch.device) -> None:
        from transformers import AutoModelForSequenceClassification

        named = ModelConfig(path=section.path)
        directory = locate(section.path, named, base, weights=True)
        try:
            self._model: Any
            self._model, loading_info = AutoModelForSequenceClassification.from_pretrained(
                directory, dtype=getattr(torch, section.dtype), output_loading_info=True
            )
            tokenizer = load_tokenizer(named, base)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{directory} cannot be loaded for sequence classification: {error}") from error
        absent = sorted({*loading_info["missing_keys"], *(name for name, *_ in loading_info["mismatched_keys"])})
        if absent:  # transformers draws them at random, on every rank others, and only says so
            raise not_trained_to_score(directory, absent[0])
        self.reading = Reading(section, tokenizer, self._model.config, directory)
        self._rotary = RotaryAngles(self._model)
        self._model.to(device).eval().requires_grad_(False)  # noqa: FBT003 - torch's own form
        self._device = device

    def scores(self, rows: Sequence[TextTokens]) -> list[float]:
        """Return one number per row."""
        return scores_of(rows, batches_of(rows, self.reading.batch_size), self._numbers)

    @torch.no_grad()
    def _numbers(self, rows: list[TextTokens]) -> list[float]:
        filler = self.reading.pad
        if filler is None:  # any token that ends none of these texts
            filler = min({*range(len(rows) + 1)} - {row[-1] for row in rows})
        self._model.config.get_text_config().pad_token_id = filler
        width = max(len(row) for row in rows)
        tokens = torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        self._rotary.follow([(len(row),) for row in rows])
        outputs: Tensor = self._model(input_ids=tokens.to(self._device), attention_mask=mask.to(self._device)).logits
        return self.reading.numbers(outputs)
