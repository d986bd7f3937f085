"""Keep what a step was made of, so that one process can make it again, and show some of it to people.

rollouts/step-N.jsonl.gz holds a line about the step and one for each of its groups: everything between sampling and
the update, and nothing that follows from the weights. samples.jsonl holds the completions of some steps as text, and
the tokens of a few of them.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import ConfigError
from holdfast.files import open_regular, parse_json
from holdfast.models.layers.expert_choices import CHOICES_COLUMN
from holdfast.text.escaping import escaped
from holdfast.training.policy.groups import CompletionSummary, GroupFact
from holdfast.training.policy.rollouts import Rollout
from holdfast.training.policy.run import PolicyRun
from holdfast.types import Finish, Group, Prompt, Trajectory

RECORD_FOLDER = "rollouts"
REPLAYED_METRICS = ("loss", "grad_norm")
"""What a replay must reproduce."""


@dataclass(frozen=True)
class Record:
    """One step as it was made."""

    step: int
    """Counted from 1, as in metrics.jsonl."""
    base: Path
    """Directory of the run's YAML."""
    metrics: Mapping[str, float]
    rollout: Rollout
    compute_dtype: str | None
    """What the run computed in; None in records of earlier versions."""


def record_path(directory: Path, step: int) -> Path:
    """Return where a step is kept."""
    return directory / RECORD_FOLDER / f"step-{step:08d}.jsonl.gz"


def record(run: PolicyRun, rollout: Rollout, metrics: Mapping[str, float]) -> None:
    """Write the step that was just made, if `rollout.record` asks for it; all ranks call this together."""
    if not run.config.rollout.record:
        return
    left_out = [_group_line(group) | {"left_out": True} for group in rollout.left_out]
    everyone = run.setting.ranks.gather([*(_group_line(group) for group in rollout.groups), *left_out])
    if not run.setting.world.is_first:
        return
    lines = {line["prompt_id"]: line for part in everyone for line in part}
    head = {
        "step": run.trained.state.step,
        "base": str(run.setting.base),
        "metrics": {name: metrics[name] for name in REPLAYED_METRICS},
        "compute_dtype": run.trained.plan.compute_dtype,
    }
    path = record_path(run.setting.directory, run.trained.state.step)
    path.parent.mkdir(exist_ok=True)
    beside = path.with_suffix(".tmp")
    with gzip.open(beside, "wt", encoding="utf-8", compresslevel=3) as file:
        file.write(json.dumps(head) + "\n")
        for fact in rollout.facts:
            file.write(json.dumps(lines[fact.prompt_id] | {"facts": _fact_lines(fact)}) + "\n")
        for line in lines.values():
            if "left_out" in line:
                file.write(json.dumps(line) + "\n")
    beside.replace(path)


def what_is_deleted(config: GRPOConfig) -> str:
    """Return which of the steps that are kept cannot be made again, since no checkpoint will be; "" if all can."""
    section, keep = config.checkpoint, config.checkpoint.keep
    whole = config.steps is not None and config.steps <= keep.last
    if not config.rollout.record or (section.every_steps == 1 and (keep.every == 1 or whole)):
        return ""
    saved = "by the clock alone" if section.every_steps is None else f"every {section.every_steps} steps"
    checkpoints = f"the last {keep.last}" + ("" if keep.every is None else f" and those of every {keep.every} steps")
    return (
        f"rollout.record: step N is made again from the checkpoint of step N-1; checkpoints are saved {saved}, and of "
        f"them {checkpoints} stay, so most steps cannot be replayed. Set checkpoint.every_steps and "
        "checkpoint.keep.every to 1, or to the distance of the steps that you may want."
    )


def _group_line(group: Group) -> dict[str, Any]:
    return {
        "prompt_id": group.prompt.prompt_id,
        "prompt": group.prompt.tokens.tolist(),
        "source": group.prompt.source,
        "completions": [
            {
                "sample_id": trajectory.sample_id,
                "seed": trajectory.seed,
                "temperature": trajectory.temperature,
                "tokens": trajectory.tokens[group.prompt.tokens.size :].tolist(),
                "trained": bool(trajectory.loss_mask.any()),
                "sampler_logprobs": [float(value) for value in trajectory.sampler_logprobs[group.prompt.tokens.size :]],
                "finish": trajectory.finish.value,
                "versions": _segments(trajectory.weights_versions[group.prompt.tokens.size :]),
                "text": trajectory.completion,
                **{
                    name: trajectory.per_token[name].tolist()
                    for name in (CHOICES_COLUMN,)
                    if name in trajectory.per_token
                },
            }
            for trajectory in group.trajectories
        ],
    }


def _segments(versions: NDArray[np.int32]) -> list[list[int]]:
    """Return [first token, weights version] of each part of a completion."""
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()] if versions.size else []
    return [[start, int(versions[start])] for start in starts]


def _fact_lines(fact: GroupFact) -> dict[str, Any]:
    return {
        "greedy": None if math.isnan(fact.greedy) else fact.greedy,
        "completions": [
            {
                "reward": None if math.isnan(completion.reward) else completion.reward,
                "parts": dict(completion.parts),
                "finish": completion.finish.value,
            }
            for completion in fact.completions
        ],
    }


def read_record(directory: Path, step: int) -> Record:
    """Read what `record` wrote.

    Raises:
        ConfigError: The step was not kept, and the message names those that were; or what was kept is damaged.
    """
    path = record_path(directory, step)
    if not path.exists():
        steps = sorted(int(entry.name[5:13]) for entry in (directory / RECORD_FOLDER).glob("step-*.jsonl.gz"))
        there = f"kept are steps {steps[0]} to {steps[-1]}" if steps else "none was kept; set rollout.record: true"
        raise ConfigError(f"{path} does not exist: {there}.")
    try:
        with open_regular(path) as packed, gzip.open(packed, "rt", encoding="utf-8") as file:
            head, *lines = (parse_json(line) for line in file)
        trained = [_group(line) for line in lines if "left_out" not in line]
        groups, facts = zip(*trained, strict=True) if trained else ((), ())
        rollout = Rollout(groups, facts, facts, {}, ())
        return Record(head["step"], Path(head["base"]), head["metrics"], rollout, head.get("compute_dtype"))
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged ({type(error).__name__}: {error}), so step {step} cannot be made again."
        ) from error


def _group(line: Mapping[str, Any]) -> tuple[Group, GroupFact]:
    tokens = np.asarray(line["prompt"], np.int64)
    prompt = Prompt(line["prompt_id"], tokens, "", {}, line["source"])
    facts = line["facts"]["completions"]
    trajectories = tuple(_trajectory(prompt, one, fact) for one, fact in zip(line["completions"], facts, strict=True))
    completions = tuple(
        CompletionSummary(
            _number(fact["reward"]),
            fact["parts"],
            len(one["tokens"]),
            tokens.size + len(one["tokens"]),
            Finish(fact["finish"]),
            None,
            None,
        )
        for one, fact in zip(line["completions"], facts, strict=True)
    )
    return Group(prompt, trajectories), GroupFact(prompt.prompt_id, 0, completions, _number(line["facts"]["greedy"]))


def _trajectory(prompt: Prompt, one: Mapping[str, Any], fact: Mapping[str, Any]) -> Trajectory:
    size, chosen = prompt.tokens.size, np.asarray(one["tokens"], np.int64)
    own = np.arange(size + chosen.size) >= size
    versions = np.where(own, one.get("weights_version", -1), -1).astype(np.int32)  # earlier records have one version
    for start, version in one.get("versions", ()):
        versions[size + start :] = version
    return Trajectory(
        prompt_id=prompt.prompt_id,
        sample_id=one["sample_id"],
        seed=one["seed"],
        temperature=one["temperature"],
        tokens=np.concatenate([prompt.tokens, chosen]),
        loss_mask=own & one["trained"],
        sampler_logprobs=np.concatenate([np.zeros(size, np.float32), np.asarray(one["sampler_logprobs"], np.float32)]),
        weights_versions=versions,
        finish=Finish(fact["finish"]),
        completion=one["text"],
        reward=fact["reward"],
        rewards=fact["parts"],
        per_token={name: np.asarray(one[name], np.int16) for name in (CHOICES_COLUMN,) if name in one},
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


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
    tokens = _tokens(run, rollout, shown)
    if run.setting.world.is_first and shown:
        run.setting.log.samples += [_line(item, tokens.get(item.sample_id)) for item in shown]
        if config.show:
            run.setting.log.messages.append(sample_table(choose_samples(shown, config.show), step))


def _tokens(run: PolicyRun, rollout: Rollout, shown: Sequence[Shown]) -> dict[int, list[list[Any]]]:
    """Return the tokens of the best, the worst and the newest completion; all ranks call this together."""
    if not shown or run.config.metrics.samples != "jsonl":
        return {}
    chosen = {item.sample_id for _, item in choose_samples(shown, 3)}
    own = {
        trajectory.sample_id: _token_rows(trajectory, group.prompt.tokens.size, run.trained.origin.tokenizer)
        for group in (*rollout.groups, *rollout.left_out)
        for trajectory in group.trajectories
        if trajectory.sample_id in chosen
    }
    return {sample: rows for part in run.setting.ranks.gather(own) for sample, rows in part.items()}


_MOST_TOKENS = 2_000
"""Of a completion; what comes after is in no record of this kind."""
_TOKEN_DIGITS = 4


def _token_rows(trajectory: Trajectory, prompt_tokens: int, tokenizer: Any) -> list[list[Any]]:
    """Return [text, log-probability in nats, advantage] of each token behind a prompt; [] without a fast tokenizer.

    A character of several tokens stands at the last of them. What the policy did not choose has no log-probability.

    Args:
        trajectory: Prompt and completion.
        prompt_tokens: Length of the prompt.
        tokenizer: Of the run.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    chosen = slice(prompt_tokens, prompt_tokens + _MOST_TOKENS)
    texts = _token_texts(backend, trajectory.tokens[chosen].tolist())
    own = trajectory.loss_mask[chosen].tolist()
    logprobs = trajectory.sampler_logprobs[chosen].tolist()
    advantages = [None] * len(own) if trajectory.advantages is None else trajectory.advantages[chosen].tolist()
    return [
        [text, _rounded(logprob) if is_own else None, _rounded(advantage) if is_own else None]
        for text, is_own, logprob, advantage in zip(texts, own, logprobs, advantages, strict=True)
    ]


def _token_texts(backend: Any, tokens: Sequence[int]) -> Iterator[str]:
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    for token in tokens:
        yield stream.step(backend, token) or ""


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, _TOKEN_DIGITS)


def _line(item: Shown, tokens: list[list[Any]] | None) -> dict[str, Any]:
    return item._asdict() | ({"tokens": tokens} if tokens else {})


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


_MOST_PARTS = 6
_LONGEST_NAME = 20


def sample_table(picked: Sequence[tuple[str, Shown]], step: int) -> str:
    """Return completions as lines of text: reward, advantage, the reward's parts, and what was asked and answered.

    A part that is the reward itself is left out, and so are parts beyond the sixth; samples.jsonl has all.
    """
    items = [item for _, item in picked]
    parts = _parts(items)
    shown, more = parts[:_MOST_PARTS], len(parts) - _MOST_PARTS
    rows = [[" " * 6, "reward", "advantage", *(_short(name, _LONGEST_NAME) for name in shown)]]
    rows += [[label, *_numbers(item, shown)] for label, item in picked]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ends = [f"(and {more} parts more)" if more > 0 else "", *map(_spoken, items)]
    cells = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = ["  ".join(["", *row, end]).rstrip() for row, end in zip(cells, ends, strict=True)]
    return "\n".join([f"completions of step {step}:", *lines])


def _parts(items: Sequence[Shown]) -> list[str]:
    """Return the parts that say more than the reward."""
    parts = list(dict.fromkeys(name for item in items for name in item.rewards))
    alone = len(parts) == 1 and all(item.rewards.get(parts[0]) == item.reward for item in items)
    return [] if alone else parts


def _numbers(item: Shown, parts: Sequence[str]) -> list[str]:
    advantage = f"{item.advantage:+.2f}" if item.trained else "untrained"
    return [_decimal(item.reward), advantage, *(_decimal(item.rewards.get(name)) for name in parts)]


def _spoken(item: Shown) -> str:
    cut = " (cut)" if item.finish == Finish.LENGTH.value else ""
    return f"{_short(item.prompt, _LONGEST)} -> {_short(item.completion, _LONGEST)}{cut}"


def _decimal(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _short(text: str, longest: int) -> str:
    one_line = escaped(text)
    return one_line if len(one_line) <= longest else "..." + one_line[-longest:]
