"""Completions of a step that a person shall see: a few in a table, all of them in samples.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.escaping import escaped
from holdfast.training.policy.rollouts import Rollout
from holdfast.training.policy.run import PolicyRun
from holdfast.types import Finish, Group

_LONGEST = 160
"""Characters of a completion that the table shows."""


class Shown(NamedTuple):
    """One completion as text."""

    step: int
    sample_id: int
    prompt: str
    completion: str
    reward: float | None
    rewards: dict[str, float | None]
    advantage: float
    finish: str
    trained: bool
    """Whether its group is; what is left out of a step has no advantage."""


def tell_samples(run: PolicyRun, rollout: Rollout) -> None:
    """Every `rollout.show_every` steps, leave some completions to be shown, and all that were sampled to be written."""
    config, step = run.config.rollout, run.trained.state.step
    if step % config.show_every and step != 1:
        return
    own_samples = [_shown(step, group, trained=True) for group in rollout.groups]
    own_samples += [_shown(step, group, trained=False) for group in rollout.left_out]
    everyone = [item for of_rank in run.setting.ranks.gather(own_samples) for of_group in of_rank for item in of_group]
    shown = sorted(everyone, key=lambda item: item.sample_id)
    if run.setting.world.is_first and shown:
        run.setting.log.samples += [item._asdict() for item in shown]
        if config.show:
            run.setting.log.messages.append(table(choose_samples(shown, config.show), step))


def _shown(step: int, group: Group, *, trained: bool) -> list[Shown]:
    return [
        Shown(
            step,
            trajectory.sample_id,
            group.prompt.text,
            trajectory.completion,
            trajectory.reward,
            dict(trajectory.rewards),
            0.0 if trajectory.advantages is None else float(trajectory.advantages[-1]),
            trajectory.finish.value,
            trained,
        )
        for trajectory in group.trajectories
    ]


def choose_samples(shown: Sequence[Shown], count: int) -> list[tuple[str, Shown]]:
    """Return the best, the worst and the newest completion, and then the next best, each with its label."""
    scored = [item for item in shown if item.reward is not None] or list(shown)
    ranked = sorted(scored, key=lambda item: (-(item.reward or 0.0), item.sample_id))
    picked = [("best", ranked[0]), ("worst", ranked[-1]), ("newest", shown[-1])]
    return [*picked, *(("", item) for item in ranked[1:-1])][:count]


def table(picked: Sequence[tuple[str, Shown]], step: int) -> str:
    """Return completions as lines of text."""
    lines = [f"completions of step {step}:"]
    for label, item in picked:
        reward = "none" if item.reward is None else f"{item.reward:.2f}"
        cut = " (cut)" if item.finish == Finish.LENGTH.value else ""
        lines.append(f"  {label:>6}  reward {reward:>6}  {_short(item.prompt)} -> {_short(item.completion)}{cut}")
    return "\n".join(lines)


def _short(text: str) -> str:
    one_line = escaped(text)
    return one_line if len(one_line) <= _LONGEST else "..." + one_line[-_LONGEST:]
