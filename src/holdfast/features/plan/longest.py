"""Searches the longest row that fits, for each `parallel.context` and `parallel.offload`, by executing steps of rows.

A phase takes a fixed number of bytes, and a number that grows with the tokens of a row. So an execution tells at which
length each phase would fill the device, and the shortest of these lengths is executed next, until it is the one that
was executed. Every length that is told as fitting was executed and fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.config.load import from_mapping
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.verbs.training import TrainingConfig, as_plain
from holdfast.errors import HoldfastError, UserError
from holdfast.features.plan.counting.kinds import ACTIVATIONS, CACHE, TEMPORARY
from holdfast.features.plan.devices import GIB
from holdfast.features.plan.execution.origin import without_files
from holdfast.features.plan.execution.process import tell
from holdfast.features.plan.formulas import sequences_of_row
from holdfast.features.plan.records import RankSpec, plain_plan, room_for_tensors
from holdfast.features.plan.request import made, turns

MOST_EXECUTIONS = 6
"""Of one `context` and one `offload`; three suffice as a rule."""
_GROWING = (ACTIVATIONS, TEMPORARY, CACHE)
"""Kinds of bytes that grow with the tokens of a row."""
_FINE, _COARSE, _LONG = 64, 1024, 8192
"""Lengths are multiples of `_FINE` tokens, from `_LONG` tokens on of `_COARSE`."""


class NothingFits(HoldfastError):  # noqa: N818 - the name says what was found
    """Not even the shortest row fits the devices."""


@dataclass(frozen=True)
class Measured:
    """The peaks of an execution whose rows have a number of tokens."""

    tokens: int
    phases: Mapping[str, Mapping[str, Any]]
    """Row of the table -> bytes, as `total` and by kind as `parts`."""
    host_bytes: int = 0
    """Of host memory, at most."""

    @property
    def limiting(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=lambda row: int(self.phases[row]["total"]))

    @property
    def total(self) -> int:
        """Bytes at the peak of that phase."""
        return int(self.phases[self.limiting]["total"])

    def length_for(self, room: int, earlier: Measured | None = None) -> float:
        """Return at how many tokens the first of the phases would take all of the room.

        Args:
            room: Bytes.
            earlier: Another execution, which tells how phases grow; without one their parts do.
        """
        lengths = []
        for row, peak in self.phases.items():
            total = int(peak["total"])
            of_token = sum(int(peak["parts"].get(kind, 0)) for kind in _GROWING) / self.tokens
            if earlier is not None and row in earlier.phases:
                of_token = (total - int(earlier.phases[row]["total"])) / (self.tokens - earlier.tokens)
            if of_token > 0:
                lengths.append(self.tokens + (room - total) / of_token)
        return min(lengths, default=float("inf"))


def rounded(tokens: float) -> int:
    """Return a number of tokens, rounded down to a multiple that is a small share of it."""
    unit = _COARSE if tokens >= _LONG else _FINE
    return int(tokens // unit * unit)


def search(
    measure: Callable[[int], Measured], room: int, start: int, least: int, most: float = float("inf")
) -> Measured:
    """Return the execution of the longest row that fits; where none does, of the shortest that was tried.

    Args:
        measure: Executes rows of so many tokens.
        room: Bytes that tensors may take.
        start: Tokens of the rows that are executed first.
        least: The fewest tokens that are tried.
        most: The most tokens that are tried.
    """
    measured: list[Measured] = []
    tokens = int(min(max(start, least), most))
    while len(measured) < MOST_EXECUTIONS and tokens not in {known.tokens for known in measured}:
        measured.append(measure(tokens))
        estimate = measured[-1].length_for(room, measured[-2] if len(measured) > 1 else None)
        # An estimate stays between the longest row that is known to fit and the shortest that is known not to.
        low = max((known.tokens for known in measured if known.total <= room), default=least)
        high = min((known.tokens - 1 for known in measured if known.total > room), default=most)
        tokens = max(rounded(min(max(estimate, low), high)), low) if high > low else low
    if all(known.total > room for known in measured) and least < measured[-1].tokens:
        measured.append(measure(least))
    return max(
        measured, key=lambda known: (known.total <= room, known.tokens if known.total <= room else -known.tokens)
    )


def longest(request: dict[str, Any], no_guard: str = "") -> dict[str, Any]:
    """Return the longest row of each `parallel.context` and `parallel.offload`, JSON-ready.

    Args:
        request: As of `request.planned`.
        no_guard: Why nothing can be executed; "" where it can.

    Raises:
        UserError: The run could not start.
        NothingFits: No row fits.
    """
    config = from_mapping(request["config"], ROOTS[request["verb"]], "the run")
    on_cpu = request["device"] == "cpu"
    ranks = request["ranks"]
    spec = RankSpec(ranks, 0, "cpu" if on_cpu else "cuda", request["memory"])
    searching = _Searching(config, Path(request["base"]), spec, no_guard)
    contexts = [context for context in range(1, ranks + 1) if ranks % context == 0]
    answers = [searching.answer(context, offload) for offload in searching.offloads for context in contexts]
    tried = [answer for answer in answers if "refused" not in answer]
    if not tried:
        raise UserError(answers[0]["refused"])
    if all(answer["tokens"] is None for answer in tried):
        raise NothingFits(_nothing_fits(searching, tried))
    return {
        "ranks": ranks,
        "device": None if on_cpu else request["device"],
        "memory_bytes": request["memory"],
        "executed": searching.executed,
        "longest": answers,
        "executions": searching.executions,
        "cpu_seconds": time.process_time(),
        "notes": [*searching.notes, *searching.of_positions(answers)],
    }


def _prompt_of(config: TrainingConfig) -> int:
    """Return how many tokens of a row a completion follows; 0 where nothing is sampled."""
    if isinstance(config, GRPOConfig):
        return config.longest_context
    if isinstance(config, DistillConfig) and config.rollout is not None:
        return config.data.max_length - config.rollout.max_new_tokens
    return 0


class _Searching:
    """The search over values of `parallel.context` and `parallel.offload`, and what it learns on the way."""

    def __init__(self, config: TrainingConfig, base: Path, spec: RankSpec, no_guard: str) -> None:
        self._config, self._base, self._spec, self._no_guard = config, base, spec, no_guard
        self._rollout = config.rollout if isinstance(config, GRPOConfig | DistillConfig) else None
        self._has_turns = isinstance(config, GRPOConfig) and config.environment is not None
        self._prompt = _prompt_of(config)
        values = without_files(config, base, spec.device)[0].model.config or {}
        text = values.get("text_config") or values
        self._positions = int(text.get("max_position_embeddings") or 0)
        self.least = rounded(self._prompt) + _FINE
        self.most = self._positions if self._rollout is not None and self._positions else float("inf")
        self._refuse_no_room()
        self._tokens_of_rank = config.data.max_length / config.parallel.context
        more = () if spec.device == "cpu" else ({"activations"}, {"activations", "optimizer", "parameters"})
        self.offloads: list[list[str]] = [[*sorted(config.parallel.offloads)]]
        for kinds in more:
            if (offload := sorted(kinds.union(config.parallel.offloads))) not in self.offloads:
                self.offloads.append(offload)
        self.executions, self.executed, self.notes = 0, True, list[str]()

    def _refuse_no_room(self) -> None:
        if self.least > self.most:
            raise UserError(
                f"The model has {self._positions} positions (max_position_embeddings), and prompts may have "
                f"{self._prompt} tokens (data.max_length less rollout.max_new_tokens), which leaves no room for an "
                "answer. Lower data.max_length."
            )

    def answer(self, context: int, offload: list[str]) -> dict[str, Any]:
        """Return the longest row where so many ranks share one, and so much is kept in host memory."""
        room = room_for_tensors(self._spec.memory, self._spec.ranks if self._spec.device == "cuda" else 0)
        start = rounded(self._tokens_of_rank * context)
        before = self.executions
        answer: dict[str, Any] = {"context": context, "offload": offload}

        def measure(tokens: int) -> Measured:
            return self._measured(self.config_of(tokens, context, offload))

        try:
            best = search(measure, room, start, self.least, self.most)
        except UserError as error:
            return answer | {"refused": str(error)}
        limiting = best.phases[best.limiting]
        fits = best.total <= room
        if fits:
            self._tokens_of_rank = best.tokens / context
        if self.executions - before >= MOST_EXECUTIONS:
            self.notes.append(f"context {context}: a search ended after {MOST_EXECUTIONS} executions; longer may fit")
        return answer | {
            "tokens": best.tokens if fits else None,
            "tried": best.tokens,
            "tokens_per_rank": -(-best.tokens // context),
            "peak_bytes": best.total,
            "host_bytes": best.host_bytes,
            "room_bytes": room,
            "phase": best.limiting,
            "parts": dict(limiting["parts"]),
            "executions": self.executions - before,
        }

    def _measured(self, config: TrainingConfig) -> Measured:
        parallel = config.parallel
        tell(f"context {parallel.context}, offload [{', '.join(parallel.offload)}]: rows of {config.data.max_length:,}")
        execution = made(config, self._base, self._spec, self._no_guard)
        self.executions += 1
        self.executed = self.executed and execution.executed
        if execution.uncounted:
            raise UserError(
                f"How long a row may be is not known: a step cannot be executed here, and formulas leave "
                f"{execution.uncounted} out. {execution.notes[-1]}."
            )
        self.notes += [note for note in execution.notes if note not in self.notes]
        plan = plain_plan(execution, None, self._spec.memory)
        host_bytes = max((int(peak["total"]) for peak in plan["host"].values()), default=0)
        return Measured(config.data.max_length, plan["phases"], host_bytes)

    def config_of(self, tokens: int, context: int, offload: list[str]) -> TrainingConfig:
        """Return the run with rows of so many tokens, one to a micro-batch.

        Raises:
            ConfigError: Its rows cannot be shared, or not so much can be kept in host memory.
        """
        plain = as_plain(self._config)
        least = -(-tokens * sequences_of_row(self._config) // context)
        plain["data"] |= {"max_length": tokens, "tokens_per_micro_batch": least}
        plain["parallel"] |= {"context": context, "shard": "auto", "offload": offload, "cpu_offload": False}
        if self._rollout is not None and not self._has_turns:
            plain["rollout"] |= {"max_new_tokens": tokens - self._prompt}
        return from_mapping(plain, type(self._config), "the run")

    def turn(self, answer: Mapping[str, Any]) -> str:
        """Return the first change that leaves room for longer rows."""
        config = self.config_of(answer["tried"], answer["context"], answer["offload"])
        savings = [f"{saving.key}: {saving.value}" for saving in turns(config, self._spec)]
        recompute = [saving for saving in savings if saving.startswith("parallel.recompute")]
        return next(iter([*recompute, *savings]), "more ranks, or devices with more memory")

    def of_positions(self, answers: list[dict[str, Any]]) -> list[str]:
        """Return what to say where rows are longer than a model's positions."""
        tokens = max(answer.get("tokens") or 0 for answer in answers)
        if not self._positions or tokens < self._positions:
            return []
        if tokens == self.most:
            return [f"completions end at the model's {self._positions:,} positions (max_position_embeddings)"]
        return [
            f"the model has {self._positions:,} positions (max_position_embeddings): for longer rows say in "
            "model.config_override how it is to take them (rope_parameters, max_position_embeddings)"
        ]


def _nothing_fits(searching: _Searching, answers: list[dict[str, Any]]) -> str:
    answer = min(answers, key=lambda answer: int(answer["peak_bytes"]))
    parts = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in answer["parts"].items() if size >= GIB / 100)
    return (
        f"No row fits: rows of {answer['tried']} tokens take {answer['peak_bytes'] / GIB:.2f} GiB in {answer['phase']} "
        f"({parts}), and tensors may take {answer['room_bytes'] / GIB:.2f} GiB of each device. What to turn: "
        f"{searching.turn(answer)}, more ranks, or devices with more memory (--ranks, --device, --memory)."
    )
