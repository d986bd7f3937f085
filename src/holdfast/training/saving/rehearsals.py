"""The rehearsals of a run: that it can be saved and loaded, and hears SIGTERM, is seen before it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.checkpoint.keep.retention import replaceable
from holdfast.checkpoint.saving.rehearsal import (
    CheckpointCounts,
    NonTensorState,
    RehearsalFailed,
    RehearsalReport,
    run_rehearsal,
)
from holdfast.checkpoint.session import Saved, Session
from holdfast.config.sections.optim import UserOptimizerConfig
from holdfast.optim.user import rehearse_user_optimizer
from holdfast.training.control import StopRequests
from holdfast.training.run import Training, say
from holdfast.training.saving.exports import check_export
from holdfast.training.saving.run_snapshot import Contents, checked_assets


class Rehearsals:
    """Rehearses a save before the first step and again if the first step changed the tensors.

    Args:
        training: The run.
        session: Its saves: they tell where checkpoints go, and over which ranks.
        contents: What they hold.
    """

    def __init__(self, training: Training, session: Session, contents: Contents) -> None:
        self._training = training
        self._config = training.run.config.checkpoint
        self._session = session
        self._contents = contents
        self._report: RehearsalReport | None = None
        """Of the rehearsal before the first step; None from the end of that step on."""

    def before_first_step(self, requests: StopRequests) -> None:
        """Save, verify and load once, and let a SIGTERM pass, before anything is trained; all ranks call this together.

        Raises:
            RehearsalFailed: A checkpoint could not be made; nothing was trained.
            ConfigError, UnsavableOptimizer: As `rehearse_user_optimizer`.
        """
        training, config = self._training, self._config
        if not config.rehearsal or training.finished:
            return
        with training.run.phase("rehearsal"):
            with training.run.ranks.together():
                check_export(training)
                assets = checked_assets(training)
            self._rehearse_user_optimizer()
            training.model.state.observers = training.run.ranks.agree(training.model.state.observers)
            shared: dict[str, Any] = {"state": training.model.state.as_plain(), "stream": training.stream.state()}
            if training.ahead is not None:
                shared["ahead"] = training.ahead.largest()
            extras = NonTensorState(shared, assets=assets)
            report = self._report = self._rehearse(extras)
            self._drill(requests)
        description = report.describe(ranks=training.run.world.size, background=config.background)
        late = report.save_seconds > config.grace_seconds
        warning = (
            f"warning: a save takes {report.save_seconds:.0f} s, longer than checkpoint.grace_seconds="
            f"{config.grace_seconds:g}: a run that gets SIGTERM may be killed before its checkpoint is whole"
        )
        say(training, description, *([warning] if late else []))

    def after_step(self, requests: StopRequests, collect: Callable[[], list[Saved]]) -> list[Saved]:
        """Drill after the first step, and rehearse again if the tensors are not as rehearsed.

        Args:
            requests: Hear SIGTERM.
            collect: Waits for a save in flight, which uses the same ranks.

        Returns:
            The save that this had to wait for.

        Raises:
            RehearsalFailed: No checkpoint can be made of what is trained by now.
        """
        before, self._report = self._report, None
        if before is None:
            return []
        self._drill(requests)  # by now the user's losses and models have run
        if self._config.contents != "full":
            return []
        outline = self._contents.outline()
        if not any(self._training.run.ranks.gather(outline != before.outline)):
            return []
        saved = collect()
        self._rehearse()
        return saved

    def _rehearse_user_optimizer(self) -> None:
        """Rehearse an optimizer's class that a user named, of which nobody knows what it keeps."""
        run, model = self._training.run, self._training.model
        if isinstance(optim := run.config.optim, UserOptimizerConfig):
            kind, all_raise = type(model.updater), run.whether_all_raise()
            rehearse_user_optimizer(optim, kind, model.parameters, run.ranks, all_raise)

    def _rehearse(self, extras: NonTensorState | None = None) -> RehearsalReport:
        training, session, contents, keep = self._training, self._session, self._contents, self._config.keep
        resumed = set() if session.resumed is None else {session.resumed.step}
        replaced = training.run.ranks.on_first_rank(
            lambda: replaceable(session.storage, session.retention, needed=resumed)
        )
        return run_rehearsal(
            session.storage,
            contents.tensors,
            contents.optimizer,
            session.ranks,
            counts=CheckpointCounts(keep.last + sum(best.count for best in keep.best), replaced),
            trained_steps=training.model.state.step,
            state=extras,
            companions=contents.companion_states(),
        )

    def _drill(self, requests: StopRequests) -> None:
        deaf = requests.drill(self._training.run.ranks)
        if deaf:
            raise RehearsalFailed(
                f"SIGTERM does not reach rank {deaf[0]}: something replaced its handler, or blocks it, so a preempted "
                "run would lose its last steps. Look for signal.signal and pthread_sigmask in your code and libraries."
            )
