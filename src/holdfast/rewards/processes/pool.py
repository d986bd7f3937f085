"""The rank's end of the reward processes.

A rank never runs a reward itself: what hangs, prints, forks or dies does so in a process that can be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast import patience
from holdfast.config.sections.reward import Reward, RewardPoolConfig, repeated_labels
from holdfast.errors import ConfigError, RunStopped
from holdfast.files import python_module, read_end
from holdfast.rewards.base import Sample, SampleOutcome, Scored
from holdfast.rewards.combine import combine
from holdfast.rewards.processes import framing, kernel
from holdfast.text.escaping import escaped

_AUTO_WORKERS = 4
# One thread, or every worker would start as many as there are cores. A fixed hash seed, or sets would order their
# strings otherwise after a restart, and a sum over one would round otherwise. `env` changes both and nothing else.
_ENVIRONMENT = ("env", "OMP_NUM_THREADS=1", "PYTHONHASHSEED=0")
_MOST_SHOWN_LINES, _MOST_SHOWN_BYTES = 3, 1000
"""Of what a reward file printed, in a message."""


class RewardPool:
    """Scores samples in worker processes that can be killed; a context manager that starts and closes them.

    Paths of reward files are relative to `base`, and what the functions print goes to `log_path`. A supervisor process
    stands between this process and the workers. It sends a message every second while it works on a request; after
    `silent_seconds` without one it is killed.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        config: RewardPoolConfig,
        base: Path,
        log_dir: Path,
        *,
        silent_seconds: float = 60.0,
    ) -> None:
        if not rewards:
            raise ConfigError("reward: there is none. Name at least one, for example reward: [exact].")
        if repeated := repeated_labels(rewards):
            raise ConfigError(
                f"reward: two are called {repeated[0]}, and metrics could not tell them apart. Give one of them a name."
            )
        self._rewards, self._config, self._base = tuple(rewards), config, base
        self._silent_seconds = silent_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self.columns: dict[str, tuple[str, ...]] = {}
        """By name of the reward, the row columns that it requires; filled by `start`."""
        self._batched: list[str] = []
        """Names of the rewards that are called with lists, in order; filled by `start`."""
        self.log_path = log_dir / f"rewards-{os.uname().nodename}-{os.getpid()}.log"
        """What reward functions print, tracebacks of those that raise included."""
        self.log_is_named = False
        """Whether an error message has named the log, which must then be kept."""
        self._new_log: str | None = None
        self._log_start = 0
        """Size of the log at the start; an earlier process with the same number may have written to it."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes and import every user file in them; started already, do nothing.

        Raises:
            ConfigError: A reward cannot work: its file, its function, its signature, or a library it needs.
        """
        if self._process is not None:
            return
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        command = [*_ENVIRONMENT, *python_module("holdfast.rewards.workers.worker"), str(self.log_path)]
        self._process = subprocess.Popen(
            # Ctrl-C is sent to the terminal's process group; in a session of its own, the pool survives until the rank
            # ends it.
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self._end(0.0)
            raise

    def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """Return the reward of each sample, in their order.

        Raises:
            RunStopped: The process that keeps the workers died, or hangs.
        """
        outcomes = self.outcomes(samples)
        return [
            combine(sample, [line[index] for line in outcomes], self._rewards, self._config)
            for index, sample in enumerate(samples)
        ]

    def try_out(self, samples: Sequence[Sample]) -> dict[str, list[SampleOutcome]]:
        """Score samples with only the rewards that are called with lists; return outcomes by name of the reward.

        Raises:
            RunStopped: As `score`.
        """
        return dict(zip(self._batched, self.outcomes(samples, self._batched), strict=True))

    def outcomes(self, samples: Sequence[Sample], only: Collection[str] | None = None) -> list[list[SampleOutcome]]:
        """Return the outcome of each reward for each sample, as one list per reward.

        Args:
            samples: The samples to score.
            only: Names of the rewards to call; the result has no lists for the others. None: all.

        Raises:
            RunStopped: As `score`.
        """
        assert self._process is not None
        packed: list[bytes] = []
        unseen: dict[int, SampleOutcome] = {}
        for index, sample in enumerate(samples):
            try:
                packed.append(pickle.dumps(sample))
            except Exception as error:  # noqa: BLE001 - whatever a column's class does when it is pickled
                unseen[index] = SampleOutcome(fault="error", message=f"cannot be sent the row: {error}")
        reward_indices = self._places(only)
        answered = self._ask(reward_indices, packed) if packed and reward_indices else [[] for _ in reward_indices]
        lines = [iter(line) for line in answered]
        return [[unseen[index] if index in unseen else next(line) for index in range(len(samples))] for line in lines]

    def _places(self, only: Collection[str] | None) -> list[int]:
        return [index for index, reward in enumerate(self._rewards) if only is None or reward.label in only]

    def move_log(self, folder: Path) -> None:
        """Copy the log into another folder; functions print there from the next request on.

        Raises:
            OSError: It cannot be copied.
        """
        target = folder / self.log_path.name
        shutil.copyfile(self.log_path, target)
        self.log_path, self._new_log = target, str(target)

    def close(self) -> None:
        """End every process; closed already, do nothing."""
        self._end(patience.current.pool_close_seconds)

    def _end(self, timeout_seconds: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Its workers die with it: the kernel sees to that.
            kernel.kill_with_group(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience.current.pool_close_seconds)
            process.stdout.close()

    def _ask(self, reward_indices: Sequence[int], packed: Sequence[bytes]) -> list[list[SampleOutcome]]:
        requests, replies = self._channels()
        try:
            framing.write(requests, pickle.dumps((reward_indices, packed, self._new_log)), self._silent_seconds)
            reply = self._answer(replies)
        except BrokenPipeError:
            reply = None
        except TimeoutError:
            self._end(0.0)
            raise RunStopped(
                f"The reward processes have said nothing for {self._silent_seconds:g} s. Read {self._log()}; they may "
                "have been stopped, or hang in a file system. Then start the run again."
            ) from None
        except BaseException:
            self.close()  # KeyboardInterrupt: the answer is still under way, and nobody will read it
            raise
        if reply is None:
            raise RunStopped(f"The reward processes died{self._how()}. Read {self._log()}, then start the run again.")
        return [[SampleOutcome(**outcome) for outcome in reply[index]] for index in reward_indices]

    def _answer(self, replies: int) -> list[list[dict[str, Any]]] | None:
        """Skip the supervisor's signs of life and return its reply; None if it closed the channel."""
        while framing.has_come(replies, self._silent_seconds):
            message = framing.read_frame(replies, time.monotonic() + self._silent_seconds)
            if message is None:
                return None
            match json.loads(message):
                case {"outcomes": found}:
                    return list(found)
        raise TimeoutError

    def _channels(self) -> tuple[int, int]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin.fileno(), self._process.stdout.fileno()

    def _wait_until_ready(self) -> None:
        requests, replies = self._channels()
        workers, step_seconds = self._config.workers, self._config.step_timeout_seconds
        setup: dict[str, Any] = {
            "rewards": [(reward.label, reward.model_dump()) for reward in self._rewards],
            "base": str(self._base.resolve()),
            "timeout_seconds": self._config.timeout_seconds,
            "batch_size": self._config.batch_size,
            "step_seconds": None if step_seconds == "auto" else step_seconds,
            "workers": min(os.cpu_count() or 1, _AUTO_WORKERS) if workers == "auto" else workers,
        }
        seconds = self._config.start_timeout_seconds
        deadline = time.monotonic() + seconds
        building = self._rewards[0].label
        try:
            framing.write(requests, pickle.dumps(setup))
            while (reply := framing.read_frame(replies, deadline)) is not None:
                match json.loads(reply):
                    case {"building": str(name)}:
                        building = name
                    case {"mistake": str(mistake)}:
                        raise ConfigError(mistake)
                    case {"ready": columns, "batched": batched}:
                        self._batched = batched
                        self.columns = {str(name): tuple(needed) for name, needed in columns.items()}
                        return
        except BrokenPipeError:
            pass
        except TimeoutError:
            raise ConfigError(
                f"reward {building}: its file is still being imported after {seconds:g} s. Move slow work into the "
                "first call, or raise rewards.start_timeout_seconds."
            ) from None
        raise ConfigError(
            f"reward {building}: importing its file ended the process{self._how()}.{self._printed()} Import the file "
            "in a Python of your own."
        )

    def _printed(self) -> str:
        """Return the end of the log for a message: a run that is refused leaves no log behind."""
        lines = read_end(self.log_path, _MOST_SHOWN_BYTES, self._log_start).strip().splitlines()
        return f" It printed last: {escaped(' | '.join(lines[-_MOST_SHOWN_LINES:]))}." if lines else ""

    def _log(self) -> str:
        """Return the path of the log for a message; it may be moved to a run directory that is created later."""
        self.log_is_named = True
        return str(self.log_path) if self.log_path.exists() else f"logs/{self.log_path.name} in the run's directory"

    def _how(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ""
        return f" with signal {-code}" if code < 0 else f" with exit code {code}"
