"""Decode over the training weights, in this process.

Each distinct prompt is computed once and shared by its completions. Rows that have ended are dropped when half of them
have, and waiting prompts take their place; what is decoded together follows from the requests and the tokens alone,
never from the clock, so the same requests with the same weights give the same bits again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.config.rollout import SamplingConfig
from holdfast.models.attention import Documents
from holdfast.models.build import Blueprint
from holdfast.models.expert_choices import column
from holdfast.models.family import backbone_of, output_layer_of
from holdfast.models.routers import Routers, choices
from holdfast.models.scores import Head, logits_of
from holdfast.rollout.cache import CACHED, PromptCache, RowCache, register
from holdfast.rollout.engine import Interrupted, Request, Sampled
from holdfast.rollout.replica import Replica, for_few_rows, joined_inputs
from holdfast.rollout.sampling import draw, most_probable, penalise, restrict, uniform
from holdfast.rollout.stopping import Stops
from holdfast.types import Finish

_LOOK_EVERY_ON_DEVICE = 16
"""Tokens between two looks at what has ended, where looking waits for the device."""


@dataclass
class _Row:
    """One completion while it grows."""

    request: Request
    place: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_choices: NDArray[np.int16] | None = None
    """[P, layers, k] experts that the prompt met; None where nobody asks"""
    choices: list[NDArray[np.int16]] = field(default_factory=list)
    """[layers, k] of each drawn token that was read"""


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
    ) -> None:
        register()
        self._replica = Replica(origin, device, dtype, CACHED)
        self._routers = Routers(self._replica.model) if tells_experts else None
        self._spec = origin.family.head_spec(float32_product=float32_head, chunk_tokens=None)
        self._stops = stops
        self._rows = rows
        self._waiting: deque[Request] = deque()
        self._sampling = SamplingConfig()
        self._version = -1
        self._look_every = 1 if device.type == "cpu" else _LOOK_EVERY_ON_DEVICE

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
            return self._collect(interrupted)

    def _collect(self, interrupted: Interrupted) -> list[Sampled]:
        done: list[Sampled] = []
        decoding: _Decoding | None = None
        stops = self._stops.with_texts(self._sampling.stop)
        head = self._head()
        while self._waiting or decoding is not None:
            if decoding is None or 2 * len(decoding.rows) <= self._rows:
                decoding = self._admit(decoding, head)
            for _ in range(self._look_every):
                decoding.step()
                if decoding.longest >= self._sampling.max_new_tokens:
                    break
            ended = decoding.take(stops, abort=interrupted())
            done += [self._sampled(row, finish) for row, finish in ended]
            if interrupted():
                done += [
                    self._aborted(request, place) for request in self._waiting for place in range(len(request.seeds))
                ]
                self._waiting.clear()
            decoding = decoding.remaining()
        return sorted(done, key=lambda sampled: (sampled.request_id, sampled.place))

    def sleep(self) -> None:
        """Give the weights' memory back."""
        self._replica.release()

    def close(self) -> None:
        """Give everything back."""
        self._replica.release()

    def _admit(self, decoding: _Decoding | None, head: Head) -> _Decoding:
        """Add waiting requests while there is room; one that alone is too large is decoded all the same."""
        room = self._rows - (0 if decoding is None else len(decoding.rows))
        chosen: list[Request] = []
        while self._waiting and (len(self._waiting[0].seeds) <= room or (decoding is None and not chosen)):
            chosen.append(self._waiting.popleft())
            room -= len(chosen[-1].seeds)
        if not chosen:
            assert decoding is not None
            return decoding
        new = _Decoding(self._replica, self._routers, head, self._spec, self._sampling, chosen)
        return new if decoding is None else decoding.joined(new)

    def _head(self) -> Head:
        layer: Any = output_layer_of(self._replica.model)
        weight, bias = layer.weight, getattr(layer, "bias", None)
        if self._spec.float32_product and weight.dtype == torch.bfloat16:
            weight, bias = weight.float(), None if bias is None else bias.float()
        return Head(for_few_rows(weight), bias)

    def _sampled(self, row: _Row, finish: Finish) -> Sampled:
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
        return self._sampled(_Row(request, place), Finish.ABORT)


class _Decoding:
    """Rows that are decoded together."""

    def __init__(
        self,
        replica: Replica,
        routers: Routers | None,
        head: Head,
        spec: Any,
        sampling: SamplingConfig,
        requests: Sequence[Request],
    ) -> None:
        self._replica, self._head, self._spec, self._sampling = replica, head, spec, sampling
        self._routers, self._device = routers, replica.device
        device, config = replica.device, replica.model.config.get_text_config()
        self.rows = [_Row(request, place) for request in requests for place in range(len(request.seeds))]
        self._seeds = torch.tensor([seed for request in requests for seed in request.seeds]).to(device)
        self._drawn = torch.zeros(len(self.rows), dtype=torch.int64, device=device)
        """[rows], tokens each row has drawn"""
        self._last: Tensor | None = None
        """[rows], tokens drawn whose successors are not predicted yet; None right after prompts were computed"""
        self._last_position = getattr(config, "max_position_embeddings", 2**31) - 1
        self._pending: list[tuple[Tensor, Tensor]] = []
        """Tokens and log-probabilities of the steps since the last look."""
        self._unnoted: list[Tensor] = []
        """[rows, layers, k] experts that the rows' last tokens met, since the last look."""
        self._done: set[int] = set()
        self._seen = self._prompt_tokens()
        of_row = [number for number, request in enumerate(requests) for _ in request.seeds]
        lengths = [len(request.prompt) for request in requests]
        ends = np.cumsum(lengths)
        placed = [_positions_of(request) for request in requests]
        after = [int(positions.max()) + 1 for positions in placed]
        ahead = torch.tensor([after[number] - lengths[number] for number in of_row])
        self._ahead = ahead.to(device)
        """[rows], how far each row's positions run ahead of its places: an image's positions are not its tokens'"""
        self._cache, hidden = self._compute_prompts(requests, placed, of_row)
        self._hidden = hidden[torch.from_numpy(ends - 1).to(device)[torch.tensor(of_row, device=device)]]
        """[rows, H], what predicts each row's next token"""

    @property
    def longest(self) -> int:
        """Tokens drawn by the row that has drawn most."""
        return max(len(row.tokens) for row in self.rows) + len(self._pending)

    def _compute_prompts(
        self, requests: Sequence[Request], placed: Sequence[NDArray[np.int64]], of_row: list[int]
    ) -> tuple[RowCache, Tensor]:
        """Run all prompts side by side; return the rows' cache and the prompts' hidden states [T, H]."""
        tokens = torch.from_numpy(np.concatenate([request.prompt for request in requests])).to(self._device)[None]
        lengths = [positions.shape[1] for positions in placed]
        axes = max(len(positions) for positions in placed)
        wide = [np.broadcast_to(positions, (axes, positions.shape[1])) for positions in placed]
        positions = torch.from_numpy(np.concatenate(wide, axis=1)).to(self._device)[:, None]  # [A, 1, T]
        cache = PromptCache()
        output, met = self._run(
            input_ids=self._replica.family.with_one_image_token(tokens),
            position_ids=positions[0] if axes == 1 else positions,
            past_key_values=cache,
            **joined_inputs(requests, self._device),
            documents=Documents.of(tuple(lengths), self._device),
        )
        ends = np.cumsum(lengths).tolist()
        spans = [(ends[number] - lengths[number], ends[number]) for number in of_row]
        if met is not None:
            of_prompts = met.cpu().numpy()
            for row, (start, end) in zip(self.rows, spans, strict=True):
                row.prompt_choices = of_prompts[start:end]
        return RowCache(cache, spans), output.last_hidden_state[0]

    def _run(self, **inputs: Any) -> tuple[Any, Tensor | None]:
        """Run the backbone; return its output and which experts the tokens met, [T, layers, k], where that is told."""
        with choices(self._routers) as chosen:
            output = backbone_of(self._replica.model)(use_cache=True, **inputs)
        return output, torch.stack(chosen, 1) if chosen else None

    def _prompt_tokens(self) -> Tensor | None:
        """Return [rows, V], which tokens stand in each row; None where no option asks for it."""
        if self._sampling.repetition_penalty == 1.0:
            return None
        seen = torch.zeros(len(self.rows), self._head.weight.shape[0], dtype=torch.bool, device=self._device)
        for number, row in enumerate(self.rows):
            seen[number, torch.from_numpy(row.request.prompt).to(self._device)] = True
        return seen

    def step(self) -> None:
        """Draw one token in every row."""
        self._catch_up()
        tokens, logprobs = self._draw()
        self._pending.append((tokens, logprobs))
        self._last = tokens
        self._drawn += 1

    def _catch_up(self) -> None:
        """Compute what predicts the next tokens, if the last ones were drawn and not yet read."""
        if self._last is None:
            return
        self._cache.begin_step()
        output, met = self._run(
            input_ids=self._last[:, None],
            # Rows that have ended go on until they are dropped; theirs is the only position that may lie beyond.
            position_ids=(self._cache.view.places + self._ahead)[:, None].clamp(max=self._last_position),
            past_key_values=self._cache,
            rows=self._cache,
        )
        if met is not None:
            self._unnoted.append(met)
        self._hidden, self._last = output.last_hidden_state[:, 0], None

    def _draw(self) -> tuple[Tensor, Tensor]:
        sampling = self._sampling
        logits, _ = logits_of(self._hidden.to(self._head.weight.dtype), self._head, self._spec)
        if self._seen is not None:
            logits = penalise(logits, self._seen, sampling.repetition_penalty)
        if sampling.temperature == 0.0:
            tokens, logprobs = most_probable(logits)
        else:
            if sampling.temperature != 1.0:
                logits.div_(sampling.temperature)
            logits = restrict(logits, sampling)
            tokens, logprobs = draw(logits, uniform(self._seeds, self._drawn))
        if self._seen is not None:
            self._seen[torch.arange(len(self.rows), device=self._device), tokens] = True
        return tokens, logprobs

    def _note_choices(self) -> None:
        """Bring the experts of the rows' tokens to the host."""
        if not self._unnoted:
            return
        found = torch.stack(self._unnoted, 1).cpu().numpy()  # [rows, tokens, layers, k]
        self._unnoted.clear()
        for number, row in enumerate(self.rows):
            row.choices += list(found[number])

    def take(self, stops: Stops, *, abort: bool) -> list[tuple[_Row, Finish]]:
        """Bring the drawn tokens to the host, and return the rows that have ended."""
        tokens = torch.stack([tokens for tokens, _ in self._pending], 1).tolist()
        logprobs = torch.stack([logprobs for _, logprobs in self._pending], 1).tolist()
        self._pending.clear()
        self._note_choices()
        ended = []
        for number, row in enumerate(self.rows):
            if number in self._done:
                continue
            before = len(row.tokens)
            row.tokens += tokens[number]
            row.logprobs += logprobs[number]
            end = stops.end(row.tokens, before)
            limit = self._sampling.max_new_tokens
            if end is not None and end <= limit:
                finish = Finish.STOP
            elif len(row.tokens) >= limit:
                end, finish = limit, Finish.LENGTH
            elif abort:
                end, finish = len(row.tokens), Finish.ABORT
            else:
                continue
            del row.tokens[end:], row.logprobs[end:]
            self._done.add(number)
            ended.append((row, finish))
        return ended

    def remaining(self) -> _Decoding | None:
        """Drop ended rows when they are half of all; None if nothing is left."""
        left = [number for number in range(len(self.rows)) if number not in self._done]
        if not left:
            return None
        if 2 * len(left) <= len(self.rows):
            self._keep(left)
        return self

    def joined(self, other: _Decoding) -> _Decoding:
        """Return both as one: rows of different ages need not know of each other."""
        left = [number for number in range(len(self.rows)) if number not in self._done]
        if self._done:
            self._keep(left)
        self._catch_up()
        self._note_choices()
        self._cache.add(other._cache)
        self.rows += other.rows
        self._seeds, self._drawn = torch.cat([self._seeds, other._seeds]), torch.cat([self._drawn, other._drawn])
        self._ahead = torch.cat([self._ahead, other._ahead])
        self._hidden = torch.cat([self._hidden, other._hidden])
        if self._seen is not None and other._seen is not None:
            self._seen = torch.cat([self._seen, other._seen])
        return self

    def _keep(self, left: list[int]) -> None:
        rows = torch.tensor(left, device=self._device)
        self._cache.keep(rows, [self._cache.lengths[number] for number in left])
        self.rows = [self.rows[number] for number in left]
        self._seeds, self._drawn, self._ahead = self._seeds[rows], self._drawn[rows], self._ahead[rows]
        self._hidden = self._hidden[rows]
        self._last = None if self._last is None else self._last[rows]
        self._seen = None if self._seen is None else self._seen[rows]
        self._done = set()


def _positions_of(request: Request) -> NDArray[np.int64]:
    """Return [A, P] positions of a prompt's tokens."""
    return np.arange(len(request.prompt))[None] if request.positions is None else request.positions
