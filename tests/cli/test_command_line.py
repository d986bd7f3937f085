"""What needs no model: help, configuration, usage; real processes where imports are counted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast import registry
from holdfast.cli.main import COMMANDS, GROUPS
from tests.cli.fixtures import HOLDFAST, write_run
from tests.cli.screens import numbers
from tests.cli.warm import Done, run_and_list_imports
from tests.config.test_schema import SNAPSHOT
from tests.messages import MISTAKE, Said, lacks

Command = Callable[..., Done]


def test_help_imports_the_list_of_commands_and_typer_alone(tmp_path: Path) -> None:
    _, always = run_and_list_imports([sys.executable, "-c", "pass"], cwd=tmp_path)

    done, imports = run_and_list_imports([HOLDFAST, "--help"], cwd=tmp_path)

    ours = {f"holdfast.cli.{name}" for name in ("edge", "entry", "groups", "main")}
    others = {"holdfast"} | {f"holdfast.{name}" for name in ("cli", "errors", "interrupts", "registry", "text")}
    others |= {"holdfast.text.escaping"}
    assert {name for name in imports if name.partition(".")[0] == "holdfast"} == ours | others
    # `copy` looks for `org.python`, which is Jython's.
    packages = {name.partition(".")[0] for name in imports - always} - sys.stdlib_module_names
    assert {"holdfast", "typer"} <= packages <= {"holdfast", "typer", "shellingham", "annotated_doc", "org"}
    assert not {"email", "asyncio", "importlib.metadata", "logging"} & imports
    assert done.code == 0
    assert done.err == ""
    for verb in ("sft", "eval", "config", "data", "model", "version"):
        assert f"\n  {verb} " in done.out


def test_every_listed_command_has_a_function_and_a_group() -> None:
    for name, command in COMMANDS.items():
        assert registry.load(command.path).__doc__
        assert command.help.endswith(".")
        assert " " not in name or name.split()[0] in GROUPS


def test_what_the_registry_names_is_there() -> None:
    paths = [value for name, value in vars(registry).items() if name.isupper()]
    paths = [path for value in paths for path in (value.values() if isinstance(value, dict) else [value])]

    assert all(callable(registry.load(path)) for path in paths)
    assert len(paths) > 8


def test_no_annotation_of_a_command_is_a_string_that_typer_evaluates() -> None:
    commands = [registry.load(command.path) for command in COMMANDS.values()]
    annotations = [value for command in commands for value in command.__annotations__.values()]

    assert len(commands) > 30
    assert [value for value in annotations if isinstance(value, str)] == []


@pytest.mark.parametrize(("stands", "code"), [("is a directory", 2), ("", 1)])
def test_an_error_of_the_system_is_a_paragraph_where_something_stands_in_the_place_of_a_file(
    stands: str, code: int, said: Said
) -> None:
    program = f"""
import errno
from holdfast.cli import main
from holdfast.files import NotRegular
def fail():
    raise NotRegular(errno.EINVAL, {stands!r}, "rows") if {stands!r} else OSError(errno.EIO, "broken", "rows")
main.app = fail
main.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == code
    if stands:
        assert done.stderr.startswith(f"rows: {stands}")
        assert len(done.stderr.splitlines()) == 1
        said(done.stderr.strip())
    else:
        assert lacks(done.stderr, "OSError: [Errno 5] 'rows'") == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("stf", "'stf'"),
        ("sft", "`holdfast sft RUN.yaml`"),
        ("sft --fast run.yaml", "--fast"),
        ("config shw", "'shw'"),
        ("sft run.yaml --optim.lr=3", " optim.lr=3"),
        ("grpo --steps 3", " steps=3"),
        ("config show run.yaml --seed=1", " seed=1"),
        ("train", "sft dpo reward grpo distill `holdfast sft"),
        ("ppo run.yaml", "`holdfast grpo RUN.yaml` `critic` PPO"),
        ("data preview run.yaml --row -1", "'--row'"),
        ("config schema stf", "stf sft dpo reward grpo distill"),
        ("config show gone.yaml", "gone.yaml"),
        ("sft gone.yaml", "gone.yaml"),
        ("eval .", "holdfast.yaml"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_no_traceback(holdfast: Command, arguments: str, named: str, said: Said) -> None:
    done = holdfast(*arguments.split())

    assert done.code == 2
    assert lacks(done.err, named) == []
    assert "Traceback" not in done.err + done.out
    if not done.err.startswith("Usage: "):  # which is typer's
        said(done.err.strip())


def test_a_file_for_one_verb_is_sent_to_it(holdfast: Command, tmp_path: Path, tree: dict[str, Any], said: Said) -> None:
    write_run(tmp_path / "run.yaml", tree | {"reward": "exact"})

    done = holdfast("train", "run.yaml")

    assert done.code == 2
    assert lacks(done.err, "run.yaml `holdfast grpo run.yaml`") == []
    said(done.err.strip())


@pytest.mark.parametrize("place", [[], ["sft"], ["config"], ["config", "show"], ["checkpoint", "ls"]])
def test_help_answers_to_a_short_name_too(holdfast: Command, place: list[str]) -> None:
    short, long = holdfast(*place, "-h"), holdfast(*place, "--help")

    assert short.code == 0
    assert short.out == long.out


def test_the_version_has_a_switch(holdfast: Command) -> None:
    done = holdfast("--version")

    assert (done.code, done.err) == (0, "")
    assert done.out == f"holdfast {metadata.version('holdfast')}\n"


def test_show_prints_the_whole_tree_and_reads_back_as_the_same(
    holdfast: Command, tmp_path: Path, tree: dict[str, Any]
) -> None:
    write_run(tmp_path / "small.yaml", tree)

    first = holdfast("config", "show", "small.yaml", "optim.lr=2e-6", "model.revision='7e10'")
    (tmp_path / "resolved.yaml").write_text(first.out)
    second = holdfast("config", "show", "resolved.yaml")

    assert first.code == second.code == 0
    shown = yaml.safe_load(first.out)
    assert shown["run"]["name"] == "small"
    assert shown["optim"]["lr"] == 2e-6
    assert shown["optim"]["kind"] == "adamw"
    assert shown["model"]["revision"] == "7e10"
    assert shown["launch"]["timeout_minutes"] == 30.0
    assert second.out == first.out


def test_schema_prints_the_snapshot(holdfast: Command) -> None:
    assert json.loads(holdfast("config", "schema", "sft").out) == json.loads(SNAPSHOT.read_text())


def test_diff_names_every_key_that_differs_and_exits_1(holdfast: Command, tmp_path: Path, tree: dict[str, Any]) -> None:
    write_run(tmp_path / "one.yaml", tree)
    write_run(tmp_path / "two.yaml", tree | {"seed": 3, "optim": {"kind": "sgd", "lr": 1e-3}})

    done = holdfast("config", "diff", "one.yaml", "two.yaml")

    assert done.code == 1
    assert [tuple(re.split(": | -> ", line)) for line in done.out.splitlines()] == [
        ("optim.betas", "[0.9, 0.999]", "(absent)"),
        ("optim.dampening", "(absent)", "0.0"),
        ("optim.eps", "1e-08", "(absent)"),
        ("optim.kind", "adamw", "sgd"),
        ("optim.lr", "1e-05", "0.001"),
        ("optim.momentum", "(absent)", "0.0"),
        ("optim.nesterov", "(absent)", "False"),
        ("seed", "0", "3"),
    ]


def test_a_run_is_compared_by_what_was_resolved_for_it(holdfast: Command, tmp_path: Path, tree: dict[str, Any]) -> None:
    write_run(tmp_path / "one.yaml", tree)
    (tmp_path / "runs" / "two").mkdir(parents=True)
    resolved = holdfast("config", "show", "one.yaml", "seed=3").out
    (tmp_path / "runs" / "two" / "config.resolved.yaml").write_text(resolved)

    done = holdfast("config", "diff", "one.yaml", "runs/two")

    assert (done.code, done.out) == (1, "seed: 0 -> 3\n")


def test_runs_that_differ_by_name_alone_are_the_same(holdfast: Command, tmp_path: Path, tree: dict[str, Any]) -> None:
    write_run(tmp_path / "one.yaml", tree)
    write_run(tmp_path / "two.yaml", tree)

    done = holdfast("config", "diff", "one.yaml", "two.yaml")

    assert (done.code, done.out) == (0, "")


def test_every_mistake_is_a_line_with_its_place_and_nothing_is_started(
    holdfast: Command, tmp_path: Path, tree: dict[str, Any], said: Said
) -> None:
    (tmp_path / "run.yaml").write_text(
        "steps: 2\noptm: {lr: 1}\nmodel: {path: m}\ndata:\n  path: rows.jsonl\n  batch_size: many\n"
    )

    done = holdfast("sft", "run.yaml", "optim.lr=fast")

    assert done.code == 2
    assert done.out == ""
    first, *others = done.err.splitlines()
    assert numbers(first) == [3]
    mistakes = [found.groups() for found in map(MISTAKE.fullmatch, others) if found]
    assert [(at, key) for at, key, _ in mistakes] == [
        ("run.yaml:2", "optm"), ("run.yaml:6", "data.batch_size"), ("command line (optim.lr=fast)", "optim.lr"),
    ]  # fmt: skip
    named = zip(mistakes, ("optim", "'many'", "'fast'"), strict=True)
    assert [word for (_, _, message), word in named if word not in message] == []
    said(done.err.strip())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "run.yaml"]


def test_help_imports_no_heavy_library() -> None:
    look = "import sys, holdfast.cli.main; print({'pydantic', 'rich', 'yaml', 'numpy', 'torch'} & {*sys.modules})"

    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"
