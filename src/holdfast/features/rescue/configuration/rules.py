"""The closed set of conversions that an entry of the table may name.

A rule takes a key with its value and what else the file says, and returns keys here with their values. It may add a
remark, such as the arithmetic of a batch. `NotConverted` says why a person has to decide.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from holdfast.config.sections.metrics import TrackerConfig
from holdfast.features.rescue.configuration.facts import (
    Facts,
    ForeignKey,
    KeyOutcome,
    NotConverted,
    Rule,
    count,
    integer,
    number,
    weights_of,
)
from holdfast.features.rescue.configuration.rows import ROW_RULES
from holdfast.features.rescue.configuration.sizes import SIZE_RULES

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SCHEDULER_OPTIONS = {
    "min_lr_rate": "optim.schedule.final_ratio",
    "num_cycles": "optim.schedule.cycles",
    "power": "optim.schedule.power",
}
_TRACKERS = typing.get_args(TrackerConfig.model_fields["kind"].annotation)
_SCHEDULERS = {"min_lr_rate": "cosine_with_min_lr", "num_cycles": "cosine_with_restarts", "power": "polynomial"}
"""The schedule there that has the option in this meaning."""
_EVALUATION_SAMPLING = {
    "n": "evaluation.per_prompt",
    **{name: f"evaluation.sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p")},
}


def by_hand(_: ForeignKey) -> KeyOutcome:
    """Convert nothing; a person has to decide."""
    raise NotConverted


def epochs(foreign: ForeignKey) -> KeyOutcome:
    """Write the number of passes, unless a number of steps ends the run there."""
    if any(
        number(foreign.facts.get(key), 0) > 0
        for key in ("max_steps", "trainer.max_steps", "trainer.total_training_steps")
    ):
        return KeyOutcome({}, "not read there, since a number of steps is set")
    return KeyOutcome({"epochs": foreign.value})


def warmup(foreign: ForeignKey) -> KeyOutcome:
    """Distinguish a share of all steps from a number of steps."""
    steps = number(foreign.value)
    schedule = foreign.target.rpartition(".")[0]
    if 0 < steps < 1:
        return KeyOutcome({f"{schedule}.warmup_ratio": steps})
    return KeyOutcome({f"{schedule}.warmup_steps": integer(steps)})


def ratio_unless_steps(foreign: ForeignKey) -> KeyOutcome:
    """Write the share of warm-up, unless a number of steps is given."""
    if foreign.facts.get("warmup_steps") is not None:
        return KeyOutcome({}, "not read there, since warmup_steps is set")
    return KeyOutcome({foreign.target: foreign.value})


def betas(foreign: ForeignKey) -> KeyOutcome:
    """Join the two decay rates into one list."""
    return KeyOutcome(
        {"optim.betas": [number(foreign.facts.get("adam_beta1"), 0.9), number(foreign.facts.get("adam_beta2"), 0.999)]}
    )


def clip_norm(foreign: ForeignKey) -> KeyOutcome:
    """Turn 0, which clips nothing, into null."""
    return KeyOutcome({foreign.target: foreign.value if number(foreign.value) > 0 else None})


def scheduler_options(foreign: ForeignKey) -> KeyOutcome:
    """Rename the options of a schedule; the same name has another meaning in another schedule."""
    kind = foreign.facts.get("lr_scheduler_type")
    options = {name for name, schedule in _SCHEDULERS.items() if schedule == kind}
    if not isinstance(foreign.value, Mapping) or set(foreign.value) - options:
        raise NotConverted
    return KeyOutcome({_SCHEDULER_OPTIONS[name]: option for name, option in foreign.value.items()})


def minutes(foreign: ForeignKey) -> KeyOutcome:
    """Turn seconds into minutes."""
    return KeyOutcome({foreign.target: number(foreign.value) / 60}, f"{foreign.value} s")


def keep_last(foreign: ForeignKey) -> KeyOutcome:
    """Keep at least two checkpoints."""
    checkpoints = integer(foreign.value)
    if checkpoints < 1:
        raise NotConverted("no limit there; here checkpoint.keep.last stay, and multiples of checkpoint.keep.every")
    return KeyOutcome({foreign.target: max(2, checkpoints)})


def per_epoch(foreign: ForeignKey) -> KeyOutcome:
    """Convert a number of times per pass into a share of a pass between them."""
    return KeyOutcome({foreign.target: round(1 / count(foreign.value), 6)}, f"{foreign.value} per epoch")


def whole_steps(foreign: ForeignKey) -> KeyOutcome:
    """Accept a number of steps; a share of all steps is not converted."""
    if number(foreign.value) < 1:
        raise NotConverted(f"{foreign.value} is a share of all steps there; write the number of steps")
    return KeyOutcome({foreign.target: integer(foreign.value)})


def held_out(foreign: ForeignKey) -> KeyOutcome:
    """Accept a share of rows; a number of rows is not converted."""
    share = number(foreign.value)
    if share >= 1:
        raise NotConverted(f"{foreign.value} counts rows there; write the share of rows")
    return KeyOutcome({"data.validation_split": share} if share > 0 else {})


def run_folder(foreign: ForeignKey) -> KeyOutcome:
    """Split a path into the folder of runs and the run's name."""
    path = PurePosixPath(str(foreign.value))
    if not _RUN_NAME.fullmatch(path.name):
        raise NotConverted(f"the last part of {foreign.value} is no name of a run")
    return KeyOutcome({"run.dir": str(path.parent), "run.name": path.name})


def run_name(foreign: ForeignKey) -> KeyOutcome:
    """Accept a name of characters that a folder of ours may have."""
    if not _RUN_NAME.fullmatch(str(foreign.value)):
        raise NotConverted("a name has letters, digits, '.', '_' and '-'")
    return KeyOutcome({"run.name": str(foreign.value)})


def trackers(foreign: ForeignKey) -> KeyOutcome:
    """Keep the trackers that Holdfast has too, and name the others in a remark."""
    names = [str(name).lower() for name in (foreign.value if isinstance(foreign.value, list) else [foreign.value])]
    sinks = [name for name in names if name in _TRACKERS]
    unsupported = [name for name in names if name not in {*_TRACKERS, "none", "console", "file", "false"}]
    missing = f"{', '.join(unsupported)}: not offered" if unsupported else ""
    return KeyOutcome({"metrics.sinks": sinks} if sinks else {}, missing)


def name_list(foreign: ForeignKey) -> KeyOutcome:
    """Turn one name, or names with commas, into a list; all linear layers have a word of their own."""
    names = (
        foreign.value if isinstance(foreign.value, list) else [text.strip() for text in str(foreign.value).split(",")]
    )
    if [str(name) for name in names] in (["all-linear"], ["all"]):
        return KeyOutcome({foreign.target: "all-linear"})
    return KeyOutcome({foreign.target: [str(name) for name in names]})


def lora_rank(foreign: ForeignKey) -> KeyOutcome:
    """Write the rank of adapters; rank 0 means no adapters."""
    return KeyOutcome(
        {foreign.target: integer(foreign.value)} if number(foreign.value) > 0 else {},
        "" if number(foreign.value) else "no adapters",
    )


def router(foreign: ForeignKey) -> KeyOutcome:
    """Write the coefficient of the router loss per sequence; 0 means no router loss."""
    if number(foreign.value) == 0:
        return KeyOutcome({"model.router_loss.kind": "off"})
    return KeyOutcome({"model.router_loss.kind": "sequence", "model.router_loss.coefficient": foreign.value})


def config_fields(foreign: ForeignKey) -> KeyOutcome:
    """Move the fields of a model's configuration out of verl's own level."""
    if not isinstance(foreign.value, Mapping):
        raise NotConverted
    fields = foreign.value.get("model_config", foreign.value)
    return KeyOutcome({foreign.target: dict(fields)} if fields else {})


def machine_ranks(foreign: ForeignKey) -> KeyOutcome:
    """Start one rank per GPU of this machine; torchrun starts those of several machines."""
    nodes = integer(foreign.facts.get("trainer.nnodes"), 1)
    if nodes > 1:
        return KeyOutcome({}, f"{nodes} machines of {foreign.value}: start it with torchrun on each")
    return KeyOutcome({"launch.ranks": integer(foreign.value)})


def evaluation_sampling_rule(foreign: ForeignKey) -> KeyOutcome:
    """Rename the options of sampling in evaluations."""
    if not isinstance(foreign.value, Mapping) or set(foreign.value) - set(_EVALUATION_SAMPLING):
        raise NotConverted
    as_in_rollout = {
        "temperature": foreign.facts.get("worker.rollout.temperature"),
        "n": foreign.facts.get("worker.rollout.n"),
    }
    options = {**as_in_rollout, **foreign.value}
    written = {name: option for name, option in options.items() if option is not None and option != -1}
    return KeyOutcome({_EVALUATION_SAMPLING[name]: option for name, option in written.items()})


def rank_and_alpha(foreign: ForeignKey) -> KeyOutcome:
    """Write the rank, and alpha as twice the rank unless the file sets it."""
    rank = integer(foreign.value)
    alpha = {} if foreign.facts.get("lora_alpha") is not None else {"model.lora.alpha": 2 * rank}
    return KeyOutcome({"model.lora.rank": rank, **alpha})


def thinking(foreign: ForeignKey) -> KeyOutcome:
    """Pass the variable for reasoning to the chat template."""
    return KeyOutcome({"data.template_kwargs": {"enable_thinking": foreign.value}})


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
    loss: dict[str, Any] = {**_PAIR_LOSSES[name], "beta": number(facts.get("beta"), 0.1)}
    smoothing = facts.get("label_smoothing")
    if smoothing and loss["kind"] in {"dpo", "robust"}:
        loss["label_smoothing"] = smoothing
    if weight != 1:
        loss["weight"] = weight
    return loss


def policy_loss(foreign: ForeignKey) -> KeyOutcome:
    """Write two keys: which ratio is clipped, and what the loss averages over."""
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
    """Write both bounds of the ratio; the upper one equals the lower one unless the file sets it."""
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
    """Write one number as both bounds, unless the file sets each of them."""
    prefix = "actor_rollout_ref.actor.clip_ratio"
    bounds = {f"objective.{side}": foreign.facts.get(f"{prefix}_{side}") for side in ("low", "high")}
    return KeyOutcome({key: foreign.value for key, bound in bounds.items() if bound is None})


def policy_kl(foreign: ForeignKey) -> KeyOutcome:
    """Write the coefficient of the KL term, and whether the term is multiplied by the ratio."""
    coefficient = number(foreign.facts.get("beta"), 0.0)
    if coefficient == 0:
        return KeyOutcome({}, "no KL term")
    weighted = foreign.facts.get("use_bias_correction_kl")
    return KeyOutcome({"kl.coefficient": coefficient, "kl.importance_weighted": weighted is not False})


def verl_advantage(foreign: ForeignKey) -> KeyOutcome:
    """Name the estimator of advantages; `grpo` without the standard deviation has another name here."""
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


_OWN: dict[str, Rule] = {
    function.__name__: function
    for function in (
        by_hand,
        epochs,
        warmup,
        ratio_unless_steps,
        betas,
        clip_norm,
        scheduler_options,
        minutes,
        keep_last,
        per_epoch,
        whole_steps,
        held_out,
        run_folder,
        run_name,
        trackers,
        name_list,
        lora_rank,
        router,
        config_fields,
        machine_ranks,
        evaluation_sampling_rule,
        rank_and_alpha,
        thinking,
        pair_losses,
        policy_loss,
        clip_bounds,
        both_bounds,
        policy_kl,
        verl_advantage,
        sampling_cut,
        filtered_reward,
    )
}
# By the name that entries of the table use; a test finds an entry that names another one.
RULES = {**_OWN, **SIZE_RULES, **ROW_RULES}
