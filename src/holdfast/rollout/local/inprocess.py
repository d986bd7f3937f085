"""Our own decoding over the training weights, in this process.

Keys and values lie in blocks (`cache`), each distinct prompt is computed once and shared by its completions, and a
completion that ends makes room for one that waits (`decoding`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.models.chunks.logits import HeadWeights, widens
from holdfast.models.layers.family import output_layer_of
from holdfast.models.setup.model import Blueprint
from holdfast.parallel.forms import Candidate, Forms, Standing
from holdfast.rollout.engine import Interrupted, Sampled, TurnSource
from holdfast.rollout.local.block_attention import InPlace
from holdfast.rollout.local.blocks import Blocks
from holdfast.rollout.local.cache import BLOCK_SIZE, CACHED, register_cache
from holdfast.rollout.local.decoding import Decoding
from holdfast.rollout.local.fused import CompiledLayers, Compiler, StepForm
from holdfast.rollout.local.graphs import CHECKED_STEPS, Recorder
from holdfast.rollout.local.pieces import Pieces, why_whole
from holdfast.rollout.local.predictor import Predictor
from holdfast.rollout.local.projections import JoinedProjections
from holdfast.rollout.local.recordings import Recordings
from holdfast.rollout.local.replica import Replica, ReplicaEngine, for_few_rows
from holdfast.rollout.local.rows import DeviceRows
from holdfast.rollout.local.texts import DecodedRow, state_blocks
from holdfast.rollout.local.trial import Trial, made_up
from holdfast.rollout.sampling import Stops
from holdfast.types import Finish

_LOOK_EVERY_ON_DEVICE = 16
"""Tokens between two looks at what has ended, where looking waits for the device."""
_PIECE = 1024
_LEAST_PIECE = 4 * BLOCK_SIZE
"""Tokens of the pieces of a text that shows whether turns may go on from earlier ones, where no text is longer."""


class InProcessEngine(ReplicaEngine):
    """Samples on weights that live in this process.

    Args:
        origin: What the policy was built from.
        device: Where to decode.
        dtype: The policy's compute dtype.
        stops: What ends a completion.
        rows: Most completions decoded together.
        blocks: Most blocks of keys and values, with room for the longest row; default: as many as rows need.
        piece: Tokens by which long prompts are computed between decoding steps, where a model allows it.
        float32_head: The head's matrix product is in float32, as in training with `model.head.dtype: float32`.
        recorder: Records a step once for all tokens; default: each operation is called for every token.
        compiler: Compiles the layers of steps that are recorded; default: they are not compiled.
        measured: Measures the block in which a step is recorded.
    """

    def __init__(  # noqa: PLR0913 - what an engine is made of
        self,
        origin: Blueprint,
        device: torch.device,
        dtype: torch.dtype,
        stops: Stops,
        *,
        rows: int = 512,
        blocks: int | None = None,
        piece: int = _PIECE,
        float32_head: bool = False,
        recorder: Recorder | None = None,
        compiler: Compiler | None = None,
        measured: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        register_cache()
        super().__init__(Replica(origin, device, dtype, CACHED), stops, rows)
        self._spec = origin.family.head_spec(float32_product=float32_head, chunk_tokens=None)
        self.block_limit = blocks
        self.block_room = 0
        """Blocks that every rank has memory for, where `block_limit` follows from memory."""
        self.block_bytes = 0
        """Most that keys and values of a block take, as far as that is known."""
        self._state_blocks: int | None = None
        self.in_place = InPlace() if device.type == "cuda" and dtype != torch.float64 else None
        """Whether decoding steps read blocks in place."""
        self.piece = piece
        self.longest: int = 0
        """Most tokens of a text that a row begins with, as far as that is known."""
        self.takes_turns = False
        """Whether prompts will begin as earlier ones with their completions."""
        self.in_pieces: bool | None = None
        """Whether texts longer than a piece are computed in pieces; None, as long as nobody looked, for at once."""
        self.turns: bool | None = None
        """Whether turns go on from the keys and values of earlier ones; None, as long as nobody looked, for no."""
        self.forms = Forms()
        """What is told of optional forms that are given up."""
        self._settled = False
        self._kept = Recordings(self.in_place, recorder, measured)
        self._began_recorded = recorder is not None
        self._layers: CompiledLayers | None = None
        if recorder is not None and compiler is not None:
            self._layers = CompiledLayers(self._replica.model, compiler)
        self._projections = JoinedProjections(self._replica.model)
        self._look_every = 1 if device.type == "cpu" and recorder is None else _LOOK_EVERY_ON_DEVICE

    @property
    def _recorder(self) -> Recorder | None:
        return self._kept.recorder

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept between rollouts beside the weights."""
        return self._kept.nbytes + self._projections.nbytes

    def free(self, reason: str = "") -> None:
        """Give back what is kept between rollouts, for ever if there is a reason."""
        if reason:
            self._kept.give_up(reason)
        self._free_kept()

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over whole tensors; keys and values of older weights are never read."""
        before = [] if self._kept.is_empty else self._replica.places()
        super().update_weights(tensors, version)
        if before and before != self._replica.places():
            self._kept.forget()

    def step_metrics(self) -> dict[str, float]:
        """Return how many steps were recorded since the last call, where steps are recorded."""
        return {"rollout/recordings": float(self._kept.made())} if self._began_recorded else {}

    def sleep(self) -> bool:
        """Give the memory of weights, and all that was recorded, back."""
        self._free_kept()
        return super().sleep()

    def close(self) -> None:
        """Give everything back."""
        self._free_kept()
        super().close()

    def _free_kept(self) -> None:
        self._kept.free()
        self._projections.free()

    @torch.no_grad()
    def collect(self, interrupted: Interrupted = lambda: False) -> list[Sampled]:
        """Return all completions of what was submitted, by request and place."""
        done: list[Sampled] = []
        longest = max((len(request.prompt) for request in self._waiting), default=0) + self._sampling.max_new_tokens
        with self._laid_out(), self.decoding(max(longest, self.longest)) as decoding:
            decoding.submit(self._waiting)
            self._waiting.clear()
            while decoding.is_busy:
                done += self._advance(decoding, interrupted)
        return sorted(done, key=lambda sampled: (sampled.request_id, sampled.place))

    @torch.no_grad()
    def converse(self, source: TurnSource, sampling: SamplingConfig, interrupted: Interrupted = lambda: False) -> None:
        """Sample until a source has no more turns; of a turn's prompt, only what is new is computed."""
        self._sampling = sampling
        # Without remembered turns, the most tokens of a prompt were unknown to runs that began so: nothing is recorded.
        longest = self.longest or None if self.turns else None
        with self._laid_out(), self.decoding(longest, remembers=bool(self.turns)) as decoding:
            while True:
                decoding.submit(source.ready(wait=not decoding.is_busy))
                if not decoding.is_busy:
                    return
                source.finished(self._advance(decoding, interrupted))

    def _advance(self, decoding: Decoding, interrupted: Interrupted) -> list[Sampled]:
        ended = decoding.abort() if interrupted() else decoding.advance()
        return [self._sampled(row, finish) for row, finish in ended]

    @contextmanager
    def decoding(self, longest: int | None, *, planned: bool = False, remembers: bool = False) -> Iterator[Decoding]:
        """Give what decodes rows with the present weights, as `submit` has said.

        Args:
            longest: Most tokens of a row; None where that is not known, and no step is recorded.
            planned: No token and no text ends a completion, and prompts are computed at once, in the fewest passes.
            remembers: Texts may begin as earlier ones with their completions, whose keys and values they read.
        """
        kept = self._kept
        if longest is None or kept.recorder is None:
            self._free_kept()
            kept = Recordings()
        else:
            self._join_projections()
        predictor = self._predictor(kept)
        if self._state_blocks is None:
            self._state_blocks = state_blocks(predictor) if self._replica.family.recurrent else 0
        blocks = Blocks(BLOCK_SIZE, self.block_limit)
        kept.cache.in_place = self.in_place
        on_device = DeviceRows(
            predictor,
            kept,
            blocks,
            forms=self._step_forms,
            most_blocks=None if longest is None else blocks.needed(longest),
            look_every=self._look_every,
            lose=self.forms.lose,
        )
        decoding = Decoding(
            predictor,
            on_device,
            blocks,
            Stops(frozenset()) if planned else self._stops.with_texts(self._sampling.stop),
            limit=self._sampling.max_new_tokens,
            most_rows=self._rows,
            look_every=self._look_every,
            pieces=Pieces(self.piece) if (self.in_pieces or remembers) and not planned else None,
            state_blocks=self._state_blocks,
            remembers=remembers and not self._replica.family.recurrent,
        )
        ended = False
        try:
            kept.begin()
            yield decoding
            ended = True
        finally:
            if not (ended and kept.stays):
                kept.free()
                self._projections.free()

    @torch.no_grad()
    def choose_forms(self, forms: Forms) -> list[Standing]:
        """Choose the optional forms of what this engine computes, once; all ranks call this together.

        Args:
            forms: Of the policy.

        Returns:
            The forms that were chosen.
        """
        if self._settled:
            return []
        self._settled, self.forms, chosen = True, forms, []
        if not self._replica.family.recurrent:
            asked = {"prompts": ("in_pieces", self.longest > self.piece), "turns": ("turns", self.takes_turns)}
            why = cache(self.why_whole)
            for name, (switch, is_asked) in asked.items():
                use = lambda value, switch=switch: setattr(self, switch, bool(value))  # noqa: E731 - a switch
                chosen += [forms.choose(Candidate(name, use, why))] if is_asked else []
        steps = min(self._look_every, self._sampling.max_new_tokens - 1)
        if steps < CHECKED_STEPS or (self.in_place is None and self._recorder is None):
            return chosen
        request = made_up(self._predictor(), self._rows, self.longest)
        longest = max(self.longest, len(request.prompt) + self._sampling.max_new_tokens)
        with self._laid_out(), self.decoding(longest, planned=True) as decoding:
            trial = Trial(decoding, request, steps, longest)
            if self.in_place is not None:
                chosen.append(trial.choose_attention(forms, self.in_place))
            if self._recorder is not None:
                chosen += trial.choose_graphs(forms, self._recorder, self._step_forms, self._use_recorder)
        self._free_kept()
        return chosen

    def _join_projections(self) -> None:
        missing = self._projections.missing_bytes(self._replica.owned)
        if missing and not self._has_room(missing):
            self._projections.use(0)
            self.forms.lose(self._projections.name, "keys and values need their memory")
            return
        try:
            if self._projections.fill(self._replica.owned):
                self._kept.forget()
        except torch.OutOfMemoryError:
            self._kept.forget()
            self._projections.use(0)
            self.forms.lose(self._projections.name, "memory has no room for them")

    def _has_room(self, nbytes: int) -> bool:
        """Return whether a GPU has room for so many bytes beside all blocks of keys and values."""
        device = self._replica.device
        if device.type != "cuda" or self.block_limit is None:
            return True
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        blocks = max(0, self.block_limit - self._kept.cache.capacity) * self.block_bytes
        return nbytes + blocks <= torch.cuda.mem_get_info(device)[0] + unused

    @property
    def _step_forms(self) -> list[StepForm]:
        """The forms that recorded steps may have; layers are compiled with the projections that they then compute."""
        joined: list[StepForm] = [self._projections] if self._projections.are_possible else []
        return joined if self._layers is None else [*joined, self._layers]

    def _use_recorder(self, value: int) -> None:
        if not value:
            self._kept.recorder = None

    def _laid_out(self) -> AbstractContextManager[None]:
        """Lay weights out for decoding, unless recordings speak of the memory that they have."""
        return self._replica.for_few_rows() if self._recorder is None else nullcontext()

    @torch.no_grad()
    def why_whole(self) -> str:
        """Say why the model's texts must be computed at once, "" if they need not; see `pieces`."""
        size = self.piece if self.longest > self.piece else min(self.piece, _LEAST_PIECE)
        return why_whole(self._predictor(), size, set(self._replica.family.image_marks))

    def _predictor(self, kept: Recordings | None = None) -> Predictor:
        return Predictor(self._replica, self._head(kept), self._spec, self._sampling)

    def _head(self, kept: Recordings | None) -> HeadWeights:
        layer: Any = output_layer_of(self._replica.model)
        own = HeadWeights(layer.weight, getattr(layer, "bias", None))
        narrow = self._spec.float32_product and own.weight.dtype == torch.bfloat16
        if narrow and not widens(self._spec, own.weight):
            own = (kept or Recordings()).wide_head(own)
        return own if self._recorder is not None else HeadWeights(for_few_rows(own.weight), own.bias)

    def _sampled(self, row: DecodedRow, finish: Finish) -> Sampled:
        return Sampled(
            row.request.request_id,
            row.place,
            np.asarray(row.tokens, np.int64),
            np.asarray(row.logprobs, np.float32),
            finish,
            self._version,
        )
