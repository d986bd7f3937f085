"""Groups of commands. Each command is imported when it is called, and commands or flags of other tools get a hint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from holdfast import registry
from holdfast.errors import ConfigError

_TRAINS = ("train", "run", "fit", "tune", "finetune", "fine-tune", "launch")
_ELSEWHERE = {
    "ppo": "`holdfast grpo RUN.yaml` with a `critic` section trains by PPO.",
    "export": "`holdfast checkpoint export CHECKPOINT` makes a model of a checkpoint.",
    "chat": "`holdfast generate MODEL --chat` asks a model in its chat template.",
    "resume": "A run goes on by itself: start the same command again; checkpoint.resume.from=STEP goes back.",
    "verify": "`holdfast checkpoint verify CHECKPOINT` reads every byte of a checkpoint.",
}


class CommandEntry(NamedTuple):
    """A command in the list of a command line."""

    path: str
    """`module:function`; typer reads the function's signature when the command is called."""
    help: str
    """One line, for the list."""


_SETTINGS = {"help_option_names": ["-h", "--help"]}


def command_line(
    commands: Mapping[str, CommandEntry], groups: Mapping[str, str], before_all: Callable[..., None]
) -> typer.Typer:
    """Return the program.

    Args:
        commands: Those of a group begin with its name, as in `checkpoint ls`.
        groups: Name to a line of help.
        before_all: What is called before any command; its parameters are options of the program.
    """
    outermost = {name: command for name, command in commands.items() if " " not in name}
    app = _group(outermost, add_completion=True)
    app.callback()(before_all)
    for group, text in groups.items():
        below = {name.partition(" ")[2]: command for name, command in commands.items() if name.startswith(f"{group} ")}
        app.add_typer(_group(below, help=text), name=group)
    return app


def _group(listed: Mapping[str, CommandEntry], **options: Any) -> typer.Typer:
    kind = type("ListedGroup", (HintingGroup,), {"listed": listed})
    return _typer(cls=kind, no_args_is_help=True, **options)


def _typer(**options: Any) -> typer.Typer:
    return typer.Typer(context_settings=_SETTINGS, pretty_exceptions_enable=False, rich_markup_mode=None, **options)


class HintingGroup(TyperGroup):
    """Commands that say what was meant where a word is none of theirs."""

    listed: Mapping[str, CommandEntry] = {}

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the signature is click's
        """Return the names, groups last."""
        return [*self.listed, *(name for name in self.commands if name not in self.listed)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command's file and return the command; None where there is none of this name."""
        if cmd_name in self.listed and cmd_name not in self.commands:
            app = _typer(add_completion=False)
            app.command(cmd_name)(registry.load(self.listed[cmd_name].path))
            self.commands[cmd_name] = typer.main.get_command(app)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the signature is click's
        """Write the list of commands without importing any."""
        groups = {name: group.help or "" for name, group in self.commands.items() if name not in self.listed}
        rows = [*((name, command.help) for name, command in self.listed.items()), *groups.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the words name.

        Raises:
            ConfigError: They name one of another tool, or a key of the run as an option.
        """
        if ctx.resilient_parsing:  # a shell asks for completions, and shows what is said amid the line
            return super().resolve_command(ctx, args)
        name, arguments = args[0], args[1:]
        if self.get_command(ctx, name) is None:
            if ctx.parent is None:
                _refuse_command(name, arguments)
            close = [repr(match) for match in get_close_matches(name, self.list_commands(ctx))]
            ctx.fail(f"No such command {name!r}.{f' Did you mean {chr(32).join(close)}?' if close else ''}")
        resolved = super().resolve_command(ctx, args)
        command = resolved[1]
        if command is not None and any(parameter.name == "overrides" for parameter in command.params):
            options = {text for parameter in command.params for text in parameter.opts}
            _refuse_dashes(resolved[2], options)
        return resolved


def _refuse_command(name: str, arguments: list[str]) -> None:
    if name in _ELSEWHERE:
        raise ConfigError(f"There is no command `holdfast {name}`. {_ELSEWHERE[name]}")
    if name not in _TRAINS:
        return
    from holdfast.config.path_kinds import PathKind, recognise
    from holdfast.config.path_uses import use
    from holdfast.config.verbs.roots import ROOTS, verb_of
    from holdfast.config.yaml12 import parse_file

    file = arguments[0] if arguments else "RUN.yaml"
    text = f"There is no command `holdfast {name}`: each way of training has its own, {', '.join(ROOTS)}."
    at = recognise(file)
    if at.kind not in {PathKind.RUN_FILE, PathKind.UNKNOWN}:
        raise ConfigError(f"{text} {file} is {at.noun}. {use(at, PathKind.RUN_FILE)}")
    try:
        verb = verb_of(parse_file(Path(file)).values)
    except ConfigError:
        raise ConfigError(f"{text} For example: `holdfast sft {file}`.") from None
    raise ConfigError(f"{text} {file} looks like one for {verb}: `holdfast {verb} {file}`.")


def _refuse_dashes(arguments: list[str], options: set[str]) -> None:
    """Refuse a key of the run that is written as an option."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if argument == "--":
            return
        if not name.startswith("--") or name in {*options, "--help"} or not _is_key(name[2:], bool(equals)):
            continue
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        value = value if equals else following if following and not following.startswith("-") else "VALUE"
        raise ConfigError(f"{name} is no option. A run's keys are written without dashes: {name[2:]}={value}")


def _is_key(name: str, has_value: bool) -> bool:
    from holdfast.config.verbs.roots import ROOTS

    return "." in name or has_value or any(name in root.model_fields for root in ROOTS.values())
