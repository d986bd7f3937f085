"""Completion in real shells: a terminal on which somebody types, and presses Tab."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.fixtures import HOLDFAST

SHELLS = {
    "bash": ["bash", "--noprofile", "-i"],
    "zsh": ["zsh", "-i"],
}
PROMPT = "READY>"


class Typed:
    """A shell on a terminal of its own, with a home directory of its own."""

    def __init__(self, shell: str, home: Path) -> None:
        self._master, slave = pty.openpty()
        environ = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "BASH_ENV"}}
        self._process = subprocess.Popen(
            SHELLS[shell],
            cwd=home,
            env=environ
            | {
                "HOME": str(home), "ZDOTDIR": str(home), "TERM": "dumb", "HISTFILE": "",
                "PATH": f"{HOLDFAST.parent}:{os.environ['PATH']}",
            },
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.types(f"PS1='REA''DY>'; PROMPT_COMMAND=; cd {home}\n", until=PROMPT)

    def types(self, keys: str, until: str, seconds: float = 60.0) -> str:
        """Type; return what the terminal shows from there on, up to what is awaited."""
        os.write(self._master, keys.encode())
        shown, deadline = "", time.monotonic() + seconds
        while until not in shown:
            assert time.monotonic() < deadline, f"{until!r} does not come: {shown!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                shown += os.read(self._master, 65536).decode(errors="replace")
        return shown

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._master)


def home_with_completion(shell: str, home: Path) -> Path:
    """Return a home directory after `holdfast --install-completion` in that shell."""
    (home / "base.yaml").write_text("steps: 3\n")
    typed = Typed(shell, home)
    try:
        typed.types("holdfast --install-completion\n", until="once you restart the terminal")
    finally:
        typed.close()
    return home


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_an_installed_completion_knows_commands_options_and_files(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    typed = Typed(shell, home_with_completion(shell, tmp_path))
    try:
        if (
            shell == "zsh"
        ):  # what typer writes for it defines the completion at the first Tab, and completes from then on
            typed.types("holdfast \t", until="\a")
            typed.types("\x15", until="")
        typed.types("holdfast chec\t", until="kpoint ")
        typed.types("veri\t", until="verify ")
        typed.types("\x15holdfast sft ba\t", until="base.yaml ")
        typed.types("--mod\t", until="--model ")
        typed.types("\x15holdfast config sho\t", until="show ")
        shown = typed.types("base.yaml steps=\n", until=PROMPT)
    finally:
        typed.close()

    assert re.search(r"base\.yaml \w+ 2 \w+:", shown)


def test_a_word_that_names_no_command_completes_to_nothing_and_says_nothing(tmp_path: Path) -> None:
    asked = {"COMP_WORDS": "holdfast train ba", "COMP_CWORD": "2", "_HOLDFAST_COMPLETE": "complete_bash"}

    done = subprocess.run([HOLDFAST], cwd=tmp_path, env=os.environ | asked, capture_output=True, text=True, check=False)

    assert (done.stdout.strip(), done.stderr) == ("", "")
