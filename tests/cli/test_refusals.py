"""Bad inputs through the real command on two ranks: one paragraph, exit code 2, and nothing left on the disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fixtures import HOLDFAST, TINY, write_rows, write_run
from tests.cli.warm import Done, WarmPython, run
from tests.messages import Said, lacks


def missing_shard(folder: Path, tree: dict[str, Any]) -> None:
    import json

    from transformers import AutoConfig, AutoModelForCausalLM

    from holdfast.data.tasks.synthetic import character_tokenizer

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    model.save_pretrained(folder / "model", max_shard_size="4KB")
    character_tokenizer().save_pretrained(folder / "model")
    index = json.loads((folder / "model" / "model.safetensors.index.json").read_text())
    (folder / "model" / index["weight_map"]["model.norm.weight"]).unlink()
    tree["model"] = {"path": "model"}


def no_file(folder: Path, tree: dict[str, Any]) -> None:
    tree["data"]["path"] = "gone.jsonl"


def empty_file(folder: Path, tree: dict[str, Any]) -> None:
    (folder / "rows.jsonl").write_text("")


def small_batch(folder: Path, tree: dict[str, Any]) -> None:
    tree["data"]["batch_size"] = 1


def one_row(folder: Path, tree: dict[str, Any]) -> None:
    write_rows(folder / "rows.jsonl", [{"prompt": "a=", "completion": "b"}])
    tree["data"]["allow_partial"] = True


def large_tokenizer(folder: Path, tree: dict[str, Any]) -> None:
    tree["model"]["config"]["vocab_size"] = 20


def typo(folder: Path, tree: dict[str, Any]) -> None:
    tree["optm"] = {"lr": 1e-3}


def wrong_type(folder: Path, tree: dict[str, Any]) -> None:
    tree["data"]["batch_size"] = "four"


def missing_column(folder: Path, tree: dict[str, Any]) -> None:
    write_rows(folder / "rows.jsonl", [{"prompt": "a=", "completion": "b"}, {"prompt": "a="}] * 6)


def two_shapes(folder: Path, tree: dict[str, Any]) -> None:
    row = {"text": "abc", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    write_rows(folder / "rows.jsonl", [row] * 12)


def no_warm_start(folder: Path, tree: dict[str, Any]) -> None:
    tree["checkpoint"] = {"init_from": "elsewhere/checkpoints/step-00000003"}


def no_such_set(folder: Path, tree: dict[str, Any]) -> None:
    tree["checkpoint"] = {"keep": {"best": [{"metric": "eval/validaton/loss", "mode": "min"}]}}
    tree["data"]["validation_split"] = 0.2


def router_loss_without_routers(folder: Path, tree: dict[str, Any]) -> None:
    tree["model"]["router_loss"] = "sequence"


def longer_than_its_table_of_positions(folder: Path, tree: dict[str, Any]) -> None:
    tree["model"]["config"] = {
        "model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 31,
        "bos_token_id": None, "eos_token_id": 1,
    }  # fmt: skip


def completions_longer_than_its_table_of_positions(folder: Path, tree: dict[str, Any]) -> None:
    longer_than_its_table_of_positions(folder, tree)
    tree["model"]["config"]["n_positions"] = 34
    tree["evaluation"] = tree.get("evaluation", {}) | {"completions": {"max_new_tokens": 4}}
    tree["data"]["validation_split"] = 0.2


def small_batch_later(folder: Path, tree: dict[str, Any]) -> None:
    tree["data"]["batch_size_schedule"] = {1: 1}


def unreadable_file(folder: Path, tree: dict[str, Any]) -> None:
    """The memory of a process is a file whose beginning nobody can read, whoever asks."""
    (folder / "rows.jsonl").unlink()
    (folder / "rows.jsonl").symlink_to("/proc/self/mem")


def half_a_character(folder: Path, tree: dict[str, Any]) -> None:
    write_rows(folder / "rows.jsonl", [{"prompt": "a \ud800", "completion": "b"}] * 12)


BEFORE_THE_FIRST_BATCH: dict[Callable[[Path, dict[str, Any]], None], str] = {
    small_batch_later: "data.batch_size_schedule.1=1 2 launch.ranks",
    unreadable_file: "data.path=rows.jsonl [Errno 5]",
    longer_than_its_table_of_positions: "data.max_length 32 gpt2 31 max_position_embeddings",
    completions_longer_than_its_table_of_positions: "evaluation.completions.max_new_tokens 35 34 data.max_length",
    router_loss_without_routers: "model.router_loss sequence llama",
    no_warm_start: "elsewhere/checkpoints/step-00000003",
    no_such_set: "eval/validaton/loss validation",
    no_file: "data.path=gone.jsonl",
    empty_file: "rows",
    small_batch: "data.batch_size=1 2 launch.ranks",
    one_row: "1 2 launch.ranks",
    large_tokenizer: "59 20 model.resize_vocab",
    missing_shard: "model-0000",
    typo: "run.yaml: optm optim",
    wrong_type: "run.yaml: data.batch_size 'four'",
}
"""Each with the words that its message has to name."""
IN_THE_FIRST_BATCH: dict[Callable[[Path, dict[str, Any]], None], str] = {
    missing_column: "rows row",
    two_shapes: "rows row",
    half_a_character: "'prompt' UTF-16",
}


def refused(done: Done, folder: Path, before: set[str], named: str) -> None:
    assert done.code == 2, done
    assert "Traceback" not in done.err + done.out
    assert lacks(done.err.strip().splitlines()[0], named) == []
    assert done.err.strip() == done.err.strip().split("\n\n")[0]
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == before


def everything_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("spoil", BEFORE_THE_FIRST_BATCH)
def test_a_bad_input_is_one_paragraph_and_leaves_nothing(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any], spoil: Any, said: Said
) -> None:
    spoil(tmp_path, tree)
    write_run(tmp_path / "run.yaml", tree)
    before = everything_in(tmp_path)

    done = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", cwd=tmp_path)

    refused(done, tmp_path, before, BEFORE_THE_FIRST_BATCH[spoil])
    said(done.err.strip())


@pytest.mark.parametrize("spoil", IN_THE_FIRST_BATCH)
def test_a_bad_row_of_the_first_batch_is_one_paragraph_and_leaves_nothing(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any], spoil: Any, said: Said
) -> None:
    spoil(tmp_path, tree)
    write_run(tmp_path / "run.yaml", tree)
    before = everything_in(tmp_path)

    done = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", cwd=tmp_path)

    refused(done, tmp_path, before, IN_THE_FIRST_BATCH[spoil])
    said(re.sub(r"\brow \d+", "row N", done.err.strip()))  # of the rank that met it first


def test_the_command_as_users_start_it_refuses_in_the_same_way(tmp_path: Path, tree: dict[str, Any]) -> None:
    no_file(tmp_path, tree)
    write_run(tmp_path / "run.yaml", tree)
    before = everything_in(tmp_path)

    done = run([HOLDFAST, "sft", "run.yaml"], cwd=tmp_path)

    refused(done, tmp_path, before, BEFORE_THE_FIRST_BATCH[no_file])
