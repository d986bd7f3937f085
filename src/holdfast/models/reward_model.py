"""A sequence-classification model that scores texts: whole on every rank, frozen, and nobody's policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.config.model import ModelConfig
from holdfast.config.reward import ModelRewardConfig
from holdfast.data.formats import Conversation, prompt_of
from holdfast.errors import ModelError
from holdfast.models.origin import load_tokenizer, locate


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
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model.config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
        self._tokenizer.padding_side, self._tokenizer.truncation_side = "right", "left"
        self._model.to(device).eval().requires_grad_(False)  # noqa: FBT003 - torch's own form
        self._section, self._device = section, device

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
        inputs = self._tokenizer(
            texts,
            return_tensors="pt",
            padding=True,
            truncation=True,
            max_length=self._section.max_length,
            add_special_tokens=False,
        )
        logits: Tensor = self._model(
            input_ids=inputs["input_ids"].to(self._device), attention_mask=inputs["attention_mask"].to(self._device)
        ).logits.double()
        chosen = logits[:, self._section.output or 0]
        return chosen.sigmoid() if self._section.sigmoid else chosen
