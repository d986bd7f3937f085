"""Decode over the training weights, in this process.

Each distinct prompt is computed once and shared by its completions. Rows that have ended are dropped when half of them
have, and waiting prompts take their place; what is decoded together follows from the requests and the tokens alone,
never from the clock, so the same requests with the same weights give the same bits again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.models.build.model import Blueprint
from holdfast.models.layers.expert_choices import column
from holdfast.models.layers.family import output_layer_of
from holdfast.models.layers.routers import Routers
from holdfast.models.scores import HeadWeights
from holdfast.rollout.cache import CACHED, register_cache
from holdfast.rollout.decoding import DecodedRow, Decoding, begun
from holdfast.rollout.engine import Interrupted, Request, Sampled
from holdfast.rollout.graphs import NotReplayable, Recorder
from holdfast.rollout.predictor import Predictor
from holdfast.rollout.replica import Replica, for_few_rows
from holdfast.rollout.static import StaticRows
from holdfast.rollout.stopping import Stops
from holdfast.types import Finish

_LOOK_EVERY_ON_DEVICE = 16
"""Tokens between two looks at what has ended, where looking waits for the device."""


@dataclass
class _Means:
    """What one `collect` decodes with."""

    predictor: Predictor
    stops: Stops
    limit: int
    """Most tokens of a completion."""
    static: StaticRows | None
    """Where recorded steps are replayed; None where each operation is called for every token."""


class InProcessEngine:
    """Samples on weights that live in this process.

    Args:
        origin: What the policy was built from.
        device: Where to decode.
        dtype: The policy's compute dtype.
        stops: What ends a completion.
        rows: Most completions decoded together.
        tells_experts: Completions say which experts their tokens met; for a mixture of them.
        float32_head: The head's matrix product is in float32, as in training with `model.head.dtype: float32`.
        recorder: Records a step once for all tokens; default: each operation is called for every token. Not where
            experts are told, which are read from the step itself.
    """

    def __init__(  # noqa: PLR0913 - what an engine is made of
        self,
        origin: Blueprint,
        device: torch.device,
        dtype: torch.dtype,
        stops: Stops,
        *,
        rows: int = 512,
        tells_experts: bool = False,
        float32_head: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        register_cache()
        self._replica = Replica(origin, device, dtype, CACHED)
        self._routers = Routers(self._replica.model) if tells_experts else None
        self._spec = origin.family.head_spec(float32_product=float32_head, chunk_tokens=None)
        self._stops = stops
        self._rows = rows
        self._waiting: deque[Request] = deque()
        self._sampling = SamplingConfig()
        self._version = -1
        self._recorder = None if tells_experts else recorder
        self._look_every = 1 if device.type == "cpu" and recorder is None else _LOOK_EVERY_ON_DEVICE

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over whole tensors; no keys or values outlive a `collect`, so none are of older weights."""
        self._replica.refresh(tensors)
        self._version = version

    def submit(self, requests: Sequence[Request], sampling: SamplingConfig) -> None:
        """Accept requests; all that wait together are sampled alike."""
        self._waiting.extend(requests)
        self._sampling = sampling

    @torch.no_grad()
    def collect(self, interrupted: Interrupted = lambda: False) -> list[Sampled]:
        """Return all completions of what was submitted, by request and place."""
        with self._replica.for_few_rows():
            means = self._means()
            try:
                return self._collect(means, interrupted)
            finally:
                if means.static is not None:
                    means.static.close()

    def _means(self) -> _Means:
        predictor = Predictor(self._replica, self._routers, self._head(), self._spec, self._sampling)
        stops, limit = self._stops.with_texts(self._sampling.stop), self._sampling.max_new_tokens
        static = None
        if self._recorder is not None:
            # Weights may lie elsewhere at the next `collect`, so nothing recorded outlives this one.
            most = max((len(request.prompt) for request in self._waiting), default=0) + limit
            static = StaticRows(predictor, self._recorder, most, self._look_every)
        return _Means(predictor, stops, limit, static)

    def _collect(self, means: _Means, interrupted: Interrupted) -> list[Sampled]:
        done: list[Sampled] = []
        decoding: Decoding | None = None
        while self._waiting or decoding is not None:
            if decoding is None or 2 * len(decoding.rows) <= self._rows:
                decoding, ended = self._admit(decoding, means)
                done += [self._sampled(row, finish) for row, finish in ended]
            if decoding is not None:
                self._run(decoding, means)
                ended = decoding.take(means.stops, abort=interrupted())
                done += [self._sampled(row, finish) for row, finish in ended]
                decoding = decoding.remaining()
            if interrupted():
                done += [
                    self._aborted(request, place) for request in self._waiting for place in range(len(request.seeds))
                ]
                self._waiting.clear()
        return sorted(done, key=lambda sampled: (sampled.request_id, sampled.place))

    def _run(self, decoding: Decoding, means: _Means) -> None:
        """Draw tokens until the next look."""
        count = min(self._look_every, decoding.missing)
        try:
            decoding.on_device.run(count)
        except NotReplayable as reason:
            assert means.static is not None
            print(f"rollouts go on without graphs, operation by operation: {reason}", flush=True)
            decoding.on_device = means.static.plain()
            means.static.close()
            means.static = self._recorder = None
            decoding.on_device.run(count)

    def sleep(self) -> None:
        """Give the weights' memory back."""
        self._replica.release()

    def close(self) -> None:
        """Give everything back."""
        self._replica.release()

    def _admit(
        self, decoding: Decoding | None, means: _Means
    ) -> tuple[Decoding | None, list[tuple[DecodedRow, Finish]]]:
        """Add waiting requests while there is room; one that alone is too large is decoded all the same.

        Returns:
            What is decoded now, and completions that ended with their first token.
        """
        room = self._rows - (0 if decoding is None else len(decoding.rows))
        chosen: list[Request] = []
        while self._waiting and (len(self._waiting[0].seeds) <= room or (decoding is None and not chosen)):
            chosen.append(self._waiting.popleft())
            room -= len(chosen[-1].seeds)
        if not chosen:
            return decoding, []
        rows, on_device = begun(means.predictor, chosen)
        new = Decoding(rows, on_device, means.limit)
        ended = new.take(means.stops, abort=False)
        if not new.left:
            return decoding, ended
        new.drop_ended()
        if decoding is not None:
            decoding.join(new.rows, on_device)
            return decoding, ended
        if means.static is not None:
            means.static.load(on_device)
            new.on_device = means.static
        return new, ended

    def _head(self) -> HeadWeights:
        layer: Any = output_layer_of(self._replica.model)
        weight, bias = layer.weight, getattr(layer, "bias", None)
        if self._spec.float32_product and weight.dtype == torch.bfloat16:
            weight, bias = weight.float(), None if bias is None else bias.float()
        return HeadWeights(for_few_rows(weight), bias)

    def _sampled(self, row: DecodedRow, finish: Finish) -> Sampled:
        length = len(row.request.prompt) + len(row.tokens)
        return Sampled(
            row.request.request_id,
            row.place,
            np.asarray(row.tokens, np.int64),
            np.asarray(row.logprobs, np.float32),
            finish,
            self._version,
            None if row.prompt_choices is None else column(row.prompt_choices, row.choices, length),
        )

    def _aborted(self, request: Request, place: int) -> Sampled:
        return self._sampled(DecodedRow(request, place), Finish.ABORT)
