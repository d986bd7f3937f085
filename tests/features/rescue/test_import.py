"""An import makes a checkpoint that its run continues, or a model directory; the rest is refused, unwritten."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from holdfast import checkpoint
from holdfast.checkpoint.inspect.tensors import StoredCheckpoint
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.cli.main import app
from holdfast.errors import HoldfastError
from tests.cli.warm import WarmPython
from tests.features.rescue.damages import other_schedule, rank_file, state_of
from tests.features.rescue.reading import hash_of, place_of, truth_of
from tests.features.rescue.test_damage import copied
from tests.features.rescue.test_readers import SIZES


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a configuration and a tokenizer, and random weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("began")
    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, 19)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(5)
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(folder)
    rows = [{"text": " ".join(f"w{2 + (row * 7 + place) % 17}" for place in range(12))} for row in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run_file(folder: Path, tokens: Path, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "run": {"dir": str(folder / "runs"), "name": "rescued"},
        "steps": 4,
        "model": {"path": str(tokens), "freeze": [r"layers\.0\."]},
        "data": {"path": str(tokens / "rows.jsonl"), "batch_size": 4, "max_length": 32},
        "optim": {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.1, "no_decay": []},
        "checkpoint": {"every_steps": 2, "rehearsal": False},
        "launch": {"ranks": 2},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        values[section] = {**values.get(section, {}), name: value} if name else value
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def imported(*words: Any) -> str:
    """Run the command; return what it printed.

    Raises:
        HoldfastError: What it refused.
    """
    result = CliRunner().invoke(
        app, ["checkpoint", "import", *map(str, words)], catch_exceptions=False, standalone_mode=False
    )
    return result.output


def stored_at(folder: Path) -> StoredCheckpoint:
    manifest = checkpoint.verify(str(folder))
    return StoredCheckpoint(LocalStorage(folder.parent), folder.name, manifest)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", [
    "verl-fsdp2", "verl-fsdp1-orig-4", "verl-fsdp2-poison", "titan-frozen", "lightning-mp-frozen", "accelerate-v2-full",
])  # fmt: skip
def test_a_run_continues_what_was_imported(
    fixtures: Path, tokens: Path, name: str, warm: WarmPython, tmp_path: Path
) -> None:
    # What the launcher and two ranks make of an imported checkpoint is the same for all systems.
    ranks = 2 if name == "verl-fsdp2" else 1
    before, file = hash_of(fixtures / name), run_file(tmp_path, tokens)
    position = ["--data-from-start"] if name.startswith(("accelerate", "titan")) else []

    imported(place_of(fixtures / name), "--as", file, *position)
    stored, truth = stored_at(tmp_path / "runs/rescued/checkpoints/step-00000002"), truth_of(fixtures / name)
    done = warm.run("-m", "holdfast.cli.main", "sft", file, f"launch.ranks={ranks}", cwd=tmp_path)

    for parameter, value in truth["model"].items():
        assert torch.equal(stored.read(f"model.{parameter}"), value), parameter
    for parameter, slots in truth["optim"].items():
        for slot, value in slots.items():
            assert torch.equal(stored.read(f"optim.{parameter}.{slot}"), torch.as_tensor(value)), (parameter, slot)
    assert hash_of(fixtures / name) == before
    assert done.code == 0, done.out + done.err
    assert "resuming from step 2" in done.out
    assert "imported from" in done.out
    assert "done after step 4" in done.out


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "name",
    [
        "verl-fsdp1-flat",
        "verl-fsdp2-tied",
        "dcp",
        "titan",
        "trainer-full",
        "lightning-mp-full",
        "lightning-mp-weights",
        "accelerate-v1-sharded",
    ],
)
def test_plain_transformers_loads_an_export(fixtures: Path, tokens: Path, name: str, tmp_path: Path) -> None:
    out = tmp_path / "model"

    imported(place_of(fixtures / name), "--export", out, "--model", tokens)
    model = AutoModelForCausalLM.from_pretrained(out)

    truth = truth_of(fixtures / name)["model"]
    state = model.state_dict()
    assert all(torch.equal(state[parameter], value) for parameter, value in truth.items())
    assert (out / "tokenizer.json").exists()
    assert (out / "generation_config.json").exists()


BF16 = {"model__dtype": "bfloat16", "optim": {"kind": "adamw_bf16", "lr": 0.1}}


@pytest.mark.cases("all")
@pytest.mark.parametrize(
    ("fixture", "changes", "options", "words"),
    [
        (
            "lightning-mp-weights",
            {"model__dtype": "bfloat16", "optim": {"kind": "adamw_bf16", "lr": 0.1}},
            [],
            "model.dtype: float32 would fit",
        ),
        ("dcp", {"model__freeze": []}, [], "does not state its position"),
        ("verl-fsdp2", {"model__freeze": []}, [], "model.freeze must name the others"),
        ("verl-fsdp2", {"model__dtype": "bfloat16"}, [], "bfloat16"),
        ("verl-fsdp2", {"optim": {"kind": "sgd", "lr": 0.1}}, [], "not of this run's optimizer"),
        ("verl-fsdp2", {"optim": {"kind": "adamw_8bit", "lr": 0.1}}, [], "optim.kind: adamw"),
        ("verl-fsdp2", {"optim__ema": {"decay": 0.9}}, [], "optim.ema"),
        ("verl-fsdp2", {}, ["--step", "7"], "is of step 2, and --step says 7"),
        ("accelerate-v2-full", {}, ["--data-from-start", "--step", "4"], "is of step 2, and --step says 4"),
        ("lightning-mp-frozen", {}, ["--step", "1"], "is of step 2, and --step says 1"),
        ("trainer-full", {}, [], "trained then and is frozen now"),
    ],
)
def test_what_a_resume_would_refuse_is_refused_before_anything_is_written(
    fixtures: Path, tokens: Path, fixture: str, changes: dict[str, Any], options: list[str], words: str, tmp_path: Path
) -> None:
    file = run_file(tmp_path, tokens, **changes)

    with pytest.raises(HoldfastError, match=words):
        imported(place_of(fixtures / fixture), "--as", file, *options)

    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").rglob("manifest.json"))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("key", "value"), [("rms_norm_eps", 1e-3), ("rope_theta", 5e5), ("hidden_act", "gelu"), ("num_attention_heads", 4)]
)
def test_a_configuration_of_another_model_with_the_same_shapes_is_refused(
    fixtures: Path, tokens: Path, key: str, value: Any, tmp_path: Path
) -> None:
    path = copied(fixtures, "verl-fsdp2", tmp_path)
    file = path / "global_step_2/actor/huggingface/config.json"
    about = json.loads(file.read_text())
    about |= {"num_key_value_heads": 2} if key.startswith("num_") else {}
    about.get("rope_parameters", {}).pop("rope_theta", None)
    file.write_text(json.dumps(about | {key: value}))

    with pytest.raises(HoldfastError, match=f"config.json is of another model than model.path: .*{key} is {value!r}"):
        imported(path, "--as", run_file(tmp_path, tokens))

    assert not (tmp_path / "runs").exists()


def test_a_step_of_several_updates_goes_on_where_its_schedule_stands(
    fixtures: Path, tokens: Path, tmp_path: Path
) -> None:
    path, file = copied(fixtures, "verl-fsdp2", tmp_path), run_file(tmp_path, tokens)
    other_schedule(path, 8, (0, 1))

    with pytest.raises(HoldfastError, match="is of step 2, its schedule at 8, and --step says 7"):
        imported(path, "--as", file, "--step", 7)
    imported(path, "--as", file, "--step", 8)

    assert (tmp_path / "runs/rescued/checkpoints/step-00000008").is_dir()


@pytest.mark.parametrize(
    ("step", "words"), [(2, "pass 1"), (12, "pass 2"), (22, "pass 3"), (5, "a pass whose number is not stated")]
)
def test_the_pass_of_a_loader_that_counts_rows_follows_from_the_step(
    fixtures: Path, tokens: Path, step: int, words: str, tmp_path: Path
) -> None:
    """The fixture had drawn 8 of 40 rows, 4 of them a step: the second pass at step 12, the third at 22."""
    path = copied(fixtures, "verl-fsdp2", tmp_path)
    (path / "latest_checkpointed_iteration.txt").write_text(str(step))
    (path / "global_step_2").rename(path / f"global_step_{step}")

    said = imported(path, "--as", run_file(tmp_path, tokens))

    assert f"goes on behind 8 rows of {words}" in said
    assert (tmp_path / f"runs/rescued/checkpoints/step-{step:08d}").is_dir()


@pytest.mark.slow
def test_adapters_that_were_saved_alone_go_on_beside_the_base_of_the_run(
    fixtures: Path, tokens: Path, warm: WarmPython, tmp_path: Path
) -> None:
    lora = {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"]}
    allowed = {"every_steps": 2, "rehearsal": False, "resume": {"add": ["^(?!.*lora_)"]}}
    file = run_file(tmp_path, tokens, model__freeze=[], model__lora=lora, checkpoint=allowed)
    place = place_of(fixtures / "trainer-sharded-lora")

    said = imported(place, "--as", file, "--data-from-start")
    done = warm.run("-m", "holdfast.cli.main", "sft", file, cwd=tmp_path)

    assert "model.lora.alpha of this run, 4, must be it" in said
    assert done.code == 0, done.out + done.err
    assert "resuming from step 2" in done.out
    scaled = {**lora, "alpha": 8, "rank": 2}
    other = run_file(tmp_path, tokens, model__freeze=[], model__lora=scaled, checkpoint=allowed, run__name="other")
    whole = tmp_path / "with its configuration"
    shutil.copytree(place, whole)
    (whole / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4, "peft_type": "LORA"}))
    with pytest.raises(HoldfastError, match="lora_alpha is 4 there and 8.0 here"):
        imported(whole, "--as", other, "--data-from-start")


def test_parameters_of_the_optimizer_without_a_state_are_counted(fixtures: Path, tokens: Path, tmp_path: Path) -> None:
    path = copied(fixtures, "accelerate-v2-full", tmp_path)
    state_of(path / "optimizer.bin", lambda content: content["state"].pop("model.embed_tokens.weight"))

    said = imported(path, "--as", run_file(tmp_path, tokens), "--data-from-start")

    assert "1 parameters of the optimizer have no state, such as model.embed_tokens.weight" in said


def test_a_damaged_checkpoint_is_not_imported(fixtures: Path, tokens: Path, tmp_path: Path) -> None:
    path = copied(fixtures, "verl-fsdp2", tmp_path)
    rank_file(path).unlink()

    with pytest.raises(HoldfastError, match="rank_1.pt is missing"):
        imported(path, "--as", run_file(tmp_path, tokens))

    assert not (tmp_path / "runs").exists()


def test_an_import_begins_a_run_and_never_changes_one(fixtures: Path, tokens: Path, tmp_path: Path) -> None:
    file = run_file(tmp_path, tokens)
    imported(place_of(fixtures / "verl-fsdp2"), "--as", file)

    with pytest.raises(HoldfastError, match="is a run already"):
        imported(place_of(fixtures / "verl-fsdp2"), "--as", file)


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ([], "empty directory"),
        (["notes.txt"], "no checkpoint that is known"),
        (["model_world_size_2_rank_0.pt", "meta.pt"], "two systems"),
        (["latest", "zero_to_fp32.py", "global_step2/mp_rank_00_model_states.pt"], "DeepSpeed.*zero_to_fp32"),
        (["manifest.json"], "checkpoint verify"),
    ],
)
def test_a_directory_that_cannot_be_read_is_one_paragraph(there: list[str], words: str, tmp_path: Path) -> None:
    for name in there:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")

    with pytest.raises(HoldfastError, match=words):
        CliRunner().invoke(app, ["checkpoint", "check", str(tmp_path)], catch_exceptions=False, standalone_mode=False)


def test_the_check_answers_scripts_too(fixtures: Path) -> None:
    result = CliRunner().invoke(app, ["checkpoint", "check", str(fixtures / "verl-fsdp2/checkpoint"), "--json"])

    about = json.loads(result.output)
    assert result.exit_code == 0
    assert about["system"] == "verl"
    assert about["optimizer"]["parameters"] == 15
    assert about["position"] == {"rows": 8}
    assert not about["damaged"]


def test_the_folder_of_a_checkpoint_that_has_no_weights_is_refused_with_the_command_that_makes_them(
    fixtures: Path, tokens: Path, tmp_path: Path
) -> None:
    path = copied(fixtures, "easyr1_adamw_bf16_frozen", tmp_path)
    (folder,) = path.rglob("huggingface")
    for file in tokens.glob("tokenizer*"):
        shutil.copy(file, folder)
    run = run_file(tmp_path, tokens, model__path=str(folder), **BF16)

    with pytest.raises(HoldfastError) as refused:
        imported(path, "--as", run)

    assert refused.value.exit_code == 2
    words = str(refused.value)
    assert f"holdfast checkpoint import {path}" in words
    assert all(word in words for word in ("--export", "model.path", str(folder)))
    assert not (tmp_path / "runs").exists()
