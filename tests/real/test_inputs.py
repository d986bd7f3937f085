"""A pretrained model's own template and limits, and what is said of damaged weights."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import AutoTokenizer

from holdfast.config.sections.data import TextConfig
from holdfast.data.tokens.chat import RowTokeniser
from tests.real.conftest import holdfast, write_rows, write_run

POSITIONS = 8192
ROOMY = {"tokens_per_micro_batch": POSITIONS}


def test_what_is_trained_under_its_own_template_is_what_a_hand_marks(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    talk = [
        {"role": "user", "content": "What is 40 + 57?"},
        {"role": "assistant", "content": "97"},
        {"role": "user", "content": "And twice that?\n"},
        {"role": "assistant", "content": "194, which is <b>even</b>."},
    ]
    pieces = [
        (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nWhat is 40 + 57?<|im_end|>\n<|im_start|>assistant\n",
            False,
        ),
        ("97<|im_end|>", True),
        ("\n<|im_start|>user\nAnd twice that?\n<|im_end|>\n<|im_start|>assistant\n", False),
        ("194, which is <b>even</b>.<|im_end|>", True),
        ("\n", False),
    ]
    by_hand = [
        (token, trained) for text, trained in pieces for token in tokenizer(text, add_special_tokens=False)["input_ids"]
    ]

    tokeniser = RowTokeniser(tokenizer, TextConfig(), Path.cwd())
    (example,) = tokeniser.examples({"messages": talk}, 0, "talk").examples

    ours = list(zip(example.tokens.tolist(), example.loss_mask.tolist(), strict=True))
    assert ours == by_hand[: len(ours)]
    assert not any(trained for _, trained in by_hand[len(ours) :])


def test_a_row_longer_than_its_positions_is_refused_by_name(room: Path) -> None:
    file = write_run(room, "sft", data={"max_length": POSITIONS, "overlong": "refuse", **ROOMY})
    rows = [{"question": "Count.", "answer": "1"}, {"question": "Count.", "answer": "one two " * POSITIONS}]
    write_rows(room / "rows.jsonl", rows)

    ended = holdfast("data", "check", file, cwd=room)

    assert ended.returncode == 1, ended.stderr
    assert "row 1 has 16419 tokens, more than 8192, and data.overlong is refuse" in ended.stdout


def test_a_prompt_longer_than_its_positions_is_refused(room: Path, model: Path) -> None:
    ended = holdfast("generate", model, "--chat", "--prompt", "one two " * POSITIONS, cwd=room)

    assert ended.returncode == 2
    assert f"do not fit into the {POSITIONS} positions of the model" in ended.stderr


def test_weights_that_are_cut_short_are_named(room: Path, model: Path) -> None:
    damaged = room / "damaged"
    shutil.copytree(model, damaged)
    weights = damaged / "model.safetensors"
    weights.chmod(0o600)
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 1000)
    run = write_run(room, "sft", model={"path": str(damaged)})

    trained, generated = holdfast("sft", run, cwd=room), holdfast("generate", damaged, "--prompt", "a", cwd=room)

    for ended in (trained, generated):
        assert ended.returncode == 2, ended.stderr
        assert "Traceback" not in ended.stderr
        assert str(damaged) in ended.stderr
