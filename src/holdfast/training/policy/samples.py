"""Show completions of a step: a table of some on the screen, and all as text in samples.jsonl, a few with tokens."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import xxhash

from holdfast.data.content.formats import Conversation, prompt_of
from holdfast.data.content.image_files import ImageFiles
from holdfast.data.content.images import held_images
from holdfast.errors import DataError
from holdfast.metrics.progress import terminal_width
from holdfast.text.escaping import escaped
from holdfast.text.shortening import shortened
from holdfast.training.policy.rollouts import Rollout
from holdfast.training.policy.run import PolicyTraining
from holdfast.types import Finish, Group, Prompt, Trajectory

_LONGEST = 160
"""Characters of a completion that the table shows."""


class SampleRow(NamedTuple):
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
    """Whether its group is trained on; groups that are left out of a step have no advantages."""
    messages: list[Any] | None = None
    """The whole conversation of an episode."""
    prompt_messages: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of what an episode may call."""
    images: tuple[bytes, ...] = ()
    """Files of its prompt's images."""
    question: str = ""
    """What the user said last before it, which the table shows in the place of the prompt; "": nothing is known."""


def tell_samples(training: PolicyTraining, rollout: Rollout) -> None:
    """Every `rollout.show_every` steps, queue some completions for the screen and all of them for samples.jsonl."""
    config, step = training.config.rollout, training.model.state.step
    if step % config.show_every and step != 1:
        return
    files = ImageFiles(training.config.data.image_dir, training.run.base)
    is_formatted = training.config.data.format is not None
    own_samples = [_sample_rows(step, group, files, is_formatted, trained=True) for group in rollout.groups]
    own_samples += [_sample_rows(step, group, files, is_formatted, trained=False) for group in rollout.left_out]
    everyone = training.run.ranks.gather_to_first(own_samples)
    samples = sorted(
        (item for of_rank in everyone for of_group in of_rank for item in of_group), key=lambda item: item.sample_id
    )
    tokens = _tokens(training, rollout, samples)
    if samples:
        log = training.run.log
        for item in samples:
            log.samples.append(sample_line(item, tokens.get(item.sample_id)))
            log.sample_images |= {image_name(image): image for image in item.images}
        if config.show:
            log.messages.append(sample_table(choose_samples(samples, config.show), step, terminal_width()))


def _tokens(training: PolicyTraining, rollout: Rollout, samples: Sequence[SampleRow]) -> dict[int, list[list[Any]]]:
    """Return the tokens of the best, the worst and the newest completion on rank 0; all ranks call this together.

    Args:
        training: Of the policy.
        rollout: Of this rank.
        samples: All completions, on rank 0.
    """
    if training.config.metrics.samples != "jsonl":
        return {}
    selected = choose_samples(samples, 3) if samples else []
    selected_ids = training.run.ranks.agree({item.sample_id for _, item in selected})
    token_rows = {
        trajectory.sample_id: _token_rows(trajectory, group.prompt.tokens.size, training.model.blueprint.tokenizer)
        for group in (*rollout.groups, *rollout.left_out)
        for trajectory in group.trajectories
        if trajectory.sample_id in selected_ids
    }
    everyone = training.run.ranks.gather_to_first(token_rows)
    return {sample: rows for rank_rows in everyone for sample, rows in rank_rows.items()}


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
    window = slice(prompt_tokens, prompt_tokens + _MOST_TOKENS)
    texts = _token_texts(backend, trajectory.tokens[window].tolist())
    is_trained = trajectory.loss_mask[window].tolist()
    logprobs = trajectory.sampler_logprobs[window].tolist()
    advantages = [None] * len(is_trained) if trajectory.advantages is None else trajectory.advantages[window].tolist()
    return [
        [text, _rounded(logprob) if is_own else None, _rounded(advantage) if is_own else None]
        for text, is_own, logprob, advantage in zip(texts, is_trained, logprobs, advantages, strict=True)
    ]


def _token_texts(backend: Any, tokens: Sequence[int]) -> Iterator[str]:
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    for token in tokens:
        yield stream.step(backend, token) or ""


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, _TOKEN_DIGITS)


def sample_line(item: SampleRow, tokens: list[list[Any]] | None) -> dict[str, Any]:
    """Return a row of samples.jsonl."""
    line = item._asdict()
    del line["prompt_messages"], line["images"], line["question"]
    if item.images:
        line["images"] = " ".join(map(image_name, item.images))
    if item.messages is None:
        del line["messages"], line["tools"]
    return line | ({"tokens": tokens} if tokens else {})


def _sample_rows(step: int, group: Group, files: ImageFiles, is_formatted: bool, *, trained: bool) -> list[SampleRow]:
    images = small_images(group.prompt, files)
    rows = [
        SampleRow(
            step,
            trajectory.sample_id,
            group.prompt.text,
            trajectory.completion,
            trajectory.reward,
            dict(trajectory.rewards),
            0.0 if trajectory.advantages is None else float(trajectory.advantages[-1]),
            trajectory.finish.value,
            trained,
            None if trajectory.episode is None else list(trajectory.episode.messages),
            0 if trajectory.episode is None else trajectory.episode.prompt_messages,
            () if trajectory.episode is None else trajectory.episode.tools,
            images,
        )
        for trajectory in group.trajectories
    ]
    return [row._replace(question=question_of(group.prompt, row, is_formatted)) for row in rows]


def question_of(prompt: Prompt, row: SampleRow, is_formatted: bool) -> str:
    """Return what the user said last before a completion: what stands around it in a prompt is the same for all rows.

    Args:
        prompt: Of the completion.
        row: The completion; an environment may have asked more than its row.
        is_formatted: Whether `data.format` writes prompts, and so the end of each; then it is what the row says.
    """
    try:
        asked = prompt_of(prompt.row, "")
    except DataError:  # `data.format` makes prompts of any columns
        return ""
    messages = asked.messages if isinstance(asked, Conversation) else [{"role": "user", "content": asked}]
    if row.messages is not None and not is_formatted:
        messages = row.messages[: row.prompt_messages]
    contents = [message.get("content") for message in messages if message.get("role") == "user"]
    last = contents[-1] if contents else ""
    parts = last if isinstance(last, list) else [{"type": "text", "text": last}]
    return " ".join(map(_part_words, (part for part in parts if isinstance(part, Mapping)))).strip()


def _part_words(part: Mapping[str, Any]) -> str:
    return str(part.get("text") or ("" if part.get("type") == "text" else f"<{part.get('type')}>"))


def choose_samples(samples: Sequence[SampleRow], count: int) -> list[tuple[str, SampleRow]]:
    """Return the best, the worst and the newest completion, and then the next best, each with its label."""
    scored = [item for item in samples if item.reward is not None] or list(samples)
    ranked = sorted(scored, key=lambda item: (-(item.reward or 0.0), item.sample_id))
    picked = [("best", ranked[0]), ("worst", ranked[-1]), ("newest", samples[-1])]
    return [*picked, *(("", item) for item in ranked[1:-1])][:count]


_MOST_PARTS = 6
_LONGEST_NAME = 20
_ALWAYS = ("label", "reward", "advantage")
_SHORTEST_TEXT = 24
"""Columns that stay for prompt and completion: on a narrow terminal, parts are left out first."""


def sample_table(picked: Sequence[tuple[str, SampleRow]], step: int, width: int | None = None) -> str:
    """Return completions as lines of text: reward, advantage, the reward's parts, and what was asked and answered.

    A part that is the reward itself is left out, and so are parts beyond the sixth; samples.jsonl has all.

    Args:
        picked: Labels and completions.
        step: Of the completions.
        width: Columns that a line may take; None: prompts and completions are cut at a fixed length alone.
    """
    from rich.cells import cell_len

    items = [item for _, item in picked]
    reward_names = _reward_names(items)
    names = [shortened(escaped(name), _LONGEST_NAME, keeps_end=True) for name in reward_names[:_MOST_PARTS]]
    rows = [[" " * 6, *_ALWAYS[1:], *names]]
    rows += [[label, *_numbers(item, reward_names[:_MOST_PARTS])] for label, item in picked]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    while width is not None and len(widths) > len(_ALWAYS) and _taken(widths) + _SHORTEST_TEXT > width:
        widths.pop()
    more = len(reward_names) + len(_ALWAYS) - len(widths)
    room = None if width is None else max(width - _taken(widths), _SHORTEST_TEXT)
    ends = [f"(and {more} more)" if more else "", *(_spoken(item, room) for item in items)]
    lines = [_table_line(row, widths, end) for row, end in zip(rows, ends, strict=True)]
    return "\n".join([f"completions of step {step}:", *lines])


def _table_line(row: Sequence[str], widths: Sequence[int], end: str) -> str:
    from rich.cells import cell_len

    cells = [" " * (width - cell_len(cell)) + cell for cell, width in zip(row, widths, strict=False)]
    return "  ".join(["", *cells, end]).rstrip()


def _taken(widths: Sequence[int]) -> int:
    """Return the columns that lie before the texts."""
    return sum(2 + width for width in widths) + 2


def _reward_names(items: Sequence[SampleRow]) -> list[str]:
    """Return the names of the reward's parts, unless the only part equals the reward."""
    reward_names = list(dict.fromkeys(name for item in items for name in item.rewards))
    alone = len(reward_names) == 1 and all(item.rewards.get(reward_names[0]) == item.reward for item in items)
    return [] if alone else reward_names


def _numbers(item: SampleRow, reward_names: Sequence[str]) -> list[str]:
    advantage = f"{item.advantage:+.2f}" if item.trained else "untrained"
    return [_decimal(item.reward), advantage, *(_decimal(item.rewards.get(name)) for name in reward_names)]


def _spoken(item: SampleRow, room: int | None) -> str:
    arrow, cut = " -> ", " (cut)" if item.finish == Finish.LENGTH.value else ""
    said = (item.question or item.prompt, _conversation(item))
    prompt, completion = (shortened(escaped(text), _LONGEST, keeps_end=True) for text in said)
    if room is not None:
        prompt, completion = _shared(prompt, completion, room - len(arrow) - len(cut))
    return f"{prompt}{arrow}{completion}{cut}"


def _conversation(item: SampleRow) -> str:
    """Return an answer, or who said what in an episode."""
    if item.messages is None:
        return item.completion
    said = item.messages[item.prompt_messages :]
    return " | ".join(f"{message['role']}: {message['content']}" for message in said) or "(no turn)"


def _shared(first: str, second: str, room: int) -> tuple[str, str]:
    """Return the ends of two texts that have this many columns together: half each, or what the other one leaves."""
    from rich.cells import cell_len

    first = shortened(first, max(room // 2, room - cell_len(second)), keeps_end=True, width=cell_len)
    return first, shortened(second, room - cell_len(first), keeps_end=True, width=cell_len)


def _decimal(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


_SIDE = 96
"""Pixels of the longer side."""
_MOST = 4
"""Images of a prompt, or frames."""


def small_images(prompt: Prompt, files: ImageFiles) -> tuple[bytes, ...]:
    """Return JPEG files of a prompt's first images; those up to one that cannot be read again."""
    if not prompt.model_inputs:
        return ()
    small = []
    with suppress(DataError, OSError, MemoryError):  # the rollout read them, but files may be gone since
        for image in islice(held_images(prompt.row, "a prompt"), _MOST):
            small.append(_small(files.open(image, "an image")))
    return tuple(small)


def _small(image: Any) -> bytes:
    image.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=70)
    return file.getvalue()


def image_name(data: bytes) -> str:
    """Return the name of an image's file."""
    return f"{xxhash.xxh3_64_hexdigest(data)}.jpg"


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
