"""Sampling through transformers' own `generate`, which is slow but correct for every architecture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.models.layers.family import reader_of
from holdfast.models.setup.model import Blueprint
from holdfast.rollout.engine import Interrupted, Request, Sampled
from holdfast.rollout.local.replica import Replica, ReplicaEngine, merged_inputs
from holdfast.rollout.sampling import Stops, draw, most_probable, penalise, restrict, uniform
from holdfast.types import Finish, host_value


class TransformersEngine(ReplicaEngine):
    """Calls `generate` on an unsharded copy, drawing tokens by `rollout/sampling.py` as all our engines do.

    Args:
        origin: What the policy was built from.
        device: Where to decode.
        dtype: The policy's compute dtype.
        stops: What ends a completion.
        pad_token: Fills the left side of shorter prompts.
        rows: Most completions decoded together.
    """

    def __init__(  # noqa: PLR0913 - as InProcessEngine, and the padding
        self,
        origin: Blueprint,
        device: torch.device,
        dtype: torch.dtype,
        stops: Stops,
        pad_token: int,
        *,
        rows: int = 512,
    ) -> None:
        super().__init__(Replica(origin, device, dtype), stops, rows)
        self._pad = pad_token

    @torch.no_grad()
    def collect(self, interrupted: Interrupted = lambda: False) -> list[Sampled]:
        """Return all completions of what was submitted, by request and place."""
        rows = [(request, index) for request in self._waiting for index in range(len(request.seeds))]
        self._waiting.clear()
        rows.sort(key=lambda row: (-len(row[0].prompt), row[0].request_id, row[1]))  # little padding, always the same
        done = []
        for start in range(0, len(rows), self._rows):
            done += self._decode(rows[start : start + self._rows], interrupted)
        return sorted(done, key=lambda sampled: (sampled.request_id, sampled.place))

    def _decode(self, rows: list[tuple[Request, int]], interrupted: Interrupted) -> list[Sampled]:
        width = max(len(request.prompt) for request, _ in rows)
        tokens = torch.full((len(rows), width), self._pad, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for number, (request, _) in enumerate(rows):
            tokens[number, width - len(request.prompt) :] = torch.from_numpy(request.prompt)
            mask[number, width - len(request.prompt) :] = 1
        device = self._replica.device
        seeds = torch.tensor([request.seeds[index] for request, index in rows])
        drawing = _DrawingProcessor(self._sampling, seeds.to(device), mask.to(device))
        stops = self._stops.with_texts(self._sampling.stop)
        out: Tensor = reader_of(self._replica.model).generate(  # type: ignore[operator]  # transformers'
            input_ids=tokens.to(device),
            attention_mask=mask.to(device),
            **self._image_inputs([request for request, _ in rows], tokens),
            generation_config=self._settings(stops),
            logits_processor=[drawing],
            stopping_criteria=[_Ended(stops, len(rows), interrupted)],
        )
        logprobs = host_value(torch.stack(drawing.logprobs, 1), "drawn tokens").tolist()
        drawn_tokens = host_value(out[:, width:], "drawn tokens").tolist()
        return [
            self._sampled(request, index, drawn_tokens[number], logprobs[number], stops)
            for number, (request, index) in enumerate(rows)
        ]

    def _settings(self, stops: Stops) -> Any:
        """Return all that `generate` may know: keys of older config.json would forbid tokens, or change their odds."""
        from transformers import GenerationConfig

        return GenerationConfig(
            max_new_tokens=self._sampling.max_new_tokens,
            eos_token_id=sorted(stops.tokens) or None,
            pad_token_id=self._pad,
            use_cache=True,
            do_sample=False,  # the processor leaves one token to choose
        )

    def _image_inputs(self, requests: Sequence[Request], tokens: Tensor) -> dict[str, Tensor]:
        """Return what `generate` gets of the rows' images; those of a prompt come once for each of its rows."""
        inputs = merged_inputs(requests, self._replica.device)
        family = self._replica.family
        if inputs and family.token_types is not None and family.image_token_id is not None:
            inputs[family.token_types] = (tokens == family.image_token_id).long().to(self._replica.device)
        return inputs

    def _sampled(self, request: Request, index: int, tokens: list[int], logprobs: list[float], stops: Stops) -> Sampled:
        end, limit = stops.end(tokens, 0), self._sampling.max_new_tokens
        finish = Finish.STOP if end is not None else Finish.LENGTH if len(tokens) >= limit else Finish.ABORT
        completion = np.asarray(tokens[:end], np.int64)
        return Sampled(
            request.request_id,
            index,
            completion,
            np.asarray(logprobs[: len(completion)], np.float32),
            finish,
            self._version,
        )


class _Ended:
    """A stopping criterion for transformers: rows end at a stop text, and all of them where they are abandoned."""

    def __init__(self, stops: Stops, rows: int, interrupted: Interrupted) -> None:
        self._stops, self._interrupted = stops, interrupted
        self._drawn: list[list[int]] = [[] for _ in range(rows)]

    def __call__(self, input_ids: Tensor, scores: Any) -> Tensor:  # noqa: ARG002 - a criterion's arguments
        """Return [rows] bool."""
        ended = [self._interrupted()] * len(self._drawn)
        if self._stops.texts and not all(ended):
            newest = host_value(input_ids[:, -1], "drawn tokens, for stop texts").tolist()
            ended = [self._ends(*row) for row in zip(self._drawn, newest, strict=True)]
        return torch.tensor(ended, device=input_ids.device)

    def _ends(self, drawn: list[int], token: int) -> bool:
        drawn.append(token)
        return self._stops.end(drawn, len(drawn) - 1) is not None


class _DrawingProcessor:
    """A logits processor for transformers that draws a token and sets the scores of all others to minus infinity."""

    def __init__(self, sampling: SamplingConfig, seeds: Tensor, prompt_mask: Tensor) -> None:
        self._sampling, self._seeds, self._mask = sampling, seeds, prompt_mask
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return [rows, V] scores that are minus infinity but for one token a row."""
        sampling, logits = self._sampling, scores.to(torch.promote_types(scores.dtype, torch.float32))
        if sampling.repetition_penalty != 1.0:
            logits = penalise(logits, self._seen(input_ids, logits.shape[1]), sampling.repetition_penalty)
        if sampling.temperature == 0.0:
            tokens, logprobs = most_probable(logits)
        else:
            positions = torch.full_like(self._seeds, len(self.logprobs))
            logits = restrict(logits / sampling.temperature, sampling)
            tokens, logprobs = draw(logits.clone(), uniform(self._seeds, positions))
        self.logprobs.append(logprobs)
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)

    def _seen(self, input_ids: Tensor, vocabulary: int) -> Tensor:
        real = torch.ones_like(input_ids, dtype=torch.bool)
        real[:, : self._mask.shape[1]] = self._mask.bool()
        is_present = torch.zeros(input_ids.shape[0], vocabulary + 1, dtype=torch.bool, device=input_ids.device)
        return is_present.scatter_(1, input_ids.masked_fill(~real, vocabulary), value=True)[:, :vocabulary]
