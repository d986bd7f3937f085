"""Check rewards before step 1: missing columns, unreadable answers, and wrong types or numbers of return values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import product
from typing import Any

from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import ConfigError, DataError
from holdfast.rewards.base import Sample, SampleOutcome
from holdfast.text.numbers import number_as_text
from holdfast.text.shortening import shortened
from holdfast.training.policy.run import PolicyEvaluation
from holdfast.training.policy.scoring import progress_of
from holdfast.training.setup.rows import OpenedData
from holdfast.types import Finish, Prompt

_FIRST = "the first batch"
_SHOWN = 60
_TRIED = 2
"""Number of prompts on whose completions rewards are tried."""


def check_columns(policy: PolicyEvaluation, needed_columns: Mapping[str, Sequence[str]]) -> None:
    """Look for every column that rewards need in the first batch and in the evaluation sets; all ranks together.

    Rows of several sources may differ, so a column counts as there if one of the rows has it, and a first batch of
    several sources only lets the run warn: the rows that have it may come later.

    Args:
        policy: Before its first step.
        needed_columns: Columns by the name of the reward.

    Raises:
        DataError: No row has a column; the same on all ranks.
    """
    if not any(needed_columns.values()):
        return
    for label, prompts in _read(policy):
        everyone = policy.run.ranks.gather(
            list(dict.fromkeys(str(column) for prompt in prompts for column in prompt.row))
        )
        present = list(dict.fromkeys(column for columns in everyone for column in columns))
        absent = _absent(needed_columns, present) if present else {}
        if label == _FIRST and policy.several_sources:
            policy.run.log.messages += [
                f"warning: reward {reward} needs column {absent[reward]}, and no row of {label} has one."
                for reward in absent
            ]
        elif absent:
            raise _column_error(absent, label, present)


def _column_error(absent: Mapping[str, str], label: str, present: Sequence[str]) -> DataError:
    reward = next(iter(absent))
    return DataError(
        f"reward {reward}: it needs column {absent[reward]}, and no row of {label} has one; their columns are "
        f"{', '.join(present)}. Correct the name in the reward, rename the column by data.columns, or give "
        "the parameter of a function of your own a default."
    )


def refuse_absent_columns(
    data: OpenedData, needed_columns: Mapping[str, Sequence[str]], *, skips: bool = False
) -> None:
    """Refuse rewards whose columns no row of the only source, or of an evaluation set, has; before a weight is read.

    `check_columns` looks at what is read first; this at all rows that have numbers, and beyond the first one only for
    what that lacks.

    Args:
        data: The rows.
        needed_columns: By the name of the reward.
        skips: Rows to train on that cannot be read are left out (`data.on_bad_row`), so they are here too.

    Raises:
        DataError: As `check_columns`; or a row that is read cannot be.
    """
    if not any(needed_columns.values()):
        return
    sources = [(_FIRST, data.training[0])] if len(data.training) == 1 else []
    sources += [(f"evaluation set {name}", source) for name, source in data.evaluation.items()]
    for label, source in sources:
        present: dict[str, None] = {}
        absent: dict[str, str] = {}
        for index in range(source.size or 0):
            with suppress(DataError) if skips and label == _FIRST else nullcontext():
                present |= dict.fromkeys(map(str, source.row(index)))
            absent = _absent(needed_columns, list(present))
            if not absent:
                break
        if present and absent:
            raise _column_error(absent, label, list(present))


def check_answers(
    policy: PolicyEvaluation, answer_columns: Mapping[str, str], unreadable: Callable[[str, Sequence[str]], list[str]]
) -> None:
    """Count the answers of the first batch and the evaluation sets that a reward cannot read; all ranks together.

    Some are a warning of the run: completions of their prompts have no score. Where it is all of a place, the column
    is the wrong one; a first batch of several sources only lets the run warn.

    Args:
        policy: Before its first step.
        answer_columns: The column of answers, by the name of the reward.
        unreadable: As `Rewards` has it.

    Raises:
        ConfigError: Not one answer of a place can be read; the same on all ranks.
    """
    for reward, column in answer_columns.items():
        for label, prompts in _read(policy):
            with policy.run.ranks.together():
                answers = [
                    "" if prompt.row[column] is None else str(number_as_text(prompt.row[column]))
                    for prompt in prompts
                    if column in prompt.row
                ]
                bad = set(unreadable(reward, list(dict.fromkeys(answers))))
            everyone = policy.run.ranks.gather((len(answers), [answer for answer in answers if answer in bad]))
            _report_unreadable(policy, f"{label} (column {column})", reward, everyone, is_first=label == _FIRST)


def check_returns(
    policy: PolicyEvaluation, try_out: Callable[[Sequence[Sample]], Mapping[str, Sequence[SampleOutcome]]]
) -> None:
    """Call rewards that take lists with two rows of two completions each; all ranks together.

    Ends of the prompts stand for completions. A reward may fail for such texts, or have no number for them: it is
    refused for the type and the number of what it returns alone.

    Args:
        policy: Before its first step, or its evaluation.
        try_out: As `OpenRewards` has it.

    Raises:
        ConfigError: A reward returned that; the same on all ranks.
    """
    config = policy.run.config
    assert isinstance(config, GRPOConfig)
    prompts = next((prompts for _, prompts in _read(policy) if prompts), ())
    progress = progress_of(policy)
    samples = [
        Sample(
            sample_id=number,
            prompt=prompt.text,
            completion=prompt.text[-length:],
            prompt_tokens=prompt.tokens.tolist(),
            completion_tokens=prompt.tokens[-length:].tolist(),
            finish=Finish.STOP.value,
            row=prompt.row,
            progress=progress,
            **_as_episode(config, prompt, length),
        )
        for number, (prompt, length) in enumerate(product(prompts[:_TRIED], (1, 2)))
    ]
    samples = samples[: config.rewards.batch_size]  # one call: a rest of one completion would get its one value
    policy.run.ranks.on_all_ranks(lambda: _refuse_malformed(try_out(samples) if samples else {}))


def _as_episode(config: GRPOConfig, prompt: Prompt, length: int) -> dict[str, Any]:
    """Return what a sample has besides, where completions are episodes."""
    if config.environment is None:
        return {}
    said = [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": prompt.text[-length:]}]
    return {"messages": said, "prompt_messages": 1, "environment_reward": 0.0}


def _refuse_malformed(outcomes: Mapping[str, Sequence[SampleOutcome]]) -> None:
    for reward, of_samples in outcomes.items():
        if all(outcome.is_malformed for outcome in of_samples):
            raise ConfigError(
                f"reward {reward}: called with {len(of_samples)} completions before step 1, it "
                f"{of_samples[0].message}. Correct its return value."
            )


def _report_unreadable(
    policy: PolicyEvaluation, label: str, reward: str, everyone: Sequence[tuple[int, list[str]]], *, is_first: bool
) -> None:
    """Refuse a place without a readable answer; warn of one with some; everyone has (answers, those unreadable)."""
    count, lost = sum(number for number, _ in everyone), [answer for _, answers in everyone for answer in answers]
    if not lost:
        return
    examples = ", ".join(repr(shortened(answer, _SHOWN)) for answer in list(dict.fromkeys(lost))[:3])
    sentence = f"reward {reward} cannot read {len(lost)} of {count} answers of {label}: {examples}"
    several = is_first and policy.several_sources
    if len(lost) == count and not several:
        raise ConfigError(
            f"{sentence}. Name the column of the right answers in the reward, or bring them there by data.columns."
        )
    policy.run.log.messages.append(
        f"warning: {sentence}. It scores no completion of these prompts; mend them or leave them out."
    )


def _absent(needed_columns: Mapping[str, Sequence[str]], present: Sequence[str]) -> dict[str, str]:
    """Return a column that is not there, for each reward that needs one."""
    lacking = {
        reward: [column for column in columns if column not in present] for reward, columns in needed_columns.items()
    }
    return {reward: columns[0] for reward, columns in lacking.items() if columns}


def _read(policy: PolicyEvaluation) -> Iterator[tuple[str, Sequence[Prompt]]]:
    """Yield what was read: where from, and this rank's share."""
    if policy.stream is not None:
        batch = policy.stream.read_ahead(policy.model.state.step)
        yield _FIRST, () if batch is None else batch.own_prompts
    for prompts in policy.prompt_sets:
        yield f"evaluation set {prompts.name}", prompts.prompts
