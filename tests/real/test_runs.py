"""Runs on a pretrained model: killed and resumed, on fewer ranks, exported, and read by others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.real.conftest import COLUMNS, answer_logprobs, done, steps, sums, write_rows, write_run

QLORA = {"lora": {"rank": 8, "quantize": "nf4"}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "dpo": ("dpo", {}),
    "grpo": ("grpo", {}),
    "lora": ("sft", {"lora": {"rank": 8}}),
    "qlora": ("sft", QLORA),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_and_resumed_is_bit_for_bit_the_one_that_was_not(room: Path, kind: str) -> None:
    verb, model = KINDS[kind]
    file = write_run(room, verb, model=model)

    out = done("prove", file, "--steps", 3, "--kill-at", 3, cwd=room)

    assert "identical" in out.splitlines()[-1], out


@pytest.mark.parametrize("kind", ["sft", "qlora"])
def test_saved_at_two_ranks_a_run_goes_on_at_one_as_it_would_at_two(room: Path, kind: str) -> None:
    saves = {"every_steps": 2, "export_at_end": False}
    two = write_run(room, "sft", steps=3, run={"name": "two"}, checkpoint=saves, model=KINDS[kind][1])
    done("sft", two, cwd=room)
    one = write_run(room, "sft", steps=2, run={"name": "one"}, checkpoint=saves, model=KINDS[kind][1])
    done("sft", one, cwd=room)

    done("sft", one, "steps=3", "launch.ranks=1", cwd=room)

    lines = {name: steps(room / "runs" / name) for name in ("one", "two")}
    assert [line["step"] for line in lines["one"]] == [1, 2, 3]
    for key in ("loss", "grad_norm"):
        ours, whole = ([line[key] for line in lines[name]] for name in ("one", "two"))
        assert ours == pytest.approx(whole, rel=1e-4)


def evaluated(out: str, metric: str) -> float:
    (line,) = (line for line in out.splitlines() if line.startswith(f"{metric} "))
    return float(line.split(" ")[1])


def test_an_export_is_the_trained_model_for_plain_transformers(room: Path, model: Path) -> None:
    held, tokenizer = sums(8, start=40), AutoTokenizer.from_pretrained(model)
    held_out = {"path": str(write_rows(room / "held.jsonl", held)), "columns": COLUMNS}
    file = write_run(room, "sft", evaluation={"sets": {"held": held_out}})
    done("sft", file, cwd=room)
    final = room / "runs/run/exports/final"

    ours = evaluated(done("eval", final, "--data", "held.jsonl", "launch.ranks=1", cwd=room), "eval/rows/nll")
    base = evaluated(done("eval", model, "--data", "held.jsonl", "launch.ranks=1", cwd=room), "eval/rows/nll")

    lines = [json.loads(line) for line in (room / "runs/run/metrics.jsonl").read_text().splitlines()]
    in_run = [line["eval/held/nll"] for line in lines if "eval/held/nll" in line][-1]
    for directory, told in ((final, in_run), (final, ours), (model, base)):
        wide, narrow = (
            np.array(answer_logprobs(AutoModelForCausalLM.from_pretrained(directory, dtype=dtype), tokenizer, held))
            for dtype in (torch.float64, torch.float32)
        )
        # transformers' own float32 is as far from float64: about 1e-5 for a log-probability of this model.
        rounding = float(np.abs(wide - narrow).mean())
        print(f"loss {told:.6f}, in float64 {-wide.mean():.6f}, rounding {rounding:.1e}")
        assert rounding < 3e-5
        assert told == pytest.approx(-float(wide.mean()), abs=3 * rounding)
    assert ours < base


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21 asks for it
def test_adapters_are_read_by_peft_as_the_merged_model_computes(room: Path, model: Path) -> None:
    from peft import PeftModel

    file = write_run(room, "sft", model={"lora": {"rank": 8}}, optim={"lr": 1e-3})
    done("sft", file, cwd=room)
    (adapters,) = (path.parent for path in (room / "runs/run/exports").rglob("adapter_config.json"))
    (merged,) = (path.parent for path in (room / "runs/run/exports").rglob("model.safetensors"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer(sums(1)[0]["question"], return_tensors="pt")

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        base = plain(**tokens).logits
        by_peft = PeftModel.from_pretrained(plain, str(adapters))(**tokens).logits
        whole = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(**tokens).logits

    assert float((by_peft - base).abs().max()) > 1e-2
    assert float((by_peft - whole).abs().max()) <= 1e-4


def test_bfloat16_differs_from_float32_by_no_more_than_in_transformers(room: Path, model: Path) -> None:
    held = sums(24, start=60)
    write_rows(room / "held.jsonl", held)
    tokenizer = AutoTokenizer.from_pretrained(model)
    here = ("eval", model, "--data", "held.jsonl", "launch.ranks=1")

    ours = [
        evaluated(done(*here, f"parallel.compute_dtype={dtype}", cwd=room), "eval/rows/nll")
        for dtype in ("float32", "bfloat16")
    ]

    wide, narrow = (
        answer_logprobs(AutoModelForCausalLM.from_pretrained(model, dtype=dtype), tokenizer, held)
        for dtype in (torch.float32, torch.bfloat16)
    )
    apart = sum(abs(a - b) for a, b in zip(wide, narrow, strict=True)) / len(wide)
    print(f"mean difference of transformers' log-probabilities {apart:.4f}, of our loss {abs(ours[0] - ours[1]):.4f}")
    assert 0 < abs(ours[0] - ours[1]) <= apart


def test_grpo_records_what_the_trainer_computes(room: Path) -> None:
    file = write_run(room, "grpo", rollout={"record": True}, checkpoint={"every_steps": 1, "export_at_end": False})
    done("grpo", file, cwd=room)

    told = [json.loads(line) for line in (room / "runs/run/metrics.jsonl").read_text().splitlines()]
    replayed = done("replay", room / "runs/run", "--step", 2, cwd=room)
    explained = done("explain-mismatch", room / "runs/run", "--step", 2, cwd=room)

    worst = [line["sampling/sampling_logp_difference/max"] for line in told if "reward" in line]
    assert max(worst) <= 1e-4
    assert explained.splitlines()[-1].startswith("nothing to explain")
    assert replayed
