"""Runs on images are saved, continued at another number of ranks, and exported with everything that reads images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from holdfast.checkpoint.export.stored import export_stored
from holdfast.checkpoint.keep import find
from holdfast.cli.commands.data.preview import preview
from holdfast.config.load import from_mapping
from holdfast.config.sections.data import PromptDataConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.batches.packing import Share, pack
from holdfast.data.content.lengths import ImageSpan, Stretch, example_of, joined_inputs
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import DataError
from holdfast.models.files.vision import image_side
from holdfast.models.setup.model import configured
from holdfast.training.run import EvaluationSet
from holdfast.training.saving.differences import changed_fingerprints
from holdfast.training.setup.rows import refuse_completions_with_images
from holdfast.types import Example
from tests.models.directories import filled
from tests.training.cases import evaluate, run
from tests.vision import picture_rows, tokenizer_of, vision_directory, vision_model
from tests.vision_lies import LIES, run_with_lies

KIND = "qwen2_5_vl"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model in `model`, and 24 rows whose pictures are files."""
    place = tmp_path_factory.mktemp("place")
    vision_directory(place / "model", KIND)
    (place / "pictures").mkdir()
    with (place / "rows.jsonl").open("w") as file:
        for number, row in enumerate(picture_rows(24)):
            parts = row["messages"][0]["content"]
            for index, part in enumerate(parts):
                if part["type"] == "image":
                    part.pop("image").save(place / f"pictures/{number}-{index}.png")
                    part["path"] = f"{number}-{index}.png"
            file.write(json.dumps(row) + "\n")
    return place


def tree(place: Path, runs: Path, steps: int, **sections: Any) -> dict[str, Any]:
    return {
        "steps": steps,
        "run": {"dir": str(runs), "name": "r"},
        "model": {"path": str(place / "model"), "freeze": ["vision_tower"]},
        "data": {"path": "rows.jsonl", "image_dir": "pictures", "batch_size": 8, "max_length": 128}
        | {"tokens_per_micro_batch": 160},
        "optim": {"lr": 0.01, "schedule": "constant"},
        "metrics": {"progress": "off"},
        "checkpoint": {"every_steps": 2, "rehearsal": False},
    } | sections


def steps_of(runs: Path) -> dict[int, float]:
    """Return the loss of every step."""
    lines = [json.loads(line) for line in (runs / "r/metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture(scope="module")
def straight(place: Path, pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the runs folder of a run of four steps on two ranks."""
    runs = tmp_path_factory.mktemp("straight")
    pools(2).run(run, tree(place, runs, 4), str(place))
    return runs


@pytest.mark.slow
def test_a_run_saved_on_two_ranks_goes_on_on_one(place: Path, straight: Path, pools: Any, tmp_path: Path) -> None:
    pools(2).run(run, tree(place, tmp_path, 2), str(place))
    pools(1).run(run, tree(place, tmp_path, 4), str(place))

    # float32 adds in another order on one rank; losses are near 5.
    expected, found = steps_of(straight), steps_of(tmp_path)
    assert list(found) == [1, 2, 3, 4]
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-5), step


def test_a_picture_that_is_not_there_is_told_before_step_1_or_its_row_is_skipped(
    place: Path, pools: Any, tmp_path: Path
) -> None:
    here = Path(shutil.copytree(place, tmp_path / "place", ignore=shutil.ignore_patterns("model")))
    vision_directory(here / "model", KIND)
    rows = [json.loads(line) for line in (here / "rows.jsonl").read_text().splitlines()]
    gone = next(part["path"] for part in rows[20]["messages"][0]["content"] if part["type"] == "image")
    (here / "pictures" / gone).unlink()
    skipping = tree(here, tmp_path, 3)
    skipping["data"] |= {"on_bad_row": "skip"}

    pools(2).run(run, skipping, str(here))
    errors = pools(2).errors(run, tree(here, tmp_path / "other", 3), str(here))

    assert len(set(errors)) == 1
    assert errors[0][0] == "DataError"
    assert errors[0][1].startswith("rows row 20: there is no file ")
    assert not (tmp_path / "other").exists()
    lines = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("data/bad_rows", 0) for line in lines) == 1
    assert [line["data/rows"] for line in lines if "loss" in line] == [8, 8, 7]


def test_another_processor_is_another_run(place: Path, pools: Any, tmp_path: Path) -> None:
    pools(1).run(run, tree(place, tmp_path, 2), str(place))
    other = tree(place, tmp_path, 4)
    other["data"] |= {"max_pixels": 256}

    ((kind, message),) = pools(1).errors(run, other, str(place))

    assert kind == "CheckpointMismatch"
    assert "data.max_pixels" in message


def test_other_pictures_under_the_same_names_are_another_run(place: Path, pools: Any, tmp_path: Path) -> None:
    here = Path(shutil.copytree(place, tmp_path / "place", ignore=shutil.ignore_patterns("model")))
    (here / "model").symlink_to(place / "model")
    pools(1).run(run, tree(here, tmp_path, 2), str(here))
    last = max((here / "pictures").iterdir(), key=lambda file: int(file.name.split("-")[0]))
    last.write_bytes((here / "pictures/0-0.png").read_bytes())

    ((kind, message),) = pools(1).errors(run, tree(here, tmp_path, 4), str(here))
    declared = tree(here, tmp_path, 4, checkpoint={"every_steps": 2, "resume": {"changed": ["data"]}})
    pools(1).run(run, declared, str(here))

    assert kind == "CheckpointMismatch"
    assert "(data: images of source 0). Nothing was changed" in message
    assert list(steps_of(tmp_path)) == [1, 2, 3, 4]


def test_the_export_holds_the_processor_byte_for_byte_and_computes_the_same(place: Path, straight: Path) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    export = straight / "r/exports/final"
    name = "preprocessor_config.json"
    assert (export / name).read_bytes() == (place / "model" / name).read_bytes()
    # Plain transformers alone: its tokenizer, its image processor, its model, its own placeholder count.
    tokenizer = AutoTokenizer.from_pretrained(export)
    processor = AutoImageProcessor.from_pretrained(export, backend="pil")
    before, after = (AutoModelForImageTextToText.from_pretrained(path).eval() for path in (place / "model", export))
    made = processor(images=[Image.open(place / "pictures/0-0.png").convert("RGB")], return_tensors="pt")
    count = int(made["image_grid_thw"].prod()) // 4
    text = f"<user><|vision_start|>{'<|image_pad|>' * count}<|vision_end|>see a=<assistant>"
    tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    types = (tokens == tokenizer.convert_tokens_to_ids("<|image_pad|>")).long()
    with torch.no_grad():
        first, second = (model(input_ids=tokens, mm_token_type_ids=types, **made).logits for model in (before, after))
    assert (first - second).abs().max() > 0.1  # it was trained
    logprobs = second.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None]).squeeze(1)
    written = (types[0, 1:] == 0).numpy()  # tokens of an image are never trained
    np.testing.assert_allclose(ours(export, tokens[0].numpy(), made), logprobs.numpy()[written], atol=1e-5)


def ours(export: Path, tokens: Any, made: Any) -> Any:
    """Return what our own path says of a sequence with an image, of a model filled from the export."""
    policy, _ = filled(export)
    side = ours_of(export)
    places = np.flatnonzero(tokens == side.image_id)
    inputs = {name: made[name].numpy() for name in side.family.inputs}
    trained = (tokens != side.image_id).tolist()
    stretch = Stretch(tokens.tolist(), trained, (ImageSpan(places[0], places[-1] + 1, inputs),))
    example = example_of(stretch, 0, "", side.positions(stretch))
    with torch.no_grad():
        return policy(pack([example], [Share(1.0, 1.0)])).logprobs.numpy()


def ours_of(directory: Path) -> ImageSide:
    raw_config, processor = configured(ModelConfig(path=str(directory)), directory)
    side = image_side(processor, tokenizer_of(KIND), raw_config)
    assert isinstance(side, ImageSide)
    return side


def test_a_frozen_tower_is_exported_as_it_was(place: Path, straight: Path) -> None:
    before, after = (load_file(path / "model.safetensors") for path in (place / "model", straight / "r/exports/final"))

    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    tower = {name for name in before if name.startswith("visual.") and not name.startswith("visual.merger.")}
    assert same == tower
    assert tower


def test_a_checkpoint_exported_alone_is_the_run_s_export(place: Path, straight: Path, tmp_path: Path) -> None:
    export_stored([find.one(str(straight / "r"))], tmp_path / "again")

    for name in ("preprocessor_config.json", "model.safetensors", "chat_template.jinja"):
        assert (tmp_path / "again" / name).read_bytes() == (straight / "r/exports/final" / name).read_bytes(), name


def test_completions_of_an_evaluation_see_the_images(place: Path, pools: Any, tmp_path: Path) -> None:
    """What plain transformers says is most probable, a token at a time, each by a forward pass over the whole."""
    completions = {"samples": 4, "max_new_tokens": 6}
    evaluation = {"sets": {"held_out": {"path": str(place / "rows.jsonl")}}, "completions": completions}
    values = tree(place, tmp_path, 2, evaluation=evaluation)
    values["model"] |= {"dtype": "float64"}
    values["data"] |= {"path": str(place / "rows.jsonl"), "image_dir": str(place / "pictures")}

    pools(2).run(evaluate, values)

    side, tokenizer, model = ours_of(place / "model"), tokenizer_of(KIND), vision_model(KIND).double()
    rows = RowTokeniser(tokenizer, PromptDataConfig(path="rows", image_dir=str(place / "pictures")), Path(), side)
    lines = [
        json.loads(line)
        for line in next((tmp_path / "r/completions").glob("model-*/eval.held_out.jsonl")).read_text().splitlines()
    ]
    assert [line["sample_id"] for line in lines] == [0, 1, 2, 3]
    for line, text in zip(lines, (place / "rows.jsonl").read_text().splitlines(), strict=False):
        written, laid, *_ = rows.opening({"messages": json.loads(text)["messages"]}, "row")
        tokens, images = list(laid.tokens), joined_inputs(laid)
        for _ in range(6):
            given = side.upstream_inputs(np.array(tokens), images) if images else {}
            inputs = {name: torch.as_tensor(values) for name, values in given.items()}
            with torch.no_grad():
                tokens.append(int(model(input_ids=torch.tensor([tokens]), **inputs).logits[0, -1].argmax()))
            if tokens[-1] in (tokenizer.eos_token_id, side.image_id):
                break
        assert line["completion"] == tokenizer.decode(tokens[len(laid.tokens) :], skip_special_tokens=True)
        assert line["prompt"] == tokenizer.decode(written)


def test_completions_are_refused_where_an_image_stands_behind_the_prompt(place: Path) -> None:
    side = ours_of(place / "model")
    evaluation = {"sets": {"held_out": {"path": "rows.jsonl"}}, "completions": {"samples": 2}}
    config = from_mapping(tree(place, place, 2, evaluation=evaluation), SFTConfig)
    tokens = np.array([5, 6, side.image_id, 7])
    before, behind = (Example(3, 3, tokens, np.arange(4) == trained) for trained in (3, 1))

    def held_out(example: Example) -> list[EvaluationSet]:
        return [EvaluationSet("held_out", lambda: iter(()), lambda _: [example])]  # type: ignore[arg-type,return-value]

    refuse_completions_with_images(config, held_out(before), side)
    with pytest.raises(DataError, match="would complete row 3 of held_out, whose answer holds an image"):
        refuse_completions_with_images(config, held_out(behind), side)


def test_a_start_records_what_the_processor_does_with_images_and_another_rule_is_another_run(
    place: Path, straight: Path
) -> None:
    (event,) = [
        json.loads(line)
        for line in (straight / "r/events.jsonl").read_text().splitlines()
        if json.loads(line)["event"] == "start"
    ]
    record = ours_of(place / "model").family.record
    saved = find.one(str(straight / "r")).manifest.fingerprints

    assert event["images"] == json.loads(json.dumps(record))
    other = {**saved, "tokenizer": saved["tokenizer"] | {"rules for images": "other"}}
    earlier = {**saved, "tokenizer": {k: v for k, v in saved["tokenizer"].items() if k != "rules for images"}}
    assert changed_fingerprints(other, saved) == {"tokenizer": ["rules for images"]}
    assert changed_fingerprints(earlier, saved) == {}  # a version before this one saved none


def test_a_damaged_picture_stops_the_run_on_all_ranks_before_anything_is_written(
    place: Path, pools: Any, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text((place / "rows.jsonl").read_text())
    (tmp_path / "model").symlink_to(place / "model")
    (tmp_path / "pictures").mkdir()
    for file in (place / "pictures").iterdir():
        (tmp_path / "pictures" / file.name).write_bytes(file.read_bytes()[:-30])

    errors = pools(2).errors(run, tree(tmp_path, tmp_path, 2), str(tmp_path))

    assert errors[0] == errors[1]
    assert errors[0][0] == "DataError"
    assert "cannot be read as an image" in errors[0][1]
    assert not (tmp_path / "r").exists()


def test_a_run_whose_processor_lies_is_refused_before_step_1(place: Path, pools: Any, tmp_path: Path) -> None:
    for lie in LIES:
        ((kind, message),) = pools(1).errors(run_with_lies, lie, tree(place, tmp_path, 2), str(place))

        assert kind == "DataError", lie
        assert message.startswith("rows row 0 has images. Images of qwen2_5_vl cannot be trained on: "), message
    assert not (tmp_path / "r").exists()


def test_a_row_is_previewed_with_the_tokens_of_its_image(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = tree(place, place, 2)
    (place / "run.yaml").write_text(json.dumps(values))

    preview(place / "run.yaml", [], 0)

    with Image.open(place / "pictures/0-0.png") as image:
        made, size = ours_of(place / "model").prepare(image, ""), f"{image.width}x{image.height}"
    printed = capsys.readouterr().out
    assert printed.count("<|image_pad|>") == len(made.tokens) > 1
    assert "<|image_pad|><|vision_end|>see " in printed
    assert f"rows row 0, image 0: {size} pixels, {len(made.tokens)} tokens\n" in printed
