"""Conversion rules for batches, steps and lengths, from rows of one device to rows of a whole update."""

from __future__ import annotations

from typing import Any

from holdfast.features.rescue.configuration.facts import (
    Facts,
    ForeignKey,
    KeyOutcome,
    NotConverted,
    Rule,
    count,
    number,
)
from holdfast.features.rescue.systems.table import spelled

PROMPT_ROOM = 1024
"""Tokens left for a prompt beside the longest completion, where the other system bounds no prompt."""


def _length(facts: Facts) -> int | None:
    """Return the longest sequence of a row in the other system; None where it has no bound."""
    if facts.verb == "grpo":
        completion = count(facts.get("max_completion_length"), 512)
        return count(facts.get("vllm_max_model_length"), completion + PROMPT_ROOM)
    length = facts.get("max_length", "max_seq_length", "cutoff_len", "sequence_len")
    return None if length is None else count(length)


def _per_device(facts: Facts) -> tuple[int, int]:
    """Return rows of a forward pass of one device, and passes per update."""
    rows = facts.get("per_device_train_batch_size", "micro_batch_size")
    return count(rows, 1), count(facts.get("gradient_accumulation_steps"), 1)


def _row_ranks(facts: Facts) -> int:
    """Return the ranks divided by those that have the same rows, since they share sequences or matrices there."""
    sharing = count(facts.get("context_parallel_size", "sequence_parallel_degree"), 1)
    sharing *= count(facts.get("tensor_parallel_size"), 1)
    if facts.ranks % sharing:
        raise NotConverted(f"{facts.ranks} ranks are no multiple of the {sharing} that have the same rows there")
    return facts.ranks // sharing


def _micro_batch(rows: int, facts: Facts) -> dict[str, Any]:
    """Return the tokens of a number of the longest rows; a pair has two sequences."""
    length = _length(facts)
    sequences = 2 if facts.verb in {"dpo", "reward"} else 1
    return {} if length is None else {"data.tokens_per_micro_batch": rows * sequences * length}


def batch(foreign: ForeignKey) -> KeyOutcome:
    """Multiply rows of one device by accumulation and ranks with own rows; of completions, divide by a prompt's."""
    rows, passes = _per_device(foreign.facts)
    ranks = _row_ranks(foreign.facts)
    update = rows * passes * ranks
    shared = f" / {foreign.facts.ranks // ranks}" if ranks < foreign.facts.ranks else ""
    of_ranks = f"{foreign.facts.ranks} rank{'s' if foreign.facts.ranks > 1 else ''}{shared}"
    product = f"{rows} x {passes} x {of_ranks} = {update}"
    if foreign.facts.verb != "grpo":
        packed = any(spelled(foreign.facts.get(key)) == "true" for key in ("packing", "sample_packing"))
        remark = f"{product}; a row is a full pack there, so multiply by the rows of a pack" if packed else product
        return KeyOutcome({"data.batch_size": update, **_micro_batch(rows, foreign.facts)}, remark)
    group = count(foreign.facts.get("num_generations"), 8)
    generated = count(foreign.facts.get("generation_batch_size"), rows * ranks * _steps_per_generation(foreign.facts))
    prompts, mini_batches = generated / group, generated / update
    if prompts != int(prompts) or mini_batches != int(mini_batches):
        raise NotConverted(
            f"{generated} completions of a rollout in groups of {group} and updates of {update} do not divide"
        )
    settings = {
        "data.batch_size": int(prompts),
        "updates.mini_batches": int(mini_batches),
        **_micro_batch(rows, foreign.facts),
    }
    return KeyOutcome(settings, f"{product} completions an update; {generated} a rollout / {group} of a prompt")


def _steps_per_generation(facts: Facts) -> int:
    return count(facts.get("steps_per_generation"), count(facts.get("gradient_accumulation_steps"), 1))


def updates_per_rollout(facts: Facts) -> int:
    """Return how many updates TRL makes of one rollout, each of which is a step there."""
    if facts.verb != "grpo":
        return 1
    rows, passes = _per_device(facts)
    ranks = _row_ranks(facts)
    generated = count(facts.get("generation_batch_size"), rows * ranks * _steps_per_generation(facts))
    return max(1, generated // (rows * passes * ranks)) * count(facts.get("num_iterations"), 1)


def rounds(foreign: ForeignKey) -> KeyOutcome:
    """Turn updates into rollouts, where a rollout is several updates."""
    steps = number(foreign.value)
    if steps < 1:
        raise NotConverted(f"{foreign.value} is a share of all steps there; write the number of steps")
    updates = updates_per_rollout(foreign.facts)
    remark = f"{foreign.value} updates / {updates} a rollout" if updates > 1 else ""
    return KeyOutcome({foreign.target: max(1, round(steps / updates))}, remark)


def mini_batches(foreign: ForeignKey) -> KeyOutcome:
    """Divide the prompts of a rollout by those of an update."""
    prompts, update = count(foreign.facts.get("data.rollout_batch_size", "data.train_batch_size")), count(foreign.value)
    if prompts % update:
        raise NotConverted(f"{prompts} prompts of a rollout are no multiple of {update}")
    return KeyOutcome({foreign.target: prompts // update}, f"{prompts} / {update}")


def _prompt_and_response(facts: Facts) -> tuple[int, int]:
    return count(facts.get("data.max_prompt_length"), 512), count(facts.get("data.max_response_length"), 512)


def prompt_and_response(foreign: ForeignKey) -> KeyOutcome:
    """Add the bounds of prompt and response."""
    prompt, response = _prompt_and_response(foreign.facts)
    settings = {"rollout.max_new_tokens": response, "data.max_length": prompt + response}
    settings["data.max_prompt_length"] = prompt
    if foreign.facts.get(*_MICRO_BATCHES) is None:
        settings["data.tokens_per_micro_batch"] = max(4096, prompt + response)
    return KeyOutcome(settings, f"{prompt} + {response}")


_MICRO_BATCHES = (
    "worker.actor.micro_batch_size_per_device_for_update",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
)


def micro_batch_tokens(foreign: ForeignKey) -> KeyOutcome:
    """Convert a number of sequences into the tokens of as many of the longest ones."""
    if foreign.facts.get("actor_rollout_ref.actor.use_dynamic_bsz") is True:
        return KeyOutcome({}, "not read there, since use_dynamic_bsz is true")
    longest = sum(_prompt_and_response(foreign.facts))
    return KeyOutcome(
        {"data.tokens_per_micro_batch": count(foreign.value) * longest}, f"{foreign.value} x {longest} tokens"
    )


def row_length(foreign: ForeignKey) -> KeyOutcome:
    """Write the longest sequence; Holdfast requires a bound."""
    if foreign.value is None:
        raise NotConverted("no limit there; write the longest sequence")
    return KeyOutcome({"data.max_length": count(foreign.value)})


def completion_length(foreign: ForeignKey) -> KeyOutcome:
    """Leave room for a prompt beside the longest completion."""
    room = (
        ""
        if foreign.facts.get("vllm_max_model_length")
        else f"{foreign.value} + {PROMPT_ROOM} tokens for a prompt, a choice of ours"
    )
    return KeyOutcome({"rollout.max_new_tokens": count(foreign.value), "data.max_length": _length(foreign.facts)}, room)


def rounds_of_sampling(foreign: ForeignKey) -> KeyOutcome:
    """Bound the number of rollouts of one step; it is at least two."""
    rollouts = number(foreign.value)
    if rollouts < 1:
        raise NotConverted("no limit there; write the largest number of rollouts in a step")
    return KeyOutcome({foreign.target: max(2, count(rollouts))})


SIZE_RULES: dict[str, Rule] = {
    function.__name__: function
    for function in (
        batch,
        rounds,
        mini_batches,
        prompt_and_response,
        micro_batch_tokens,
        row_length,
        completion_length,
        rounds_of_sampling,
    )
}
