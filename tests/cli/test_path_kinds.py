"""Paths of the wrong kind, command by command: one paragraph that names what takes the path."""

# ruff: noqa: E501 - screens are written as they are printed
from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from holdfast.checkpoint.format.shards import shard_file
from holdfast.cli.main import COMMANDS, app
from holdfast.config.load import load_config
from holdfast.config.path_kinds import KEYS, PathKind, misplaced, recognise
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.rows.files import files_of_split, find_files
from holdfast.errors import ConfigError, DataError, ModelError, UserError
from holdfast.models.files.places import local_directory
from holdfast.training.directory import check_verb
from tests.messages import Said, lacks

K = PathKind
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
RUN = "steps: 2\nmodel: {path: hf}\ndata: {path: rows.jsonl}\n"
EASYR1 = (
    "data: {train_files: a.parquet, val_files: b.parquet, prompt_key: q}\nworker: {actor: {model: {model_path: hf}}}\n"
)
PLACES: dict[str, PathKind | None] = {
    "runs/run": K.RUN,
    "runs": K.RUNS,
    "runs/run/checkpoints": K.CHECKPOINTS,
    "runs/run/checkpoints/step-00000002": K.CHECKPOINT,
    "runs/run/checkpoints/step-00000002/manifest.json": None,
    "runs/run/checkpoints/step-00000002/tensors": None,
    f"runs/run/checkpoints/step-00000002/{shard_file(0)}": K.WEIGHTS,
    "runs/run/checkpoints/step-00000001": K.CHECKPOINT,
    "tensors/model.safetensors": K.WEIGHTS,
    "runs/run/exports/final": K.EXPORT,
    "runs/run/exports/final-adapter": K.ADAPTER,
    "gguf": K.GGUF,
    "runs/run/metrics.jsonl": K.ROWS,
    "runs/run/config.resolved.yaml": K.RUN_FILE,
    "hf": K.MODEL,
    "hf/config.json": None,
    "hf/model.safetensors": K.WEIGHTS,
    "lfs": K.MODEL,
    "lfs.jsonl": K.ROWS,
    "verl": None,
    "run.yaml": K.RUN_FILE,
    "easyr1.yaml": K.FOREIGN_CONFIG,
    "trl.yaml": K.FOREIGN_CONFIG,
    "axolotl.yaml": K.FOREIGN_CONFIG,
    "llamafactory.yaml": K.FOREIGN_CONFIG,
    "verl.yaml": K.FOREIGN_CONFIG,
    "rows.jsonl": K.ROWS,
    "rows": K.ROWS,
    "rows_with_a_configuration": K.ROWS,
    "train.py": None,
    "empty": None,
    "picture.png": None,
    "absent": None,
}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, with a path of every kind."""
    model = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    texts = {
        "runs/run/run.json": json.dumps({"run_id": "a", "verb": "sft"}),
        "runs/run/config.resolved.yaml": RUN,
        "runs/run/metrics.jsonl": '{"step": 1}\n',
        "runs/run/checkpoints/step-00000002/manifest.json": "{}",
        f"runs/run/checkpoints/step-00000002/{shard_file(0)}": "",
        "runs/run/checkpoints/step-00000001/manifest.json": "{}",
        "runs/run/checkpoints/step-00000001/dcp/.metadata": "",
        "tensors/model.safetensors": "x" * 2000,
        "runs/run/exports/final/config.json": model,
        "runs/run/exports/final/holdfast_export.json": "{}",
        "runs/run/exports/final/model.safetensors": "x" * 2000,
        "runs/run/exports/final-adapter/adapter_config.json": "{}",
        "gguf/holdfast_export.json": "{}",
        "gguf/gguf-F16.gguf": "x",
        "hf/config.json": model,
        "hf/model.safetensors": "x" * 2000,
        "lfs/config.json": model,
        "lfs/model.safetensors": LFS,
        "lfs.jsonl": LFS,
        "verl/model_world_size_1_rank_0.pt": "",
        "run.yaml": RUN,
        "easyr1.yaml": EASYR1,
        "trl.yaml": "model_name_or_path: hf\ndataset_name: d\nper_device_train_batch_size: 4\nmax_steps: 2\n",
        "axolotl.yaml": "base_model: hf\ndatasets: [{path: a, type: alpaca}]\nmicro_batch_size: 2\nsequence_len: 32\n",
        "llamafactory.yaml": "model_name_or_path: hf\nstage: sft\nfinetuning_type: full\ntemplate: llama3\n",
        "verl.yaml": "data: {train_files: a}\nactor_rollout_ref: {model: {path: hf}, rollout: {n: 4}}\n",
        "rows.jsonl": '{"text": "a"}\n',
        "rows/a.jsonl": '{"text": "a"}\n',
        "rows_with_a_configuration/config.json": "{}",
        "rows_with_a_configuration/manifest.json": "{}",
        "rows_with_a_configuration/a.parquet": "",
        "train.py": "",
        "picture.png": "",
        "empty/.keep": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("path", "kind"), PLACES.items())
def test_every_kind_is_recognised(places: Path, path: str, kind: PathKind | None) -> None:
    assert recognise(path)[0] is kind
    assert recognise(str(places / path))[0] is kind


def test_the_name_of_the_system_is_found(places: Path) -> None:
    systems = {path: recognise(path)[1]["system"] for path, kind in PLACES.items() if kind is K.FOREIGN_CONFIG}

    assert systems == {f"{name}.yaml": name for name in ("easyr1", "trl", "axolotl", "llamafactory", "verl")}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("seed: 1\nlearning_rate: 1.0e-5\n", K.FOREIGN_CONFIG),
        ("steps: 2\nmodle: {path: hf}\ndata: {path: rows.jsonl}\n", K.RUN_FILE),
        ("steps: 2\nmodel: {path: hf}\nevaluation: {sets: {a: {path: a.jsonl}}}\n", K.RUN_FILE),
        ("optim: {lr: 1.0e-5}\n", None),
        ("zzz: 1\n", None),
        ("[1, 2]\n", None),
        ("", None),
    ],
)
def test_a_configuration_is_told_by_whose_keys_it_has_more_of(places: Path, text: str, kind: PathKind | None) -> None:
    (places / "some.yaml").write_text(text)

    assert recognise("some.yaml")[0] is kind


PROGRAM = typer.main.get_command(app)


def path_arguments() -> list[tuple[str, str]]:
    """Return every command with each of its parameters that checks a path."""
    found = []

    for command in COMMANDS:
        group: Any = PROGRAM
        for name in command.split():
            group = group.get_command(None, name)
        found.extend((command, each.name) for each in group.params if each.callback is not None)
    return found


ARGUMENTS = path_arguments()


def ask(command: str, parameter: str, path: str) -> str:
    """Call what looks at a parameter before a command runs; return the refusal, "" if there is none."""
    group: Any = PROGRAM
    context = typer.Context(group, info_name="holdfast")
    for name in command.split():
        group = group.get_command(None, name)
        context = typer.Context(group, parent=context, info_name=name)
    each = next(each for each in group.params if each.name == parameter)
    value = [path] if each.multiple or each.nargs == -1 else path
    try:
        each.callback(context, each, value)
    except UserError as error:
        assert error.exit_code == 2
        return str(error)
    return ""


def test_every_command_that_takes_a_path_says_which_kinds() -> None:
    commands = {command for command, _ in ARGUMENTS}

    assert {
        "plan", "doctor", "report", "watch", "push", "init", "sft", "dpo", "reward", "grpo", "distill", "serve", "eval",
        "prove", "replay", "explain-mismatch", "generate", "checkpoint ls", "checkpoint path", "checkpoint show",
        "checkpoint verify", "checkpoint diff", "checkpoint export", "checkpoint check", "checkpoint import",
        "checkpoint convert", "checkpoint average", "checkpoint prune", "checkpoint pin", "config show", "config diff", "config import",
        "data preview", "data check", "launch slurm", "launch ray", "model parameters", "model check", "runs ls",
        "runs compare",
    } == commands  # fmt: skip


def is_answer(text: str, path: str) -> bool:
    """Return whether a refusal is one paragraph that names the path, and what takes it."""
    sentence = text.partition(" takes ")[2]
    names_taker = re.search(r"`holdfast [^`]+`|[a-z.]+=\S", sentence) is not None
    begins = re.match(re.escape(path) + " is (a|an|the) ", text) is not None
    return begins and "\n" not in text and "{" not in text and names_taker


@pytest.mark.parametrize(("command", "parameter"), ARGUMENTS)
def test_every_kind_is_taken_or_answered_by_what_takes_it(places: Path, command: str, parameter: str) -> None:
    refusals = {path: ask(command, parameter, path) for path in PLACES}

    assert all(not refusals[path] for path, kind in PLACES.items() if kind is None)
    assert any(not refusals[path] for path, kind in PLACES.items() if kind is not None)
    assert [(path, text) for path, text in refusals.items() if text and not is_answer(text, path)] == []


@pytest.mark.parametrize("key", KEYS)
def test_every_kind_is_taken_by_a_key_or_answered(places: Path, key: str) -> None:
    refusals = {path: misplaced(path, KEYS[key], key) or "" for path in PLACES}

    assert [(path, text) for path, text in refusals.items() if text and not is_answer(text, path)] == []


ANSWERED = {
    "sft easyr1.yaml": "EasyR1, `holdfast config import easyr1.yaml --from easyr1 --to RUN.yaml`",
    "sft runs/run": "runs/run/config.resolved.yaml",
    "eval runs/run": "eval` runs/run/exports",
    "report run.yaml": "`holdfast sft run.yaml` run.dir run.name",
    "train trl.yaml": "train`: sft, dpo, reward, grpo, distill. TRL trl.yaml --from trl --to RUN.yaml`",
    "replay runs/run --step 1": "sft`, grpo` rollout.record: report runs/run`",
    "config import run.yaml --from trl": "import` `holdfast sft run.yaml`",
}


@pytest.mark.parametrize(("words", "named"), ANSWERED.items(), ids=ANSWERED)
def test_what_a_newcomer_types_is_answered_on_the_screen(
    places: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    said: Said,
    words: str,
    named: str,
) -> None:
    from holdfast.cli.main import main

    monkeypatch.setattr(sys, "argv", ["holdfast", *words.split()])

    with pytest.raises(SystemExit) as end:
        main()

    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert lacks(err, named) == []
    said(err.strip())


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("runs/run", "runs/run/exports"),
        ("runs/run/checkpoints/step-00000002", "checkpoint.init_from=runs/run/checkpoints/step-00000002"),
        ("runs/run/exports/final-adapter", "model.lora.path=runs/run/exports/final-adapter"),
        ("lfs", "git-lfs"),
        ("rows.jsonl", "data.path=rows.jsonl"),
        ("hf/model.safetensors", "model.path=hf."),
    ],
)
def test_a_model_path_of_another_kind_hears_of_what_takes_it(places: Path, said: Said, path: str, named: str) -> None:
    with pytest.raises(ModelError, match=re.escape(named)) as raised:
        local_directory(path, places)

    said(str(raised.value))


@pytest.mark.parametrize(("path", "named"), [("runs/run", "holdfast report"), ("hf", "model.path=")])
def test_a_data_path_of_another_kind_hears_of_what_takes_it(places: Path, said: Said, path: str, named: str) -> None:
    with pytest.raises(DataError, match=re.escape(named)) as raised:
        find_files(path, places)

    said(str(raised.value))


def test_a_pointer_among_the_files_of_a_directory_is_named(places: Path, said: Said) -> None:
    (places / "rows" / "b.jsonl").write_text(LFS)

    with pytest.raises(DataError, match=r"b\.jsonl .*git-lfs") as raised:
        files_of_split([places / "rows"], None, "rows")
    with pytest.raises(DataError, match=r"lfs\.jsonl .*git-lfs"):
        files_of_split([places / "lfs.jsonl"], None, "lfs.jsonl")

    said(str(raised.value))


def test_only_a_pointer_that_a_run_would_read_refuses_a_model(places: Path) -> None:
    (places / "hf" / "pytorch_model.bin").write_text(LFS)
    assert local_directory("hf", places) == Path("hf")

    (places / "hf" / "tokenizer.json").write_text(LFS)
    with pytest.raises(ModelError, match=r"^hf/tokenizer\.json .*`git lfs pull`"):
        local_directory("hf", places)


def test_a_missing_evaluation_file_is_told_under_its_own_key(places: Path, said: Said) -> None:
    with pytest.raises(DataError, match=r"^evaluation\.sets\.v\.path=gone\.jsonl\b") as raised:
        find_files("gone.jsonl", places, "evaluation.sets.v.path")

    said(str(raised.value))


def test_a_run_of_another_command_is_named_with_its_model(places: Path, said: Said) -> None:
    check_verb(places / "runs" / "run", "sft")
    check_verb(places / "absent", "dpo")

    with pytest.raises(ConfigError, match=r" sft`.* dpo`.*checkpoint export") as raised:
        check_verb(places / "runs" / "run", "dpo")

    said(str(raised.value))


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[draw.randrange(len(data))] = draw.randrange(256)
    path.write_bytes(bytes(data))


def cut(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(40)])


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def exchange(path: Path, draw: random.Random) -> None:
    others = [each for each in Path().rglob("*") if each.is_file()]
    path.write_bytes(draw.choice(others).read_bytes())


def link(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(draw.choice(["nowhere", path.name, "/dev/null", "."]))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_was_changed_a_path_is_recognised_or_unknown_and_refusals_are_answers(places: Path, seed: int) -> None:
    draw = random.Random(seed)
    changes: list[Callable[[Path, random.Random], None]] = [flip, cut, remove, exchange, link]
    for path in draw.sample(sorted(each for each in Path().rglob("*") if each.is_file()), 6):
        draw.choice(changes)(path, draw)

    for path in PLACES:
        for command, parameter in draw.sample(ARGUMENTS, 4):
            text = ask(command, parameter, path)
            assert not text or is_answer(text, path), text


TYPED = [
    ("optm", "optim"), ("evalutaion", "evaluation"), ("sead", "seed"), ("lanch", "launch"), ("checkpiont", "checkpoint"),
    ("paralel", "parallel"), ("modle", "model"), ("dtaa", "data"), ("objetive", "objective"), ("metrcis", "metrics"),
    ("run_id", None), ("date", "data"), ("verb", None), ("format", None), ("zzz", None),
    ("optimization", None), ("reward", None), ("mode", "model"), ("loss", None), ("notes", None),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "meant"), TYPED)
def test_only_a_near_key_is_suggested(places: Path, typed: str, meant: str | None) -> None:
    (places / "typed.yaml").write_text(RUN + f"{typed}: {{}}\n")

    with pytest.raises(ConfigError) as refused:
        load_config(places / "typed.yaml", [], SFTConfig)

    suggestion = re.search(r"unknown key; did you mean (\S+)\?", str(refused.value))
    assert (suggestion and suggestion[1]) == meant


def test_an_export_that_is_not_there_is_told_with_what_its_run_has_or_would_write(places: Path, said: Said) -> None:
    from holdfast.cli.commands.eval import evaluate_model

    with pytest.raises(ModelError) as of_a_done_run:
        evaluate_model("runs/run/exports/best", [])
    with pytest.raises(ModelError) as of_no_run:
        evaluate_model("runs/next/exports/best", [])

    assert lacks(str(of_a_done_run.value), f"runs/run/exports/best {Path.cwd()} final, final-adapter.") == []
    assert lacks(str(of_no_run.value), f"runs/next/exports/best {Path.cwd()}") == []
    said(str(of_a_done_run.value))
    said(str(of_no_run.value))


def test_a_limit_of_all_rewards_that_stands_with_one_is_sent_to_the_section_of_all(places: Path, said: Said) -> None:
    from holdfast.config.verbs.grpo import GRPOConfig

    (places / "grpo.yaml").write_text(RUN + "reward: {kind: path, path: 'r.py:f', timeout_seconds: 5}\n")

    with pytest.raises(ConfigError, match=r"reward\b.*\.timeout_seconds: .* rewards\.timeout_seconds") as raised:
        load_config(places / "grpo.yaml", [], GRPOConfig)

    said(str(raised.value))
