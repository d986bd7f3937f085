"""Alarms for runs that go wrong; each is a sentence that says what was observed and what to try.

Alarms look at the metrics of the last steps since the start of the process, and change nothing. An alarm whose metric a
run does not have stays silent, so that most do in supervised runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

from holdfast.metrics.divergence import COMPARED_STEPS, LONGEST_PAST, Past, diverged, guessing, last_values, reward_fell

_REPEAT_STEPS = 50
"""Steps for which an alarm rests after it sounded."""
_LASTING_STEPS = 5
"""Steps in a row that what is no alarm in one step lasts before it counts."""
_FLAT_REWARD_STEPS = 20
"""Steps in a row with one and the same mean reward."""
_FLAT_GROUPS = 0.8
"""Share of groups whose completions have one reward."""
_TRUNCATED = 0.3
"""Share of completions cut at `rollout.max_new_tokens`."""
_LOWEST_ENTROPY = 0.01
"""Nats per token, of the entropy where it is measured (`metrics.entropy`), else of its estimate from samples."""
_REWARD_FAULTS = 0.01
"""Share of a step's completions whose reward timed out, raised or was not a finite number."""
_JUMP = 10.0
"""A KL or a gradient norm this many times its usual value."""
_JUMP_OF_LARGEST = 5.0
"""A gradient norm this many times the largest of the last 20 steps; one that grows from step to step is no spike."""
_USUAL_STEPS = 20
"""Steps whose median is the usual value of a number."""
_FEWEST_STEPS = 10
"""Of them, before anything counts as unusual."""
_SMALL_KL = 0.01
"""Nats per token; a jump that stays below is no alarm, since a KL starts from 0."""
_PREFERENCE_STEPS = 20
"""Steps in a row in which fewer than half of the pairs are in the right order."""
_SKIPPED_UPDATES = 3
"""Updates of the last 20 steps that are skipped since their gradient is no finite number."""
_CUT_ROWS = 0.1
"""Share of rows that lose their end, or are left out as too long or as training nothing."""
_LOSS_JUMP = 3.0
"""A supervised loss this many times its usual value."""
_SLOW = 0.5
"""Share of its usual throughput that a run falls to."""
_STRAGGLES = 1.5
"""Work of the slowest rank over that of the one in the middle."""
STRAGGLER_STEPS = 10
"""Steps between two comparisons of the ranks' work."""
SLOWEST, SLOWEST_RATIO = "ranks/slowest", "ranks/slowest_ratio"
"""The rank that worked longest since the comparison before, and its work over that of the one in the middle."""
SPIKES = frozenset({"gradient_spike", "loss_spike"})
"""Alarms about what one batch did, which is recorded."""
_SAME = 1e-6
"""Rewards within this range are one value."""

Alarm = Callable[[Past], str | None]


class Health:
    """Checks each step's metrics and raises alarms; an alarm is not repeated for a while.

    Args:
        vocabulary: Tokens that the model tells apart; None where nothing is compared with guessing one.
    """

    def __init__(self, vocabulary: int | None = None) -> None:
        self._past: deque[Mapping[str, float]] = deque(maxlen=LONGEST_PAST)
        self._first = first = list[Mapping[str, float]]()
        self._sounded: dict[str, int] = {}
        self._alarms: dict[str, Alarm] = {
            **_ALARMS,
            "diverged": lambda past: diverged(past, first),
            "reward_fell": lambda past: reward_fell(past, first),
        }
        if vocabulary is not None and vocabulary > 1:
            self._alarms["guessing"] = lambda past: guessing(past, math.log(vocabulary))

    def see(self, step: int, metrics: Mapping[str, float]) -> dict[str, str]:
        """Return the alarms of a step, by name."""
        self._past.append(metrics)
        if len(self._first) < COMPARED_STEPS:
            self._first.append(metrics)
        past = list(self._past)
        alarms = {}
        for name, alarm in self._alarms.items():
            last = self._sounded.get(name)
            if last is not None and step - last < _REPEAT_STEPS:
                continue
            if sentence := alarm(past):
                alarms[name] = sentence
                self._sounded[name] = step
        return alarms


def _flat_reward(past: Past) -> str | None:
    values = last_values(past, "reward", _FLAT_REWARD_STEPS)
    if not values or max(values) - min(values) > _SAME:
        return None
    return (
        f"the reward has been {values[-1]:.4g} in each of the last {len(values)} steps. What never changes teaches "
        "nothing: read samples.jsonl, and score some of its completions by hand."
    )


def _flat_groups(past: Past) -> str | None:
    values = last_values(past, "frac_reward_zero_std", _LASTING_STEPS)
    if not values or min(values) <= _FLAT_GROUPS:
        return None
    return (
        f"in {values[-1]:.0%} of the groups all completions have one reward, and for {len(values)} steps it has been "
        f"more than {_FLAT_GROUPS:.0%}. Such groups teach nothing. If the reward is not at its best, choose "
        "prompts that the policy solves sometimes, raise rollout.group_size, or set groups.flat: resample."
    )


def _truncation(past: Past) -> str | None:
    values = last_values(past, "completions/clipped_ratio", _LASTING_STEPS)
    if not values or min(values) <= _TRUNCATED:
        return None
    return (
        f"{values[-1]:.0%} of the completions are cut at rollout.max_new_tokens, and for {len(values)} steps it has "
        f"been more than {_TRUNCATED:.0%}. Raise rollout.max_new_tokens, or look in samples.jsonl for "
        "completions that do not end."
    )


def _low_entropy(past: Past) -> str | None:
    measured = last_values(past, "entropy", _LASTING_STEPS)
    values = measured or last_values(past, "entropy_estimate", _LASTING_STEPS)
    if not values or max(values) >= _LOWEST_ENTROPY:
        return None
    name = "entropy" if measured else "estimated entropy"
    return (
        f"the {name} is {values[-1]:.2g} nats per token, and for {len(values)} steps it was below "
        f"{_LOWEST_ENTROPY:g}: the policy hardly explores. Lower optim.lr, raise objective.high, or set "
        "entropy.coefficient."
    )


def _reward_faults(past: Past) -> str | None:
    faults = {kind: int(past[-1].get(f"reward/{kind}", 0)) for kind in ("timeout", "error", "nan")}
    total = past[-1].get("rollout/completions", 0)
    if not total or sum(faults.values()) <= _REWARD_FAULTS * total:
        return None
    listing = ", ".join(f"{count} by {kind}" for kind, count in faults.items() if count)
    return (
        f"{sum(faults.values())} of {total:.0f} completions could not be scored ({listing}). The lines above name "
        "some; what the functions print is in logs/."
    )


def _kl_jump(past: Past) -> str | None:
    value, usual = _usual(past, "kl")
    if not value > max(_SMALL_KL, _JUMP * usual):
        return None
    return (
        f"the KL to the reference is {value:.2g} nats per token, and it was {usual:.2g} in the steps before. Lower "
        "optim.lr, or raise kl.coefficient."
    )


def _gradient_spike(past: Past) -> str | None:
    value, usual = _usual(past, "grad_norm")
    before = [line.get("grad_norm", 0.0) for line in past[-_USUAL_STEPS - 1 : -1]]
    if not (usual > 0 and value > max(_JUMP * usual, _JUMP_OF_LARGEST * max(before))):
        return None
    return (
        f"the gradient norm is {value:.3g}, and it was {usual:.3g} in the steps before. If this comes again, lower "
        "optim.lr or optim.clip_norm."
    )


def _loss_spike(past: Past) -> str | None:
    """Say that a supervised loss jumped; the loss of a policy lies around 0 and says nothing by its size."""
    value, usual = _usual(past, "loss")
    if "mean_token_accuracy" not in past[-1] or not (usual > 0 and value > _LOSS_JUMP * usual):
        return None
    return (
        f"the loss is {value:.3g}, and it was {usual:.3g} in the steps before. Look at the rows of this batch; if this "
        "comes again, lower optim.lr."
    )


def _slow(past: Past) -> str | None:
    """Say that throughput fell, and which phase takes the time."""
    name = "throughput/tokens_per_second"
    recent = last_values(past, name, _LASTING_STEPS)
    before = [line[name] for line in past[:-_LASTING_STEPS] if name in line]
    if not recent or len(before) < _FEWEST_STEPS or max(recent) >= _SLOW * median(before):
        return None
    phases = {key for line in past for key in line if key.startswith("timing/")}
    more = {key: _mean(past[-_LASTING_STEPS:], key) - _mean(past[:-_LASTING_STEPS], key) for key in sorted(phases)}
    slowest = max(more, key=more.__getitem__, default=None)
    phase_sentence = ""
    if slowest is not None and more[slowest] > 0:
        phase_sentence = (
            f" Phase {slowest.removeprefix('timing/')} takes {_mean(past[-_LASTING_STEPS:], slowest):.3g} s a step, "
            f"and it took {_mean(past[:-_LASTING_STEPS], slowest):.3g} s."
        )
    return (
        f"throughput has been below {_SLOW:.0%} of {median(before):,.0f} tokens per second for {len(recent)} steps; it "
        f"is {recent[-1]:,.0f}.{phase_sentence} Look at what else runs on these machines, or set profile."
    )


def _mean(lines: Past, name: str) -> float:
    return sum(line.get(name, 0.0) for line in lines) / len(lines)


def _straggler(past: Past) -> str | None:
    looks = [(int(line[SLOWEST]), line[SLOWEST_RATIO]) for line in past if SLOWEST in line and SLOWEST_RATIO in line]
    if SLOWEST not in past[-1] or len(looks) < 2:
        return None
    (before, ratio_before), (rank, ratio) = looks[-2:]
    if rank != before or min(ratio, ratio_before) < _STRAGGLES:
        return None
    return (
        f"rank {rank} works {ratio:.3g} times as long as the rank in the middle, and did so in the last two "
        f"comparisons, each over {STRAGGLER_STEPS} steps; the others wait for it. Look at what else runs on its "
        f"machine, and at its log, logs/rank-{rank}.log."
    )


def _nothing_learned(past: Past) -> str | None:
    """Say that rollouts are left out whole; rewards that are all alike have an alarm of their own."""
    values, line = last_values(past, "optim/no_gradient", _LASTING_STEPS), past[-1]
    if not values or min(values) < 1 or not line.get("rollout/groups") or line.get("frac_reward_zero_std") == 1:
        return None
    trained, groups = line.get("rollout/trained_groups", 0), line["rollout/groups"]
    if trained:
        why = "no completion of theirs counts: look at groups.truncated, advantage, and rewards without a number"
    else:
        why = "groups.between and groups.flat leave out all others: widen them, or choose other prompts"
    return (
        f"no weight has moved for {len(values)} steps. Of {groups:.0f} groups in the last one {trained:.0f} were kept, "
        f"and {why}."
    )


def _no_gradient(past: Past) -> str | None:
    """Say that nothing is trained; rollouts that are left out whole have an alarm of their own."""
    values = last_values(past, "optim/no_gradient", _LASTING_STEPS)
    if not values or min(values) < 1 or "rollout/groups" in past[-1]:
        return None
    return (
        f"the gradient has been exactly zero for {len(values)} steps, and no weight has moved. A model that a step too "
        "large has broken looks like this: lower optim.lr, and begin from an earlier checkpoint. Else look at "
        "model.freeze, and at the loss."
    )


def _wrong_order(past: Past) -> str | None:
    values = last_values(past, "rewards/accuracies", _PREFERENCE_STEPS)
    if not values or max(values) >= 0.5:
        return None
    return (
        f"fewer than half of the pairs have been in the right order in each of the last {len(values)} steps, "
        f"{values[-1]:.0%} in this one. Look whether columns chosen and rejected are exchanged, and lower optim.lr."
    )


def _skipped_updates(past: Past) -> str | None:
    counts = [line["optim/skipped_steps"] for line in past[-_USUAL_STEPS - 1 :] if "optim/skipped_steps" in line]
    if not counts or counts[-1] - counts[0] < _SKIPPED_UPDATES or counts[-1] == counts[-2]:
        return None
    return (
        f"{counts[-1] - counts[0]:.0f} updates of the last {len(counts) - 1} steps were skipped: their gradient is no "
        "finite number. Lower optim.lr, or compute in another dtype (parallel.compute_dtype)."
    )


def _one_sided(past: Past) -> str | None:
    values = last_values(past, "kto/desirable", _LASTING_STEPS)
    if not values or min(values) != max(values) or values[-1] not in {0.0, 1.0}:
        return None
    return (
        f"for {len(values)} steps {'every' if values[-1] else 'no'} answer was desirable, and nothing pulls the other "
        "way. Look at the column label, or mix in rows of the other kind."
    )


def cut_rows(past: Past) -> tuple[float, str]:
    """Return which share of the rows of some steps is not trained whole, and a sentence on it; "" where all are."""
    counts = {name: sum(line.get(f"data/{name}", 0.0) for line in past) for name in _CUT}
    read = sum(line.get("data/rows", line.get("rollout/groups", 0.0)) for line in past)
    left_out = counts["overlong_dropped"] + counts["untrained"]
    total = read + left_out
    listing = ", ".join(f"{number:.0f} {_CUT[name]}" for name, number in counts.items() if number)
    if not listing or not total:
        return 0.0, ""
    steps = "this step" if len(past) == 1 else f"the last {len(past)} steps"
    sentence = (
        f"of the {total:.0f} rows of {steps}, {listing}. `holdfast data check` counts all rows and suggests lengths."
    )
    return min(1.0, (counts["truncated"] + left_out) / total), sentence


_CUT = {
    "truncated": "are longer than data.max_length and lose their end",
    "overlong_dropped": "are left out as too long",
    "untrained": "are left out since no token of them is trained",
}


def _much_cut(past: Past) -> str | None:
    share, sentence = cut_rows(past[-_LASTING_STEPS:])
    return sentence if share > _CUT_ROWS else None


_ALARMS: Mapping[str, Alarm] = {
    "flat_reward": _flat_reward,
    "flat_groups": _flat_groups,
    "nothing_learned": _nothing_learned,
    "no_gradient": _no_gradient,
    "skipped_updates": _skipped_updates,
    "wrong_order": _wrong_order,
    "one_sided": _one_sided,
    "truncation": _truncation,
    "low_entropy": _low_entropy,
    "reward_faults": _reward_faults,
    "kl_jump": _kl_jump,
    "gradient_spike": _gradient_spike,
    "loss_spike": _loss_spike,
    "slow": _slow,
    "straggler": _straggler,
    "cut_rows": _much_cut,
}


def _usual(past: Past, name: str) -> tuple[float, float]:
    """Return a metric and its median over the steps before; NaN, of which no comparison holds, for what is unknown."""
    before = [line[name] for line in past[-_USUAL_STEPS - 1 : -1] if name in line]
    if name not in past[-1] or len(before) < _FEWEST_STEPS:
        return math.nan, math.nan
    return past[-1][name], median(before)
