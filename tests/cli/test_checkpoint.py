"""`holdfast checkpoint` on a real run's checkpoints: numbers against NumPy, bytes against the run's own export."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from holdfast.checkpoint.format.shards import shard_file
from tests.checkpoint.damage import rewrite_manifest
from tests.cli.fixtures import Command, of_step
from tests.cli.screens import numbers
from tests.cli.warm import WarmPython
from tests.messages import Said, lacks


def losses(place: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (place / "runs/run/metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def flip(file: Path, at: int | None = None) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 8
    file.write_bytes(data)


def test_ls_lists_steps_with_the_losses_of_the_log(checkpoint: Command, place: Path) -> None:
    done = checkpoint("ls", "runs/run", "--metric", "loss", "--metric", "no_such")

    lines = done.out.splitlines()
    assert done.code == 0, done.err
    assert [line.split()[0] for line in lines] == [f"step-{step:08d}" for step in range(1, 5)]
    for step, line in enumerate(lines, start=1):
        assert f"loss={losses(place)[step]:.6g}  no_such=-" in line
        assert "model+optimizer+trainer+rank" in line


def test_path_prints_the_last_and_the_best_by_hand(checkpoint: Command, place: Path, said: Said) -> None:
    best = min(losses(place), key=lambda step: losses(place)[step])

    assert checkpoint("path", "runs/run").out.strip().endswith(of_step(4))
    assert checkpoint("path", "runs/run", "--last").out.strip().endswith(of_step(4))
    assert checkpoint("path", "runs/run", "--best", "loss", "--mode", "min").out.strip() == of_step(best)
    nobody_says = checkpoint("path", "runs/run", "--best", "loss")
    assert (nobody_says.code, nobody_says.out) == (2, "")
    assert lacks(nobody_says.err, "loss --mode max min") == []
    said(nobody_says.err.strip())
    unknown = checkpoint("path", "runs/run", "--best", "accuracy")
    assert unknown.code == 2
    named, _, others = unknown.err.partition(";")
    assert "accuracy" in named
    assert {"loss,", "grad_norm,"} <= {*others.split()}
    said(named)


def test_show_says_what_is_inside(checkpoint: Command) -> None:
    done = checkpoint("show", of_step(4))

    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    (contents,) = [line for line in lines if line[0] == "contents"]
    assert contents[1:5] == ["model,", "optimizer,", "trainer,", "rank;"]
    (written,) = [line for line in lines if line[0] == "written"]
    assert numbers(" ".join(written))[:2] == [1, 2]  # replicates and shards
    assert ["optimizer", "torch.optim.adamw.AdamW"] in lines
    assert ["tied:", "model.embed_tokens.weight", "=", "lm_head.weight"] in lines
    assert ["model.model.embed_tokens.weight", "float32", "[64,", "16]"] in lines
    assert ["optim.model.embed_tokens.weight.exp_avg", "float32", "[64,", "16]"] in lines


@pytest.mark.parametrize("level", ["names", "files", "tensors"])
def test_verify_finds_a_whole_run_whole(checkpoint: Command, level: str) -> None:
    done = checkpoint("verify", "runs/run", "--level", level)

    assert done.code == 0, done.err
    assert [line.split(":")[0] for line in done.out.splitlines()] == ["whole"] * 4
    assert f"level {level})" in done.out


def test_verify_of_one_flipped_bit_exits_1_and_names_the_tensor(checkpoint: Command, place: Path, said: Said) -> None:
    assert checkpoint("export", of_step(3), "--format", "torch", "-o", "state.pt").code == 0
    weight = torch.load(place / "state.pt", weights_only=True)["model"]["model.layers.0.mlp.up_proj.weight"]
    shard = place / of_step(3) / shard_file(1)
    flip(shard, at=shard.read_bytes().index(weight[-1].numpy().tobytes()))

    done = checkpoint("verify", "runs/run")
    one = checkpoint("verify", of_step(3))

    assert (done.code, one.code) == (1, 1)
    assert [line.split(":")[0] for line in done.out.splitlines()] == ["whole", "whole", "damaged", "whole"]
    assert f"{of_step(3)}/{shard_file(1)}" in one.out
    assert [word for word in one.out.split() if "model.model" in word] == ["model.model.layers.0.mlp.up_proj.weight."]
    said(one.out.strip())
    assert sorted(path.name for path in (place / "runs/run/checkpoints").glob("step-*")) == [
        f"step-{step:08d}" for step in range(1, 5)
    ]


def test_diff_names_the_first_difference_and_every_one(checkpoint: Command, place: Path) -> None:
    shutil.copytree(place / of_step(1), place / "copy-of-1")

    same = checkpoint("diff", of_step(1), "copy-of-1")
    first = checkpoint("diff", of_step(1), of_step(2))
    everything = checkpoint("diff", of_step(1), of_step(2), "--all")

    assert (same.code, same.out) == (0, "identical\n")
    assert first.code == everything.code == 1
    assert len(first.out.splitlines()) == 1
    assert first.out == everything.out.splitlines()[0] + "\n"
    told = [line.split()[0].rstrip(":") for line in everything.out.splitlines()]
    assert {"model.model.embed_tokens.weight", "optim.model.embed_tokens.weight.exp_avg", "trainer.json"} <= set(told)
    assert told[0].startswith("model.")


def test_export_is_the_run_s_own_export_byte_for_byte_and_transformers_computes_the_same(
    checkpoint: Command, place: Path
) -> None:
    from transformers import AutoModelForCausalLM

    done = checkpoint("export", of_step(4), "-o", "exported")

    assert done.code == 0, done.err
    ours, theirs = place / "exported", place / "runs/run/exports/final"
    files = sorted(path.name for path in ours.iterdir())
    assert files == sorted(path.name for path in theirs.iterdir())
    for name in files:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    tokens = torch.arange(2, 14)[None]
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(path)(input_ids=tokens).logits for path in (ours, theirs)]
    assert torch.equal(logits[0], logits[1])
    assert bool(torch.isfinite(logits[0]).all())
    assert "lm_head.weight" not in load_file(ours / "model.safetensors")


def test_export_in_small_shards_and_another_dtype_holds_the_same_numbers(checkpoint: Command, place: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint("export", of_step(4), "-o", "whole")
    done = checkpoint("export", of_step(4), "-o", "sharded", "--shard-bytes", "4000", "--dtype", "bfloat16")

    assert done.code == 0, done.err
    assert len(list((place / "sharded").glob("model-*.safetensors"))) > 2
    whole = AutoModelForCausalLM.from_pretrained(place / "whole").state_dict()
    sharded = AutoModelForCausalLM.from_pretrained(place / "sharded", dtype=torch.bfloat16).state_dict()
    assert whole.keys() == sharded.keys()
    for name, tensor in whole.items():
        assert torch.equal(sharded[name], tensor.to(sharded[name].dtype)), name


def test_export_as_one_torch_file_holds_weights_and_state_by_name(checkpoint: Command, place: Path) -> None:
    done = checkpoint("export", of_step(2), "--format", "torch", "-o", "state.pt")

    assert done.code == 0, done.err
    held = torch.load(place / "state.pt", weights_only=True)
    weights = load_file(_exported(checkpoint, place, 2) / "model.safetensors")
    assert np.array_equal(held["model"]["model.embed_tokens.weight"].numpy(), weights["model.embed_tokens.weight"])
    state = held["optimizer"]["state"]["model.embed_tokens.weight"]
    assert state["exp_avg"].shape == (64, 16)
    assert float(state["step"]) == 2
    assert sorted(name for group in held["optimizer"]["param_groups"] for name in group["params"]) == sorted(
        held["optimizer"]["state"]
    )


def _exported(checkpoint: Command, place: Path, step: int) -> Path:
    assert checkpoint("export", of_step(step), "-o", f"exported-{step}").code == 0
    return place / f"exported-{step}"


def test_average_is_the_mean_that_numpy_takes(checkpoint: Command, place: Path) -> None:
    parts = [load_file(_exported(checkpoint, place, step) / "model.safetensors") for step in (1, 2, 4)]

    done = checkpoint("average", of_step(1), of_step(2), of_step(4), "-o", "mean")

    assert done.code == 0, done.err
    mean = load_file(place / "mean" / "model.safetensors")
    assert mean.keys() == parts[0].keys()
    for name, array in mean.items():
        expected = np.mean([part[name].astype(np.float64) for part in parts], axis=0).astype(array.dtype)
        np.testing.assert_allclose(array, expected, rtol=0, atol=float(np.spacing(np.abs(expected).max())))
        assert not np.array_equal(array, parts[0][name]) or math.prod(array.shape) == 0


def test_prune_keeps_what_was_asked_for_and_what_is_pinned(checkpoint: Command, place: Path, said: Said) -> None:
    assert checkpoint("pin", "runs/run", "1").out == "pinned: 1\n"
    assert checkpoint("pin", "runs/run", "9").code == 2

    dry = checkpoint("prune", "runs/run", "--keep-last", "2", "--dry-run")
    assert numbers(dry.out) == [2, 3]  # the step, and how many stay
    said(dry.out.strip())
    done = checkpoint("prune", "runs/run", "--keep-last", "2")

    assert numbers(done.out) == [2, 3]
    said(done.out.strip())
    assert sorted(path.name for path in (place / "runs/run/checkpoints").iterdir() if path.is_dir()) == [
        f"step-{step:08d}" for step in (1, 3, 4)
    ]
    assert "pinned" in checkpoint("ls", "runs/run").out.splitlines()[0]
    assert checkpoint("pin", "runs/run", "1", "--remove").out == "pinned: none\n"


def train(warm: WarmPython, place: Path, *overrides: str) -> None:
    done = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", *overrides, cwd=place)
    assert done.code == 0, done.err


def kept(place: Path, run: str = "run") -> list[int]:
    return sorted(int(path.name[5:]) for path in (place / "runs" / run / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_prune_and_path_follow_what_the_run_was_told_to_keep(
    checkpoint: Command, warm: WarmPython, place: Path
) -> None:
    keep = "checkpoint.keep={last: 9, best: [{metric: loss, mode: max}]}"
    train(warm, place, "run.name=other", "steps=6", "optim.lr=0.001", keep)
    lines = [json.loads(line) for line in (place / "runs/other/metrics.jsonl").read_text().splitlines()]
    loss = {line["step"]: line["loss"] for line in lines}
    norm = {line["step"]: line["grad_norm"] for line in lines}
    worst, flattest = max(loss, key=lambda step: loss[step]), min(norm, key=lambda step: norm[step])

    assert checkpoint("path", "runs/other", "--best", "loss").out.strip().endswith(f"step-{worst:08d}")
    assert checkpoint("prune", "runs/other").out.split()[0] == "6"
    unknown = checkpoint("prune", "runs/other", "--keep-last", "2", "--keep-best", "accuracy", "--mode", "max")
    assert (unknown.code, kept(place, "other")) == (2, [1, 2, 3, 4, 5, 6])
    nobody_says = checkpoint("prune", "runs/other", "--keep-last", "2", "--keep-best", "grad_norm")
    assert nobody_says.code == 2
    assert lacks(nobody_says.err, "grad_norm --mode") == []
    words = ["prune", "runs/other", "--keep-last", "2", "--keep-best", "grad_norm", "--mode", "min"]
    dry = checkpoint(*words, "--dry-run")
    done = checkpoint(*words)

    assert done.code == 0, done.err
    assert kept(place, "other") == sorted({worst, flattest, 5, 6})
    deleted = sorted({1, 2, 3, 4, 5, 6} - {worst, flattest, 5, 6})
    assert numbers(dry.out) == numbers(done.out) == [*deleted, 6 - len(deleted)]


def test_prune_keeps_what_the_run_went_on_from(checkpoint: Command, warm: WarmPython, place: Path) -> None:
    for step in (3, 4):
        shutil.rmtree(place / of_step(step))
    train(warm, place, "steps=6")

    done = checkpoint("prune", "runs/run", "--keep-last", "2")

    assert numbers(done.out) == [1, 3, 4, 3]
    assert kept(place) == [2, 5, 6]


def test_prune_keeps_the_newest_whole_one_beside_damaged_newer_ones(checkpoint: Command, place: Path) -> None:
    for step in (3, 4):
        flip(place / of_step(step) / shard_file(0))

    done = checkpoint("prune", "runs/run", "--keep-last", "2")

    assert numbers(done.out) == [1, 3]
    assert checkpoint("verify", of_step(2)).code == 0


@pytest.mark.parametrize(
    "arguments",
    [("verify", of_step(4)), ("diff", of_step(3), of_step(4)), ("export", of_step(4), "-o", "out"),
     ("show", of_step(4)), ("ls", "runs/run"), ("average", of_step(3), of_step(4), "-o", "out")],
    ids=lambda arguments: f"14-forged header, {arguments[0]}",
)  # fmt: skip
def test_no_command_believes_a_header_that_the_manifest_does_not_bear_out(
    checkpoint: Command, place: Path, arguments: tuple[str, ...], said: Said
) -> None:
    """Tensors of one shape exchange their names in a header, and the manifest is made to fit the file."""
    forged = place / of_step(4) / shard_file(0)
    data = forged.read_bytes()
    for old, new in ((b"layers.0.mlp", b"layers.X.mlp"), (b"layers.1.", b"layers.0."), (b"layers.X.", b"layers.1.")):
        data = data.replace(old, new)
    forged.write_bytes(data)
    rewrite_manifest(place / of_step(4))

    done = checkpoint(*arguments)

    assert done.code == (0 if arguments[0] == "ls" else 1)
    assert "Traceback" not in done.err
    if arguments[0] != "ls":
        assert f"{of_step(4)}/{shard_file(0)}" in done.out + done.err
        said((done.out + done.err).strip())
    if arguments[0] in {"show", "diff"}:
        assert done.out == ""
    assert not (place / "out").exists()
