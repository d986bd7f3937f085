"""Adapters on sharded models: trained as peft trains them, saved, resumed, merged and exported without a difference."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from holdfast.checkpoint.errors import CheckpointMismatch
from holdfast.checkpoint.export.stored import export_stored, export_stored_adapter
from holdfast.checkpoint.keep import find
from holdfast.cli.main import app
from holdfast.config.sections.data import DataConfig
from holdfast.config.yaml12 import parse_file
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.errors import UserError
from holdfast.models.files.origin import files_fingerprint
from holdfast.models.names import canonical_name
from tests.distributed.cases import reference, rows_of, settings, train
from tests.distributed.grpo_cases import prompts_of
from tests.distributed.grpo_cases import settings as grpo_settings
from tests.distributed.grpo_cases import train as train_policy
from tests.distributed.lora_cases import look, optimizer_bytes, run, told_by
from tests.tiny import tiny_directory, tiny_model

ROWS = rows_of(24)
LORA = {"rank": 4, "alpha": 8.0, "ranks": {"q_proj": 6}, "rank_stabilised": True}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=True)


def with_lora(directory: Path, **sections: Any) -> dict[str, Any]:
    tree = settings(str(directory), **sections)
    tree["model"]["lora"] = dict(LORA)
    return tree


def examples() -> list[Any]:
    tokeniser = RowTokeniser(character_tokenizer(), DataConfig(path="rows", max_length=48), Path.cwd())
    return [tokeniser.examples(row, index, "rows").examples[0] for index, row in enumerate(ROWS)]


def peft_model(start: dict[str, torch.Tensor]) -> Any:
    """Return a plain model with peft's adapters, which start where ours did."""
    model = tiny_model("llama", tie_word_embeddings=True).double()
    paths = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and "layers" in name]
    ranks = {path: 6 for path in paths if path.endswith("q_proj")}
    options = LoraConfig(r=4, lora_alpha=8, target_modules=paths, rank_pattern=ranks, use_rslora=True)
    inject_adapter_in_model(options, model)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.copy_(start[canonical_name(name)])
                value.data = value.data.double()
    return model


@pytest.mark.parametrize(
    ("ranks", "data", "parallel"),
    [(1, {}, {}), (2, {"tokens_per_micro_batch": 64}, {}), (2, {"packing": "none"}, {"recompute": "full"}),
     pytest.param(4, {}, {"replicate": 2}, marks=pytest.mark.slow)],
)  # fmt: skip
def test_adapters_are_trained_as_peft_trains_them(
    pools: Any, llama: Path, ranks: int, data: dict[str, Any], parallel: dict[str, Any]
) -> None:
    tree = with_lora(llama, data=data, parallel=parallel, optim={"lr": 0.5})
    start = pools(ranks).run(look, tree, ROWS, 0)[0]["parameters"]
    batches = [examples()[first : first + 8] for first in (0, 8, 16)]

    found = pools(ranks).run(train, tree, ROWS)[0]
    expected = reference(
        peft_model(start), batches, lambda batch: ([1.0] * len(batch), [float(e.loss_mask.sum()) for e in batch]), 0.5
    )

    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-10)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-9)
    assert found["losses"][2] < found["losses"][0] - 0.1, "three steps must move something"
    for name, value in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][canonical_name(name)], value, atol=1e-10, err_msg=name)


def test_only_adapters_are_trained_and_the_frozen_model_is_kept_in_half(pools: Any, llama: Path) -> None:
    tree = with_lora(llama)
    tree["model"] |= {"dtype": "float32", "frozen_dtype": "bfloat16"}

    found = pools(2).run(look, tree, ROWS, 0)[0]["trained"]

    assert {kind for name, kind in found.items() if ".lora_" in name} == {("torch.float32", True)}
    assert {kind for name, kind in found.items() if ".lora_" not in name} == {("torch.bfloat16", False)}
    assert sum(".lora_A." in name for name in found) == 14


def test_a_new_adapter_changes_nothing_and_one_that_is_off_is_the_frozen_model_bit_for_bit(
    pools: Any, llama: Path
) -> None:
    for found in pools(2).run(look, with_lora(llama, optim={"lr": 0.5}), ROWS, 3):
        assert torch.equal(found["before"], found["off"])
        assert float((found["after"] - found["off"]).abs().max()) > 1e-2


def test_an_engine_gets_each_matrix_with_its_adapter(pools: Any, llama: Path) -> None:
    found = pools(2).run(look, with_lora(llama, optim={"lr": 0.5}), ROWS, 3)[0]
    plain = tiny_model("llama", tie_word_embeddings=True).double()

    missing = plain.load_state_dict(found["merged"], strict=False)

    assert (missing.unexpected_keys, missing.missing_keys) == ([], ["lm_head.weight"])
    tokens = torch.arange(2, 40)[None]
    with torch.no_grad():
        logprobs = plain(input_ids=tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)
    torch.testing.assert_close(found["after"], logprobs, rtol=1e-9, atol=1e-9)


def saved(place: Path, llama: Path, steps: int, **checkpoint: Any) -> dict[str, Any]:
    tree = with_lora(llama)
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tree | {
        "steps": steps,
        "run": {"dir": str(place), "name": "r"},
        "model": tree["model"] | {"dtype": "float32"},
        "data": tree["data"] | {"path": str(place / "rows.jsonl")},
        "optim": {"kind": "adamw", "lr": 0.02, "schedule": "constant"},
        "metrics": {"progress": "off"},
        "checkpoint": {"every_steps": 1, "keep": {"last": 9}, "rehearsal": False} | checkpoint,
    }


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
def test_both_exports_are_the_trained_model(pools: Any, llama: Path, tmp_path: Path) -> None:
    pools(2).run(run, saved(tmp_path, llama, 3))

    place = tmp_path / "r" / "exports"
    merged = AutoModelForCausalLM.from_pretrained(place / "final")
    base = AutoModelForCausalLM.from_pretrained(llama)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama), place / "final-adapter")
    tokens = torch.arange(2, 40)[None]
    with torch.no_grad():
        logits = [model(input_ids=tokens).logits for model in (merged, adapted, base)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)
    assert float((logits[0] - logits[2]).abs().max()) > 0.1
    assert {path.name for path in (place / "final-adapter").iterdir()} == {
        "README.md", "adapter_config.json", "adapter_model.safetensors", "holdfast.yaml", "holdfast_export.json",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("frozen", "section"),
    [
        ("save", {}),
        ("skip", {"frozen_dtype": "bfloat16"}),
        pytest.param("skip", {"lora": LORA | {"dora": True}}, marks=pytest.mark.slow),
        pytest.param("skip", {"lora": LORA | {"train": ["norm"]}}, marks=pytest.mark.slow),
        pytest.param("skip", {"lora": LORA | {"quantize": "nf4"}}, marks=pytest.mark.slow),
        pytest.param("skip", {"lora": None, "freeze": ["embed_tokens", r"layers\.0\."]}, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_exported_alone_is_the_run_s_export(
    pools: Any, llama: Path, tmp_path: Path, frozen: str, section: dict[str, Any]
) -> None:
    if "quantize" in (section.get("lora") or {}):
        pytest.importorskip("bitsandbytes")
    tree = saved(tmp_path, llama, 2, frozen=frozen)
    pools(2).run(run, tree | {"model": tree["model"] | section})

    checkpoint = find.one(str(tmp_path / "r"))
    export_stored([checkpoint], tmp_path / "again")

    assert checkpoint.manifest.contents[0] == {"save": "model", "skip": "trained parameters"}[frozen]

    one, two = (load_file(place / "model.safetensors") for place in (tmp_path / "again", tmp_path / "r/exports/final"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize("frozen", ["save", "skip"])
def test_adapters_of_a_checkpoint_alone_are_the_run_s_export_and_peft_computes_with_them(
    pools: Any, llama: Path, tmp_path: Path, frozen: str
) -> None:
    pools(2).run(run, saved(tmp_path, llama, 2, frozen=frozen))

    done = CliRunner().invoke(
        app, ["checkpoint", "export", str(tmp_path / "r"), "--adapter", "-o", str(tmp_path / "again")]
    )

    assert done.exit_code == 0, done.output
    one, two = tmp_path / "again", tmp_path / "r/exports/final-adapter"
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in two.iterdir())
    for path in two.iterdir():
        assert (one / path.name).read_bytes() == path.read_bytes(), path.name
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama), one)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "r/exports/final")
    tokens = torch.arange(2, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            adapted(input_ids=tokens).logits, merged(input_ids=tokens).logits, rtol=1e-5, atol=1e-5
        )


@pytest.mark.cases(1)
@pytest.mark.parametrize("rank", [4, 8])
def test_bytes_of_moments_and_of_adapter_checkpoints_are_those_of_the_adapters(
    pools: Any, llama: Path, tmp_path: Path, rank: int
) -> None:
    """A rank of one adapter takes in + out numbers of 4 bytes: of q, k, v, o, gate, up, down in each of two layers."""
    adapters = 4 * rank * 2 * (64 + 48 + 48 + 64 + 96 + 96 + 96)
    tree = saved(tmp_path, llama, 1, frozen="skip")
    tree["model"]["lora"] = {"rank": rank}

    kept = pools(2).run(optimizer_bytes, tree | {"run": {"dir": str(tmp_path), "name": "other"}}, ROWS)
    pools(2).run(run, tree)
    tensors = find.one(str(tmp_path / "r")).manifest.tensors
    sizes = {name: math.prod(entry.shape) * 4 for name, entry in tensors.items()}

    assert {entry.dtype for entry in tensors.values()} <= {"float32", "torch.float32"}
    assert kept == [adapters, adapters], "of two moments, half on each of two ranks"
    assert sum(size for name, size in sizes.items() if name.startswith("model.")) == adapters
    assert sum(size for name, size in sizes.items() if name.endswith((".exp_avg", ".exp_avg_sq"))) == 2 * adapters
    others = [name for name in sizes if not name.startswith("model.") and ".exp_avg" not in name]
    assert all(sizes[name] == 4 for name in others), "steps do not grow with the rank"


@pytest.mark.slow
def test_a_checkpoint_that_has_no_adapters_or_more_is_no_adapter(pools: Any, llama: Path, tmp_path: Path) -> None:
    """The embeddings of this model are tied to its head."""
    for name, lora in (("plain", None), ("more", LORA | {"train": ["embed_tokens"]})):
        tree = saved(tmp_path, llama, 1)
        tree["model"] |= {"lora": lora}
        pools(2).run(run, tree | {"run": {"dir": str(tmp_path), "name": name}})

    with pytest.raises(UserError, match=r"plain/checkpoints/step-00000001 has no adapters: its run had no model\.lora"):
        export_stored_adapter(find.one(str(tmp_path / "plain")), tmp_path / "out")
    with pytest.raises(UserError, match=r"model\.lora\.train trained embed_tokens, which is part of a module, tied"):
        export_stored_adapter(find.one(str(tmp_path / "more")), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "more/exports/final-adapter").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize("frozen", ["save", "skip"])
def test_what_is_trained_whole_beside_adapters_is_in_the_adapter_directory_and_is_read_back(
    pools: Any, tmp_path: Path, frozen: str
) -> None:
    base = tiny_directory(tmp_path / "untied", "llama", tie_word_embeddings=False)
    tree = saved(tmp_path, base, 2, frozen=frozen)
    tree["model"]["lora"] = LORA | {"train": ["norm", "embed_tokens"]}
    pools(2).run(run, tree)
    place = tmp_path / "r/exports/final-adapter"

    norms = [f"model.layers.{layer}.{norm}_layernorm" for layer in (0, 1) for norm in ("input", "post_attention")]
    whole = ["model.embed_tokens", *norms, "model.norm"]
    assert json.loads((place / "adapter_config.json").read_text())["modules_to_save"] == whole
    plain = AutoModelForCausalLM.from_pretrained(base)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "r/exports/final")
    tokens = torch.arange(2, 40)[None]
    with torch.no_grad():
        before = plain(input_ids=tokens).logits
        adapted = PeftModel.from_pretrained(plain, place)(input_ids=tokens).logits
        torch.testing.assert_close(adapted, merged(input_ids=tokens).logits, rtol=1e-5, atol=1e-5)
    assert float((adapted - before).abs().max()) > 1e-3
    stored, there = load_file(place / "adapter_model.safetensors"), merged.state_dict()
    for name in whole:
        assert torch.equal(stored[f"base_model.model.{name}.weight"], there[f"{name}.weight"])
    first = load_file(base / "model.safetensors")
    assert all(not torch.equal(there[f"{name}.weight"], first[f"{name}.weight"]) for name in whole)

    done = CliRunner().invoke(
        app, ["checkpoint", "export", str(tmp_path / "r"), "--adapter", "-o", str(tmp_path / "again")]
    )
    assert done.exit_code == 0, done.output
    for path in place.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name

    more = settings(str(base)) | {
        "model": {"path": str(base), "dtype": "float32", "lora": tree["model"]["lora"] | {"path": str(place)}}
    }
    found = pools(2).run(look, more, ROWS, 0)[0]["parameters"]
    for name, tensor in stored.items():
        assert torch.equal(found[name.removeprefix("base_model.model.")], tensor), name


@pytest.mark.slow
def test_what_a_directory_of_adapters_alone_does_not_hold_begins_as_in_the_base(pools: Any, tmp_path: Path) -> None:
    base = tiny_directory(tmp_path / "untied", "llama", tie_word_embeddings=False)
    pools(2).run(run, saved(tmp_path, base, 1))
    lora = LORA | {"train": ["norm"], "path": str(tmp_path / "r/exports/final-adapter")}
    tree = settings(str(base)) | {"model": {"path": str(base), "dtype": "float32", "lora": lora}}

    found = pools(2).run(look, tree, ROWS, 0)[0]["parameters"]

    stored, weights = (
        load_file(tmp_path / "r/exports/final-adapter/adapter_model.safetensors"),
        load_file(base / "model.safetensors"),
    )
    assert all(torch.equal(found[name.removeprefix("base_model.model.")], tensor) for name, tensor in stored.items())
    norms = [name for name in weights if "norm" in name]
    assert len(norms) == 5
    assert all(torch.equal(found[name], weights[name]) for name in norms)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_checkpoints_of_adapters_alone_are_small_whole_and_resume_at_any_number_of_ranks(
    pools: Any, llama: Path, tmp_path: Path, ranks: int
) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    straight.mkdir()
    stopped.mkdir()
    pools(2).run(run, saved(straight, llama, 4, frozen="skip"))
    pools(2).run(run, saved(stopped, llama, 2, frozen="skip"))

    pools(ranks).run(run, saved(stopped, llama, 4, frozen="skip"))

    one, two = (find.one(str(place / "r")) for place in (straight, stopped))
    names = {key.removeprefix("model.") for key in one.manifest.tensors if key.startswith("model.")}
    assert names == {name for name in names if ".lora_" in name}
    assert len(names) == 28
    assert one.manifest.contents[0] == "trained parameters"
    # With as many ranks, bit for bit; else sums over ranks are rounded in another order.
    rounding = {"rtol": 0.0, "atol": 0.0} if ranks == 2 else {"rtol": 1e-4, "atol": 1e-5}
    for key in one.manifest.tensors:
        torch.testing.assert_close(two.read(key), one.read(key), **rounding)
    first, again = (load_file(place / "r/exports/final/model.safetensors") for place in (straight, stopped))
    for name, tensor in first.items():
        torch.testing.assert_close(again[name], tensor, **rounding)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["save", "skip"])
def test_a_resume_without_the_key_keeps_the_dtype_of_frozen_weights_bit_for_bit(
    pools: Any, llama: Path, tmp_path: Path, frozen: str
) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    for place, steps in ((straight, 4), (stopped, 2)):
        place.mkdir()
        tree = saved(place, llama, steps, frozen=frozen)
        pools(2).run(run, tree | {"model": tree["model"] | {"frozen_dtype": "bfloat16"}})

    pools(2).run(run, saved(stopped, llama, 4, frozen=frozen))

    one, two = (find.one(str(place / "r")) for place in (straight, stopped))
    assert one.manifest.tensors.keys() == two.manifest.tensors.keys()
    for key in one.manifest.tensors:
        assert torch.equal(two.read(key), one.read(key)), key
    resolved = parse_file(stopped / "r/config.resolved.yaml").values["model"]
    assert resolved["frozen_dtype"] == "bfloat16"
    first, again = (load_file(place / "r/exports/final/model.safetensors") for place in (straight, stopped))
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize("change", ["others", "absent", "elsewhere"])
def test_a_resume_beside_other_frozen_weights_is_refused_with_both_hashes_and_one_that_finds_them_is_not(
    pools: Any, llama: Path, tmp_path: Path, change: str
) -> None:
    mine = tmp_path / "model"
    shutil.copytree(llama, mine)
    pools(2).run(run, saved(tmp_path, mine, 1))
    before = files_fingerprint(mine).rpartition("-")[2]
    if change == "others":
        tiny_directory(mine, "llama", tie_word_embeddings=True, seed=5)
    else:
        mine.rename(tmp_path / "moved")
    if change == "elsewhere":
        pools(2).run(run, saved(tmp_path, tmp_path / "moved", 2))
        assert find.one(str(tmp_path / "r")).manifest.step == 2
        return
    here = files_fingerprint(mine).rpartition("-")[2] if change == "others" else "absent"
    left = sorted(path.name for path in (tmp_path / "r").rglob("*"))

    errors = pools(2).errors(run, saved(tmp_path, mine, 2))

    assert errors[0] == errors[1]
    assert errors[0][0] == "CheckpointMismatch"
    assert CheckpointMismatch.exit_code == 2
    assert before != here
    assert all(word in errors[0][1] for word in (before, here, "checkpoint.frozen: save", "model.path"))
    assert "\n" not in errors[0][1]
    assert sorted(path.name for path in (tmp_path / "r").rglob("*")) == left
    done = CliRunner().invoke(app, ["checkpoint", "export", str(tmp_path / "r"), "-o", str(tmp_path / "out")])
    assert isinstance(done.exception, CheckpointMismatch)
    assert all(word in str(done.exception) for word in (before, here, "checkpoint.frozen: save", "--adapter"))
    assert not (tmp_path / "out").exists()
    assert CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path / "r")]).exit_code == 0
    start = {"init_from": str(tmp_path / "r/checkpoints/step-00000001")}
    if change == "others":
        fresh = saved(tmp_path, mine, 1, **start) | {"run": {"dir": str(tmp_path), "name": "other"}}
        assert pools(2).errors(run, fresh)[0][0] == "CheckpointMismatch"
    declared = saved(tmp_path, mine, 2, resume={"changed": ["model"]})
    if change == "others":
        pools(2).run(run, declared)


def test_adapters_over_the_weights_of_a_checkpoint_are_not_saved_without_them(
    pools: Any, llama: Path, tmp_path: Path
) -> None:
    whole = saved(tmp_path, llama, 1)
    del whole["model"]["lora"]
    pools(2).run(run, whole)
    start = {"init_from": str(tmp_path / "r/checkpoints/step-00000001")}

    declared = {"freeze": [".*"], "add": [".*lora.*"]}

    def other(frozen: str) -> dict[str, Any]:
        return saved(tmp_path, llama, 1, frozen=frozen, resume=declared, **start) | {
            "run": {"dir": str(tmp_path), "name": frozen}
        }

    errors = pools(2).errors(run, other("skip"))
    pools(2).run(run, other("auto"))

    assert [kind for kind, _ in errors] == ["ConfigError"] * 2
    assert "checkpoint.frozen" in errors[0][1]
    assert not (tmp_path / "skip").exists()
    assert find.one(str(tmp_path / "auto")).manifest.contents[0] != "trained parameters"


def test_checkpoints_beside_a_local_directory_hold_adapters_alone_and_resume_bit_for_bit(
    pools: Any, llama: Path, tmp_path: Path
) -> None:
    for name, steps in (("straight", [3]), ("stopped", [2, 3])):
        (tmp_path / name).mkdir()
        for end in steps:
            pools(2).run(run, saved(tmp_path / name, llama, end))

    one, two = (find.one(str(tmp_path / name / "r")) for name in ("straight", "stopped"))
    assert one.manifest.contents[0] == "trained parameters"
    assert len([key for key in one.manifest.tensors if key.startswith("model.")]) == 28
    for key in one.manifest.tensors:
        assert torch.equal(two.read(key), one.read(key)), key
    assert parse_file(tmp_path / "stopped/r/config.resolved.yaml").values["checkpoint"]["frozen"] == "skip"
    first, again = (
        load_file(tmp_path / name / "r/exports/final/model.safetensors") for name in ("straight", "stopped")
    )
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["save", "skip"])
def test_a_resume_without_the_key_saves_what_its_checkpoint_had(
    pools: Any, llama: Path, tmp_path: Path, frozen: str
) -> None:
    """The default would say otherwise of both: of a local directory, and of a run's export."""
    base = tmp_path / "source/exports/final"
    shutil.copytree(llama, base)
    if frozen == "skip":
        (tmp_path / "source/run.json").write_text("{}")
    pools(2).run(run, saved(tmp_path, base, 1, frozen=frozen))

    pools(2).run(run, saved(tmp_path, base, 2))

    manifests = [find.one(str(tmp_path / f"r/checkpoints/step-0000000{step}")).manifest for step in (1, 2)]
    assert [manifest.contents[0] for manifest in manifests] == [
        {"save": "model", "skip": "trained parameters"}[frozen]
    ] * 2
    assert manifests[0].fingerprints["model"] == manifests[1].fingerprints["model"]


@pytest.mark.slow
def test_adapters_go_on_from_a_directory_and_others_are_refused(pools: Any, llama: Path, tmp_path: Path) -> None:
    pools(2).run(run, saved(tmp_path, llama, 2))
    adapter = str(tmp_path / "r/exports/final-adapter")
    tree = with_lora(llama)
    tree["model"] |= {"dtype": "float32", "lora": LORA | {"path": adapter}}

    found = pools(2).run(look, tree, ROWS, 0)[0]["parameters"]

    stored = load_file(tmp_path / "r/exports/final-adapter/adapter_model.safetensors")
    assert len(stored) == 28
    for name, tensor in stored.items():
        assert torch.equal(found[name.removeprefix("base_model.model.")], tensor)
    tree["model"]["lora"] = LORA | {"path": adapter, "rank": 5}
    errors = pools(2).errors(look, tree, ROWS, 0)
    assert "holds other adapters than model.lora describes" in errors[0][1]
    tree["model"]["lora"] = LORA | {"path": adapter, "alpha": 3.5}
    errors = pools(2).errors(look, tree, ROWS, 0)
    assert errors[0] == errors[1]
    assert "model.lora.alpha is 3.5, and the adapter in " in errors[0][1]


@pytest.mark.slow
def test_adapters_of_another_base_are_refused_unless_they_are_asked_for(
    pools: Any, llama: Path, tmp_path: Path
) -> None:
    pools(2).run(run, saved(tmp_path, llama, 1))
    other = tiny_directory(tmp_path / "other", "llama", tie_word_embeddings=True, seed=5)
    adapter = tmp_path / "r/exports/final-adapter"
    lora = LORA | {"path": str(adapter)}

    def beside(base: Path, **more: Any) -> dict[str, Any]:
        return settings(str(base)) | {"model": {"path": str(base), "dtype": "float32", "lora": lora | more}}

    errors = pools(2).errors(look, beside(other), ROWS, 0)

    assert errors[0] == errors[1]
    assert errors[0][0] == "ModelError"
    assert "final-adapter holds adapters that were trained beside other weights than those in" in errors[0][1]
    assert re.search(r"the mark of their files is \w{12}, here it is \w{12}\. Name their own model", errors[0][1])
    pools(2).run(look, beside(other, any_base=True), ROWS, 0)
    shutil.copytree(llama, tmp_path / "copy")
    pools(2).run(look, beside(tmp_path / "copy"), ROWS, 0)
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(tensors, adapter / "adapter_model.safetensors")  # as peft writes it, without a mark
    (adapter / "holdfast_export.json").unlink()
    (told, _) = pools(2).run(told_by, beside(other), ROWS)
    assert f"names {llama} as its model, and this run's is {other}; no mark in its file tells" in told
    (told, _) = pools(2).run(told_by, beside(llama), ROWS)
    assert "as its model" not in told


def test_rollouts_follow_the_adapters(pools: Any, llama: Path) -> None:
    tree = grpo_settings(str(llama), optim={"lr": 2.0})
    tree["model"]["lora"] = dict(LORA)

    lines = pools(2).run(train_policy, tree, prompts_of(12), 3)[0]["lines"]

    assert all(line["sampling/sampling_logp_difference/mean"] < 1e-5 for line in lines)
    assert all(line["grad_norm"] > 1e-3 for line in lines)


@pytest.mark.slow
def test_the_policy_with_its_adapters_off_is_the_reference(pools: Any, llama: Path) -> None:
    tree = grpo_settings(str(llama), optim={"lr": 2.0}, kl={"coefficient": 0.1})
    tree["model"]["lora"] = dict(LORA)

    off = pools(2).run(train_policy, tree, prompts_of(12), 3)[0]
    apart = pools(2).run(train_policy, tree | {"reference": {"kind": "sharded"}}, prompts_of(12), 3)[0]

    assert off["lines"][0]["kl"] == 0.0
    assert off["lines"][2]["kl"] > 1e-4
    for one, other in zip(off["lines"], apart["lines"], strict=True):
        for name in ("kl", "loss", "grad_norm", "reward"):
            assert one[name] == pytest.approx(other[name], rel=1e-9, abs=1e-12), name
    assert [calls["policy"] for calls in off["forwards"]] == [2, 2, 2]
    assert [calls["policy"] for calls in apart["forwards"]] == [1, 1, 1]
