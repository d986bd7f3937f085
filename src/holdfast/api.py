"""Holdfast from Python: the YAML's tree, with live objects where the YAML names files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from holdfast.config.load import Draft, LoadedConfig, check_draft, read_draft
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.dpo import DPOConfig, ScorerConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import SFTConfig, TrainingConfig
from holdfast.config.yaml12 import Document
from holdfast.environments.given import REPLACED, section_of
from holdfast.errors import ConfigError, UserError
from holdfast.launch.environment import under_torchrun
from holdfast.launch.first_rank import end_as_command
from holdfast.objectives.base import Objective
from holdfast.parallel.mesh import World, joined_world
from holdfast.parallel.rendezvous import number_of_call
from holdfast.recipes.distill import distill as run_distill
from holdfast.recipes.dpo import dpo as run_dpo
from holdfast.recipes.grpo import grpo as run_grpo
from holdfast.recipes.reward import reward as run_reward
from holdfast.recipes.sft import sft as run_sft
from holdfast.training.fit import Outcome
from holdfast.training.setup.begin import Live

_Root = TypeVar("_Root", bound=TrainingConfig)
Tree = Mapping[str, Any] | str | Path
Observers = Sequence[Callable[..., object]]
Rewards = Callable[..., object] | Sequence[Callable[..., object]] | Mapping[str, Callable[..., object]]

GIVEN = "(given in Python)"
"""Recorded in the configuration in place of a path where a live object was used."""


def sft(
    config: SFTConfig | Tree,
    *,
    rows: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    objective: Objective | None = None,
    observers: Observers = (),
) -> Outcome:
    """Fine-tune a model on completions.

    The run takes place in this process; under torchrun, this process is one of its ranks.

    Args:
        config: The configuration: a built `SFTConfig`, nested mappings, or the path of a YAML file. Paths in
            mappings are looked up from the current directory, those of a YAML file also beside it.
        rows: Training rows, instead of those that `data` names: a list of dictionaries, a `datasets.Dataset`, or an
            iterable that can be walked again.
        model: A transformers model, instead of `model.path`. Its weights are copied; the object does not change. It
            needs `tokenizer` or `model.tokenizer`.
        tokenizer: A transformers tokenizer, instead of `model.tokenizer`.
        objective: A loss over tokens, instead of the section `objective`.
        observers: Functions that are called on rank 0 with the `StepEvent` of every update, after those of the section
            `observers`. A second parameter receives a dictionary that is saved with the run. They return None, "stop",
            "save", "evaluate", or a list of these.

    Returns:
        Steps, metrics and paths of the run, the same on every rank.

    Raises:
        UserError: The request cannot work; nothing was written.
        RunStopped: The run stopped before its end, e.g. by a failed save; the same call continues it.
        RankFailed: Another rank failed; the message names the rank and its first cause.
        CheckpointError: A checkpoint that the run starts from is damaged or cannot be read.
    """
    return _run(SFTConfig, run_sft, config, Live(rows, model, tokenizer, objective, observers))


def dpo(
    config: DPOConfig | Tree,
    *,
    rows: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    objective: Objective | None = None,
    observers: Observers = (),
) -> Outcome:
    """Train a model on preferences between answers.

    The run takes place in this process; under torchrun, this process is one of its ranks.

    Args:
        config: The configuration: a built `DPOConfig`, nested mappings, or the path of a YAML file. Paths in
            mappings are looked up from the current directory, those of a YAML file also beside it.
        rows: Rows with `prompt`, `chosen` and `rejected`, instead of those that `data` names, in a form that `sft`
            takes. With `preference.loss: kto` they have `prompt`, `completion` and `label`.
        model: A transformers model, instead of `model.path`. Its weights are copied, once more for the reference; the
            object does not change. It needs `tokenizer` or `model.tokenizer`.
        tokenizer: A transformers tokenizer, instead of `model.tokenizer`.
        objective: A loss over the tokens of pairs, instead of the losses of `preference`. That section still decides
            whether rows are pairs and whether there is a reference.
        observers: Functions that are called on rank 0 with the `StepEvent` of every update, after those of the section
            `observers`. A second parameter receives a dictionary that is saved with the run. They return None, "stop",
            "save", "evaluate", or a list of these.

    Returns:
        Steps, metrics and paths of the run, the same on every rank.

    Raises:
        UserError: The request cannot work; nothing was written.
        RunStopped: The run stopped before its end, e.g. by a failed save; the same call continues it.
        RankFailed: Another rank failed; the message names the rank and its first cause.
        CheckpointError: A checkpoint that the run starts from is damaged or cannot be read.
    """
    return _run(DPOConfig, run_dpo, config, Live(rows, model, tokenizer, objective, observers))


def reward(
    config: ScorerConfig | Tree,
    *,
    rows: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    observers: Observers = (),
) -> Outcome:
    """Train a reward model on preferences between answers.

    The run takes place in this process; under torchrun, this process is one of its ranks.

    Args:
        config: The configuration: a built `ScorerConfig`, nested mappings, or the path of a YAML file. Paths in
            mappings are looked up from the current directory, those of a YAML file also beside it.
        rows: Rows with `prompt`, `chosen` and `rejected`, instead of those that `data` names, in a form that `sft`
            takes.
        model: A transformers model for sequence classification with one output, instead of `model.path`. Its weights
            are copied; the object does not change. It needs `tokenizer` or `model.tokenizer`.
        tokenizer: A transformers tokenizer, instead of `model.tokenizer`.
        observers: Functions that are called on rank 0 with the `StepEvent` of every update, after those of the section
            `observers`. A second parameter receives a dictionary that is saved with the run. They return None, "stop",
            "save", "evaluate", or a list of these.

    Returns:
        Steps, metrics and paths of the run, the same on every rank.

    Raises:
        UserError: The request cannot work; nothing was written.
        RunStopped: The run stopped before its end, e.g. by a failed save; the same call continues it.
        RankFailed: Another rank failed; the message names the rank and its first cause.
        CheckpointError: A checkpoint that the run starts from is damaged or cannot be read.
    """
    return _run(ScorerConfig, run_reward, config, Live(rows, model, tokenizer, observers=observers))


def grpo(  # noqa: PLR0913 - one per thing that a caller can bring
    config: GRPOConfig | Tree,
    *,
    rows: Any = None,
    rewards: Rewards | None = None,
    environment: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    objective: Objective | None = None,
    observers: Observers = (),
) -> Outcome:
    """Train a policy by rewards of its completions.

    The run takes place in this process; under torchrun, this process is one of its ranks.

    Args:
        config: The configuration: a built `GRPOConfig`, nested mappings, or the path of a YAML file. Paths in
            mappings are looked up from the current directory, those of a YAML file also beside it.
        rows: Rows with prompts, instead of those that `data` names, in a form that `sft` takes.
        rewards: A function, several, or functions by name, instead of the section `reward`; each has weight 1. They
            are called in this process: nothing ends a function that hangs, and `rewards.timeout_seconds` does not
            hold. Parameters and results are those of a reward file.
        environment: An environment, instead of the one that the section `environment` names: a class, or a function
            that makes an environment; a list of functions, which are tools; or an agent, a function of (row, base_url,
            api_key). It stands at the top of an imported file, since episodes run in processes of their own.
        model: A transformers model, instead of `model.path`. Its weights are copied; the object does not change. It
            needs `tokenizer` or `model.tokenizer`.
        tokenizer: A transformers tokenizer, instead of `model.tokenizer`.
        objective: A loss over the tokens of completions, instead of the section `objective`.
        observers: Functions that are called on rank 0 with the `StepEvent` of every update, after those of the section
            `observers`. A second parameter receives a dictionary that is saved with the run. They return None, "stop",
            "save", "evaluate", or a list of these.

    Returns:
        Steps, metrics and paths of the run, the same on every rank.

    Raises:
        UserError: The request cannot work; nothing was written.
        RunStopped: The run stopped before its end, e.g. by a failed save; the same call continues it.
        RankFailed: Another rank failed; the message names the rank and its first cause.
        CheckpointError: A checkpoint that the run starts from is damaged or cannot be read.
    """
    live = Live(rows, model, tokenizer, objective, observers, _named_rewards(rewards), environment)
    return _run(GRPOConfig, run_grpo, config, live)


def distill(
    config: DistillConfig | Tree,
    *,
    rows: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    observers: Observers = (),
) -> Outcome:
    """Train a student on a teacher's distribution.

    The run takes place in this process; under torchrun, this process is one of its ranks.

    Args:
        config: The configuration: a built `DistillConfig`, nested mappings, or the path of a YAML file. Paths in
            mappings are looked up from the current directory, those of a YAML file also beside it. The
            section `teacher` names the teacher's directory or server.
        rows: Training rows, instead of those that `data` names, in a form that `sft` takes. With `rollout.share: 1`
            they need no answers.
        model: The student, a transformers model, instead of `model.path`. Its weights are copied; the object does not
            change. It needs `tokenizer` or `model.tokenizer`.
        tokenizer: A transformers tokenizer, instead of `model.tokenizer`.
        observers: Functions that are called on rank 0 with the `StepEvent` of every update, after those of the section
            `observers`. A second parameter receives a dictionary that is saved with the run. They return None, "stop",
            "save", "evaluate", or a list of these.

    Returns:
        Steps, metrics and paths of the run, the same on every rank.

    Raises:
        UserError: The request cannot work; nothing was written.
        RunStopped: The run stopped before its end, e.g. by a failed save; the same call continues it.
        RankFailed: Another rank failed; the message names the rank and its first cause.
        CheckpointError: A checkpoint that the run starts from is damaged or cannot be read.
    """
    return _run(DistillConfig, run_distill, config, Live(rows, model, tokenizer, observers=observers))


def _run(
    root: type[_Root],
    recipe: Callable[[_Root, Path, World, Live], Outcome],
    config: TrainingConfig | Tree,
    live: Live,
) -> Outcome:
    """Check the tree, join the ranks and run."""
    call = number_of_call()  # before anything is refused: a rank that is refused alone has made this call too
    try:
        tree = _checked(root, config, live)
        ranks = tree.config.launch.ranks
        if not under_torchrun() and ranks not in {"auto", 1}:
            raise ConfigError(
                f"launch.ranks={ranks}, but a Python call is one process. Start the script with `torchrun "
                f"--nproc-per-node {ranks} script.py`, or use `holdfast {root.verb} RUN.yaml`."
            )
        with joined_world(tree.config.launch, call) as world:
            return recipe(tree.config, tree.base, world, live)
    except UserError:
        if under_torchrun():  # where a script that does not catch it would leave a traceback for each rank
            sys.excepthook = end_as_command(sys.__excepthook__)
        raise


def _checked(root: type[_Root], config: TrainingConfig | Tree, live: Live) -> LoadedConfig[_Root]:
    """Validate the configuration tree, with `GIVEN` in place of each path that a live object replaces."""
    if isinstance(config, str | Path):
        draft, base = read_draft(Path(config), [], root), Path(config).resolve().parent
    else:
        draft, base = Draft(Document("config", dict(config))), Path.cwd()
    values = draft.document.values
    if live.rewards:
        values["reward"] = [
            {"path": f"{GIVEN}.py:{name if name.isidentifier() else 'reward'}", "name": name} for name in live.rewards
        ]
    if live.environment is not None:
        values["environment"] = _without(values.get("environment"), REPLACED) | section_of(live.environment, base)
    if live.rows is not None:
        values["data"] = _without(values.get("data"), ("path", "synthetic", "sources")) | {"path": GIVEN}
    if live.model is not None:
        values["model"] = _live_model(values.get("model"), live)
    elif live.tokenizer is not None:
        values["model"] = _without(values.get("model"), ()) | {"tokenizer": GIVEN}
    return LoadedConfig(check_draft(draft, root), base)


def _named_rewards(rewards: Rewards | None) -> Mapping[str, Callable[..., object]]:
    """Return reward functions by name.

    Raises:
        ConfigError: There is none, or two have one name.
    """
    match rewards:
        case None:
            return {}
        case Mapping():
            functions = dict(rewards)
        case Sequence():
            labels = [_name(function, number) for number, function in enumerate(rewards, 1)]
            functions = dict(zip(labels, rewards, strict=True))
            if twice := [label for label in functions if labels.count(label) > 1]:
                raise ConfigError(
                    f"rewards: two are called {twice[0]}, and metrics could not tell them apart. Name them: "
                    f"rewards={{'first': {twice[0]}, 'second': ...}}."
                )
        case _:
            functions = {_name(rewards, 1): rewards}
    if not functions:
        raise ConfigError("rewards is empty: pass a function, several, or None for those that `reward` names.")
    return functions


def _name(function: Callable[..., object], number: int) -> str:
    name = str(getattr(function, "__name__", type(function).__name__))
    return name if name.isidentifier() else f"reward_{number}"


def _live_model(section: Any, live: Live) -> dict[str, Any]:
    """Name the live model; its tokenizer is the live one, else the one that the section would have used."""
    model = _without(section, ())
    tokenizer = GIVEN if live.tokenizer is not None else model.get("tokenizer") or model.get("path")
    if tokenizer is None:
        raise ConfigError("A model given in Python needs its tokenizer: pass tokenizer=, or set model.tokenizer.")
    return _without(section, ("config",)) | {"path": GIVEN, "tokenizer": tokenizer}


def _without(section: Any, keys: Sequence[str]) -> dict[str, Any]:
    """Return a section (mappings, a built one, or none at all) as a mapping without some of its keys."""
    return {key: value for key, value in dict(section or {}).items() if key not in keys}
