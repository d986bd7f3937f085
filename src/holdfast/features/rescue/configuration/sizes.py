"""Conversion rules for batches, steps, lengths and servers, from what one device has to what the whole run has."""

from __future__ import annotations

from typing import Any

from holdfast.features.rescue.configuration.facts import (
    Converted,
    ForeignKey,
    NotConverted,
    Provisional,
    Rule,
    count,
    integer,
    number,
)
from holdfast.features.rescue.systems.table import spelled

PROMPT_ROOM = 1024
"""Tokens left for a prompt beside the longest completion, where the other system bounds no prompt."""
_MICRO_BATCHES = (
    "worker.actor.micro_batch_size_per_device_for_update",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
)
_CONTEXTS = (
    "worker.actor.ulysses_size",
    "worker.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
)
_FIRST_PORT = 8700


def _length(foreign: ForeignKey) -> int | None:
    """Return the longest sequence of a row in the other system; None where it has no bound."""
    if foreign.verb == "grpo":
        completion = count(foreign.get("max_completion_length"), 512)
        return count(foreign.get("vllm_max_model_length"), completion + PROMPT_ROOM)
    length = foreign.get("max_length", "max_seq_length", "cutoff_len", "sequence_len")
    return None if length is None else count(length)


def _sharing(foreign: ForeignKey) -> int:
    """Return how many ranks have the same rows there, since they share sequences or matrices."""
    sharing = count(foreign.get("context_parallel_size", "sequence_parallel_degree"), 1)
    sharing *= count(foreign.get("tensor_parallel_size"), 1)
    if foreign.ranks % sharing:
        raise NotConverted(f"{foreign.ranks} ranks are no multiple of the {sharing} that have the same rows there")
    return sharing


def _completions(foreign: ForeignKey) -> tuple[int, int]:
    """Return the rows, or completions, of one update over all ranks there, and those of one rollout."""
    rows = count(foreign.get("per_device_train_batch_size", "micro_batch_size"), 1)
    passes = count(foreign.get("gradient_accumulation_steps"), 1)
    rows *= foreign.ranks // _sharing(foreign)
    generated = rows * count(foreign.get("steps_per_generation"), passes)
    return rows * passes, count(foreign.get("generation_batch_size"), generated)


def _packed(foreign: ForeignKey) -> bool:
    """Return whether a row of a batch there is a pack of rows; a window of tokens is one here too."""
    names = ("packing", "neat_packing", "sample_packing")
    packed = any(spelled(foreign.get(key)) == "true" for key in names)
    return packed and foreign.get("packing_strategy") != "wrapped"


def batch(foreign: ForeignKey) -> Converted:
    """Multiply rows of one device by accumulation and ranks with own rows; of completions, divide by a prompt's."""
    rows = count(foreign.get("per_device_train_batch_size", "micro_batch_size"), 1)
    passes = count(foreign.get("gradient_accumulation_steps"), 1)
    sharing, length = _sharing(foreign), _length(foreign)
    update, generated = _completions(foreign)
    pairs = 2 if foreign.verb in {"dpo", "reward"} else 1
    micro = {} if length is None else {"data.tokens_per_micro_batch": rows * pairs * length}
    of_ranks = f"{foreign.ranks} rank{'s' if foreign.ranks > 1 else ''}{f' / {sharing}' if sharing > 1 else ''}"
    product = f"{rows} x {passes} x {of_ranks} = {update}"
    if foreign.verb != "grpo":
        settings = {"data.batch_size": update, **micro}
        if _packed(foreign):
            return Provisional(settings, f"{product}; a row is a full pack there, so multiply by the rows of a pack")
        return settings, product
    group = count(foreign.get("num_generations"), 8)
    if generated % group or generated % update:
        raise NotConverted(
            f"{generated} completions of a rollout in groups of {group} and updates of {update} do not divide"
        )
    settings = {"data.batch_size": generated // group, "updates.mini_batches": generated // update, **micro}
    return settings, f"{product} completions an update; {generated} a rollout / {group} of a prompt"


def in_rollouts(foreign: ForeignKey) -> tuple[int, str]:
    """Return a number of updates as one of rollouts, with the arithmetic where a rollout is several updates."""
    factor = 1
    if foreign.verb == "grpo":
        update, generated = _completions(foreign)
        factor = max(1, generated // update) * count(foreign.get("num_iterations"), 1)
    remark = f"{foreign.value} updates / {factor} a rollout" if factor > 1 else ""
    return max(1, round(number(foreign.value) / factor)), remark


def updates(foreign: ForeignKey) -> tuple[dict[str, Any], str]:
    """Turn a number of updates into one of rollouts, where a rollout is several updates."""
    if number(foreign.value) < 1:
        raise NotConverted(f"{foreign.value} is a share of all steps there; write the number of steps")
    rollouts, remark = in_rollouts(foreign)
    return {foreign.target: rollouts}, remark


def mini_batches(foreign: ForeignKey) -> tuple[dict[str, Any], str]:
    """Divide the prompts of a rollout by those of an update."""
    prompts, update = count(foreign.get("data.rollout_batch_size", "data.train_batch_size")), count(foreign.value)
    if prompts % update:
        raise NotConverted(f"{prompts} prompts of a rollout are no multiple of {update}")
    return {foreign.target: prompts // update}, f"{prompts} / {update}"


def _prompt_and_response(foreign: ForeignKey) -> tuple[int, int]:
    return count(foreign.get("data.max_prompt_length"), 512), count(foreign.get("data.max_response_length"), 512)


def prompt_and_response(foreign: ForeignKey) -> tuple[dict[str, Any], str]:
    """Add the bounds of prompt and response."""
    prompt, response = _prompt_and_response(foreign)
    settings = {
        "rollout.max_new_tokens": response,
        "data.max_length": prompt + response,
        "data.max_prompt_length": prompt,
    }
    if foreign.get(*_MICRO_BATCHES) is None:
        settings["data.tokens_per_micro_batch"] = max(4096, prompt + response)
    return settings, f"{prompt} + {response}"


def micro_batch_tokens(foreign: ForeignKey) -> tuple[dict[str, Any], str]:
    """Convert a number of sequences into the tokens of as many of the longest ones."""
    if foreign.get("actor_rollout_ref.actor.use_dynamic_bsz") is True:
        return {}, "not read there, since use_dynamic_bsz is true"
    longest = sum(_prompt_and_response(foreign))
    return {foreign.target: count(foreign.value) * longest}, f"{foreign.value} x {longest} tokens"


def row_length(foreign: ForeignKey) -> dict[str, Any]:
    """Write the longest sequence; Holdfast requires a bound."""
    if foreign.value is None:
        raise NotConverted("no limit there; write the longest sequence")
    return {foreign.target: count(foreign.value)}


def longest_kept(foreign: ForeignKey) -> dict[str, Any]:
    """Write the longest sequence, where longer ones are left out."""
    return row_length(foreign) | {"data.overlong": "drop"}


def completion_length(foreign: ForeignKey) -> tuple[dict[str, Any], str]:
    """Leave room for a prompt beside the longest completion."""
    bounded = foreign.get("vllm_max_model_length") is not None
    room = "" if bounded else f"{foreign.value} + {PROMPT_ROOM} tokens for a prompt, a choice of ours"
    return {foreign.target: count(foreign.value), "data.max_length": _length(foreign)}, room


def rounds_of_sampling(foreign: ForeignKey) -> dict[str, Any]:
    """Bound the number of rollouts of one step; it is at least two."""
    if number(foreign.value) < 1:
        raise NotConverted("no limit there; write the largest number of rollouts in a step")
    return {foreign.target: max(2, count(foreign.value))}


def machine_ranks(foreign: ForeignKey) -> dict[str, Any] | tuple[dict[str, Any], str]:
    """Start one rank per GPU of this machine; torchrun starts those of several machines."""
    machines = integer(foreign.get("trainer.nnodes"), 1)
    if machines > 1:
        return {}, f"{machines} machines of {foreign.value}: start it with torchrun on each"
    return {foreign.target: integer(foreign.value)}


def shard_ranks(foreign: ForeignKey) -> tuple[dict[str, Any], str]:
    """Divide the ranks of one copy of the weights by those that share sequences, which are an axis of their own."""
    context = count(foreign.get(*_CONTEXTS), 1)
    if count(foreign.value) % context:
        raise NotConverted(f"{foreign.value} ranks of a copy are no multiple of the {context} that share sequences")
    return {foreign.target: count(foreign.value) // context}, f"{foreign.value} / {context}" if context > 1 else ""


def shared_servers(foreign: ForeignKey) -> tuple[dict[str, Any], str]:
    """Start servers of vLLM that share the GPUs of this machine's ranks, as verl and EasyR1 do."""
    kind = str(foreign.get("actor_rollout_ref.rollout.name", "worker.rollout.name") or "vllm")
    if kind == "hf":
        return {"rollout.engine.kind": "transformers"}, ""
    if kind != "vllm":
        raise NotConverted(f"{kind} samples there")
    if count(foreign.get("trainer.nnodes"), 1) > 1:
        raise NotConverted("servers on several machines; write the address of each")
    size = foreign.get("actor_rollout_ref.rollout.tensor_model_parallel_size", "worker.rollout.tensor_parallel_size")
    share = foreign.get("actor_rollout_ref.rollout.gpu_memory_utilization", "worker.rollout.gpu_memory_utilization")
    return _servers(count(foreign.get("trainer.n_gpus_per_node")), count(size, 1), share)


def trl_servers(foreign: ForeignKey) -> tuple[dict[str, Any], str]:
    """Name the servers of vLLM that TRL samples from, or start those that share the GPUs of the ranks."""
    if foreign.get("vllm_mode") == "server":
        host = str(foreign.get("vllm_server_host")).replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - replaced
        url = foreign.get("vllm_server_base_url") or f"http://{host}:{foreign.get('vllm_server_port')}"
        return {"rollout.engine.kind": "vllm", "rollout.engine.url": [str(url)]}, "start it with `holdfast serve`"
    size = count(foreign.get("vllm_tensor_parallel_size"))
    return _servers(foreign.ranks, size, foreign.get("vllm_gpu_memory_utilization"))


def _servers(ranks: int, size: int, share: Any) -> tuple[dict[str, Any], str]:
    if ranks % size:
        raise NotConverted(f"{ranks} GPUs are no multiple of the {size} of one server")
    settings: dict[str, Any] = {
        "rollout.engine.kind": "vllm",
        "rollout.engine.url": [f"http://127.0.0.1:{_FIRST_PORT + server}" for server in range(ranks // size)],
        "rollout.engine.start.share": True,
        "rollout.engine.start.tensor_parallel_size": size,
    }
    if share is not None:
        settings["rollout.engine.start.gpu_memory_utilization"] = share
    return settings, f"{ranks} GPUs / {size} = {ranks // size} servers"


SIZE_RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        batch, updates, mini_batches, prompt_and_response, micro_batch_tokens, row_length, longest_kept,
        completion_length, rounds_of_sampling, machine_ranks, shard_ranks, shared_servers, trl_servers,
    )
}  # fmt: skip
