"""Our own decoding over the training weights, in this process.

Each distinct prompt is computed once and shared by its completions. When half of the rows have ended, they are dropped,
and waiting prompts take their place. Which rows are decoded together follows from the requests and the tokens alone and
never from the clock, so that equal requests with equal weights give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.models.chunks.logits import HeadWeights
from holdfast.models.layers.documents import Documents
from holdfast.models.layers.expert_choices import column
from holdfast.models.layers.family import output_layer_of
from holdfast.models.setup.model import Blueprint
from holdfast.rollout.engine import Interrupted, Request, Sampled, TurnSource
from holdfast.rollout.local.cache import CACHED, PromptCache, RowCache, register_cache
from holdfast.rollout.local.graphs import NotReplayable, Recorder
from holdfast.rollout.local.predictor import DeviceRows, EagerRows, Predictor, RowState
from holdfast.rollout.local.replica import Replica, ReplicaEngine, for_few_rows, merged_inputs
from holdfast.rollout.local.static import StaticRows
from holdfast.rollout.sampling import Stops
from holdfast.types import Finish, host_value


@dataclass
class DecodedRow:
    """The state of one completion that is being decoded."""

    request: Request
    place: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_choices: NDArray[np.int16] | None = None
    """[P, layers, k] experts that the prompt met; None where nobody asks"""
    choices: list[NDArray[np.int16]] = field(default_factory=list)
    """[layers, k] of each drawn token that was read"""


class Decoding:
    """A set of rows that are decoded together.

    Args:
        rows: State of the completions on the host.
        on_device: State of the same rows on the device.
        limit: Largest number of tokens of a completion.
    """

    def __init__(self, rows: list[DecodedRow], on_device: DeviceRows, limit: int) -> None:
        self.rows, self.on_device = rows, on_device
        self._limit = limit
        self._done: set[int] = set()

    @property
    def left(self) -> list[int]:
        """Places of the rows that have not ended."""
        return [number for number in range(len(self.rows)) if number not in self._done]

    @property
    def missing(self) -> int:
        """Tokens until the first row that has not ended is as long as a completion may be."""
        return self._limit - max(len(self.rows[number].tokens) for number in self.left)

    def take(self, stops: Stops, *, abort: bool) -> list[tuple[DecodedRow, Finish]]:
        """Bring the drawn tokens to the host, and return the rows that have ended."""
        drawn = self.on_device.look()
        ended = []
        for number, row in enumerate(self.rows):
            if number in self._done:
                continue
            if drawn.choices is not None:
                row.choices += list(drawn.choices[number])
            before = len(row.tokens)
            row.tokens += drawn.tokens[number]
            row.logprobs += drawn.logprobs[number]
            end = stops.end(row.tokens, before)
            if end is not None and end <= self._limit:
                finish = Finish.STOP
            elif len(row.tokens) >= self._limit:
                end, finish = self._limit, Finish.LENGTH
            elif abort:
                end, finish = len(row.tokens), Finish.ABORT
            else:
                continue
            del row.tokens[end:], row.logprobs[end:]
            self._done.add(number)
            ended.append((row, finish))
        return ended

    def remaining(self) -> Decoding | None:
        """Drop ended rows when they are half of all; None if nothing is left."""
        alive = self.left
        if 2 * len(alive) <= len(self.rows):
            self.drop_ended()
        return self if alive else None

    def drop_ended(self) -> None:
        """Keep the rows that have not ended, if any has."""
        alive = self.left
        if self._done and alive:
            self.on_device.keep(alive)
            self.rows = [self.rows[number] for number in alive]
            self._done = set()

    def join(self, rows: Sequence[DecodedRow], on_device: EagerRows) -> None:
        """Take further rows in: rows of different ages need not know of each other."""
        self.drop_ended()
        self.on_device.add(on_device)
        self.rows += rows


def begun(predictor: Predictor, requests: Sequence[Request]) -> tuple[list[DecodedRow], EagerRows]:
    """Compute prompts, each once for all of its completions, and draw the first tokens."""
    device = predictor.device
    rows = [DecodedRow(request, index) for request in requests for index in range(len(request.seeds))]
    of_row = [number for number, request in enumerate(requests) for _ in request.seeds]
    placed = [_positions_of(request) for request in requests]
    ahead = [int(positions.max()) + 1 - positions.shape[1] for positions in placed]
    cache, hidden = _compute_prompts(predictor, requests, placed, rows, of_row)
    none = torch.zeros(len(rows), dtype=torch.int64, device=device)
    state = RowState(
        last=none.clone(),
        drawn=none,
        seeds=torch.tensor([seed for request in requests for seed in request.seeds]).to(device),
        ahead=torch.tensor([ahead[number] for number in of_row]).to(device),
        seen=_tokens_of_prompts(predictor, rows),
    )
    on_device = EagerRows(predictor, state, cache)
    on_device.begin(hidden)
    return rows, on_device


def _compute_prompts(
    predictor: Predictor,
    requests: Sequence[Request],
    placed: Sequence[NDArray[np.int64]],
    rows: Sequence[DecodedRow],
    of_row: Sequence[int],
) -> tuple[RowCache, Tensor]:
    """Run all prompts side by side; return the rows' cache, and [rows, H] what predicts each row's next token.

    Args:
        predictor: What runs them.
        requests: Whose prompts.
        placed: [A, P] positions of each prompt's tokens.
        rows: The completions; the experts that their prompts met are noted there.
        of_row: Which request's each of them is.
    """
    device = predictor.device
    tokens = torch.from_numpy(np.concatenate([request.prompt for request in requests])).to(device)[None]
    lengths = [positions.shape[1] for positions in placed]
    axes = max(len(positions) for positions in placed)
    wide = [np.broadcast_to(positions, (axes, positions.shape[1])) for positions in placed]
    positions = torch.from_numpy(np.concatenate(wide, axis=1)).to(device)[:, None]  # [A, 1, T]
    cache = PromptCache()
    output, met = predictor.run(
        input_ids=predictor.replica.family.with_one_image_token(tokens),
        position_ids=positions[0] if axes == 1 else positions,
        past_key_values=cache,
        **merged_inputs(requests, device),
        documents=Documents.of(tuple(lengths), device),
    )
    ends = np.cumsum(lengths).tolist()
    spans = [(ends[number] - lengths[number], ends[number]) for number in of_row]
    if met is not None:
        of_prompts = host_value(met, "experts of prompts")
        for row, (start, end) in zip(rows, spans, strict=True):
            row.prompt_choices = of_prompts[start:end]
    last = torch.tensor([end - 1 for _, end in spans]).to(device)
    return RowCache.of(cache, spans), output.last_hidden_state[0][last]


def _tokens_of_prompts(predictor: Predictor, rows: Sequence[DecodedRow]) -> Tensor | None:
    """Return [rows, V], which tokens stand in each row; None where no option asks for it."""
    if predictor.sampling.repetition_penalty == 1.0:
        return None
    vocabulary, device = predictor.head.weight.shape[0], predictor.device
    is_present = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=device)
    for number, row in enumerate(rows):
        is_present[number, torch.from_numpy(row.request.prompt).to(device)] = True
    return is_present


def _positions_of(request: Request) -> NDArray[np.int64]:
    """Return [A, P] positions of a prompt's tokens."""
    return np.arange(len(request.prompt))[None] if request.positions is None else request.positions


_LOOK_EVERY_ON_DEVICE = 16
"""Tokens between two looks at what has ended, where looking waits for the device."""


@dataclass
class _DecodingSetup:
    """The predictor, the stops and the limits that one call of `collect` decodes with."""

    predictor: Predictor
    stops: Stops
    limit: int
    """Most tokens of a completion."""
    static: StaticRows | None
    """Where recorded steps are replayed; None where each operation is called for every token."""


class InProcessEngine(ReplicaEngine):
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
        super().__init__(Replica(origin, device, dtype, CACHED), stops, rows, tells_experts=tells_experts)
        self._spec = origin.family.head_spec(float32_product=float32_head, chunk_tokens=None)
        self._recorder = None if tells_experts else recorder
        self._look_every = 1 if device.type == "cpu" and recorder is None else _LOOK_EVERY_ON_DEVICE

    @torch.no_grad()
    def collect(self, interrupted: Interrupted = lambda: False) -> list[Sampled]:
        """Return all completions of what was submitted, by request and place."""
        with self._replica.for_few_rows():
            setup = self._setup()
            try:
                return self._collect(setup, interrupted)
            finally:
                if setup.static is not None:
                    setup.static.close()

    @torch.no_grad()
    def converse(self, source: TurnSource, sampling: SamplingConfig, interrupted: Interrupted = lambda: False) -> None:
        """Sample until a source has no more turns; a turn's whole prompt is computed again."""
        self._sampling = sampling
        with self._replica.for_few_rows():
            predictor = Predictor(self._replica, self._routers, self._head(), self._spec, sampling)
            # Prompts grow, and what is recorded has room for a known number of tokens: operation by operation.
            setup = _DecodingSetup(predictor, self._stops.with_texts(sampling.stop), sampling.max_new_tokens, None)
            decoding: Decoding | None = None
            while True:
                self._waiting.extend(source.ready(wait=decoding is None and not self._waiting))
                if decoding is None and not self._waiting:
                    return
                decoding, done = self._advance(decoding, setup, interrupted)
                source.finished(done)

    def _setup(self) -> _DecodingSetup:
        predictor = Predictor(self._replica, self._routers, self._head(), self._spec, self._sampling)
        stops, limit = self._stops.with_texts(self._sampling.stop), self._sampling.max_new_tokens
        static = None
        if self._recorder is not None:
            # Weights may lie elsewhere at the next `collect`, so nothing recorded outlives this one.
            most = max((len(request.prompt) for request in self._waiting), default=0) + limit
            static = StaticRows(predictor, self._recorder, most, self._look_every)
        return _DecodingSetup(predictor, stops, limit, static)

    def _collect(self, setup: _DecodingSetup, interrupted: Interrupted) -> list[Sampled]:
        done: list[Sampled] = []
        decoding: Decoding | None = None
        while self._waiting or decoding is not None:
            decoding, ended = self._advance(decoding, setup, interrupted)
            done += ended
        return sorted(done, key=lambda sampled: (sampled.request_id, sampled.place))

    def _advance(
        self, decoding: Decoding | None, setup: _DecodingSetup, interrupted: Interrupted
    ) -> tuple[Decoding | None, list[Sampled]]:
        """Take waiting requests in, draw tokens until the next look, and return what is decoded and what has ended."""
        done: list[Sampled] = []
        if decoding is None or 2 * len(decoding.rows) <= self._rows:
            decoding, ended = self._admit(decoding, setup)
            done += [self._sampled(row, finish) for row, finish in ended]
        if decoding is not None:
            self._run(decoding, setup)
            ended = decoding.take(setup.stops, abort=interrupted())
            done += [self._sampled(row, finish) for row, finish in ended]
            decoding = decoding.remaining()
        if interrupted():
            done += [self._aborted(request, index) for request in self._waiting for index in range(len(request.seeds))]
            self._waiting.clear()
        return decoding, done

    def _run(self, decoding: Decoding, setup: _DecodingSetup) -> None:
        """Draw tokens until the next look."""
        count = min(self._look_every, decoding.missing)
        try:
            decoding.on_device.run(count)
        except NotReplayable as reason:
            assert setup.static is not None
            print(f"rollouts go on without graphs, operation by operation: {reason}", flush=True)
            decoding.on_device = setup.static.plain()
            setup.static.close()
            setup.static = self._recorder = None
            decoding.on_device.run(count)

    def _admit(
        self, decoding: Decoding | None, setup: _DecodingSetup
    ) -> tuple[Decoding | None, list[tuple[DecodedRow, Finish]]]:
        """Add waiting requests while there is room; one that alone is too large is decoded all the same.

        Returns:
            What is decoded now, and completions that ended with their first token.
        """
        room = self._rows - (0 if decoding is None else len(decoding.rows))
        requests: list[Request] = []
        while self._waiting and (len(self._waiting[0].seeds) <= room or (decoding is None and not requests)):
            requests.append(self._waiting.popleft())
            room -= len(requests[-1].seeds)
        if not requests:
            return decoding, []
        rows, on_device = begun(setup.predictor, requests)
        new = Decoding(rows, on_device, setup.limit)
        ended = new.take(setup.stops, abort=False)
        if not new.left:
            return decoding, ended
        new.drop_ended()
        if decoding is not None:
            decoding.join(new.rows, on_device)
            return decoding, ended
        if setup.static is not None:
            setup.static.load(on_device)
            new.on_device = setup.static
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

    def _aborted(self, request: Request, index: int) -> Sampled:
        return self._sampled(DecodedRow(request, index), Finish.ABORT)
