"""What tools/show_rescue.sh runs besides commands."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.features.trainers.test_trainers import killed_in_save, result_of

SIZES = {"vocab_size": 19, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False}  # fmt: skip


def write(place: Path) -> None:
    """Write the model that the run began with, its rows, and the file of the run that goes on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, 19)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        place / "model"
    )
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(place / "model")
    rows = [{"text": " ".join(f"w{2 + (row * 7 + at) % 17}" for at in range(12))} for row in range(40)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {
        "run": {"dir": "runs", "name": "rescued"},
        "steps": 6,
        "launch": {"ranks": 2},
        "model": {"path": "model", "dtype": "bfloat16", "freeze": [r"layers\.0\."]},
        "data": {"path": "rows.jsonl", "batch_size": 4, "max_length": 32},
        "optim": {"kind": "adamw_bf16", "lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.1, "no_decay": []},
    }
    (place / "run.yaml").write_text(yaml.safe_dump(run))


def kill_and_resume(place: Path) -> None:
    """Print the losses of a fit, and those of the same fit that was killed in a save and resumed."""
    script, flags = "lightning_script.py", ("mp", "wide", "frozen")
    straight = result_of(script, str(place / "straight"), *flags)
    killed_in_save(script, place / "killed", "step=4", *flags)
    whole = [path for path in (place / "killed").glob("*.ckpt") if (path / "manifest.json").exists()]
    newest = max(whole, key=lambda path: path.name)
    resumed = result_of(script, str(place / "killed"), *flags, f"resume={newest}")
    for name, result in (("straight", straight), ("resumed", resumed)):
        print(f"{name:9}", "  ".join(f"step {step + 1}: {loss:.9f}" for step, loss in result["lines"]))
    same = resumed["lines"] == straight["lines"][resumed["lines"][0][0] :]
    print(f"resumed from {newest.name}: {'the same losses bit for bit' if same else 'OTHER LOSSES'}")
