"""Replaces sampling by the completions that an earlier run recorded (`rollout.record`).

Whatever a server computed together depended on the clock, so no run repeats its samples; from recorded ones updates
are repeated bit by bit. A completion is known by its prompt and its seed, which follow from the run's seed and step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.errors import ConfigError, RunStopped
from holdfast.features.forensics.record_files import DAMAGES, record_lines, record_paths
from holdfast.features.forensics.recorder import trajectory_of_record
from holdfast.rollout.engine import Interrupted, Request, Sampled
from holdfast.types import Finish, Group, Prompt


class _Recorded(NamedTuple):
    """One completion as it was written."""

    prompt: Sequence[int]
    """Tokens that all completions of its group begin with."""
    completion: Mapping[str, Any]


_Completions = Mapping[tuple[int, int], _Recorded]
"""Those of a step, by prompt and seed."""


class RecordedEngine:
    """An engine that returns recorded completions.

    Implements `RolloutEngine`, `AheadEngine` and `EpisodeRecords` of `rollout/engine.py`.

    Args:
        directory: Directory of the run that recorded its rollouts.

    Raises:
        ConfigError: The run recorded no rollouts.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = record_paths(directory)
        if not self._files:
            raise ConfigError(
                f"rollout.engine.path: {directory} has no recorded rollouts; its run needs rollout.record: true."
            )
        self._place = 0
        self._open: _Completions = {}
        self._submitted: list[_RecordedFlight] = []

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take no weights: nothing is sampled from them."""

    def begin(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        done: Sequence[Sampled] = (),  # noqa: ARG002 - all of them are
    ) -> _RecordedFlight:
        """Look up what was recorded.

        Raises:
            RunStopped: There is no such completion.
        """
        return _RecordedFlight(
            [self._completion(request, index, sampling) for request in requests for index in range(len(request.seeds))]
        )

    def submit(self, requests: Sequence[Request], sampling: SamplingConfig) -> None:
        """Accept requests."""
        self._submitted.append(self.begin(requests, sampling))

    def collect(self, interrupted: Interrupted = lambda: False) -> list[Sampled]:  # noqa: ARG002 - it takes no time
        """Return all completions of what was submitted."""
        answered, self._submitted = self._submitted, []
        return [sampled for flight in answered for sampled in flight.collect()]

    def sleep(self) -> bool:
        """Have no weights to give back."""
        return False

    def close(self) -> None:
        """Have nothing to close."""

    def episodes(self, prompt: Prompt, seeds: Sequence[int], sampling: SamplingConfig) -> Group:
        """Return the recorded episodes of a prompt.

        Raises:
            RunStopped: There is no such episode, or what is recorded of it is damaged.
        """
        recorded = [self._recorded(prompt.prompt_id, seed, index, sampling) for index, seed in enumerate(seeds)]
        prompt = replace(prompt, tokens=np.asarray(recorded[0].prompt, np.int64))
        try:
            trajectories = tuple(trajectory_of_record(prompt, record.completion) for record in recorded)
        except (ValueError, LookupError, TypeError) as error:
            raise RunStopped(
                f"{self._files[self._place]} has no whole episodes of prompt {prompt.prompt_id} "
                f"({type(error).__name__}: {error})."
            ) from error
        return Group(prompt, trajectories)

    def _recorded(self, prompt_id: int, seed: int, index: int, sampling: SamplingConfig) -> _Recorded:
        key = prompt_id, seed
        if key not in self._open:
            self._open = self._step_with(key)
        recorded = self._open[key]
        if recorded.completion["temperature"] != sampling.temperature:
            raise RunStopped(
                f"Completion {index} of prompt {prompt_id} was recorded at temperature "
                f"{recorded.completion['temperature']:g}, and rollout.temperature is {sampling.temperature:g}."
            )
        return recorded

    def _completion(self, request: Request, index: int, sampling: SamplingConfig) -> Sampled:
        completion = self._recorded(request.request_id, request.seeds[index], index, sampling).completion
        tokens = np.asarray(completion["tokens"], np.int64)
        logprobs = np.asarray(completion["sampler_logprobs"], np.float32)
        versions = tuple((int(start), int(version)) for start, version in completion["versions"])
        return Sampled(
            request.request_id,
            index,
            tokens,
            logprobs,
            Finish(completion["finish"]),
            versions[0][1] if versions else -1,
            versions if len(versions) > 1 else (),
            int(np.count_nonzero(np.isnan(logprobs))),
        )

    def _step_with(self, key: tuple[int, int]) -> _Completions:
        """Return the step of a completion; a run goes forward, so what follows the present one is looked at first."""
        order = [*range(self._place, len(self._files)), *range(self._place)]
        for number in order:
            step = _read(self._files[number])
            if key in step:
                self._place = number
                return step
        raise RunStopped(
            f"{self._directory} has no recorded completion of prompt {key[0]} with seed {key[1]}: its run drew other "
            "prompts, has another seed or group_size, or made fewer steps. Greedy completions and evaluations are not "
            "recorded."
        )


class _RecordedFlight:
    """A request that recorded completions answer; implements `Flight` of `rollout/engine.py`."""

    def __init__(self, completions: list[Sampled]) -> None:
        self._completions = completions

    def finished(self) -> list[Sampled]:
        """Return all completions: recorded ones are finished from the start."""
        return list(self._completions)

    def collect(self, interrupted: Interrupted = lambda: False) -> list[Sampled]:  # noqa: ARG002 - it takes no time
        """Return all completions."""
        return list(self._completions)

    def end(self) -> None:
        """Have nothing to give up."""


def _read(path: Path) -> _Completions:
    """Read a step's completions.

    Raises:
        RunStopped: The file is damaged, or was written by a version that kept less.
    """
    try:
        return {
            (line["prompt_id"], completion["seed"]): _Recorded(line["prompt"], completion)
            for line in record_lines(path)[1:]  # behind the one about the step
            for completion in line["completions"]
        }
    except DAMAGES as error:
        raise RunStopped(f"{path} cannot be read ({type(error).__name__}: {error}).") from error
