"""The closed set of conversions that an entry of a table may name.

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
    Converted,
    ForeignKey,
    NotConverted,
    Provisional,
    Rule,
    count,
    integer,
    names_of,
    number,
    weights_of,
)
from holdfast.features.rescue.configuration.rows import ROW_RULES
from holdfast.features.rescue.configuration.sizes import SIZE_RULES, in_rollouts

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TRACKERS = typing.get_args(TrackerConfig.model_fields["kind"].annotation)
_SCHEDULES = {
    "cosine_with_min_lr": {"min_lr_rate": "optim.schedule.final_ratio"},
    "cosine_with_restarts": {"num_cycles": "optim.schedule.cycles"},
    "polynomial": {"power": "optim.schedule.power"},
}
"""The options of a schedule there that have the same meaning here."""
_EVALUATION = {
    "n": "evaluation.per_prompt",
    **{name: f"evaluation.sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p")},
}
_PAIR_LOSSES: dict[str, dict[str, Any]] = {
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


def epochs(foreign: ForeignKey) -> dict[str, Any] | tuple[dict[str, Any], str]:
    """Write the number of passes, unless a number of steps ends the run there."""
    limits = ("max_steps", "trainer.max_steps", "trainer.total_training_steps")
    if any(number(foreign.get(key), 0) > 0 for key in limits):
        return {}, "not read there, since a number of steps is set"
    return {foreign.target: foreign.value}


def warmup(foreign: ForeignKey) -> Converted:
    """Distinguish a share of all steps from a number of steps, which counts updates there."""
    steps = number(foreign.value)
    schedule = foreign.target.rpartition(".")[0]
    if 0 < steps < 1:
        return {f"{schedule}.warmup_ratio": steps}
    rollouts, remark = in_rollouts(foreign) if integer(steps) > 0 else (integer(steps), "")
    return {f"{schedule}.warmup_steps": rollouts}, remark


def share_of_warmup(foreign: ForeignKey) -> Converted:
    """Write the share of warm-up; where it is Axolotl's own, at most 100 steps."""
    if not foreign.is_default:
        return {foreign.target: foreign.value}
    steps = number(foreign.get("max_steps"), 0)
    if steps < 1:
        return Provisional({foreign.target: foreign.value}, "at most 100 steps there")
    first = min(int(number(foreign.value) * steps), 100)
    schedule = foreign.target.rpartition(".")[0]
    return {f"{schedule}.warmup_steps": first}, f"{foreign.value} x {foreign.get('max_steps')}, at most 100"


def betas(foreign: ForeignKey) -> dict[str, Any]:
    """Join the two decay rates into one list."""
    return {foreign.target: [number(foreign.get("adam_beta1"), 0.9), number(foreign.get("adam_beta2"), 0.999)]}


def clip_norm(foreign: ForeignKey) -> dict[str, Any]:
    """Turn 0, which clips nothing, into null."""
    return {foreign.target: foreign.value if number(foreign.value) > 0 else None}


def scheduler_options(foreign: ForeignKey) -> dict[str, Any]:
    """Rename the options of a schedule; the same name has another meaning in another schedule."""
    options = _SCHEDULES.get(str(foreign.get("lr_scheduler_type")), {})
    if not isinstance(foreign.value, Mapping) or set(foreign.value) - set(options):
        raise NotConverted
    return {options[name]: option for name, option in foreign.value.items()}


def minutes(foreign: ForeignKey) -> tuple[dict[str, Any], str]:
    """Turn seconds into minutes."""
    return {foreign.target: number(foreign.value) / 60}, f"{foreign.value} s"


def keep_last(foreign: ForeignKey) -> dict[str, Any]:
    """Keep at least two checkpoints."""
    if integer(foreign.value) < 1:
        raise NotConverted("no limit there; write how many checkpoints stay")
    return {foreign.target: max(2, integer(foreign.value))}


def per_epoch(foreign: ForeignKey) -> tuple[dict[str, Any], str]:
    """Convert a number of times per pass into a share of a pass between them."""
    return {foreign.target: round(1 / count(foreign.value), 6)}, f"{foreign.value} per epoch"


def whole_steps(foreign: ForeignKey) -> dict[str, Any]:
    """Accept a number of steps; a share of all steps is not converted."""
    if number(foreign.value) < 1:
        raise NotConverted(f"{foreign.value} is a share of all steps there; write the number of steps")
    return {foreign.target: integer(foreign.value)}


def held_out(foreign: ForeignKey) -> dict[str, Any]:
    """Accept a share of rows; a number of rows is not converted."""
    share = number(foreign.value)
    if share >= 1:
        raise NotConverted(f"{foreign.value} counts rows there; write the share of rows")
    return {foreign.target: share} if share > 0 else {}


def run_folder(foreign: ForeignKey) -> dict[str, Any]:
    """Split a path into the folder of runs and the run's name."""
    path = PurePosixPath(str(foreign.value))
    if not _RUN_NAME.fullmatch(path.name):
        raise NotConverted(f"the last part of {foreign.value} is no name of a run")
    return {"run.dir": str(path.parent), "run.name": path.name}


def run_name(foreign: ForeignKey) -> dict[str, Any]:
    """Accept a name of characters that a folder of ours may have."""
    if not _RUN_NAME.fullmatch(str(foreign.value)):
        raise NotConverted("a name has letters, digits, '.', '_' and '-'")
    return {foreign.target: str(foreign.value)}


def trackers(foreign: ForeignKey) -> tuple[dict[str, Any], str]:
    """Keep the trackers that Holdfast has too, and name the others in a remark."""
    names = [name.lower() for name in names_of(foreign.value)]
    sinks = [name for name in names if name in _TRACKERS]
    others = [name for name in names if name not in {*_TRACKERS, "none", "console", "file", "false"}]
    return {foreign.target: sinks} if sinks else {}, f"left out: {', '.join(others)}" if others else ""


def name_list(foreign: ForeignKey) -> dict[str, Any]:
    """Turn one name, or names with commas, into a list; all linear layers have a word of their own."""
    names = names_of(foreign.value)
    return {foreign.target: "all-linear" if names in (["all-linear"], ["all"]) else names}


def peft_targets(foreign: ForeignKey) -> dict[str, Any]:
    """Name the layers with adapters; where the file names none, peft's table of model types does."""
    if foreign.value is None:
        raise NotConverted("peft chooses by the type of the model, such as q_proj and v_proj; here all-linear")
    return name_list(foreign)


def lora_rank(foreign: ForeignKey) -> dict[str, Any]:
    """Write the rank of adapters; rank 0 means no adapters."""
    return {foreign.target: integer(foreign.value)} if number(foreign.value) > 0 else {}


def rank_and_alpha(foreign: ForeignKey) -> dict[str, Any]:
    """Write the rank, and alpha as twice the rank unless the file sets it."""
    rank = integer(foreign.value)
    return {foreign.target: rank} | ({} if foreign.get("lora_alpha") is not None else {"model.lora.alpha": 2 * rank})


def router(foreign: ForeignKey) -> dict[str, Any]:
    """Write the coefficient of the router loss per sequence; 0 means no router loss."""
    if number(foreign.value) == 0:
        return {"model.router_loss.kind": "off"}
    return {"model.router_loss.kind": "sequence", "model.router_loss.coefficient": foreign.value}


def config_fields(foreign: ForeignKey) -> dict[str, Any]:
    """Move the fields of a model's configuration out of verl's own level."""
    fields = foreign.value.get("model_config", foreign.value) if isinstance(foreign.value, Mapping) else None
    if not isinstance(fields, Mapping):
        raise NotConverted
    return {foreign.target: dict(fields)} if fields else {}


def evaluation_sampling(foreign: ForeignKey) -> dict[str, Any]:
    """Rename the options of sampling in evaluations, which are as in the rollout where they are left out."""
    if not isinstance(foreign.value, Mapping) or set(foreign.value) - set(_EVALUATION):
        raise NotConverted
    in_rollout = {name: foreign.get(f"worker.rollout.{name}") for name in ("temperature", "n")}
    options = {**in_rollout, **foreign.value}
    return {_EVALUATION[name]: option for name, option in options.items() if option is not None and option != -1}


def thinking(foreign: ForeignKey) -> dict[str, Any]:
    """Pass the variable for reasoning to the chat template."""
    return {foreign.target: {"enable_thinking": foreign.value}}


def scorer_loss(foreign: ForeignKey) -> dict[str, Any]:
    """Write the one loss of reward models, and the weight that keeps scores near 0."""
    center = {} if foreign.value is None else {"preference.loss.center": number(foreign.value)}
    return {foreign.target: "bradley_terry", **center}


def pair_losses(foreign: ForeignKey) -> dict[str, Any]:
    """Write TRL's list of losses, with what belongs to each."""
    names = names_of(foreign.get("loss_type"))
    settings: dict[str, Any] = {}
    losses = []
    for name, weight in zip(names, weights_of(foreign.get("loss_weights"), len(names)), strict=True):
        if name == "sft":
            settings["preference.sft"] = weight
        elif name not in _PAIR_LOSSES:
            raise NotConverted(f"{name} has no counterpart")
        else:
            losses.append(_pair_loss(name, weight, foreign))
    if losses:
        settings["preference.loss"] = losses if len(losses) > 1 else losses[0]
    return settings


def _pair_loss(name: str, weight: float, foreign: ForeignKey) -> dict[str, Any]:
    loss: dict[str, Any] = {**_PAIR_LOSSES[name], "beta": number(foreign.get("beta"))}
    smoothing = number(foreign.get("label_smoothing"), 0.0)
    if smoothing and loss["kind"] in {"dpo", "robust"}:
        loss["label_smoothing"] = smoothing
    return loss | ({"weight": weight} if weight != 1 else {})


def policy_loss(foreign: ForeignKey) -> tuple[dict[str, Any], str]:
    """Write two keys: which ratio is clipped, and what the loss averages over."""
    name, level = str(foreign.get("loss_type")), foreign.get("importance_sampling_level")
    if name not in _POLICY_LOSSES:
        raise NotConverted(f"{name} has no counterpart")
    kind, average = _POLICY_LOSSES[name]
    if level == "sequence":
        if kind != "clip":
            raise NotConverted(f"{name} of whole sequences has no counterpart")
        kind, average = "gspo", "sequence_mean"
    remark = "over the whole update, not the rows of one device" if name == "bnpo" else ""
    return {"objective.kind": kind, "data.average": average}, remark


def clip_bounds(foreign: ForeignKey) -> dict[str, Any] | tuple[dict[str, Any], str]:
    """Write both bounds of the ratio; the upper one equals the lower one unless the file sets it."""
    name = foreign.get("loss_type")
    low, high = foreign.get("epsilon"), foreign.get("epsilon_high")
    if name == "sapo":
        return {}, "not read there by sapo"
    if name == "cispo":
        if high is None:
            raise NotConverted("cispo's largest weight is not set")
        return {"objective.high": number(high) - 1}, f"{high} - 1"
    return {"objective.low": low, "objective.high": low if high is None else high}


def both_bounds(foreign: ForeignKey) -> dict[str, Any]:
    """Write one number as both bounds, unless the file sets each of them."""
    prefix = "actor_rollout_ref.actor.clip_ratio"
    unset = [side for side in ("low", "high") if foreign.get(f"{prefix}_{side}") is None]
    return {f"objective.{side}": foreign.value for side in unset}


def policy_kl(foreign: ForeignKey) -> dict[str, Any] | tuple[dict[str, Any], str]:
    """Write the coefficient of the KL term, and whether the term is multiplied by the ratio."""
    coefficient = number(foreign.get("beta"))
    if coefficient == 0:
        return {}, "no KL term"
    weighted = foreign.get("use_bias_correction_kl") is not False
    return {"kl.coefficient": coefficient, "kl.importance_weighted": weighted}


def verl_advantage(foreign: ForeignKey) -> dict[str, Any]:
    """Name the estimator of advantages; `grpo` without the standard deviation has another name here."""
    name = str(foreign.value)
    if name == "gae":
        return {foreign.target: "gae", "critic": {}}
    if name not in _ADVANTAGES:
        raise NotConverted(f"{name} has no counterpart")
    unscaled = name == "grpo" and foreign.get("algorithm.norm_adv_by_std_in_grpo") is False
    return {foreign.target: "dr_grpo" if unscaled else _ADVANTAGES[name]}


def sampling_cut(foreign: ForeignKey) -> dict[str, Any] | tuple[dict[str, Any], str]:
    """Weigh tokens where they are drawn from another distribution than the policy's."""
    neutral = {"rollout.top_k": -1, "rollout.min_p": 0}.get(foreign.target, 1)
    if number(foreign.value) == neutral:
        return {}, "draws from the policy's own distribution"
    return {foreign.target: foreign.value, "correction.kind": "truncate"}


def sampler_correction(foreign: ForeignKey) -> dict[str, Any]:
    """Write how TRL weighs tokens by which sampler and trainer differ; a sequence's weight is another number there."""
    mode = foreign.get("vllm_importance_sampling_mode")
    if foreign.get("vllm_importance_sampling_correction") is False:
        return {}
    high = number(foreign.get("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"))
    low = number(foreign.get("vllm_importance_sampling_clip_min"), 0.0)
    if mode == "token_truncate" and low == 0:
        return {"correction.kind": "truncate", "correction.cap": high}
    if mode == "token_mask":
        return {"correction.kind": "mask", "correction.high": high, "correction.low": low}
    raise NotConverted(f"{mode} has no counterpart")


def filtered_reward(foreign: ForeignKey) -> dict[str, Any]:
    """Name the reward whose mean bounds groups: the function's, or a part of it."""
    path = str(foreign.get("worker.reward.reward_function", "worker.reward.score_function") or "")
    function = path.rpartition(":")[2] if ":" in path else "main"
    return {foreign.target: function if foreign.value == "overall" else f"{function}/{foreign.value}"}


# By the name that entries of the table use; a test finds an entry that names another one.
RULES: dict[str, Rule] = {
    **{
        rule.__name__: rule
        for rule in (
            epochs, warmup, share_of_warmup, scorer_loss, betas, clip_norm, scheduler_options, minutes, keep_last,
            per_epoch, whole_steps, held_out, run_folder, run_name, trackers, name_list, peft_targets, lora_rank,
            rank_and_alpha, router, config_fields, evaluation_sampling, thinking, pair_losses, policy_loss,
            clip_bounds, both_bounds, policy_kl, verl_advantage, sampling_cut, sampler_correction, filtered_reward,
        )
    },
    **SIZE_RULES,
    **ROW_RULES,
}  # fmt: skip
