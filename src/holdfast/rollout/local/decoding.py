"""Which rows are decoded together: a row that ends makes room at once.

Rows wait in the order of their requests. A request's prompt is computed once, when its first row begins; the rows share
its blocks, and each copies the last one where it is not full. Where blocks are limited and run out, the row that began
last goes back to those that wait, and what it has read is computed again. All of this follows from requests and tokens
alone and never from the clock, so that equal requests with equal weights give equal bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from holdfast.rollout.engine import Request
from holdfast.rollout.local.blocks import Blocks
from holdfast.rollout.local.cache import BLOCK_SIZE
from holdfast.rollout.local.graphs import CHECKED_STEPS
from holdfast.rollout.local.pieces import Pieces
from holdfast.rollout.local.predictor import Predictor, RowState
from holdfast.rollout.local.rows import DeviceRows
from holdfast.rollout.local.texts import DecodedRow, Waiting, compute_pieces, compute_texts, state_of
from holdfast.rollout.sampling import Stops
from holdfast.types import Finish, host_value

_COPIES_OF_STATES = 5
"""Of all rows at most: slots, as many as a power of two, and what rows begin with or a recording is compared by."""


class Decoding:
    """Rows that are decoded together, and those that wait for room.

    Args:
        predictor: What draws tokens.
        on_device: The rows' memory.
        blocks: Which blocks of it are whose.
        stops: What ends a completion.
        limit: Largest number of tokens of a completion.
        most_rows: Largest number of rows that are decoded together.
        look_every: Most tokens between two looks at what has ended.
        pieces: Which texts are computed in pieces; None for none.
        state_blocks: Blocks that would take as much memory as the states of recurrent layers do in one row.
        remembers: Whether texts that begin as an earlier text and its completion read the blocks of these; it needs
            `pieces`.
    """

    def __init__(  # noqa: PLR0913 - what decoding is made of
        self,
        predictor: Predictor,
        on_device: DeviceRows,
        blocks: Blocks,
        stops: Stops,
        *,
        limit: int,
        most_rows: int,
        look_every: int,
        pieces: Pieces | None,
        state_blocks: int = 0,
        remembers: bool = False,
    ) -> None:
        self.predictor, self.on_device, self._blocks, self._stops = predictor, on_device, blocks, stops
        self._limit, self._configured_rows, self._most_rows, self._look_every = limit, most_rows, most_rows, look_every
        self._pieces, self._state_blocks = pieces, state_blocks
        self._remembers = remembers and pieces is not None
        self.rows: list[DecodedRow] = []
        """Those that are decoded, by slot."""
        self.waiting: deque[Waiting] = deque()
        self._begun = 0
        self._row_blocks = 0
        """Blocks of the longest row that was ever submitted."""

    @property
    def is_busy(self) -> bool:
        """Whether any row has not ended."""
        return bool(self.rows or self.waiting)

    def submit(self, requests: Iterable[Request]) -> None:
        """Let the rows of requests wait."""
        self.waiting.extend(Waiting.of(request) for request in requests)
        prompts = [(waiting.length, len(waiting.rows)) for waiting in self.waiting]
        ahead = self._limit + CHECKED_STEPS
        # One more: that of a text which ends within a block is copied.
        rows = (self._blocks.needed(length + ahead) + 1 for length, _ in prompts)
        self._row_blocks = max(self._row_blocks, *rows, 0)
        self._blocks.fit(self._row_blocks)
        if self._state_blocks and self._blocks.limit is not None:
            fit = self._blocks.limit // (self._row_blocks + _COPIES_OF_STATES * self._state_blocks)
            self._most_rows = max(1, min(self._configured_rows, fit))
        most = self._blocks.most(prompts, ahead, self._most_rows)
        # What is remembered fills the memory up to its limit.
        self.on_device.expect(self._blocks.limit or 0 if self._remembers else self._blocks.used + most)

    def advance(self) -> list[tuple[DecodedRow, Finish]]:
        """Let waiting rows begin and draw tokens until the next look; return the rows that have ended."""
        ended = self.begin_rows()
        if self.rows:
            count = min(self._look_every, self._limit - max(len(row.tokens) for row in self.rows))
            self._reserve(count)
            self.on_device.run(count)
            ended += self._look()
        return ended

    def begin_rows(self) -> list[tuple[DecodedRow, Finish]]:
        """Let rows begin while there is room for one; return those that end with their first token.

        A long text is computed by one piece a call.
        """
        ended: list[tuple[DecodedRow, Finish]] = []
        self._compute_piece()
        while admitted := self._admitted():
            ended += self._begin(admitted)
        return ended

    def step_at(self, length: int) -> None:
        """Draw a token in every row as if all had so many tokens, for plans."""
        self.on_device.stretch(length)
        self._reserve(1)
        self.on_device.run(1)
        self.on_device.look()

    def prepare(self, count: int) -> None:
        """Give rows the memory for so many tokens more."""
        self._reserve(count)
        self.on_device.settle(count)

    def abort(self) -> list[tuple[DecodedRow, Finish]]:
        """Give all rows up and return them."""
        aborted = [*self.rows, *(row for waiting in self.waiting for row in waiting.rows)]
        self._drop(range(len(self.rows)))
        for waiting in self.waiting:
            self._blocks.give_back(waiting.blocks)
        self.waiting.clear()
        return [(row, Finish.ABORT) for row in aborted]

    def _admitted(self) -> list[tuple[Waiting, int]]:
        """Return which waiting rows can begin now: of whom, and how many."""
        slots, blocks = max(0, self._most_rows - len(self.rows)), 0
        admitted: list[tuple[Waiting, int]] = []
        for waiting in self.waiting:
            if self._pieces is not None and self._pieces.cut(waiting, len(self._known(waiting)) * BLOCK_SIZE):
                break
            text = 0 if waiting.hidden is not None else self._blocks.needed(waiting.length)
            count = min(slots, len(waiting.rows))
            # Each row will want one more block soon, those that are decoded too. A row alone has room: see `Blocks`.
            while count and not self._blocks.has(blocks + text + count + len(self.rows)):
                count -= 1
            if not count and not self.rows and not admitted:
                self._forget_texts(waiting)
                count = 1
            if not count:
                break
            admitted.append((waiting, count))
            slots, blocks = slots - count, blocks + text + count
            if count < len(waiting.rows):
                break
        return admitted

    def _begin(self, admitted: Sequence[tuple[Waiting, int]]) -> list[tuple[DecodedRow, Finish]]:
        """Compute texts that have not been, draw the rows' first tokens, and return those that end with it."""
        if new := [waiting for waiting, _ in admitted if waiting.hidden is None]:
            self._compute(new)
        texts = [waiting for waiting, count in admitted for _ in range(count)]
        lengths, ahead = [waiting.length for waiting in texts], [waiting.ahead for waiting in texts]
        rows = [waiting.rows.popleft() for waiting in texts]
        state, ended = self._draw_first(rows, texts, ahead)
        self._join(state, [(rows[i], texts[i], lengths[i], i) for i in range(len(rows)) if i not in ended])
        while self.waiting and not self.waiting[0].rows:
            self._blocks.give_back(self.waiting.popleft().blocks)
        return list(ended.values())

    def _draw_first(
        self, rows: Sequence[DecodedRow], texts: Sequence[Waiting], ahead: Sequence[int]
    ) -> tuple[RowState, dict[int, tuple[DecodedRow, Finish]]]:
        """Draw the token behind each row's text; return the rows' state, and by index those that end with it."""
        state = state_of(self.predictor, rows, ahead, texts)
        drawn = self.predictor.draw(torch.stack([waiting.computed for waiting in texts]), state)
        tokens, logprobs = (host_value(part, "drawn tokens").tolist() for part in drawn)
        ended = {}
        for index, row in enumerate(rows):
            self._begun += 1
            row.number = self._begun
            finish = self._extend(row, [tokens[index]], [logprobs[index]])
            if finish is not None:
                ended[index] = (row, finish)
        return state, ended

    def _compute_piece(self) -> None:
        """Compute a piece of the text that is next, if it is a long one and a row of it could begin."""
        waiting = self.waiting[0] if self.waiting else None
        if waiting is None or self._pieces is None:
            return
        if not self._pieces.cut(waiting, len(self._known(waiting)) * BLOCK_SIZE):
            return
        if not waiting.blocks:
            needed = self._blocks.needed(waiting.length)
            if not self.rows:
                self._forget_texts(waiting)
            elif len(self.rows) >= self._most_rows or not self._blocks.has(needed + 1 + len(self.rows)):
                return
            self._take_blocks([waiting])
        self._pieces.advance(self.predictor, self.on_device.cache, waiting)

    def _known(self, waiting: Waiting) -> list[int]:
        """Return the blocks of a text's beginning that need not be computed."""
        return self._blocks.known(waiting.keys) if self._remembers and waiting.hidden is None else []

    def _take_blocks(self, several: Sequence[Waiting]) -> None:
        """Give texts blocks: those of their beginnings that are remembered, and others of their own."""
        unclean: list[int] = []
        for waiting in several:
            known = self._known(waiting)
            self._blocks.share(known)
            waiting.read = len(known) * BLOCK_SIZE
            fresh = self._blocks.take(self._blocks.needed(waiting.length) - len(known))
            waiting.blocks = known + fresh
            # A pass over pieces of several texts looks at blocks that are written later.
            unclean += fresh if self._pieces is not None else fresh[-1:]
        self.on_device.fit_memory()
        self.on_device.cache.clear(unclean)

    def _compute(self, several: Sequence[Waiting]) -> None:
        """Compute texts, what is remembered of them apart."""
        self._take_blocks(several)
        # What was remembered when a text was admitted may have made room for another one since.
        size = self._pieces.size if self._remembers and self._pieces is not None else None
        if whole := [text for text in several if not text.read and (size is None or text.length <= size)]:
            compute_texts(self.predictor, self.on_device.cache, whole)
        while size is not None and (rest := [text for text in several if text.hidden is None]):
            compute_pieces(self.predictor, self.on_device.cache, rest, size)

    def _join(self, state: RowState, going: Sequence[tuple[DecodedRow, Waiting, int, int]]) -> None:
        """Take rows into slots.

        Args:
            state: Of these rows and others.
            going: Of each row that goes on, what it begins with, how many tokens that has, and its index in the state.
        """
        if going:
            rows, texts, lengths, index = zip(*going, strict=True)
            tables = self._tables_of(texts, lengths)
            self.on_device.add(state.of(torch.tensor(index).to(self.predictor.device)), lengths, tables)
            self.rows += rows

    def _tables_of(self, texts: Sequence[Waiting], lengths: Sequence[int]) -> list[list[int]]:
        """Return each row's blocks: those of its text, but for a last one that is not full, which is copied."""
        tables, sources, targets = [], [], []
        for waiting, length in zip(texts, lengths, strict=True):
            table = waiting.blocks[: length // BLOCK_SIZE]
            self._blocks.share(table)
            if length % BLOCK_SIZE:
                sources.append(waiting.blocks[-1])
                targets += self._blocks.take(1)
                table.append(targets[-1])
            tables.append(table)
        self.on_device.fit_memory()
        self.on_device.cache.copy(sources, targets)
        return tables

    def _reserve(self, count: int) -> None:
        """Give rows blocks for so many tokens more; where there are not enough, pause the rows that began last."""
        while not self._blocks.has(sum(missing := self.on_device.missing_blocks(count))):
            if self._forget_texts(None):
                continue
            assert len(self.rows) > 1, "one row alone has room"
            last = max(range(len(self.rows)), key=lambda number: self.rows[number].number)
            paused = self.rows[last]
            self._drop([last])
            self.waiting.appendleft(Waiting(paused.request, deque([paused])))
        self.on_device.reserve(missing)

    def _forget_texts(self, spared: Waiting | None) -> bool:
        """Give the blocks of texts back whose rows wait, but for one; return whether there were any."""
        computed = [waiting for waiting in self.waiting if waiting.blocks and waiting is not spared]
        for waiting in computed:
            self._blocks.give_back(waiting.blocks)
            waiting.blocks, waiting.hidden, waiting.read, waiting.layers = [], None, 0, {}
        return bool(computed)

    def _look(self) -> list[tuple[DecodedRow, Finish]]:
        """Bring what was drawn to the host, drop the rows that have ended, and return them."""
        drawn, ended = self.on_device.look(), {}
        for number, row in enumerate(self.rows):
            finish = self._extend(row, drawn.tokens[number], drawn.logprobs[number])
            if finish is not None:
                ended[number] = (row, finish)
                self._remember(row, number)
        self._drop(list(ended))
        return list(ended.values())

    def _remember(self, row: DecodedRow, number: int) -> None:
        """Remember the blocks of a row that has ended, up to its last token, which no step has read for certain."""
        if self._remembers:
            whole = Waiting(row.request, deque([row]))
            self._blocks.remember(whole.keys, self.on_device.tables[number])

    def _extend(self, row: DecodedRow, tokens: list[int], logprobs: list[float]) -> Finish | None:
        """Append what was drawn; return how the row has ended, None if it goes on."""
        before = len(row.tokens)
        row.tokens += tokens
        row.logprobs += logprobs
        end = self._stops.end(row.tokens, before)
        finish = None
        if end is not None and end <= self._limit:
            finish = Finish.STOP
        elif len(row.tokens) >= self._limit:
            end, finish = self._limit, Finish.LENGTH
        if finish is not None:
            del row.tokens[end:], row.logprobs[end:]
        return finish

    def _drop(self, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        for source, target in self.on_device.remove(numbers):
            self.rows[target] = self.rows[source]
        del self.rows[len(self.on_device) :]
