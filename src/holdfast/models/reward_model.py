"""A sequence-classification model that scores texts: whole on every rank, frozen, and nobody's policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.config.model import ModelConfig
from holdfast.config.reward import ModelRewardConfig
from holdfast.data.formats import Conversation, prompt_of
from holdfast.errors import ModelError
from holdfast.models.origin import load_tokenizer, locate
from holdfast.models.safetensors_files import read_header, weight_files


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
    return sum(prod(header.shape) for held in headers for header in held) * dtype.itemsize


class RewardModel:
    """Scores prompt and completion together.

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
            self._model, told = AutoModelForSequenceClassification.from_pretrained(
                directory, dtype=getattr(torch, section.dtype), output_loading_info=True
            )
            self._tokenizer: Any = load_tokenizer(named, base)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                f"reward {section.label}: {directory} cannot be loaded for sequence classification: {error}"
            ) from error
        absent = sorted({*told["missing_keys"], *(name for name, *_ in told["mismatched_keys"])})
        if absent:  # transformers draws them at random, on every rank others, and only says so
            raise ModelError(
                f"reward {section.label}: {directory} holds no {absent[0]} as its model has it, so rewards would be "
                "drawn at random. Name a model that was trained to score, such as an export of `holdfast reward`."
            )
        outputs = int(self._model.config.num_labels)
        if section.output is None and outputs != 1:
            raise ModelError(
                f"reward {section.label}: {directory} has {outputs} outputs, and a reward is one of them. "
                "Name it by output."
            )
        if section.output is not None and section.output >= outputs:
            raise ModelError(f"reward {section.label}: {directory} has {outputs} outputs, numbered from 0.")
        self._pads = self._model.config.get_text_config()
        # transformers scores the last token that is not this one; a text alone, of a model without one, its very last.
        self._pad = self._pads.pad_token_id
        if self._pad is not None and self._pad < 0:  # as in old LLaMA configurations: no token is it
            self._pad = None
        self._tokenizer.truncation_side = "left"
        self._model.to(device).eval().requires_grad_(False)  # noqa: FBT003 - torch's own form
        self._section, self._device = section, device

    @property
    def note(self) -> str | None:
        """What a user should read at start."""
        if self._pad is None or self._pad != self._tokenizer.eos_token_id:
            return None
        return (
            f"reward {self._section.label}: its config.json calls the end of text, token {self._pad}, padding, so its "
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

    @torch.no_grad()
    def scores(self, texts: Sequence[str]) -> list[float]:
        """Return one number per text."""
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        found: dict[int, float] = {}
        for start in range(0, len(order), self._section.batch_size):
            members = order[start : start + self._section.batch_size]
            for place, score in zip(members, self._batch([texts[place] for place in members]).tolist(), strict=True):
                found[place] = score
        return [found[place] for place in range(len(texts))]

    def _batch(self, texts: list[str]) -> Tensor:
        rows = self._tokenizer(texts, truncation=True, max_length=self._section.max_length, add_special_tokens=False)[
            "input_ids"
        ]
        filler = self._pad
        if filler is None:  # any token that ends none of these texts
            filler = min({*range(len(rows) + 1)} - {row[-1] for row in rows if row})
        self._pads.pad_token_id = filler
        width = max(1, *(len(row) for row in rows))
        tokens = torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        logits: Tensor = self._model(
            input_ids=tokens.to(self._device), attention_mask=mask.to(self._device)
        ).logits.double()
        chosen = logits[:, self._section.output or 0]
        return chosen.sigmoid() if self._section.sigmoid else chosen
