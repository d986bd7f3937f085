"""The `environment` section: what a policy acts in over several turns, and the limits of an episode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from holdfast.config.base import ImportPath, Mistake, OneOrSeveral, Positive, PositiveInt, RewardKwargs, Section


class EnvironmentConfig(Section):
    """What a policy acts in: a class of the user's own, functions that it may call as tools, or both.

    Each episode has an instance in a process of its own. An episode has `data.max_length` tokens, and a turn begins
    where `rollout.max_new_tokens` of them are left.
    """

    path: ImportPath | None = None
    """`file.py:Class`, a relative file looked up beside the YAML, or `package.module:Class`; see docs/environments.md
    for its methods. A function that makes one is taken too, and a dictionary of them, of which a row's column
    `environment` names one. Null: tools alone."""
    action: ImportPath | None = None
    """`file.py:function` from the text of a turn to an action, where `path` makes an environment of gymnasium."""
    kwargs: RewardKwargs = Field(default_factory=dict)
    """Arguments of its constructor."""
    tools: Annotated[list[ImportPath], OneOrSeveral()] = Field(default_factory=list)
    """`file.py:function`, each with types and a docstring, that the policy may call; public methods of the class are
    tools too."""
    max_turns: PositiveInt = 8
    """Turns after which an episode ends."""
    max_seconds: Positive | None = None
    """Seconds after which no further turn begins; null: no limit."""
    on_cut: Literal["end", "continue"] = "end"
    """Whether a turn that was cut at `rollout.max_new_tokens` ends its episode, or is answered as any other one."""
    history: Literal["refuse", "split"] = "refuse"
    """What becomes of a chat template that writes earlier turns otherwise once another one follows: the run is refused,
    or an episode is trained as several samples, of which each has what the template wrote before its turns."""
    timeout_seconds: Positive = 30.0
    """Longest time for one answer of the environment."""
    memory_mib: PositiveInt = 4096
    """Most address space of one instance."""
    instances: PositiveInt = 64
    """Most instances of one rank at a time; further episodes wait."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield an environment that is none."""
        if self.path is None and not self.tools:
            yield "path", "neither path nor tools is set, so nothing would come of a turn; set one of them"
        if self.path is None and self.kwargs:
            yield "kwargs", "there is no class (path) whose constructor would take them; leave them out"
        if self.path is None and self.action is not None:
            yield "action", "tools alone take no actions; set path to an environment of gymnasium, or leave it out"
