"""`holdfast config import`: what is written, what is missing, and bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cli.warm import Done

Command = Callable[..., Done]

TRL = """model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/Capybara
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
bf16: true
deepspeed: zero3.json
report_to: wandb
made_up: 1
"""
EASYR1 = "worker: {actor: {model: {model_path: m}, global_batch_size: 64}}\ndata: {rollout_batch_size: 128}\n"
PAGE = Path(__file__).parents[3] / "docs" / "other_systems.md"
MARK = "\x1b[2J"


def test_a_file_is_written_with_its_origins_and_config_show_reads_it(holdfast: Command, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(TRL)

    done = holdfast("config", "import", "theirs.yaml", "--from", "trl", "--ranks", "4", "--to", "run.yaml")
    shown = holdfast("config", "show", "run.yaml")

    assert (done.code, done.out) == (1, "")
    assert done.err == "8 keys: 6 written, 1 without effect, 1 undecided, and 1 of TRL's defaults.\n"
    assert yaml.safe_load(shown.out)["data"]["batch_size"] == 64
    text = (tmp_path / "run.yaml").read_text()
    for line in (
        "  path: Qwen/Qwen3-0.6B  # model_name_or_path",
        "  - wandb",
        "# Undecided:",
        "#   TRL's default of assistant_only_loss: false -> data.train_on (false has no counterpart)",
        "#   line 8, made_up: 1",
        "# Without effect:",
        "#   line 6, deepspeed: zero3.json (speed)",
        "seed: 42  # TRL's default of seed",
    ):
        assert f"\n{line}\n" in f"{text}\n"


def test_without_a_name_the_file_is_printed(holdfast: Command, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(TRL.replace("made_up: 1", "assistant_only_loss: true"))

    done = holdfast("config", "import", "theirs.yaml", "--from", "trl")

    assert (done.code, done.err) == (0, "8 keys: 7 written, 1 without effect, 0 undecided.\n")
    assert yaml.safe_load(done.out)["data"]["batch_size"] == 16


def test_json_is_read_too(holdfast: Command, tmp_path: Path) -> None:
    (tmp_path / "theirs.json").write_text('{"model_name_or_path": "m", "dataset_name": "d", "learning_rate": 1e-5}')

    done = holdfast("config", "import", "theirs.json", "--from", "trl")

    assert yaml.safe_load(done.out)["model"] == {"path": "m"}


def test_what_is_missing_is_said_in_one_paragraph_and_exits_1(holdfast: Command, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(EASYR1)

    done = holdfast("config", "import", "theirs.yaml", "--from", "easyr1", "--to", "run.yaml")

    assert done.code == 1
    assert done.err.splitlines()[1:] == [
        "run.yaml does not load yet; it needs a hand here:",
        "  data.path: no rows are named; set one of path, synthetic",
        "  reward: required, and missing; for example reward: 'my_reward.py:score'",
    ]
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["updates"] == {"mini_batches": 2, "passes": 1}


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (TRL, ["--from", "megatron"], "There is no table of 'megatron' to read a file by; there are trl, easyr1, "),
        (TRL, ["--from", "trl", "--for", "train"], "There is no command 'train' to convert a file for; there are "),
        (TRL, ["--from", "trl", "--ranks", "0"], "Invalid value for '--ranks'"),
        (TRL, ["--from", "trl", "--to", "theirs.yaml"], "theirs.yaml exists, and nothing is overwritten."),
        (TRL, ["--from", "easyr1"], "theirs.yaml is no file of EasyR1: it has dataset_name of TRL. Use --from trl."),
        (EASYR1, ["--from", "verl"], "theirs.yaml is no file of verl: it has worker.actor.model.model_path, "),
        ("a: 1\n", ["--from", "trl"], "theirs.yaml has no key that TRL has (trl 1.16.0, transformers 5.23.0)"),
        ("", ["--from", "trl"], "theirs.yaml has no key that TRL has"),
        ("[1, 2]\n", ["--from", "trl"], "the file must hold keys and values, as in `steps: 100`, not a list."),
        ("a: [1\n", ["--from", "trl"], "not YAML"),
        ("import trl\n", ["--from", "trl"], "the file must hold keys and values"),
        ("worker: [1]\n", ["--from", "easyr1"], "theirs.yaml:1: worker has keys of its own in EasyR1, and here it is "),
        ("seed: 1\nseed: 2\n", ["--from", "trl"], "theirs.yaml:2: seed: set twice, first on line 1; keep one of them"),
        ("stage: ppo\ncutoff_len: 8\n", ["--from", "llamafactory"], "theirs.yaml:1: stage: ppo is no kind of run that"),
        ("rl: ebft\nsequence_len: 8\n", ["--from", "axolotl"], "theirs.yaml:1: rl: ebft is no kind of run that"),
    ],
)  # fmt: skip
def test_bad_input_is_exit_code_2_and_one_paragraph(
    holdfast: Command, tmp_path: Path, text: str, arguments: list[str], said: str
) -> None:
    (tmp_path / "theirs.yaml").write_text(text)

    done = holdfast("config", "import", "theirs.yaml", *arguments)

    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err + done.out


def test_a_script_is_refused_with_what_is_read_instead(holdfast: Command, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from trl import SFTTrainer\n")

    done = holdfast("config", "import", "train.py", "--from", "trl")

    assert done.code == 2
    assert done.err.startswith("train.py is a Python script, which is not read.")


def test_a_file_that_is_not_there_is_exit_code_2(holdfast: Command) -> None:
    done = holdfast("config", "import", "gone.yaml", "--from", "trl")

    assert (done.code, done.err) == (2, "There is no file gone.yaml. Give the path of a run's YAML file.\n")


def test_control_characters_of_the_file_reach_neither_screen_nor_output(holdfast: Command, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(
        'learning_rate: 1.0e-5\n"made\\e[2J\\nup": "\\e[2J\\nsteps: 3"\nseed: "\\e[2J"\n'
    )

    done = holdfast("config", "import", "theirs.yaml", "--from", "trl")

    assert MARK not in done.out + done.err
    assert "steps" not in yaml.safe_load(done.out)


def test_the_page_shows_what_the_command_prints(holdfast: Command, tmp_path: Path) -> None:
    command = "config import sft.yaml --from trl --ranks 8"
    shown = PAGE.read_text().partition("$ cat sft.yaml\n")[2].partition("```")[0]
    theirs, ours = shown.split(f"$ holdfast {command}\n")
    (tmp_path / "sft.yaml").write_text(theirs)

    done = holdfast(*command.split())

    assert done.out == ours


@pytest.mark.parametrize(
    "text",
    [
        "seed: !!python/object/apply:os.mkdir [made]\nlearning_rate: 1.0e-5\n",
        "a: &a [1, 1]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b, *b]\n"
        + "".join(f"k{n}: &k{n} [{', '.join([f'*k{n - 1}' if n else '*c'] * 9)}]\n" for n in range(9)),
        "a: " + "{a: " * 5000 + "1" + "}" * 5000,
        "learning_rate: \x00\n",
    ],
    ids=["a tag of Python", "aliases of aliases", "nested without end", "a null byte"],
)
def test_a_hostile_file_is_exit_code_2_and_runs_nothing(holdfast: Command, tmp_path: Path, text: str) -> None:
    (tmp_path / "theirs.yaml").write_text(text)

    done = holdfast("config", "import", "theirs.yaml", "--from", "trl")

    assert (done.code, done.out, "Traceback" in done.err) == (2, "", False)
    assert [path.name for path in tmp_path.iterdir() if path.name in {"made", "run.yaml"}] == []


def test_a_variable_of_the_environment_is_not_read_and_is_left_to_a_person(holdfast: Command, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(
        "worker: {actor: {model: {model_path: '${oc.env:PATH}'}}, rollout: {n: 2}}\ndata: {train_files: rows}\n"
    )

    done = holdfast("config", "import", "theirs.yaml", "--from", "easyr1")

    assert done.code == 1
    assert "#   line 1, worker.actor.model.model_path: ${oc.env:PATH} -> model.path" in done.out
