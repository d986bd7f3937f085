"""Groups of commands. A command is imported when it is called; a command or flag of another tool gets a hint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
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
        commands: Name to entry; the name of a group's command begins with the group, e.g. `checkpoint ls`.
        groups: Name to a line of help.
        before_all: Called before any command; its parameters are options of the program.
    """
    listed: dict[str, dict[str, CommandEntry]] = {group: {} for group in ("", *groups)}
    for name, command in commands.items():
        group, _, word = name.rpartition(" ")
        listed[group][word] = command
    app = _group(listed[""], add_completion=True)
    app.callback()(before_all)
    for group, text in groups.items():
        app.add_typer(_group(listed[group], help=text), name=group)
    return app


def _group(listed: Mapping[str, CommandEntry], **options: Any) -> typer.Typer:
    return _typer(cls=type("ListedGroup", (HintingGroup,), {"listed": listed}), no_args_is_help=True, **options)


def _typer(**options: Any) -> typer.Typer:
    return typer.Typer(context_settings=_SETTINGS, pretty_exceptions_enable=False, rich_markup_mode=None, **options)


class HintingGroup(TyperGroup):
    """Lazily imported commands, with a hint for a word that names none of them."""

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
        """Return the command that the words name.

        Raises:
            ConfigError: The words name a command of another tool, or a key of the run as an option.
        """
        if ctx.resilient_parsing:  # a shell asks for completions, and would show a message amid the line
            return super().resolve_command(ctx, args)
        name = args[0]
        if self.get_command(ctx, name) is None:
            if ctx.parent is None:
                _refuse_command(name, args[1:])
            close = [repr(match) for match in get_close_matches(name, self.list_commands(ctx))]
            ctx.fail(f"No such command {name!r}.{f' Did you mean {chr(32).join(close)}?' if close else ''}")
        resolved = super().resolve_command(ctx, args)
        parameters = resolved[1].params if resolved[1] is not None else []
        if any(parameter.name == "overrides" for parameter in parameters):
            _refuse_dashes(resolved[2], {"--help"} | {text for parameter in parameters for text in parameter.opts})
        return resolved


def _refuse_command(name: str, arguments: list[str]) -> None:
    if name in _ELSEWHERE:
        raise ConfigError(f"There is no command `holdfast {name}`. {_ELSEWHERE[name]}")
    if name not in _TRAINS:
        return
    from holdfast.config.path_kinds import PathKind, misplaced, recognise
    from holdfast.config.verbs.roots import ROOTS

    file = arguments[0] if arguments else "RUN.yaml"
    text = f"There is no command `holdfast {name}`: each way of training has its own, {', '.join(ROOTS)}."
    kind, facts = recognise(file)
    if kind is PathKind.RUN_FILE:
        raise ConfigError(f"{text} {file} looks like one for {facts['verb']}: `holdfast {facts['verb']} {file}`.")
    refusal = misplaced(file, [PathKind.RUN_FILE], "each of them")
    raise ConfigError(f"{text} {refusal or f'For example: `holdfast sft {file}`.'}")


def _refuse_dashes(arguments: list[str], options: set[str]) -> None:
    """Refuse a key of the run that is written as an option."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if argument == "--":
            return
        if not name.startswith("--") or name in options or not _is_key(name[2:], bool(equals)):
            continue
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        value = value if equals else following if following and not following.startswith("-") else "VALUE"
        raise ConfigError(f"{name} is no option. A run's keys are written without dashes: {name[2:]}={value}")


def _is_key(name: str, has_value: bool) -> bool:
    from holdfast.config.verbs.roots import ROOTS

    return "." in name or has_value or any(name in root.model_fields for root in ROOTS.values())
