"""The pages for users of EasyR1, TRL and verl: every command runs, on checkpoints that those systems wrote."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.archives import unpack
from tests.cli.warm import WarmPython
from tests.features.rescue.reading import ARCHIVE, place_of

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SKIPPED = "..."
"""A line of a page that stands for lines of the output which it leaves out."""


class Shown(NamedTuple):
    """A command of a page, and the lines that the page shows below it."""

    command: str
    lines: list[str]


class Page(NamedTuple):
    """What a page's reader has before its first command."""

    fixture: str
    """The checkpoint, in the archive of those that the systems wrote."""
    place: str
    """Where the page has it."""
    reward: str
    """The reward function, in examples/rewards."""
    sizes: dict[str, int]
    """Of the model that the checkpoint is of."""
    rows: dict[str, dict[str, Any]]
    """Name of a file to the row that it has many times."""
    frozen: str = ""
    """What the fixture froze, and no key of the page's file says."""
    done: str = ""
    """What the page's run says at its end."""


SMALL = {"vocab_size": 19, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
LARGER = {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
ASKED = [{"role": "user", "content": "w5 w3"}]
PAGES = {
    "easyr1": Page(
        fixture="easyr1_adamw_bf16_frozen",
        place="checkpoints/easy_r1/math_grpo",
        reward="from_easyr1.py",
        sizes=LARGER,
        rows={"problems.jsonl": {"problem": "w5 w3", "answer": "w4"}},
        frozen=r"[layers\.0\., embed_tokens]",
        done="done after step 4",
    ),
    "verl": Page(
        fixture="verl-fsdp1-flat",
        place="checkpoints/verl_example/gsm8k",
        reward="from_verl.py",
        sizes=SMALL,
        rows={
            "problems.jsonl": {
                "data_source": "openai/gsm8k",
                "prompt": ASKED,
                "reward_model": {"style": "rule", "ground_truth": "w4"},
                "extra_info": {"split": "train", "index": 0},
            }
        },
        done="done after step 4",
    ),
    "trl": Page(
        fixture="trl-full",
        place="qwen-sft/checkpoint-2",
        reward="from_trl.py",
        sizes=SMALL,
        rows={
            "chats.jsonl": {"messages": [*ASKED, {"role": "assistant", "content": "w4 w5"}]},
            "prompts.jsonl": {"prompt": ASKED, "answer": "w4"},
        },
        done="done after step 6",
    ),
}
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }} <eos>"
    "{% endgeneration %}{% else %}{{ message.content }} {% endif %}{% endfor %}"
)


def shown(page: str) -> Iterator[Shown]:
    """Yield the commands of a page in their order, those of `bash` blocks and of `console` blocks."""
    text = (ROOT / "docs" / f"from_{page}.md").read_text(encoding="utf-8")
    for language, block in BLOCK.findall(text):
        if language == "bash":
            yield from (Shown(line.partition("  #")[0], []) for line in block.splitlines() if line)
        else:
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, *lines = part.splitlines()
                yield Shown(command, lines)


def write_model(folder: Path, sizes: dict[str, int]) -> None:
    """Write the model that the other system's run began from, with a tokenizer of as many words as it has."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, sizes["vocab_size"])}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    Qwen2ForCausalLM(Qwen2Config(**sizes)).save_pretrained(folder)


@pytest.fixture
def shell(warm: WarmPython, tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Return a function that runs a line in a shell, in a folder where `holdfast` is the command."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "holdfast").write_text(f'#!/bin/sh\nexec {warm.program} -m holdfast.cli.main "$@"\n')
    (programs / "holdfast").chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}

    def run(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


def prepare(folder: Path, page: Page) -> None:
    """Write what a reader of the page has: checkpoint, model, rows and reward function."""
    fixtures = unpack(ARCHIVE, folder / "fixtures")
    shutil.copytree(place_of(fixtures / page.fixture), folder / page.place)
    write_model(folder / "model", page.sizes)
    for name, row in page.rows.items():
        (folder / name).write_text(f"{json.dumps(row)}\n" * 16)
    shutil.copy(ROOT / "examples" / "rewards" / page.reward, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_a_page_runs_and_prints_what_the_page_shows(
    shell: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path, name: str
) -> None:
    page, printed = PAGES[name], ""
    prepare(tmp_path, page)

    for command, lines in shown(name):
        words = shlex.split(command)
        if words[0] == "cat":
            (tmp_path / words[1]).write_text("\n".join([*lines, ""]))
            continue
        done = shell(command)
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"{command}\n{output}"
        assert [line for line in lines if line != SKIPPED and line not in output.splitlines()] == [], output
        printed += output
        if words[:3] == ["holdfast", "config", "import"] and page.frozen:
            converted = tmp_path / words[-1]
            converted.write_text(converted.read_text().replace("\nmodel:\n", f"\nmodel:\n  freeze: {page.frozen}\n"))

    assert "resuming from step 2" in printed
    assert page.done in printed


@pytest.mark.parametrize("name", PAGES)
def test_a_page_converts_checks_imports_and_continues(name: str) -> None:
    commands = [each.command for each in shown(name)]

    for words in ("config import", "checkpoint check", "checkpoint import"):
        assert any(command.startswith(f"holdfast {words} ") for command in commands), words
    assert any(re.match(r"holdfast (sft|grpo) run\.yaml", command) for command in commands)


@pytest.mark.parametrize("name", PAGES)
def test_the_files_of_a_page_are_left_with_nothing_undecided(
    shell: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path, name: str
) -> None:
    for command, lines in shown(name):
        words = shlex.split(command)
        if words[0] == "cat":
            (tmp_path / words[1]).write_text("\n".join([*lines, ""]))
        elif words[0] == "sed" and ">" in words:
            shell(command)
        elif words[:3] == ["holdfast", "config", "import"]:
            done = shell(command)
            assert (done.returncode, done.stderr.splitlines()) == (0, lines)
