"""A reward model: the backbone of a language model, and one number for a whole text.

It is transformers' model for sequence classification, whose layer `score` reads the hidden state of a text's last
token. In training it has one output. A text has one scored token, its last, and its score stands where a policy has a
log-probability.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from holdfast.errors import ModelError
from holdfast.models.heads.policy import PolicyModel, predictors
from holdfast.models.layers.family import backbone_of
from holdfast.models.weights.conversion import Header
from holdfast.models.weights.loading import RandomSource, WeightGroup, WeightSource
from holdfast.objectives.base import Objective, scored_tokens
from holdfast.types import Batch, LossSum, Scores

LAYER = "score.weight"
_OF_LANGUAGE_MODELS = ("lm_head.", "output.")


class ScoreModel(PolicyModel):
    """As `PolicyModel`, with a score for each scored token in the place of its log-probability."""

    def _scored(
        self, hidden: Tensor, batch: Batch, objective: Objective | None, temperature: float, entropy: bool
    ) -> LossSum | Scores:
        del temperature, entropy
        scores = self._scores(hidden.flatten(0, 1).index_select(0, self._places(batch)))
        scored = Scores(scores, torch.ones_like(scores, dtype=torch.bool), None)
        if objective is None:
            return scored
        tokens = scored_tokens(batch)
        terms = objective.token_terms(scored.logprobs, None, tokens)
        loss = (terms * tokens.weights.to(scored.logprobs.dtype)).sum()
        detached = scored._replace(logprobs=scores.detach())
        return LossSum(loss, detached, objective.sums(detached, tokens))

    def _places(self, batch: Batch) -> Tensor:
        """Return [N] flat positions of the hidden states that are scored."""
        return batch.scored

    def _scores(self, hidden: Tensor) -> Tensor:
        """Return [N] scores of [N, H] hidden states, in float32 or better."""
        layer: Any = self.language_model.score
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return linear(hidden.to(wide), layer.weight.to(wide)).squeeze(-1)

    def upstream_logprobs(self, tokens: Tensor, inputs: Mapping[str, Tensor] | None = None) -> Tensor:
        """Score every token but the first by transformers' own backbone: the yardstick of the check at start."""
        with self.rotary.as_upstream():
            output = backbone_of(self.language_model)(input_ids=tokens[None], use_cache=False, **(inputs or {}))
        return self._scores(output.last_hidden_state[0, 1:]).clone()


class ValueModel(ScoreModel):
    """A critic: its score of a token is made of what precedes it, where a policy has the token's prediction."""

    def _places(self, batch: Batch) -> Tensor:
        return predictors(batch)

    def upstream_logprobs(self, tokens: Tensor, inputs: Mapping[str, Tensor] | None = None) -> Tensor:
        """Score what precedes every token but the first."""
        with self.rotary.as_upstream():
            output = backbone_of(self.language_model)(input_ids=tokens[None], use_cache=False, **(inputs or {}))
        return self._scores(output.last_hidden_state[0, :-1]).clone()


class StoredScoreModel(ScoreModel):
    """A reward model as its files have it: it may have several outputs, and computes them as transformers does."""

    def _scores(self, hidden: Tensor) -> Tensor:
        """Return [N, K] outputs of [N, H] hidden states, in their dtype."""
        layer: Any = self.language_model.score
        outputs: Tensor = layer(hidden)
        return outputs

    def upstream_logprobs(self, tokens: Tensor, inputs: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the outputs for every token but the first, moved by what its class says otherwise of the text.

        So a class that makes its scores of more than the hidden state, or at another token, is found out at start, also
        where differences are averaged over tokens.
        """
        scores = super().upstream_logprobs(tokens, inputs)
        config: Any = self.language_model.config
        place = place_of_score(tokens.tolist(), config.get_text_config().pad_token_id)
        with self.rotary.as_upstream():
            output = self.language_model(input_ids=tokens[None], use_cache=False, **(inputs or {}))
        return scores + (output.logits[0] - scores[place - 1]) if place > 0 else scores


def place_of_score(tokens: Sequence[int], pad: int | None) -> int:
    """Return where transformers reads the score of a text: at the last token that is no padding, else at the first."""
    return next((place for place in range(len(tokens) - 1, -1, -1) if tokens[place] != pad), 0)


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
