"""A policy that says what a script says, in real environments."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from holdfast.config.sections.environment import EnvironmentConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.data.tokens.chat_template import ChatTemplate
from holdfast.environments.pool import EnvironmentPool
from holdfast.rollout.engine import Interrupted, Request, Sampled, converse
from holdfast.rollout.episodes.environments import EnvironmentLoop
from holdfast.rollout.episodes.episode import Episode, EpisodeRequest, Limits
from holdfast.rollout.episodes.history import TurnTemplate
from holdfast.rollout.episodes.proof import proved_parser
from holdfast.types import Finish
from tests.rollout.test_episode_tokens import CHATML

TOOLS = "def add(a: int, b: int) -> int:\n    '''Add.'''\n    return a + b\n"
GUESS = """
    from holdfast.environments.base import Observation
    class World:
        replayable = True
        def begin(self, row):
            self.target = row["target"]
            return "guess" if row.get("asks") else None
        def step(self, turn):
            if turn.text == "die":
                import os
                os._exit(3)
            right = turn.text == self.target
            return Observation("right" if right else f"no, after {turn.number + 1}", 1.0 if right else -0.1, right)
        def close(self): ...
"""
Script = Callable[[str], str]


class ScriptedEngine:
    """Says what a script answers to the text so far; ends with the end token unless the text is cut."""

    def __init__(self, tokenizer: Any, script: Script, cut: int = 10**6) -> None:
        self.tokenizer, self.script, self.cut = tokenizer, script, cut
        self.asked: list[list[Request]] = []
        self._waiting: list[Request] = []

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None: ...

    def submit(self, requests: Sequence[Request], sampling: SamplingConfig) -> None:
        self._waiting += requests
        self.asked.append(list(requests))

    def collect(self, interrupted: Interrupted = lambda: False) -> list[Sampled]:
        waiting, self._waiting = self._waiting, []
        return [self._said(request, place) for request in waiting for place in range(len(request.seeds))]

    def sleep(self) -> bool:
        return False

    def close(self) -> None: ...

    def _said(self, request: Request, place: int) -> Sampled:
        text = self.script(self.tokenizer.decode(request.prompt.tolist()))
        tokens = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        finish = Finish.STOP if len(tokens) <= self.cut else Finish.LENGTH
        tokens = tokens[: self.cut]
        logprobs = np.full(len(tokens), -0.5, np.float32)
        return Sampled(request.request_id, place, np.array(tokens, np.int64), logprobs, finish, 7)


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[..., list[Episode]]]:
    pools: list[EnvironmentPool] = []

    def run(
        engine: ScriptedEngine,
        rows: Sequence[dict[str, Any]],
        *,
        source: str = GUESS,
        splits_at: Sequence[str] = (),
        seed: int = 5,
        **options: Any,
    ) -> list[Episode]:
        (tmp_path / "world.py").write_text(textwrap.dedent(source))
        (tmp_path / "tools.py").write_text(TOOLS)
        limits = {"max_turns": 4, "max_length": 400, "max_new_tokens": 40, "max_seconds": None, "ends_when_cut": True,
                  "instances": 64, "max_characters": sys.maxsize}  # fmt: skip
        interrupted = options.pop("interrupted", lambda: False)
        limits |= {name: options.pop(name) for name in [*limits] if name in options}
        config = EnvironmentConfig.model_validate({"path": "world.py:World", **options})
        limits["max_failed_calls"] = config.max_failed_calls
        pools.append(EnvironmentPool(config, tmp_path, tmp_path / "logs"))
        pools[-1].start()
        template = ChatTemplate(engine.tokenizer, engine.tokenizer.chat_template or CHATML, {}, "it")
        writers = {
            name: TurnTemplate(template, tools, [engine.tokenizer.eos_token_id], splits_at)
            for name, tools in pools[-1].tools.items()
        }
        parsers = {name: proved_parser(template, writer, writer.tools) for name, writer in writers.items()}
        requests = []
        for place, row in enumerate(rows):
            messages = row.get("prompt", [{"role": "user", "content": "play"}])
            kind = pools[-1].kind_of(row, "the row")
            prompt = np.array(writers[kind].opening(messages), np.int64)
            requests.append(EpisodeRequest(0, place, seed + place, messages, prompt, row, writers[kind], parsers[kind]))
        decode = lambda tokens, plain: engine.tokenizer.decode(tokens, skip_special_tokens=plain)  # noqa: E731
        loop = EnvironmentLoop(requests, pools[-1], decode, Limits(**limits), interrupted)  # type: ignore[arg-type]
        converse(engine, loop, SamplingConfig())
        return loop.episodes

    yield run
    for pool in pools:
        pool.close()
