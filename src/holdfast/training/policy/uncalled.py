"""Tell of tools that a policy does not call: its reward stays low for a reason that no reward says."""

from __future__ import annotations

from holdfast.text.escaping import escaped
from holdfast.training.policy.rollouts import Rollout
from holdfast.training.policy.run import PolicyTraining

_STEPS = (3, 10, 30, 100)
"""After so many steps in a row without a call it is told."""
_LONGEST = 160


def tell_uncalled(training: PolicyTraining, rollout: Rollout) -> None:
    """Count steps in whose episodes nothing was called, and warn after some; all ranks call this together."""
    episodes = [fact.episode for group in rollout.sampled for fact in group.completions if fact.episode is not None]
    is_uncalled = bool(episodes) and not any(sum(episode.called.values()) for episode in episodes)
    training.steps_without_calls = training.steps_without_calls + 1 if is_uncalled else 0
    if training.steps_without_calls not in _STEPS:
        return
    examples = [said for said in training.run.ranks.gather(_said(rollout)) if said]
    if examples:
        training.run.log.messages.append(
            f"warning: no tool was called in {training.steps_without_calls} steps. The policy wrote instead: "
            f"{examples[0]} "
            "(its first words). Say in the prompt when to call which tool and show a call, or train on examples first "
            "(`holdfast sft`)"
        )


def _said(rollout: Rollout) -> str:
    """Return the beginning of a first turn of this rank's episodes that have tools; "" where there is none."""
    trajectories = (each for group in (*rollout.groups, *rollout.left_out) for each in group.trajectories)
    episodes = (trajectory.episode for trajectory in trajectories if trajectory.episode is not None)
    turns = (episode.messages[episode.prompt_messages :] for episode in episodes if episode.tools)
    texts = (escaped(str(turn[0]["content"]))[:_LONGEST] for turn in turns if turn)
    return next((text for text in texts if text.strip()), "")
