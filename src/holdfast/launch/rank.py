"""One rank of a run: the program that our launcher starts, and the work of a process that torchrun has started."""

from __future__ import annotations

if __name__ == "__main__":
    from holdfast import interrupts

    interrupts.end_at_once(3)  # the launcher has told of the request

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast import patience
from holdfast.config.load import from_mapping
from holdfast.config.quiet import hush, leave_out_broken
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import HoldfastError, RankFailed, RunStopped, UserError, how_to_go_on
from holdfast.files import NotRegular
from holdfast.interrupts import end_at_once, raise_after_imports
from holdfast.launch.environment import has_launcher
from holdfast.launch.first_rank import await_first_rank, leave
from holdfast.launch.verdict import EXIT_WITHOUT_RESULT
from holdfast.parallel.failure.reports import DISK_ERRORS

if TYPE_CHECKING:
    from holdfast.parallel.mesh import World
    from holdfast.training.fit import Outcome

_UNSCORED = (
    "Not one completion of any evaluation set could be scored, so nothing was measured. The reason stands above; mend "
    "the reward, or the rows."
)


def _tell(left_out: Iterable[str]) -> None:
    for reason in left_out:
        print(f"{reason}.", file=sys.stderr, flush=True)


def work(verb: str, config: TrainingConfig, base: Path) -> int:
    """Join the other ranks, run the verb, and return the exit code."""
    # Until here a rank has done nothing, and the longest imports come now.
    end_at_once(RunStopped.exit_code, "" if has_launcher() else "Ctrl-C: stopped before the first step.\n")
    hush()
    left_out = leave_out_broken()
    from holdfast.parallel.mesh import joined_world
    from holdfast.training import fit  # noqa: F401 - with transformers

    raise_after_imports()
    first: bool | None = None
    try:
        with joined_world(config.launch, logs=True) as world:
            first = world.is_first
            _tell(left_out if first else [])
            return leave(_verbs(verb, config, base, world))
    except RankFailed as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except (HoldfastError, NotRegular) as error:
        # Every rank raises the same mistake of a user; the first speaks for all.
        speaks = first or not isinstance(error, UserError)
        # Where they have not joined nobody knows of the others, and whoever is told to speaks.
        if speaks or (await_first_rank() and first is None):
            print(error, file=sys.stderr, flush=True)
        return leave(error.exit_code if isinstance(error, HoldfastError) else UserError.exit_code)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        # A launcher says it for the rank, from the report that it left.
        if not has_launcher():
            print(f"{error}. {how_to_go_on(1)}", file=sys.stderr, flush=True)
        return leave(RunStopped.exit_code)


def _verbs(verb: str, config: TrainingConfig, base: Path, world: World) -> int:
    from holdfast.recipes.distill import distill
    from holdfast.recipes.dpo import dpo
    from holdfast.recipes.evaluation import evaluate_run, scored_nothing
    from holdfast.recipes.grpo import grpo
    from holdfast.recipes.reward import reward
    from holdfast.recipes.sft import sft
    from holdfast.training.watched import is_end

    if verb == "eval":
        if not scored_nothing(config, evaluate_run(config, base, world)):
            return 0
        if world.is_first:
            print(_UNSCORED, file=sys.stderr, flush=True)
        return EXIT_WITHOUT_RESULT
    recipes: dict[str, Callable[[Any, Path, World], Outcome]] = {
        "sft": sft,
        "dpo": dpo,
        "reward": reward,
        "grpo": grpo,
        "distill": distill,
    }
    outcome = recipes[config.verb](config, base, world)
    if world.is_first:
        print(_closing_words(outcome, dry=config.dry_run), flush=True)
    return 0 if is_end(outcome.stopped) else 3


def _closing_words(outcome: Outcome, *, dry: bool) -> str:
    if dry:
        return f"the dry run of {outcome.step} steps did everything once; nothing of it was kept"
    ending = f"{outcome.stopped}, after" if outcome.stopped is not None else "done after"
    model = f"; the model is in {outcome.export}" if outcome.export is not None else ""
    sentence = f"{ending} step {outcome.step}. The run is in {outcome.directory}{model}."
    return sentence if outcome.export is not None else "\n".join((sentence, *_models(outcome)))


def _models(outcome: Outcome) -> list[str]:
    """Describe the models of a run that ended without a final export, and the command that exports one."""
    from holdfast.training.saving.exports import EXPORTS, describe_exports

    exports = Path(outcome.directory) / EXPORTS
    content = describe_exports(Path(outcome.directory))
    lines = [f"{exports} holds {content}." if content else f"{exports} holds no model yet."]
    if outcome.export_command is not None:
        lines.append(f"To make a model of its newest checkpoint: {outcome.export_command}")
    return lines


def main() -> None:
    """Run as `python -m holdfast.launch.rank VERB TREE CONFIG.json BASE`; TREE is the verb of the configuration."""
    # A scheduler may send it to every process of a job, at any time; only a run that trains can save for it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    verb, tree, file, base = sys.argv[1:5]
    config = from_mapping(json.loads(Path(file).read_text(encoding="utf-8")), ROOTS[tree])
    try:
        code = work(verb, config, Path(base))
    except KeyboardInterrupt:  # before the first step, or the second Ctrl-C: there is nothing to tell
        code = RunStopped.exit_code
    if any(thread.name in {"holdfast-save", "holdfast-rows"} for thread in threading.enumerate()):
        # It was given up because it hangs in a file system or in a filter; Python would wait for it.
        _exit_at_once(code)
    exit_in_time(code)
    sys.exit(code)


def exit_in_time(code: int) -> None:
    """Have this process, which leaves with a code now, end within `threads_end_seconds` whatever its threads do.

    Python waits for threads, such as one that an observer started, for as long as they go on.
    """

    def watch() -> None:
        time.sleep(patience.current.exit_word_seconds)
        others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        names = ", ".join(thread.name for thread in others if not thread.daemon)
        if names:
            seconds = f"{patience.current.threads_end_seconds:g} s"
            print(f"Threads go on: {names}. The process waits for them {seconds} at most.", file=sys.stderr, flush=True)
        time.sleep(max(0.0, patience.current.threads_end_seconds - patience.current.exit_word_seconds))
        _exit_at_once(code)

    threading.Thread(target=watch, name="holdfast-exit", daemon=True).start()


def _exit_at_once(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
