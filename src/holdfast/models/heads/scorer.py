"""A reward model: the backbone of a language model, and one number for a whole text.

It is transformers' model for sequence classification, whose layer `score` reads the hidden state of a text's last
token. In training it has one output. A text has one scored token, its last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.reward import ModelRewardConfig
from holdfast.data.content.formats import Conversation, prompt_of
from holdfast.errors import ModelError
from holdfast.models.files.conversion import Header
from holdfast.models.files.loading import RandomSource, WeightGroup, WeightSource
from holdfast.models.files.origin import load_tokenizer, locate
from holdfast.models.files.safetensors_files import read_header, weight_files
from holdfast.models.heads import spans
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.layers.family import backbone_of
from holdfast.models.layers.rotary import angle_changes, read_rows_alone
from holdfast.objectives.base import Objective, scored_tokens
from holdfast.types import Batch, LossSum, Scores, host_value

LAYER = "score.weight"
_OF_LANGUAGE_MODELS = ("lm_head.", "output.")


class ScoreModel(PolicyModel):
    """A model with the forward pass of a `PolicyModel`, whose `Scores.values` are scores of texts."""

    def _scored(
        self, hidden: Tensor, batch: Batch, objective: Objective | None, temperature: float, entropy: bool
    ) -> LossSum | Scores:
        del temperature, entropy
        scores = spans.read_at(self._places(batch), hidden, batch, self.context, self._scores)
        scored = Scores(scores, torch.ones_like(scores), None)
        if objective is None:
            return scored
        tokens = scored_tokens(batch)
        terms = objective.token_terms(scores, None, tokens)
        loss = spans.first_ranks_loss((terms * tokens.weights.to(scores.dtype)).sum(), batch)
        detached = scored._replace(values=scores.detach())
        return LossSum(loss, detached, spans.counted_once(objective.sums(detached, tokens), batch))

    def readable_head(self) -> None:
        """Return None: the root reads the layer of scores by itself, a row of numbers."""

    def _places(self, batch: Batch) -> Tensor:
        """Return [N] flat positions of the hidden states that are scored."""
        return batch.scored

    def _scores(self, hidden: Tensor) -> Tensor:
        """Return [N] scores of [N, H] hidden states, in float32 or better."""
        layer: Any = self.language_model.score
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return linear(hidden.to(wide), layer.weight.to(wide)).squeeze(-1)

    def upstream_values(self, tokens: Tensor, inputs: Mapping[str, Tensor] | None = None) -> Tensor:
        """Score every token but the first by transformers' own backbone: the yardstick of the check at start."""
        output = backbone_of(self.language_model)(input_ids=tokens[None], use_cache=False, **(inputs or {}))
        return self._scores(output.last_hidden_state[0, 1:]).clone()


class ValueModel(ScoreModel):
    """A critic, whose `Scores.values` are values: that of a token is made of what precedes it."""

    def _places(self, batch: Batch) -> Tensor:
        return spans.predictors_of_all(batch)

    def upstream_values(self, tokens: Tensor, inputs: Mapping[str, Tensor] | None = None) -> Tensor:
        """Score what precedes every token but the first."""
        output = backbone_of(self.language_model)(input_ids=tokens[None], use_cache=False, **(inputs or {}))
        return self._scores(output.last_hidden_state[0, :-1]).clone()


class StoredScoreModel(ScoreModel):
    """A reward model as its files have it: it may have several outputs, and computes them as transformers does."""

    def _scores(self, hidden: Tensor) -> Tensor:
        """Return [N, K] outputs of [N, H] hidden states, in their dtype."""
        layer: Any = self.language_model.score
        outputs: Tensor = layer(hidden)
        return outputs

    def upstream_values(self, tokens: Tensor, inputs: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the outputs for every token but the first, moved by what its class says otherwise of the text.

        So a class that makes its scores of more than the hidden state, or at another token, is found out at start, also
        where differences are averaged over tokens.
        """
        scores = super().upstream_values(tokens, inputs)
        config: Any = self.language_model.config
        position = place_of_score(tokens.tolist(), config.get_text_config().pad_token_id)
        output = self.language_model(input_ids=tokens[None], use_cache=False, **(inputs or {}))
        return scores + (output.logits[0] - scores[position - 1]) if position > 0 else scores


def place_of_score(tokens: Sequence[int], pad: int | None) -> int:
    """Return where transformers reads the score of a text: at the last token that is not padding, else at the first."""
    return next((position for position in range(len(tokens) - 1, -1, -1) if tokens[position] != pad), 0)


def check_layer(skeleton: Any) -> None:
    """Refuse a class whose scores do not come from a linear layer `score` that reads a token's hidden state.

    Raises:
        ModelError: The class has no such layer.
    """
    if type(getattr(skeleton, "score", None)) is not nn.Linear:
        raise ModelError(
            f"{type(skeleton).__name__} has no layer `score` that reads the hidden state of a token, as models for "
            "sequence classification that are made of a language model have, and only those can be split over ranks. "
            "Use place: whole."
        )


def not_trained_to_score(directory: Path, absent: str) -> ModelError:
    """Return the refusal of files without a tensor of a reward model."""
    return ModelError(
        f"{directory} holds no {absent} as its model has it, so rewards would be drawn at random. Name a model that "
        "was trained to score, such as an export of `holdfast reward`."
    )


def is_scorer(config: Any) -> bool:
    """Whether a configuration belongs to the files of a model for sequence classification."""
    return any(str(name).endswith("ForSequenceClassification") for name in config.architectures or ())


def one_score(config: Any, tokenizer: Any) -> None:
    """Turn a transformers configuration into that of a reward model, which has one output.

    Raises:
        ModelError: The files are those of a scorer with several outputs.
    """
    if is_scorer(config) and config.num_labels != 1:
        raise ModelError(
            f"The model has {config.num_labels} outputs, and a reward model has one. Start from a language model."
        )
    config.num_labels = 1
    # transformers scores the last token that is not padding, and training the one that ends the text. Where the
    # tokenizer pads with nothing else, no padding is named: transformers then refuses several texts at once.
    pad = tokenizer.pad_token_id
    config.get_text_config().pad_token_id = None if pad == tokenizer.eos_token_id else pad


def without_output_layer(stored: Mapping[str, Header]) -> dict[str, Header]:
    """Return what of a language model's files a reward model starts from."""
    return {name: header for name, header in stored.items() if not name.startswith(_OF_LANGUAGE_MODELS)}


@dataclass(frozen=True)
class ScorerSource:
    """The tensors of a language model, and a layer `score` that starts at random."""

    base: WeightSource
    random: RandomSource

    def groups(self) -> Iterator[WeightGroup]:
        """Yield the language model's, then the layer."""
        yield from self.base.groups()
        for group in self.random.groups():
            if LAYER in group.targets:
                yield group


TextTokens = Sequence[int]
"""The tokens of a text."""


def weight_bytes(section: ModelRewardConfig, base: Path) -> int:
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


class RewardFormat:
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
        self._vocabulary_size = int(config.get_text_config().vocab_size)
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
        parsed_prompt = (
            prompt_of(row, "a row") if {"prompt", "messages", "conversations", "instruction"} & set(row) else prompt
        )
        if isinstance(parsed_prompt, Conversation) and self._tokenizer.chat_template is not None:
            answered = [*parsed_prompt.messages, {"role": "assistant", "content": completion}]
            return str(self._tokenizer.apply_chat_template(answered, tokenize=False))
        return prompt + completion + (self._tokenizer.eos_token if self._section.append_eos else "")

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, cut to `max_length`; what is cut is the beginning.

        Raises:
            ValueError: A token is not in the model's vocabulary.
        """
        read = self._tokenizer(text, truncation=True, max_length=self._section.max_length, add_special_tokens=False)
        tokens = [int(token) for token in read["input_ids"]]
        if max(tokens, default=0) >= self._vocabulary_size:
            raise ValueError(
                f"its tokenizer makes token {max(tokens)} of the text, and it knows {self._vocabulary_size}"
            )
        return tokens

    def numbers(self, outputs: Tensor) -> list[float]:
        """Return [N] numbers of [N, outputs]."""
        selected = outputs.double()[:, self._section.output or 0]
        scores = host_value(selected.sigmoid() if self._section.sigmoid else selected, "scores of texts")
        return [float(score) for score in scores]


class TextScorer(Protocol):
    """A model that scores texts, wherever it lies."""

    reading: RewardFormat

    def scores(self, rows: Sequence[TextTokens]) -> list[float]:
        """Return one number per row of tokens, none of which is empty; all ranks call this, each with its own."""


def batches_of(rows: Sequence[TextTokens], size: int) -> list[list[int]]:
    """Return the places of at most `size` rows per forward pass, rows of like length together."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    return [order[start : start + size] for start in range(0, len(order), size)]


def scores_of(
    rows: Sequence[TextTokens], batches: Iterable[Sequence[int]], numbers: Callable[[list[TextTokens]], list[float]]
) -> list[float]:
    """Return one number per row, asked for batch by batch."""
    scores: dict[int, float] = {}
    for members in batches:
        scores |= zip(members, numbers([rows[index] for index in members]), strict=True)
    return [scores[index] for index in range(len(rows))]


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

        model_config = ModelConfig(path=section.path)
        directory = locate(section.path, model_config, base, weights=True)
        try:
            self._model: Any
            self._model, loading_info = AutoModelForSequenceClassification.from_pretrained(
                directory, dtype=getattr(torch, section.dtype), output_loading_info=True
            )
            tokenizer = load_tokenizer(model_config, base)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{directory} cannot be loaded for sequence classification: {error}") from error
        absent = sorted({*loading_info["missing_keys"], *(name for name, *_ in loading_info["mismatched_keys"])})
        if absent:  # transformers draws them at random, on every rank others, and only says so
            raise not_trained_to_score(directory, absent[0])
        self.reading = RewardFormat(section, tokenizer, self._model.config, directory)
        read_rows_alone(self._model)
        # It is given no positions, so the padding of a shorter text would count to its length.
        self._texts_per_pass = 1 if angle_changes(self._model.config) else section.batch_size
        self._model.to(device).eval().requires_grad_(False)  # noqa: FBT003 - torch's own form
        self._device = device

    def scores(self, rows: Sequence[TextTokens]) -> list[float]:
        """Return one number per row."""
        return scores_of(rows, batches_of(rows, self._texts_per_pass), self._numbers)

    @torch.no_grad()
    def _numbers(self, rows: list[TextTokens]) -> list[float]:
        filler = self.reading.pad
        if filler is None:  # any token that ends none of these texts
            filler = min({*range(len(rows) + 1)} - {row[-1] for row in rows})
        self._model.config.get_text_config().pad_token_id = filler
        width = max(len(row) for row in rows)
        tokens = torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        outputs: Tensor = self._model(input_ids=tokens.to(self._device), attention_mask=mask.to(self._device)).logits
        return self.reading.numbers(outputs)
