"""What people type from habit: keys with dashes, commands of other tools; each is told what is written here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from holdfast.errors import ConfigError

_TRAINS = ("train", "run", "fit", "tune", "finetune", "fine-tune", "launch")
_ELSEWHERE = {
    "ppo": "`holdfast grpo RUN.yaml` with a `critic` section trains by PPO.",
    "export": "`holdfast checkpoint export CHECKPOINT` makes a model of a checkpoint.",
    "chat": "`holdfast generate MODEL --chat` asks a model in its chat template.",
    "resume": "A run goes on by itself: start the same command again; checkpoint.resume.from=STEP goes back.",
    "verify": "`holdfast checkpoint verify CHECKPOINT` reads every byte of a checkpoint.",
}


class HintingGroup(TyperGroup):
    """Commands that say what was meant where a word is none of theirs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the words name.

        Raises:
            ConfigError: They name one of another tool, or a key of the run as an option.
        """
        name, rest = args[0], args[1:]
        if name not in self.commands and ctx.parent is None:
            _refuse_command(name, rest)
        resolved = super().resolve_command(ctx, args)
        command = resolved[1]
        if command is not None and any(parameter.name == "overrides" for parameter in command.params):
            options = {text for parameter in command.params for text in parameter.opts}
            _refuse_dashes(resolved[2], options)
        return resolved


def _refuse_command(name: str, rest: list[str]) -> None:
    if name in _ELSEWHERE:
        raise ConfigError(f"There is no command `holdfast {name}`. {_ELSEWHERE[name]}")
    if name not in _TRAINS:
        return
    from holdfast.config.path_kinds import PathKind, recognise
    from holdfast.config.path_uses import use
    from holdfast.config.verbs.roots import ROOTS, verb_of
    from holdfast.config.yaml12 import parse_file

    file = rest[0] if rest else "RUN.yaml"
    text = f"There is no command `holdfast {name}`: each way of training has its own, {', '.join(ROOTS)}."
    at = recognise(file)
    if at.kind not in {PathKind.RUN_FILE, PathKind.UNKNOWN}:
        raise ConfigError(f"{text} {file} is {at.noun}. {use(at, PathKind.RUN_FILE)}")
    try:
        verb = verb_of(parse_file(Path(file)).values)
    except ConfigError:
        raise ConfigError(f"{text} For example: `holdfast sft {file}`.") from None
    raise ConfigError(f"{text} {file} looks like one for {verb}: `holdfast {verb} {file}`.")


def _refuse_dashes(words: list[str], options: set[str]) -> None:
    """Refuse a key of the run that is written as an option."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word == "--":
            return
        if not name.startswith("--") or name in {*options, "--help"} or not _is_key(name[2:], bool(equals)):
            continue
        following = words[place + 1] if place + 1 < len(words) else ""
        value = value if equals else following if following and not following.startswith("-") else "VALUE"
        raise ConfigError(f"{name} is no option. A run's keys are written without dashes: {name[2:]}={value}")


def _is_key(name: str, has_value: bool) -> bool:
    from holdfast.config.verbs.roots import ROOTS

    return "." in name or has_value or any(name in root.model_fields for root in ROOTS.values())
