"""`holdfast init`: a first file from a model and the first rows, and a run without any file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from holdfast.data.tasks.synthetic import character_tokenizer
from tests.cli.fixtures import Command, write_rows
from tests.cli.in_process import cli_in_process
from tests.cli.screens import ended, numbers
from tests.cli.warm import WarmPython
from tests.messages import Said, lacks
from tests.vision import picture, vision_directory

CHAT = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"


def model_of(kind: str, place: Path) -> Path:
    """Return a directory with a small model of a kind for 128 positions; of llama, 24,736 weights."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHAT
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if kind == "qwen3_moe" else {}
    config = AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, **experts,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of("llama", tmp_path_factory.mktemp("small-model"))


def initialised(folder: Path, model: Path, rows: list[dict[str, Any]], *verb: str) -> dict[str, Any]:
    write_rows(folder / "rows.jsonl", rows)
    done = cli_in_process("init", *verb, "--model", model, "--data", "rows.jsonl", cwd=folder)
    assert done.code == 0, done.err
    text = (folder / "run.yaml").read_text()
    assert len(text.splitlines()) <= 40
    tree = yaml.safe_load(text)
    assert isinstance(tree, dict)
    return tree


def comment_of(text: str, line: str) -> str:
    """Return what a written file says above a line."""
    above = text.partition(f"\n  {line}")[0].splitlines()
    kept = next(number for number, each in enumerate(reversed(above)) if not each.lstrip().startswith("#"))
    return "\n".join(each.strip() for each in above[len(above) - kept :])


SHAPES: dict[str, tuple[list[dict[str, Any]], list[str], str]] = {
    "question and answer": ([{"question": f"add {n}", "answer": str(n)} for n in range(40)], [], "sft"),
    "prompt and completion": ([{"prompt": f"add {n}", "completion": str(n)} for n in range(40)], [], "sft"),
    "text": ([{"text": f"add {n} and so on"} for n in range(40)], [], "sft"),
    "messages": ([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": str(n)}]}
                  for n in range(40)], ["train"], "sft"),
    "pairs": ([{"prompt": f"add {n}", "chosen": str(n), "rejected": "x"} for n in range(40)], [], "dpo"),
    "pairs without a prompt": ([{"chosen": f"add {n}={n}", "rejected": f"add {n}=x"} for n in range(40)], [], "dpo"),
    "labels": ([{"prompt": f"add {n}", "completion": str(n), "label": n % 2 == 0} for n in range(40)], [], "dpo"),
    "pairs for a reward model": ([{"prompt": f"a {n}", "chosen": str(n), "rejected": "x"} for n in range(40)],
                                 ["reward"], "reward"),
    "numbers for a policy": ([{"question": f"add {n}", "answer": str(n)} for n in range(40)], ["grpo"], "grpo"),
    "good and bad": ([{"question": f"add {n}", "good": str(n), "bad": "x"} for n in range(40)], ["dpo"], "dpo"),
    "pairs for a student": ([{"prompt": f"add {n}", "completion": str(n)} for n in range(40)],
                            ["distill", "--teacher", "model"], "distill"),
    "prompts for a student": ([{"prompt": f"add {n}"} for n in range(40)],
                              ["distill", "--teacher", "model"], "distill"),
    "words for a policy": ([{"problem": f"say {n}", "solution": "word"} for n in range(40)], ["grpo"], "grpo"),
}  # fmt: skip


KINDS = (
    "llama",
    "granite",
    "qwen3",
    "mistral",
    "gemma2",
    "phi3",
    "olmo2",
    "qwen2",
    "llama",
    "qwen2",
    "llama",
    "gpt2",
    "qwen3_moe",
)


NO_SCORES = ("pairs for a reward model", "granite")  # transformers has no sequence classification of it
ALL = [case for shape in SHAPES for kind in dict.fromkeys(KINDS) if (case := (shape, kind)) != NO_SCORES]
DIAGONAL = list(zip(SHAPES, KINDS, strict=True))
CASES = [*DIAGONAL, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in DIAGONAL)]


@pytest.mark.parametrize(("shape", "kind"), CASES)
@pytest.mark.cases(1)
def test_what_is_written_runs_as_it_is(warm: WarmPython, tmp_path: Path, shape: str, kind: str) -> None:
    rows, asked, verb = SHAPES[shape]
    model = model_of(kind, tmp_path / "model")
    initialised(tmp_path, model, rows, *(word for word in asked if word != "train"))

    words = (verb, "run.yaml", "dry_run=true", "launch.device=cpu", "launch.ranks=1")
    done = warm.run("-m", "holdfast.cli.main", *words, cwd=tmp_path)

    assert done.code == 0, done.err
    assert (tmp_path / "run.yaml").read_text().startswith(f"# holdfast {verb} ")


def test_lengths_and_columns_are_those_of_the_rows(tmp_path: Path, model: Path) -> None:
    """A row has as many tokens as characters: 12 + 60 in one of 300 rows, 12 + 3 in others, and the end."""
    rows = [{"question": f"count {n:06}", "answer": "7" * (60 if n == 5 else 3)} for n in range(300)]

    tree = initialised(tmp_path, model, rows)

    assert tree["data"] == {
        "path": "rows.jsonl", "columns": {"instruction": "question", "output": "answer"}, "max_length": 64,
        "batch_size": 32, "validation_split": 0.05,
    }  # fmt: skip
    text = (tmp_path / "run.yaml").read_text()
    assert numbers(comment_of(text, "max_length: 64")) == [99, 300, 64, 73]
    assert tree["optim"]["lr"] == 2e-4
    assert tree["epochs"] == 3


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"question": "add 1", "answer": "1"}, {"instruction": "question", "output": "answer"}),
        ({"prompt": "add 1=", "completion": "1"}, {"instruction": "prompt", "output": "completion"}),
        ({"prompt": "add 1=", "chosen": "1", "rejected": "2"}, {"instruction": "prompt"}),
        ({"prompt": "add 1=", "completion": "1", "label": True}, {"instruction": "prompt"}),
        ({"instruction": "add", "input": "1 and 2", "output": "3"}, None),
    ],
)
def test_a_question_is_a_users_turn_where_there_is_a_chat_template(
    holdfast: Command, tmp_path: Path, said: Said, model: Path, row: dict[str, Any], columns: dict[str, str] | None
) -> None:
    tree = initialised(tmp_path, model, [row] * 8)
    shown = holdfast("data", "preview", "run.yaml", "--row", "0")

    assert tree["data"].get("columns") == columns
    assert shown.code == 0, shown.err
    assert all(value in shown.out for value in row.values() if isinstance(value, str))
    assert "<eos>" in shown.out
    said(comment_of((tmp_path / "run.yaml").read_text(), "columns:" if columns else "path: rows.jsonl"))


@pytest.mark.parametrize(
    ("row", "columns", "key"),
    [
        ({"question": "add 1", "answer": "1"}, {"prompt": "question", "completion": "answer"}, "columns:"),
        ({"prompt": "add 1", "completion": "1"}, None, "path: rows.jsonl"),
        ({"prompt": "add 1", "chosen": "1", "rejected": "2"}, None, "path: rows.jsonl"),
    ],
)
def test_without_a_chat_template_a_question_is_plain_text(
    tmp_path: Path,
    said: Said,
    model: Path,
    row: dict[str, Any],
    columns: dict[str, str] | None,
    key: str,
) -> None:
    place = tmp_path / "plain"
    shutil.copytree(model, place)
    (place / "chat_template.jinja").unlink()

    tree = initialised(tmp_path, place, [row] * 8)

    assert tree["data"].get("columns") == columns
    said(comment_of((tmp_path / "run.yaml").read_text(), key))


def test_prompts_that_hold_the_templates_own_tokens_stay_as_they_are(tmp_path: Path, said: Said, model: Path) -> None:
    tree = initialised(tmp_path, model, [{"prompt": "add 1<eos>", "completion": "1"}] * 8)

    assert "columns" not in tree["data"]
    comment = comment_of((tmp_path / "run.yaml").read_text(), "path: rows.jsonl")
    assert "<eos>" in comment
    said(comment)


def test_a_template_that_closes_no_answer_is_named_in_the_first_file(tmp_path: Path, said: Said, model: Path) -> None:
    place = tmp_path / "open"
    shutil.copytree(model, place)
    (place / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")

    initialised(tmp_path, place, [{"question": "add 1", "answer": "1"}] * 8)

    said(comment_of((tmp_path / "run.yaml").read_text(), "columns:"))


def test_good_and_bad_answers_are_the_chosen_and_the_rejected_one(tmp_path: Path, model: Path) -> None:
    tree = initialised(tmp_path, model, [{"good": "add 1=1", "bad": "add 1=2"}] * 8, "dpo")

    assert tree["data"]["columns"] == {"chosen": "good", "rejected": "bad"}
    assert tree["preference"] == {"loss": "dpo"}


def test_a_policy_gets_a_reward_and_room_to_write(tmp_path: Path, model: Path) -> None:
    rows = [{"question": f"count {n:06}", "answer": f"we count\n#### {n}"} for n in range(40)]

    tree = initialised(tmp_path, model, rows, "grpo")

    assert tree["reward"] == [{"kind": "math", "column": "answer"}]
    assert tree["rollout"] == {"group_size": 8, "max_new_tokens": 64}
    assert tree["data"]["max_length"] == 128
    assert tree["data"]["columns"] == {"instruction": "question"}


def test_a_run_needs_no_file(warm: WarmPython, tmp_path: Path, model: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"add {n}=", "completion": str(n)} for n in range(40)])

    words = ("sft", "--model", model, "--data", "rows.jsonl", "steps=2", "epochs=null", "launch.ranks=1")
    done = warm.run("-m", "holdfast.cli.main", *words, "launch.device=cpu", cwd=tmp_path)

    assert done.code == 0, done.err
    assert ended(done.out) == ("done", 2, "runs/sft")
    assert not (tmp_path / "run.yaml").exists()


REFUSED = [
    (["init", "--data", "rows.jsonl"], "--model"),
    (["init", "paint", "--model", "m", "--data", "rows.jsonl"], "'paint' sft"),
    (["init", "dpo", "--model", "m", "--data", "rows.jsonl"], "dpo` prompt chosen rejected"),
    (["init", "dpo", "--model", "m", "--data", "ab.jsonl"], "data.columns={prompt: question, chosen: a, rejected: b},"),
    (["init", "sft", "--model", "m", "--data", "prompts.jsonl"], "completion"),
    (["init", "distill", "--model", "m", "--data", "rows.jsonl"], "--teacher"),
    (["init", "sft", "--model", "m", "--teacher", "t", "--data", "rows.jsonl"], "sft` teacher"),
    (["distill", "--model", "m", "--data", "rows.jsonl"], "distill --model MODEL --teacher TEACHER --data ROWS.jsonl"),
    (["init", "--model", "m", "--data", "rows.jsonl"], "m directory"),
    (["init", "--model", "m", "--data", "empty.jsonl"], "empty rows"),
    (["init", "--model", "m", "--data", "rows.jsonl", "--output", "there.yaml"], "there.yaml"),
    (["sft", "--model", "m"], "sft RUN.yaml`"),
    (["sft"], "sft RUN.yaml`"),
    (["sft", "run.yaml", "--model", "m", "--data", "rows.jsonl"], "sft RUN.yaml`"),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSED, ids=[" ".join(case[0]) for case in REFUSED])
def test_what_is_missing_or_not_for_the_verb_is_one_paragraph(
    holdfast: Command, tmp_path: Path, said: Said, arguments: list[str], named: str
) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    write_rows(tmp_path / "ab.jsonl", [{"question": "q", "a": "b", "b": "c"}])
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": "a"}])
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "there.yaml").write_text("mine\n")

    done = holdfast(*arguments)

    assert done.code == 2
    assert lacks(done.err, named) == []
    said(re.sub(r"(hub did not give it:) .* (Check)", r"\1 ... \2", done.err.strip()))
    assert "Traceback" not in done.err
    assert (tmp_path / "there.yaml").read_text() == "mine\n"
    assert not (tmp_path / "run.yaml").exists()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_directory(tmp_path_factory.mktemp("seeing"), "qwen2_5_vl")


IMAGES: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "with placeholders": ({"question": "<image>see", "answer": "a", "images": ["0.png"]}, [], {"image_dir": "rows"}),
    "without placeholders": (
        {"question": "see", "answer": "a", "image": "0.png"},
        [],
        {"image_dir": "rows", "format": "<image>{{ content }}"},
    ),
    "called otherwise": (
        {"question": "see", "answer": "a", "picture_path": "rows/0.png"},
        [],
        {"format": "<image>{{ content }}"},
    ),
    "for a policy": (
        {"problem": "see", "solution": "a", "photo": "0.png"},
        ["grpo"],
        {"image_dir": "rows", "format": "<image>{{ content }}"},
    ),
    "of pairs": (
        {"prompt": "see <image>", "chosen": "a", "rejected": "b", "photo": ["0.png"]},
        [],
        {"image_dir": "rows"},
    ),
}


@pytest.mark.parametrize("shape", IMAGES)
def test_columns_of_images_are_recognised(holdfast: Command, tmp_path: Path, seeing: Path, shape: str) -> None:
    row, verb, expected = IMAGES[shape]
    (tmp_path / "rows").mkdir()
    picture(np.random.default_rng(0), 24, 33).save(tmp_path / "rows/0.png")
    write_rows(tmp_path / "rows/rows.jsonl", [row] * 12)

    done = holdfast("init", *verb, "--model", seeing, "--data", "rows/rows.jsonl")
    assert done.code == 0, done.err
    data = yaml.safe_load((tmp_path / "run.yaml").read_text())["data"]
    checked = holdfast("data", "check", "run.yaml")

    assert {name: data[name] for name in ("image_dir", "format") if name in data} == expected
    column = next(name for name in row if name in {"images", "image", "picture_path", "photo"})
    assert data.get("columns", {}).get("images") == (None if column in {"images", "image"} else column)
    assert checked.code == 0, checked.err
    assert "images: 12 of " in checked.out
