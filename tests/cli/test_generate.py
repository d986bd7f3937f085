"""`holdfast generate` against transformers' own generate on the exported directory, and everything it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.checkpoint.format.shards import shard_file
from tests.cli.commands import in_a_terminal
from tests.cli.fixtures import HOLDFAST, write_rows
from tests.cli.in_process import cli_in_process
from tests.cli.screens import numbers
from tests.cli.warm import Done
from tests.messages import Said, lacks

STEP_3 = "runs/run/checkpoints/step-00000003"


def generated(place: Path, *words: str) -> Done:
    return cli_in_process("generate", *words, cwd=place)


def by_transformers(directory: Path, prompt: str, count: int, *, seed: int = 0, **how: Any) -> list[int]:
    """Return the tokens that transformers' own generate adds."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
    set_seed(seed)
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, pad_token_id=0, **how)
    return [int(token) for token in out[0, tokens.shape[1] :]]


def flip(file: Path, at: bytes | None) -> None:
    """Change one bit where these bytes stand, or of the last byte."""
    data = bytearray(file.read_bytes())
    data[-1 if at is None else data.index(at)] ^= 8
    file.write_bytes(data)


def refused(done: Done, named: str) -> None:
    """Assert that a command was refused in one paragraph that names these words."""
    assert (done.code, done.out) == (2, ""), done
    assert "Traceback" not in done.err
    assert "\n\n" not in done.err.strip()
    assert lacks(done.err, named) == []


def test_greedy_completions_of_export_run_and_checkpoint_are_those_of_transformers(place: Path) -> None:
    final = place / "runs/run/exports/final"
    exported = cli_in_process("checkpoint", "export", STEP_3, "-o", "of-3", cwd=place)
    assert exported.code == 0, exported.err
    ask = ("--prompt", "add 3=", "--prompt", "sub 11", "--max-new-tokens", "9", "--json")

    of_export = json.loads(generated(place, "runs/run/exports/final", *ask).out)
    of_run = json.loads(generated(place, "runs/run", *ask).out)
    of_step = json.loads(generated(place, STEP_3, *ask).out)

    run_id = json.loads((place / "runs/run/run.json").read_text())["run_id"]
    for answer, directory, step in ((of_export, final, 4), (of_run, final, 4), (of_step, place / "of-3", 3)):
        assert (answer["run"], answer["run_id"], answer["step"]) == ("run", run_id, step)
        for each, prompt in zip(answer["completions"], ("add 3=", "sub 11"), strict=True):
            assert each["prompt"] == prompt
            assert each["tokens"] == by_transformers(directory, prompt, 9, do_sample=False)
            assert each["finished"] == (each["tokens"][-1] == 1)
    assert of_run["path"].endswith("exports/final")
    assert of_step["path"].endswith("step-00000003")


def test_a_run_without_exports_is_exported_in_passing_and_left_as_it_was(place: Path) -> None:
    ask = ("runs/run", "--prompt", "add 3=", "--max-new-tokens", "9", "--json")
    with_export = json.loads(generated(place, *ask).out)
    shutil.rmtree(place / "runs/run/exports")
    before = sorted(str(path) for path in place.rglob("*"))

    without = json.loads(generated(place, *ask).out)

    assert without["completions"] == with_export["completions"]
    assert without["step"] == 4
    assert sorted(str(path) for path in place.rglob("*")) == before


def test_draws_are_those_of_transformers_for_a_seed_temperature_and_top_p(place: Path) -> None:
    ask = (
        "runs/run",
        "--prompt",
        "add 3=",
        "--max-new-tokens",
        "20",
        "--temperature",
        "1.5",
        "--top-p",
        "0.9",
        "--json",
    )

    answers = {seed: json.loads(generated(place, *ask, "--seed", str(seed)).out) for seed in (5, 6)}

    how = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 0}
    for seed, answer in answers.items():
        expected = by_transformers(place / "runs/run/exports/final", "add 3=", 20, seed=seed, **how)
        assert answer["completions"][0]["tokens"] == expected
    assert answers[5]["completions"] != answers[6]["completions"]


def test_chat_lays_the_prompt_into_the_template_with_the_opening_of_an_answer(place: Path) -> None:
    ask = ("runs/run", "--prompt", "add 3=", "--max-new-tokens", "9", "--chat", "--json")

    (each,) = json.loads(generated(place, *ask).out)["completions"]

    written = "<user>add 3=<assistant>"
    assert each["tokens"] == by_transformers(place / "runs/run/exports/final", written, 9, do_sample=False)
    assert each["prompt_tokens"] == 8


def test_rows_are_completed_in_their_order_and_the_text_names_run_step_and_prompt(place: Path) -> None:
    write_rows(place / "asked.jsonl", [{"q": "add 1="}, {"q": "a\x1bb"}])

    done = generated(place, "runs/run", "--rows", "asked.jsonl", "--column", "q", "--max-new-tokens", "3")

    run_id = json.loads((place / "runs/run/run.json").read_text())["run_id"]
    assert done.code == 0, done.err
    *_, path, _, name, of, _, step = done.out.splitlines()[0].split()
    assert path.endswith("runs/run/exports/final:")
    assert (name, of, step) == ("run", f"({run_id}),", "4")
    assert [line for line in done.out.splitlines() if line.startswith("---")] == ["--- add 1=", "--- a\\x1bb"]


@pytest.mark.slow
def test_standard_input_has_the_prompt_unless_it_is_a_terminal_or_empty(place: Path, said: Said) -> None:
    command = [HOLDFAST, "generate", "runs/run", "--max-new-tokens", "9", "--json"]

    piped = subprocess.run(command, cwd=place, input="add 3=\nadd 4=\n", capture_output=True, text=True, check=False)
    empty = subprocess.run(command, cwd=place, input="", capture_output=True, text=True, check=False)

    (each,) = json.loads(piped.stdout)["completions"]
    assert each["prompt"] == "add 3="
    assert each["tokens"] == by_transformers(place / "runs/run/exports/final", "add 3=", 9, do_sample=False)
    refused(Done(empty.returncode, empty.stdout, empty.stderr), "--prompt")
    said(empty.stderr.strip())


@pytest.mark.slow
def test_a_terminal_is_not_waited_for(place: Path) -> None:
    shown, code = in_a_terminal([HOLDFAST, "generate", "runs/run"], place)

    assert code == 2
    assert lacks(shown, "--prompt --rows") == []


def plain_model(place: Path, *, name: str = "plain") -> Path:
    """Return a directory as others publish it, with nothing of ours beside the weights, which are others."""
    directory = Path(shutil.copytree(place / "runs/run/exports/final", place / name))
    for file in ("holdfast_export.json", "holdfast.yaml", "README.md"):
        (directory / file).unlink()
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def in_a_hub_cache(directory: Path, cache: Path) -> dict[str, str]:
    """Lay a directory into a cache of the hub as OWNER/plain; return the environment that names the cache."""
    revision = "0" * 40
    repository = cache / "models--owner--plain"
    shutil.copytree(directory, repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(revision)
    return {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}


def test_a_plain_directory_is_completed_as_transformers_does(place: Path, said: Said) -> None:
    directory = plain_model(place)

    done = generated(place, "plain", "--prompt", "add 3=", "--max-new-tokens", "9", "--json")
    shown = generated(place, "plain", "--prompt", "add 3=", "--max-new-tokens", "9")

    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert (answer["path"], answer["run"], answer["run_id"], answer["step"]) == ("plain", "", "", None)
    assert answer["completions"][0]["tokens"] == by_transformers(directory, "add 3=", 9, do_sample=False)
    assert shown.out.startswith("plain: ")
    said(shown.out.splitlines()[0])


@pytest.mark.slow
def test_a_name_on_the_hub_is_completed_as_transformers_does(place: Path) -> None:
    environment = os.environ | in_a_hub_cache(plain_model(place), place / "cache")
    command = [HOLDFAST, "generate", "owner/plain", "--prompt", "add 3=", "--max-new-tokens", "9", "--json"]

    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["path"] == "owner/plain"
    assert answer["completions"][0]["tokens"] == by_transformers(place / "plain", "add 3=", 9, do_sample=False)


def test_base_and_trained_complete_rows_side_by_side(place: Path) -> None:
    directory = plain_model(place)
    write_rows(place / "asked.jsonl", [{"prompt": "add 3="}, {"prompt": "sub 11"}])
    ask = ("plain", "runs/run", "--rows", "asked.jsonl", "--max-new-tokens", "9")

    as_json, shown = generated(place, *ask, "--json"), generated(place, *ask)

    assert (as_json.code, shown.code) == (0, 0), as_json.err + shown.err
    base, trained = json.loads(as_json.out)["models"]
    assert (base["path"], base["step"]) == ("plain", None)
    assert (trained["run"], trained["step"]) == ("run", 4)
    for number, prompt in enumerate(("add 3=", "sub 11")):
        expected = [
            by_transformers(path, prompt, 9, do_sample=False) for path in (directory, place / "runs/run/exports/final")
        ]
        assert expected[0] != expected[1]
        assert [model["completions"][number]["tokens"] for model in (base, trained)] == expected
        line = next(line for line in shown.out.splitlines() if prompt in line)
        texts = [model["completions"][number]["completion"] for model in (base, trained)]
        assert [cell.strip() for cell in line.split("│")[1:-1]] == [prompt, *(text.strip() for text in texts)]


def test_of_several_models_each_prompt_fits_all_or_nothing_is_loaded(place: Path, said: Said) -> None:
    directory = plain_model(place)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))

    done = generated(place, "runs/run", "plain", "--prompt", "add 123456=")

    refused(done, "plain:")
    assert numbers(done.err)[:4] == [1, 1, 11, 8]  # prompt, prompts, tokens and positions
    said(done.err.strip())


def test_a_plain_model_without_a_weight_is_refused_and_not_filled_with_random_values(place: Path, said: Said) -> None:
    directory = plain_model(place)
    weights = load_file(directory / "model.safetensors")
    weights.pop("model.layers.0.mlp.up_proj.weight")
    save_file(weights, directory / "model.safetensors", {"format": "pt"})

    done = generated(place, "plain", "--prompt", "add 3=")

    refused(done, "plain model.layers.0.mlp.up_proj.weight LlamaForCausalLM")
    said(done.err.strip())


def test_paths_that_are_nothing_to_load_are_refused_in_a_paragraph(place: Path, said: Said) -> None:
    (place / "empty").mkdir()

    for target in ("run.yaml", "nowhere", "./nowhere", "empty"):
        done = generated(place, target, "--prompt", "a")
        refused(done, target)
        said(done.err.strip().partition(" hub did ")[0])  # then come its own words
    shutil.rmtree(place / "runs/run/checkpoints")
    done = generated(place, "runs/run", "--prompt", "a")
    refused(done, "runs/run")
    said(done.err.strip())


def test_weights_with_another_byte_are_refused_in_an_export_and_in_a_checkpoint(place: Path) -> None:
    exported = cli_in_process("checkpoint", "export", STEP_3, "-o", "of-3", cwd=place)
    assert exported.code == 0, exported.err
    weight = load_file(place / "of-3/model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    last_row = weight[-1].numpy().tobytes()
    flip(place / STEP_3 / shard_file(1), last_row)
    flip(place / "runs/run/exports/final/model.safetensors", None)

    export = generated(place, "runs/run/exports/final", "--prompt", "a")
    checkpoint = generated(place, STEP_3, "--prompt", "a")

    refused(export, "model.safetensors hash")
    refused(checkpoint, "step-00000003 model.layers.0.mlp.up_proj.weight")


def test_an_export_without_its_tokenizer_is_refused(place: Path, said: Said) -> None:
    for file in (place / "runs/run/exports/final").glob("tokenizer*"):
        file.unlink()

    done = generated(place, "runs/run/exports/final", "--prompt", "a")

    refused(done, "exports/final tokenizer")
    said(done.err.strip())


@pytest.mark.parametrize(
    ("words", "named", "counts"),
    [
        (["--prompt", ""], "", [1, 1]),
        (["--prompt", "a", "--prompt", ""], "", [2, 2]),
        (["--prompt", "a", "--prompt", "b\udcff"], "b\\udcff", [2, 2]),
        (["--prompt", "a" * 64], "", [1, 1, 64, 64]),
        (["--prompt", "aaaa", "--max-new-tokens", "61"], "--max-new-tokens", [1, 1, 4, 61, 64]),
        (["--prompt", "a", "--rows", "rows.jsonl"], "--prompt --rows", []),
        (["--rows", "none.jsonl"], "--rows none.jsonl:", []),
        (["--rows", "rows.jsonl", "--column", "x"], "rows.jsonl, 'x' prompt completion", [0]),
    ],
    ids=["empty", "second empty", "no UTF-8", "too long", "no room", "two sources", "no file", "no column"],
)
def test_prompts_that_cannot_be_completed_are_refused(
    place: Path, words: list[str], named: str, counts: list[float], said: Said
) -> None:
    done = generated(place, "runs/run", *words)

    refused(done, named)
    assert numbers(done.err) == counts
    said(done.err.strip())


def test_chat_without_a_template_is_refused(place: Path, said: Said) -> None:
    final = place / "runs/run/exports/final"
    for file in final.glob("*.jinja"):
        file.unlink()
    config = json.loads((final / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (final / "tokenizer_config.json").write_text(json.dumps(config))

    done = generated(place, "runs/run/exports/final", "--chat", "--prompt", "a")

    refused(done, "chat_template --chat")
    said(done.err.strip())
