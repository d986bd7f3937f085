"""Losses, advantages, the KL divergence and sampling."""

from __future__ import annotations

from typing import Any

from holdfast.config.conversion.facts import Facts, ForeignKey, KeyOutcome, NotConverted, Rule, number, weights_of

_PAIR_LOSSES = {
    "sigmoid": {"kind": "dpo"},
    "sigmoid_norm": {"kind": "dpo", "lengths": "mean"},
    "robust": {"kind": "robust"},
    "ipo": {"kind": "ipo", "lengths": "mean"},
    "hinge": {"kind": "hinge"},
    "apo_zero": {"kind": "apo_zero"},
    "apo_down": {"kind": "apo_down"},
}
_POLICY_LOSSES = {
    "grpo": ("clip", "sequence_mean"),
    "dr_grpo": ("clip", "constant_length"),
    "dapo": ("clip", "token_mean"),
    "bnpo": ("clip", "token_mean"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "sequence_mean"),
}
"""TRL's name to our objective and average."""
_ADVANTAGES = {
    "grpo": "grpo",
    "rloo": "rloo",
    "opo": "opo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "grpo_passk": "pass_at_k",
}


def pair_losses(foreign: ForeignKey) -> KeyOutcome:
    """Write TRL's list of losses, with what belongs to each."""
    names = foreign.facts.get("loss_type") or ["sigmoid"]
    names = names if isinstance(names, list) else [names]
    weights = weights_of(foreign.facts.get("loss_weights"), len(names))
    settings: dict[str, Any] = {}
    losses = []
    for name, weight in zip(map(str, names), weights, strict=True):
        if name == "sft":
            settings["preference.sft"] = weight
        elif name not in _PAIR_LOSSES:
            raise NotConverted(f"{name} has no counterpart")
        else:
            losses.append(_pair_loss(name, weight, foreign.facts))
    if losses:
        settings["preference.loss"] = losses if len(losses) > 1 else losses[0]
    return KeyOutcome(settings)


def _pair_loss(name: str, weight: float, facts: Facts) -> dict[str, Any]:
    loss: dict[str, Any] = {**_PAIR_LOSSES[name], "beta": facts.get("beta") or 0.1}
    smoothing = facts.get("label_smoothing")
    if smoothing and loss["kind"] in {"dpo", "robust"}:
        loss["label_smoothing"] = smoothing
    if weight != 1:
        loss["weight"] = weight
    return loss


def policy_loss(foreign: ForeignKey) -> KeyOutcome:
    """Say by two keys which ratio is clipped and what the loss averages over."""
    name, level = str(foreign.facts.get("loss_type") or "dapo"), foreign.facts.get("importance_sampling_level")
    if name not in _POLICY_LOSSES:
        raise NotConverted(f"{name} has no counterpart")
    kind, average = _POLICY_LOSSES[name]
    if level == "sequence":
        if kind != "clip":
            raise NotConverted(f"{name} of whole sequences has no counterpart")
        kind, average = "gspo", "sequence_mean"
    remark = "over the whole update, not the rows of one device" if name == "bnpo" else ""
    return KeyOutcome({"objective.kind": kind, "data.average": average}, remark)


def clip_bounds(foreign: ForeignKey) -> KeyOutcome:
    """Write both bounds; the upper one is the lower one unless it is set."""
    name = str(foreign.facts.get("loss_type") or "dapo")
    if name == "sapo":
        return KeyOutcome({}, "not read there by sapo")
    low, high = foreign.facts.get("epsilon"), foreign.facts.get("epsilon_high")
    if name == "cispo":
        if high is None:
            raise NotConverted("cispo's largest weight is not set")
        return KeyOutcome({"objective.high": number(high) - 1}, f"{high} - 1")
    return KeyOutcome({"objective.low": low, "objective.high": low if high is None else high})


def both_bounds(foreign: ForeignKey) -> KeyOutcome:
    """Write one number for both bounds, unless each has its own."""
    prefix = "actor_rollout_ref.actor.clip_ratio"
    bounds = {
        "objective.low": foreign.facts.get(f"{prefix}_low"),
        "objective.high": foreign.facts.get(f"{prefix}_high"),
    }
    return KeyOutcome({key: foreign.value for key, own in bounds.items() if own is None})


def policy_kl(foreign: ForeignKey) -> KeyOutcome:
    """Write the coefficient, and whether its term is multiplied by the ratio."""
    coefficient = number(foreign.facts.get("beta"), 0.0)
    if coefficient == 0:
        return KeyOutcome({}, "no KL term")
    weighted = foreign.facts.get("use_bias_correction_kl")
    return KeyOutcome({"kl.coefficient": coefficient, "kl.importance_weighted": weighted is not False})


def follow_reference(foreign: ForeignKey) -> KeyOutcome:
    """Let the reference follow every 512 steps, TRL's number, unless the file says another."""
    if foreign.value is not True:
        return KeyOutcome({}, "the reference stays the model at start")
    steps, mix = foreign.facts.get("ref_model_sync_steps") or 512, foreign.facts.get("ref_model_mixup_alpha") or 0.6
    return KeyOutcome({"reference.sync.every_steps": steps, "reference.sync.mix": mix})


def verl_advantage(foreign: ForeignKey) -> KeyOutcome:
    """Name the estimator; grpo without the standard deviation is another one here."""
    name = str(foreign.value)
    if name == "gae":
        return KeyOutcome({"advantage.kind": "gae", "critic": {}})
    if name not in _ADVANTAGES:
        raise NotConverted(f"{name} has no counterpart")
    unscaled = name == "grpo" and foreign.facts.get("algorithm.norm_adv_by_std_in_grpo") is False
    return KeyOutcome({"advantage.kind": "dr_grpo" if unscaled else _ADVANTAGES[name]})


def sampling_cut(foreign: ForeignKey) -> KeyOutcome:
    """Weigh tokens where they are drawn from another distribution than the policy's."""
    if foreign.target != "rollout.top_k" and number(foreign.value) == (0 if foreign.target == "rollout.min_p" else 1):
        return KeyOutcome({}, "draws from the policy's own distribution")
    return KeyOutcome({foreign.target: foreign.value, "correction.kind": "truncate"})


def filtered_reward(foreign: ForeignKey) -> KeyOutcome:
    """Name the reward whose mean bounds groups: the function's, or a part of it."""
    path = str(foreign.facts.get("worker.reward.reward_function", "worker.reward.score_function") or "")
    function = path.rpartition(":")[2] if ":" in path else "main"
    return KeyOutcome(
        {"groups.between.reward": function if foreign.value == "overall" else f"{function}/{foreign.value}"}
    )


LOSS_RULES: dict[str, Rule] = {
    function.__name__: function
    for function in (
        pair_losses,
        policy_loss,
        clip_bounds,
        both_bounds,
        policy_kl,
        follow_reference,
        verl_advantage,
        sampling_cut,
        filtered_reward,
    )
}
