"""Early stopping (`stop_when`) and learning rates that fall when a metric stops improving (`plateau`).

The best value of a metric, and the number of measurements since, are part of the run's state, so that a resumed run
decides like one that was never interrupted. `watch_metric` is called after every step, with or without a new value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from holdfast.config.sections.measured import PatienceConfig
from holdfast.config.sections.optim import PlateauSchedule
from holdfast.metrics.sink import BY_METRIC, BY_OBSERVER, METRICS, read_metrics
from holdfast.training.run import PLATEAU_FACTOR, Model, Training, TrainState

STOP, PLATEAU = "stop_when", "plateau"
OWED = "evaluation_owed"
"""Key in the state of a run that stopped before a deciding evaluation was complete; the next start makes it."""


def is_end(stopped: str | None) -> bool:
    """Return whether a run that gives this reason has ended, as at its last step."""
    return stopped is None or stopped == BY_OBSERVER or stopped.startswith(BY_METRIC)


class MetricStanding(NamedTuple):
    """Best value of a metric and the number of measurements since."""

    best: float | None
    """None before it was measured."""
    without: int
    """Measurements since the best one."""


def after(section: PatienceConfig, standing: MetricStanding, value: float) -> MetricStanding:
    """Return where a metric stands after it was measured; what is not a finite number is no improvement."""
    best = standing.best
    if not math.isfinite(value):
        return standing._replace(without=standing.without + 1)
    gain = math.inf if best is None else value - best if section.mode == "max" else best - value
    return (
        MetricStanding(float(value), 0) if gain > section.min_delta else standing._replace(without=standing.without + 1)
    )


def standing_of(state: TrainState, name: str, section: PatienceConfig) -> MetricStanding:
    """Return where the metric of `stop_when` or of a plateau stands; another metric begins anew."""
    key = _key(name, section)
    return MetricStanding(state.watched.get(f"{key}/best"), int(state.watched.get(f"{key}/without", 0)))


def _note(state: TrainState, name: str, section: PatienceConfig, standing: MetricStanding) -> None:
    key = _key(name, section)
    if standing.best is not None:
        state.watched[f"{key}/best"] = standing.best
    state.watched[f"{key}/without"] = float(standing.without)


def _key(name: str, section: PatienceConfig) -> str:
    return f"{name}/{section.mode}/{section.metric}"


def _followed(training: Training) -> Iterator[tuple[Model, PatienceConfig]]:
    """Yield what follows a metric, with the model whose state says where the metric stands."""
    if training.run.config.stop_when is not None:
        yield training.model, training.run.config.stop_when
    for model in (training.model, *training.companions.values()):
        schedule = model.run.config.optim.schedule
        if isinstance(schedule, PlateauSchedule):
            yield model, schedule


def follows_steps(training: Training) -> bool:
    """Return whether numbers of training steps, and not of evaluations alone, decide about the run."""
    best = training.run.config.checkpoint.export_best
    metrics = [section.metric for _, section in _followed(training)] + ([] if best is None else [best.metric])
    return not all(map(_is_evaluated, metrics))


def watch_metric(
    training: Training, line: Mapping[str, float], *, due: bool = False, stopped: str | None = None
) -> str | None:
    """Take the numbers of a step, its evaluation included; all ranks call this together, and rank 0's numbers count.

    Args:
        training: Whose state says where metrics stand.
        line: The numbers.
        due: An evaluation belongs to this step. If the run stops, perhaps not all of it was made.
        stopped: Why the run stops for another reason.

    Returns:
        Why the run stops now.
    """
    state, followed = training.model.state, list(_followed(training))
    if followed:
        line = training.run.ranks.agree(dict(line))
    state.watched.pop(OWED, None)
    if not followed:
        return stopped
    names = [section.metric for _, section in followed]
    if due and stopped is not None:
        line = _without_half_an_evaluation(training, names, line)
    else:
        _warn_of_missing(training, names, line)
    for model, section in followed:
        if section.metric not in line:
            continue
        if isinstance(section, PlateauSchedule):
            _reduce(model, section, line[section.metric])
        else:
            standing = after(section, standing_of(state, STOP, section), line[section.metric])
            _note(state, STOP, section, standing)
    return stopped or reason_to_end(training)


def owe(training: Training, line: Mapping[str, float]) -> None:
    """Watch the numbers of a step, and note that its evaluation is owed in case an error comes before it."""
    watch_metric(training, line)
    if any(_is_evaluated(section.metric) for _, section in _followed(training)):
        training.model.state.watched[OWED] = 1.0


def owes_evaluation(training: Training) -> bool:
    """Return whether an evaluation of the present step is left to make; all ranks call this together.

    A start that makes an owed evaluation reports it, and saves nothing if the run ends with it. The starts that follow
    take its numbers from metrics.jsonl.
    """
    if training.model.state.watched.get(OWED):
        reported = training.run.ranks.on_first_rank(lambda: _reported_evaluation(training))
        if reported and all(
            section.metric in reported for _, section in _followed(training) if _is_evaluated(section.metric)
        ):
            watch_metric(training, reported, due=True)
    return bool(training.model.state.watched.get(OWED))


def _reported_evaluation(training: Training) -> dict[str, float]:
    """Return the evaluation of the present step in metrics.jsonl; {} where it has none."""
    path, step = training.run.directory / METRICS, training.model.state.step
    try:
        lines = read_metrics(path) if path.exists() else []
        values = {name: value for line in lines if line.get("step") == step for name, value in line.items()}
        evaluated = {name: value for name, value in values.items() if _is_evaluated(name)}
        return {name: math.nan if value is None else float(value) for name, value in evaluated.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # somebody wrote into the file: the evaluation is made
        return {}


def _without_half_an_evaluation(training: Training, names: list[str], line: Mapping[str, float]) -> Mapping[str, float]:
    """Return the numbers that count; the next start makes a whole evaluation of one that was left."""
    if all(name in line for name in names if _is_evaluated(name)):
        return line
    training.model.state.watched[OWED] = 1.0
    return {name: value for name, value in line.items() if not _is_evaluated(name)}


def _is_evaluated(name: str) -> bool:
    return name.startswith("eval/")


def _warn_of_missing(training: Training, names: list[str], line: Mapping[str, float]) -> None:
    evaluated, first = any(map(_is_evaluated, line)), training.model.state.step == 1
    for name in names:
        if name not in line and (evaluated if _is_evaluated(name) else first and not evaluated):
            training.run.log.messages.append(
                f"warning: {name}, which stop_when or optim.schedule follows, was not measured at step "
                f"{training.model.state.step}; metrics.jsonl has the names of those that were"
            )


def _reduce(model: Model, schedule: PlateauSchedule, value: float) -> None:
    """Lower the rate if its metric has stopped improving; the next `cooldown` measurements are not counted."""
    state, cooldown = model.state, int(model.state.watched.get(f"{PLATEAU}/resting", 0))
    standing = after(schedule, standing_of(state, PLATEAU, schedule), value)
    if cooldown:
        cooldown, standing = cooldown - 1, standing._replace(without=0)
    if standing.without >= schedule.patience:
        before = state.watched.get(PLATEAU_FACTOR, 1.0)
        factor = max(schedule.final_ratio, before * schedule.factor)
        cooldown, standing = schedule.cooldown, standing._replace(without=0)
        if factor < before:
            state.watched[PLATEAU_FACTOR] = factor
            model.run.log.messages.append(
                f"optim.schedule: {schedule.metric} has not improved on {standing.best:.6g}; the learning rate is "
                f"{model.run.config.optim.lr * factor:.3g} from step {state.step + 1} on"
                if standing.best is not None
                else f"optim.schedule: {schedule.metric} was no number; the rate falls by {schedule.factor:g}"
            )
    _note(state, PLATEAU, schedule, standing)
    state.watched[f"{PLATEAU}/resting"] = float(cooldown)


def reason_to_end(training: Training) -> str | None:
    """Return why the metric of `stop_when` ends the run at the step it stands at; None if it does not."""
    section, state = training.run.config.stop_when, training.model.state
    if section is None or state.step < training.run.config.min_steps:
        return None
    standing = standing_of(state, STOP, section)
    if standing.without < section.patience:
        return None
    best = "was never a number" if standing.best is None else f"has not improved on {standing.best:.6g}"
    return f"{BY_METRIC}{section.metric} {best} in {standing.without} measurements"
