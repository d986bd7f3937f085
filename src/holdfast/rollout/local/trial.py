"""A trial of the optional forms of decoding steps: rows of drawn tokens, compared and timed before a first rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from holdfast.parallel.forms import Candidate, Forms, Standing, Times, timed_rounds
from holdfast.rollout.engine import Request
from holdfast.rollout.local.block_attention import InPlace
from holdfast.rollout.local.decoding import Decoding
from holdfast.rollout.local.fused import StepForm, copied, formed_graph, put_back
from holdfast.rollout.local.graphs import CHECKED_STEPS, DrawToken, NotReplayable, Recorder, recorded_graph
from holdfast.rollout.local.predictor import Predictor

_MOST_ROWS, _MOST_TOKENS = 64, 2**16
"""Of a trial, with the longest rows that a run may have."""
_PROMPT = 256
"""Most tokens of a made-up prompt; a row is then taken for one of any length."""


def made_up(predictor: Predictor, rows: int, longest: int) -> Request:
    """Return a request for rows of drawn tokens, none of which stands for a part of an image.

    Args:
        predictor: Has the vocabulary and the positions.
        rows: How many, at most.
        longest: Tokens of a row, at most.
    """
    replica = predictor.replica
    vocabulary, marks = replica.model.config.get_text_config().vocab_size, list(replica.family.image_marks)
    plain = np.setdiff1d(np.arange(vocabulary), marks)
    length = max(1, min(_PROMPT, longest // 2, predictor.positions // 2))
    count = max(1, min(rows, _MOST_ROWS, _MOST_TOKENS // max(longest, 1)))
    return Request(0, np.random.default_rng(0).choice(plain, length), tuple(range(count)))


class Trial:
    """Rows that repeat the same steps.

    Args:
        decoding: Without rows.
        request: Of the rows.
        steps: How many steps are timed at once.
        longest: Tokens of a row, at most.
    """

    def __init__(self, decoding: Decoding, request: Request, steps: int, longest: int) -> None:
        self._rows, self._predictor, self._steps = decoding.on_device, decoding.predictor, steps
        decoding.submit([request])
        decoding.begin_rows()
        decoding.prepare(steps)
        self._start = copied(self._rows)
        self._decoding = decoding
        self._longest = min(longest, self._predictor.positions) - max(steps, CHECKED_STEPS) - 1

    def stretch(self) -> None:
        """Let rows be as long as the run's longest, whatever their keys and values are; the time of a step follows."""
        if self._longest > int(self._rows.lengths.max()):
            self._rows.stretch(self._longest)
            self._decoding.prepare(self._steps)
            self._start = copied(self._rows)

    def choose_attention(self, forms: Forms, in_place: InPlace) -> Standing:
        """Decide whether steps read blocks of keys and values in place."""

        def compare() -> str:
            self._rows.compare_attention()
            return in_place.reason

        def step_by(value: int) -> None:
            in_place.use(value)
            self._repeat(self._rows.step)

        def rounds() -> list[Times]:
            self.stretch()
            try:
                return timed_rounds(lambda: step_by(1), lambda: step_by(0), self._predictor.device)
            except torch.OutOfMemoryError:  # gathered blocks of long rows have no room
                return []

        return forms.choose(Candidate("attention", in_place.use, compare, rounds))

    def choose_graphs(
        self, forms: Forms, recorder: Recorder, optional: Sequence[StepForm], use: Callable[[int], object]
    ) -> list[Standing]:
        """Decide whether steps are recorded, and by which forms.

        Args:
            forms: Of the policy.
            recorder: Records steps.
            optional: Forms of what recorded steps compute; each is tried with those before it that are used.
            use: Switches recording.
        """
        rows, predictor = self._rows, self._predictor
        graphs: dict[str, DrawToken] = {}
        broken = ""

        def compare(name: str, record: Callable[[], DrawToken]) -> str:
            nonlocal broken
            try:
                graphs[name] = record()
            except NotReplayable as error:
                broken = str(error) if error.__cause__ is not None else broken
                return str(error)
            except torch.OutOfMemoryError:
                return "memory has no room for the recording"
            finally:
                put_back(rows, self._start)
            return ""

        def timed(name: str, plain: Callable[[], DrawToken]) -> Callable[[], list[Times]]:
            return lambda: timed_rounds(
                partial(self._repeat, graphs[name]), partial(self._repeat, plain()), predictor.device
            )

        plain_graph = partial(recorded_graph, recorder, rows, predictor.replica.model.dtype)
        candidate = Candidate("steps", use, partial(compare, "steps", plain_graph), timed("steps", lambda: rows.step))
        standings = [forms.choose(candidate)]
        plain, used = "steps", list[StepForm]()
        for form in optional if standings[0].value else ():
            formed = partial(formed_graph, recorder, rows, predictor, [*used, form])
            rounds = timed(form.name, partial(graphs.__getitem__, plain))
            standings.append(forms.choose(Candidate(form.name, form.use, partial(compare, form.name, formed), rounds)))
            forms.give_up("steps", broken)  # a recording that failed in its midst leaves no memory for another one
            if broken:
                break
            if standings[-1].value:
                plain, used = form.name, [*used, form]
        return [forms.standings[standing.name] for standing in standings]

    def _repeat(self, draw_token: DrawToken) -> None:
        lengths = self._rows.lengths.copy()
        for _ in range(self._steps):
            draw_token()
            self._rows.lengths += 1
        self._rows.lengths = lengths
        put_back(self._rows, self._start)
