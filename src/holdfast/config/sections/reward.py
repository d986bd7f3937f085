"""The `reward` and `rewards` sections: what scores a completion, and what happens where a score cannot be had."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from holdfast.config.base import (
    ByKind,
    Count,
    EvaluatedKwargs,
    ImportPath,
    Mistake,
    Number,
    Pattern,
    Positive,
    PositiveInt,
    PublicStr,
    Section,
    VariableName,
)
from holdfast.config.sections.server import endpoint_mistakes


def _check_name(name: str) -> str:
    if re.fullmatch(r"[^\s/]+", name) is None:
        raise ValueError(f"{name!r} should be one word without a slash: metrics put it between slashes")
    return name


class _RewardSection(Section):
    name: Annotated[PublicStr, AfterValidator(_check_name)] | None = None
    """Name in metrics and messages; default: the function's name, or the kind. Two rewards never share one."""
    weight: float = 1.0
    """Factor of the reward in the sum; 0 records the reward and does not train on it."""

    @property
    def label(self) -> str:
        """Name in metrics and messages."""
        return self.name or str(type(self).model_fields["kind"].default)


class UserRewardConfig(_RewardSection):
    """A function, class or callable of the user's own; see docs/rewards.md for what it is given."""

    kind: Literal["path"] = "path"
    path: ImportPath
    """`file.py:function`, a relative file looked up beside the YAML, or `package.module:function`; returns a number,
    None or a dict with the key `reward`, `overall` or `score`."""
    kwargs: EvaluatedKwargs = Field(default_factory=dict)
    """Arguments of the function, or of the constructor of a class, by name."""

    @property
    def label(self) -> str:
        """Name in metrics and messages."""
        return self.name or self.path.rpartition(":")[2]


class ExactConfig(_RewardSection):
    """1 where the stripped completion is the row's answer, else 0."""

    kind: Literal["exact"] = "exact"
    column: PublicStr = "answer"
    """Column of the right answer."""


class MathConfig(_RewardSection):
    """1 where math-verify finds the final answer equal to the row's, else 0. Needs `pip install holdfast[math]`."""

    kind: Literal["math"] = "math"
    column: PublicStr = "answer"
    """Column of the right answer: a number, LaTeX, or a worked solution that ends in `#### 42`."""


class CountdownConfig(_RewardSection):
    """1 where the completion is an expression of + - * / that uses each number once and reaches the target, else 0."""

    kind: Literal["countdown"] = "countdown"
    numbers: PublicStr = "numbers"
    """Column of the numbers."""
    target: PublicStr = "target"
    """Column of the target."""


class FormatConfig(_RewardSection):
    """1 where the completion has a form, else 0."""

    kind: Literal["format"] = "format"
    regex: Pattern
    """Regular expression of the form; a dot matches line ends too."""
    mode: Literal["fullmatch", "search"] = "fullmatch"
    """Whether the whole completion has the form, or some part of it."""


class LengthConfig(_RewardSection):
    """How well the length of a completion fits, in tokens, from 0 to 1."""

    kind: Literal["length"] = "length"
    target: PositiveInt | None = None
    """1 at this length, falling in a straight line to 0 at length 0 and at twice the target."""
    min: PositiveInt | None = None
    """1 from this length on, else 0."""
    max: PositiveInt | None = None
    """1 up to this length, else 0."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a missing bound, a target beside bounds, and an empty range."""
        low, high = self.min, self.max
        if self.target is None and low is None and high is None:
            yield "target", "no length is given; set target, min or max"
        if self.target is not None and (low is not None or high is not None):
            yield "target", "a target and a range ask for different things; keep one, or write two rewards"
        if low is not None and high is not None and low > high:
            yield "min", f"{low} is above max={high}; lower one or raise the other"


class RepetitionConfig(_RewardSection):
    """Minus `penalty` times the share of a completion's n-grams that occurred before; 0 without repetition."""

    kind: Literal["repetition"] = "repetition"
    ngram: PositiveInt = 4
    """Tokens in an n-gram."""
    penalty: Positive = 1.0


class OverlongConfig(_RewardSection):
    """Soft overlong punishment, from 0 to -1 over the last tokens before the limit (DAPO, arXiv:2503.14476, eq. 13)."""

    kind: Literal["overlong"] = "overlong"
    max_length: PositiveInt
    """Tokens from which the punishment is -1."""
    cache: PositiveInt
    """The punishment starts this many tokens before `max_length`."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a punishment that starts before the first token."""
        if self.cache > self.max_length:
            yield "cache", f"{self.cache} is above max_length={self.max_length}; lower it"


class JudgeConfig(_RewardSection):
    """A number read from what a model behind an OpenAI-compatible endpoint says."""

    kind: Literal["judge"] = "judge"
    url: PublicStr
    """Address of the endpoint up to and including the version, as in http://localhost:8000/v1."""
    model: PublicStr
    prompt: PublicStr
    """Sent as the user's message; {prompt}, {completion} and {column} are replaced, other braces stay."""
    regex: Pattern = r"-?\d+(?:\.\d+)?"
    """Where the number stands in the answer: the last match, or its one group."""
    scale: Positive = 1.0
    """The number that counts as a reward of 1."""
    api_key_variable: VariableName | None = None
    """Name of the environment variable that holds the key; a key itself never stands in a file."""
    max_tokens: PositiveInt = 512
    """Longest answer."""
    timeout_seconds: Positive = 30.0
    """Longest wait for one answer."""
    attempts: PositiveInt = 3
    """Requests before the sample counts as an error; the connection, 408, 409, 429 and 5xx are tried again."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield an address that is none, a prompt without the completion, and a regex with several groups."""
        yield from endpoint_mistakes(self.url, self.api_key_variable)
        if "{completion}" not in self.prompt:
            yield "prompt", "the judge would not see the completion; write {completion} where it belongs"
        if (groups := re.compile(self.regex).groups) > 1:
            yield "regex", f"{groups} groups could hold the number; keep one, and write (?:...) for the others"


class CodeConfig(_RewardSection):
    """Whether the completion's last Python code block passes the row's tests, in a process with limits.

    Code earns by what it answers alone: the tests run in another process. No security boundary for the machine: the
    code runs as this user, with the network and the disk.
    """

    kind: Literal["code"] = "code"
    column: PublicStr = "tests"
    """Column of the tests: Python text, or a list of texts, which call what the code defines."""
    grade: Literal["all", "share"] = "all"
    """1 only where all tests pass, or the share that passes."""
    timeout_seconds: Positive = 5.0
    """Longest time of the code and all its tests; more earns 0."""
    memory_mib: PositiveInt = 1024
    """Most address space; more earns 0."""


class EnvironmentRewardConfig(_RewardSection):
    """What the environment gave in the turns of an episode, summed (`environment`)."""

    kind: Literal["environment"] = "environment"


class ModelRewardConfig(_RewardSection):
    """What a sequence-classification model says: one number for prompt and completion together.

    It computes in the training processes and not in the reward workers.
    """

    kind: Literal["model"] = "model"
    path: PublicStr
    """A directory or hub name with a model for sequence classification and its tokenizer."""
    output: Count | None = None
    """Which output of the model is the reward; default: the only one."""
    sigmoid: bool = False
    """Squash the number to between 0 and 1."""
    max_length: PositiveInt = 2048
    """Longest prompt and completion in its own tokens; what is longer loses its beginning."""
    append_eos: bool = False
    """End texts with the tokenizer's end-of-sequence token, as `holdfast reward` ends rows of text; conversations end
    as their template says."""
    batch_size: PositiveInt = 16
    """Texts in one forward pass."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    place: Literal["whole", "sharded", "offloaded"] = "whole"
    """`whole`: on every rank; `sharded`: split over the ranks like the policy, and gathered unit by unit; `offloaded`:
    the same in host memory. The scores are those of `whole`."""


Reward = Annotated[
    UserRewardConfig
    | ExactConfig
    | MathConfig
    | CountdownConfig
    | FormatConfig
    | LengthConfig
    | RepetitionConfig
    | OverlongConfig
    | JudgeConfig
    | CodeConfig
    | EnvironmentRewardConfig
    | ModelRewardConfig,
    ByKind("path"),
]


FaultPolicy = Literal["drop_group", "drop_sample"] | Number
"""What happens to a completion whose reward is missing; a number counts as its reward."""


class RewardPoolConfig(Section):
    """The processes that compute rewards, and what happens where one gives no number."""

    workers: PositiveInt | Literal["auto"] = "auto"
    """Processes per rank; `auto`: one per CPU, at most 4."""
    batch_size: PositiveInt = 16
    """Most completions that a batched or async function sees at once; it never assumes that its group is whole."""
    timeout_seconds: Positive = 10.0
    """Longest time of one reward for one completion; a batched call may take this long for each of its completions.
    A reward with limits of its own gets at least those."""
    step_timeout_seconds: Positive | Literal["auto"] = "auto"
    """Longest time of all rewards for the completions that one rank scores at once; what has no score by then counts as
    a timeout. `auto`: three quarters of `launch.timeout_minutes` where several ranks wait for each other, else no
    bound. Rewards of `kind: model` and live functions are not ended."""
    start_timeout_seconds: Positive = 120.0
    """Longest time for importing the files of all rewards."""
    on_timeout: FaultPolicy | Literal["auto"] = "auto"
    """What happens when a reward takes longer than `timeout_seconds`: `drop_sample` leaves the completion out of the
    step and of its group's baseline, `drop_group` its whole group, and a number counts as the reward. `auto`: 0 where
    `kind: math` could not compute an answer in time, which is then no answer; otherwise `drop_sample`."""
    on_error: FaultPolicy = "drop_sample"
    """What happens when a reward raises, returns a value of another type, or kills its process."""
    on_nan: FaultPolicy = "drop_sample"
    """What happens when a reward is not a finite number."""
    on_none: FaultPolicy = "drop_sample"
    """What happens to a completion for which every reward returned None. Where another reward returned a number, None
    is left out of the sum.
    """
    max_unscored_steps: PositiveInt = 3
    """Steps in a row in which not one completion could be scored, before the run stops."""


def repeated_labels(rewards: Sequence[Reward]) -> list[str]:
    """Return the names that several rewards share."""
    labels = [reward.label for reward in rewards]
    return sorted({label for label in labels if labels.count(label) > 1})
