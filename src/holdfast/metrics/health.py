"""Alarms for runs that go wrong; each is a sentence that says what was observed and what to try.

Alarms look at the metrics of the last steps since the start of the process, and change nothing. An alarm whose metric a
run does not have stays silent, so that most do in supervised runs. `_ALARMS` is the table: each alarm has a rule, which
returns what it observed or None, and a sentence with places for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

_REPEAT_STEPS = 50
"""Steps for which an alarm rests after it sounded."""
_LASTING_STEPS = 5
"""Steps in a row that what is no alarm in one step lasts before it counts."""
_USUAL_STEPS, _FEWEST_STEPS = 20, 10
"""Steps whose median is the usual value of a number, and how many of them there must be."""
_FIRST_STEPS = 5
"""Steps whose lowest loss is that of the start."""
_COMPARED_STEPS = 10
"""Steps at the start and now whose rewards are compared; without a trend all of one are below all of the other once in
185,000 times."""
_LONGEST_PAST = 30
"""Steps in which a loss must have come below `_ALMOST_GUESSING` of ln V, that of drawing each token at random."""
_GUESSING, _ALMOST_GUESSING = 1 - 1e-4, 0.95
_SAME = 1e-6
"""Rewards within this range are one value."""
STRAGGLER_STEPS = 10
"""Steps between two comparisons of the ranks' work."""
SLOWEST, SLOWEST_RATIO = "ranks/slowest", "ranks/slowest_ratio"
"""The rank that worked longest since the comparison before, and its work over that of the one in the middle."""
SPIKES = frozenset({"gradient_spike", "loss_spike"})
"""Alarms about what one batch did, which is recorded."""

Past = Sequence[Mapping[str, float]]
"""Metrics of the last steps, the present one last."""
Observed = Mapping[str, Any] | None
Rule = Callable[[Past, Past], Observed]
"""Takes the last steps and the first ones; returns what fills the places of the alarm's sentence."""


class Health:
    """Checks each step's metrics and raises alarms; an alarm is not repeated for a while.

    Args:
        vocabulary: Tokens that the model tells apart; None where nothing is compared with guessing one.
    """

    def __init__(self, vocabulary: int | None = None) -> None:
        self._past: deque[Mapping[str, float]] = deque(maxlen=_LONGEST_PAST)
        self._first: list[Mapping[str, float]] = []
        self._sounded: dict[str, int] = {}
        self._alarms = dict(_ALARMS)
        if vocabulary is not None and vocabulary > 1:
            self._alarms["guessing"] = _guessing(math.log(vocabulary)), _NO_BETTER_THAN_CHANCE

    def see(self, step: int, metrics: Mapping[str, float]) -> dict[str, str]:
        """Return the alarms of a step, by name."""
        self._past.append(metrics)
        if len(self._first) < _COMPARED_STEPS:
            self._first.append(metrics)
        past, alarms = list(self._past), {}
        for name, (rule, sentence) in self._alarms.items():
            if step - self._sounded.get(name, -math.inf) < _REPEAT_STEPS:
                continue
            if (observed := rule(past, self._first)) is not None:
                alarms[name] = sentence.format_map(observed)
                self._sounded[name] = step
        return alarms


def _last(past: Past, name: str, steps: int = _LASTING_STEPS) -> list[float]:
    """Return the last values of a metric; none if it is missing in one of the steps."""
    values = [line[name] for line in past[-steps:] if name in line]
    return values if len(values) == steps else []


def _lasting(metric: str, limit: float, *, above: bool = True, steps: int = _LASTING_STEPS, instead: str = "") -> Rule:
    """Return the rule of a metric that is above a limit, or below it, for some steps in a row.

    Args:
        metric: Name of the metric.
        limit: Limit that a sound run does not pass.
        above: Whether values above the limit are the sick ones; else values below it.
        steps: Number of steps in a row.
        instead: Name of an estimate, which counts where the metric is not measured.
    """

    def look(past: Past, _: Past) -> Observed:
        measured = _last(past, metric, steps)
        values = measured or _last(past, instead, steps)
        if not values or not (min(values) > limit if above else max(values) < limit):
            return None
        name = metric if measured else f"estimated {metric}"
        return {"value": values[-1], "steps": steps, "limit": limit, "name": name}

    return look


def _jump(metric: str, times: float, *, of_largest: float = 0.0, least: float = 0.0, beside: str = "") -> Rule:
    """Return the rule of a metric that is far above its median of the steps before.

    Args:
        metric: Name of the metric.
        times: Ratio to the median that a jump exceeds.
        of_largest: Ratio to the largest value that it exceeds too; what grows from step to step is no spike.
        least: Value that it exceeds too. Where this is 0, a median of 0 says nothing.
        beside: Name of another metric that the step must have.
    """

    def look(past: Past, _: Past) -> Observed:
        steps = [line[metric] for line in past[-_USUAL_STEPS - 1 : -1] if metric in line]
        before = [value for value in steps if math.isfinite(value)]  # that of a skipped update is no number
        if not {metric, beside or metric} <= past[-1].keys() or len(steps) < _FEWEST_STEPS or not before:
            return None
        value, usual = past[-1][metric], median(before)
        limit = max(least, times * usual, of_largest * max(before))
        return {"value": value, "usual": usual} if value > limit and (usual or least) else None

    return look


def _flat_reward(past: Past, _: Past) -> Observed:
    values = _last(past, "reward", 20)
    return {"value": values[-1]} if values and max(values) - min(values) <= _SAME else None


def _reward_fell(past: Past, first: Past) -> Observed:
    values, begun = _last(past, "reward", _COMPARED_STEPS), _last(first, "reward", _COMPARED_STEPS)
    fell = values and begun and max(values) < min(begun) - _SAME
    return {"most": max(values), "least": min(begun), "steps": _COMPARED_STEPS} if fell else None


def _reward_faults(past: Past, _: Past) -> Observed:
    faults = {kind: int(past[-1].get(f"reward/{kind}", 0)) for kind in ("timeout", "error", "nan")}
    count, total = sum(faults.values()), past[-1].get("rollout/completions", 0)
    kinds = ", ".join(f"{number} by {kind}" for kind, number in faults.items() if number)
    return {"count": count, "total": total, "kinds": kinds} if count > 0.01 * total > 0 else None


def _at_rest(past: Past) -> bool:
    return min(_last(past, "optim/no_gradient"), default=0.0) >= 1


def _no_gradient(past: Past, _: Past) -> Observed:
    """Look for training without effect; rollouts that are left out whole have an alarm of their own."""
    return {"steps": _LASTING_STEPS} if _at_rest(past) and "rollout/groups" not in past[-1] else None


def _nothing_learned(past: Past, _: Past) -> Observed:
    """Look for rollouts that are left out whole; rewards that are all alike have an alarm of their own."""
    line = past[-1]
    if not _at_rest(past) or not line.get("rollout/groups") or line.get("frac_reward_zero_std") == 1:
        return None
    trained = line.get("rollout/trained_groups", 0)
    why = "groups.between and groups.flat leave out all others: widen them, or choose other prompts"
    if trained:
        why = "no completion of theirs counts: look at groups.truncated, advantage, and rewards without a number"
    return {"steps": _LASTING_STEPS, "groups": line["rollout/groups"], "trained": trained, "why": why}


def _guessing(chance: float) -> Rule:
    """Return the rule of a model no better than drawing tokens at random, whose loss and entropy are `chance`."""
    limits = {_LASTING_STEPS: _GUESSING * chance, _LONGEST_PAST: _ALMOST_GUESSING * chance}

    def look(past: Past, _: Past) -> Observed:
        name = next((name for name in ("nll", "entropy", "entropy_estimate") if name in past[-1]), "")
        stuck = [steps for steps, limit in limits.items() if min(_last(past, name, steps), default=-1.0) >= limit]
        if not stuck or len(past) < _FEWEST_STEPS:
            return None
        rates = [line.get("learning_rate", 0.0) for line in past[-2:]]
        was_better = any(line.get(name, chance) < limits[stuck[-1]] for line in past)
        if rates[-1] > rates[0] and not was_better:
            return None  # a random start, while the rate still rises
        quantity = "loss" if name == "nll" else "entropy of the policy"
        return {"quantity": quantity, "value": past[-1][name], "steps": stuck[-1], "chance": chance}

    return look


def _diverged(past: Past, first: Past) -> Observed:
    """Look for a loss that stays far above the first ones; that of a policy lies around 0 and says nothing."""
    name = "nll" if "nll" in past[-1] else "loss" if "rewards/margins" in past[-1] else ""
    values, begun = _last(past, name), _last(first[:_FIRST_STEPS], name, _FIRST_STEPS)
    if not values or not begun:
        return None
    # The lowest, since the second step may have broken the model; and 1 above it, since one batch may be easy.
    start = min(begun)
    high = min(values) > max(3 * start, start + 1)
    return {"value": values[-1], "steps": _LASTING_STEPS, "start": start} if high else None


def _skipped_updates(past: Past, _: Past) -> Observed:
    counts = [line["optim/skipped_steps"] for line in past[-_USUAL_STEPS - 1 :] if "optim/skipped_steps" in line]
    if not counts or counts[-1] - counts[0] < 3 or counts[-1] == counts[-2]:
        return None
    return {"count": counts[-1] - counts[0], "steps": len(counts) - 1}


def _one_sided(past: Past, _: Past) -> Observed:
    values = set(_last(past, "kto/desirable"))
    return {"which": "every" if 1.0 in values else "no"} if values in ({0.0}, {1.0}) else None


def _slow(past: Past, _: Past) -> Observed:
    """Look for a throughput that fell, and for the phase that takes the time."""
    name = "throughput/tokens_per_second"
    now, earlier = past[-_LASTING_STEPS:], past[:-_LASTING_STEPS]
    recent, before = _last(past, name), [line[name] for line in earlier if name in line]
    if not recent or len(before) < _FEWEST_STEPS or max(recent) >= 0.5 * median(before):
        return None
    keys = sorted({key for line in past for key in line if key.startswith("timing/")})
    seconds = {key: [fmean(line.get(key, 0.0) for line in lines) for lines in (now, earlier)] for key in keys}
    slowest = max(keys, key=lambda key: seconds[key][0] - seconds[key][1], default="")
    phase = ""
    if slowest and seconds[slowest][0] > seconds[slowest][1]:
        takes, took = seconds[slowest]
        phase = f" Phase {slowest.removeprefix('timing/')} takes {takes:.3g} s a step, and it took {took:.3g} s."
    return {"value": recent[-1], "usual": median(before), "steps": _LASTING_STEPS, "phase": phase}


def _straggler(past: Past, _: Past) -> Observed:
    looks = [(line[SLOWEST], line[SLOWEST_RATIO]) for line in past if SLOWEST in line and SLOWEST_RATIO in line][-2:]
    ranks, ratios = {rank for rank, _ in looks}, [ratio for _, ratio in looks]
    if SLOWEST not in past[-1] or len(looks) < 2 or len(ranks) > 1 or min(ratios) < 1.5:
        return None
    return {"rank": ranks.pop(), "ratio": ratios[-1], "steps": STRAGGLER_STEPS}


_CUT = {
    "truncated": "are longer than data.max_length and lose their end",
    "overlong_dropped": "are left out as too long",
    "untrained": "are left out since no token of them is trained",
}


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


def _much_cut(past: Past, _: Past) -> Observed:
    share, sentence = cut_rows(past[-_LASTING_STEPS:])
    return {"sentence": sentence} if share > 0.1 else None


_NO_BETTER_THAN_CHANCE = (
    "the {quantity} is {value:.4g} nats per token, and for {steps} steps it was hardly below {chance:.4g}, that of "
    "drawing every token at random. Lower optim.lr if it was better before; else raise it, or look at the rows."
)
_ALARMS: Mapping[str, tuple[Rule, str]] = {
    "flat_reward": (
        _flat_reward,
        "the reward has been {value:.4g} in each of the last 20 steps. What never changes teaches nothing: read "
        "samples.jsonl, and score some of its completions by hand.",
    ),
    "flat_groups": (
        _lasting("frac_reward_zero_std", 0.8),
        "in {value:.0%} of the groups all completions have one reward, and for {steps} steps it has been more than "
        "{limit:.0%}. Such groups teach nothing. If the reward is not at its best, choose prompts that the policy "
        "solves sometimes, raise rollout.group_size, or set groups.flat: resample.",
    ),
    "nothing_learned": (
        _nothing_learned,
        "no weight has moved for {steps} steps. Of {groups:.0f} groups in the last one {trained:.0f} were kept, and "
        "{why}.",
    ),
    "no_gradient": (
        _no_gradient,
        "the gradient has been exactly zero for {steps} steps, and no weight has moved. A model that a step too large "
        "has broken looks like this: lower optim.lr, and begin from an earlier checkpoint. Else look at model.freeze, "
        "and at the loss.",
    ),
    "skipped_updates": (
        _skipped_updates,
        "{count:.0f} updates of the last {steps} steps were skipped: their gradient is no finite number. Lower "
        "optim.lr, or compute in another dtype (parallel.compute_dtype).",
    ),
    "wrong_order": (
        _lasting("rewards/accuracies", 0.5, above=False, steps=20),
        "fewer than half of the pairs have been in the right order in each of the last {steps} steps, {value:.0%} in "
        "this one. Look whether columns chosen and rejected are exchanged, and lower optim.lr.",
    ),
    "one_sided": (
        _one_sided,
        "for 5 steps {which} answer was desirable, and nothing pulls the other way. Look at the column label, or mix "
        "in rows of the other kind.",
    ),
    "truncation": (
        _lasting("completions/clipped_ratio", 0.3),
        "{value:.0%} of the completions are cut at rollout.max_new_tokens, and for {steps} steps it has been more than "
        "{limit:.0%}. Raise rollout.max_new_tokens, or look in samples.jsonl for completions that do not end.",
    ),
    "low_entropy": (
        _lasting("entropy", 0.01, above=False, instead="entropy_estimate"),
        "the {name} is {value:.2g} nats per token, and for {steps} steps it was below {limit:g}: the policy hardly "
        "explores. Lower optim.lr, raise objective.high, or set entropy.coefficient.",
    ),
    "reward_faults": (
        _reward_faults,
        "{count} of {total:.0f} completions could not be scored ({kinds}). The lines above name some; what the "
        "functions print is in logs/.",
    ),
    "kl_jump": (
        _jump("kl", 10, least=0.01),
        "the KL to the reference is {value:.2g} nats per token, and it was {usual:.2g} in the steps before. Lower "
        "optim.lr, or raise kl.coefficient.",
    ),
    "gradient_spike": (
        _jump("grad_norm", 10, of_largest=5),
        "the gradient norm is {value:.3g}, and it was {usual:.3g} in the steps before. If this comes again, lower "
        "optim.lr or optim.clip_norm.",
    ),
    "loss_spike": (
        _jump("loss", 3, beside="mean_token_accuracy"),  # a policy's lies around 0 and says nothing by its size
        "the loss is {value:.3g}, and it was {usual:.3g} in the steps before. Look at the rows of this batch; if this "
        "comes again, lower optim.lr.",
    ),
    "slow": (
        _slow,
        "throughput has been below 50% of {usual:,.0f} tokens per second for {steps} steps; it is {value:,.0f}.{phase} "
        "Look at what else runs on these machines, or set profile.",
    ),
    "straggler": (
        _straggler,
        "rank {rank:.0f} works {ratio:.3g} times as long as the rank in the middle, and did so in the last two "
        "comparisons, each over {steps} steps; the others wait for it. Look at what else runs on its machine, and at "
        "its log, logs/rank-{rank:.0f}.log.",
    ),
    "cut_rows": (_much_cut, "{sentence}"),
    "diverged": (
        _diverged,
        "the loss is {value:.4g}, and for {steps} steps it was more than 3 times the {start:.4g} of the first steps. "
        "Lower optim.lr or optim.clip_norm, and begin from an earlier checkpoint.",
    ),
    "reward_fell": (
        _reward_fell,
        "the reward was at most {most:.4g} in the last {steps} steps, and at least {least:.4g} in the first ones: the "
        "policy unlearns. Lower optim.lr, set kl.coefficient, or read samples.jsonl.",
    ),
}
