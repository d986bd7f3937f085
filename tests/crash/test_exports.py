"""Exports that are killed, replaced while somebody looks, or hold integers."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from holdfast.checkpoint.export.write import EXPORT_PHASES, clean_exports, replace_directory
from holdfast.checkpoint.keep import find
from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.errors import RunStopped
from holdfast.parallel.mesh import World
from holdfast.recipes.sft import sft
from holdfast.training.setup.begin import Live
from tests.checkpoint.adapter_files import TEXTS, write_adapters_of
from tests.crash.faulty import die
from tests.crash.kernel import KNOWN_MACHINE, refuse_to_exchange
from tests.crash.processes import run_doomed
from tests.training.cases import run, tree


def exporting(directory: Path, steps: int) -> dict[str, Any]:
    best = {"metric": "learning_rate", "mode": "max"}
    return tree(
        str(directory),
        steps=steps,
        optim={"schedule": {"kind": "constant", "warmup_steps": 50}},
        checkpoint={"every_steps": 1, "export_best": best, "export_at_end": False, "background": False},
    )


def run_until_an_export_is_half_written(world: World, directory: Path, sign: str) -> None:
    """Kill rank 0 when the export of a later step has got so far; the first one stays."""

    def watch() -> None:
        place = directory / "r" / "exports"
        while not (place / "best").exists():
            time.sleep(0.0005)
        while not any(place.glob(sign)):
            time.sleep(0.0002)
        die()

    if world.is_first:
        threading.Thread(target=watch, daemon=True).start()
    run(world, exporting(directory, 400))


@pytest.mark.cases(1)
@pytest.mark.parametrize("sign", [".staging-best-*", ".staging-best-*/model.safetensors", ".staging-best-*/*.json"])
def test_a_kill_in_an_export_leaves_the_one_before_whole_and_the_next_run_exports_again(
    pools: Any, tmp_path: Path, sign: str
) -> None:
    from transformers import AutoModelForCausalLM

    ended = run_doomed(run_until_an_export_is_half_written, 2, tmp_path, sign)

    assert ended[0].was_killed
    best = tmp_path / "r" / "exports" / "best"
    before = {path.name: path.read_bytes() for path in best.iterdir()}
    AutoModelForCausalLM.from_pretrained(best)
    done = max(int(path.name[5:]) for path in (tmp_path / "r" / "checkpoints").glob("step-*"))
    pools(2).run(run, exporting(tmp_path, done + 2))
    AutoModelForCausalLM.from_pretrained(best)
    assert {path.name: path.read_bytes() for path in best.iterdir()} != before


def write_and_die(_: World, place: Path, phase: str) -> None:
    write_adapters_of(2.0, place, lambda name: die() if name == phase else None)


def files_of(place: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in place.iterdir()}


@pytest.mark.parametrize("known", [False, True], ids=["a new name", "a name that is there"])
def test_a_kill_in_any_phase_of_an_export_of_adapters_leaves_none_or_a_whole_one(tmp_path: Path, known: bool) -> None:
    for number in (1.0, 2.0):
        write_adapters_of(number, tmp_path / str(number))
    old, new = files_of(tmp_path / "1.0"), files_of(tmp_path / "2.0")
    assert old.keys() == new.keys() == {*TEXTS, "adapter_config.json", "adapter_model.safetensors"}
    assert old != new

    for phase in EXPORT_PHASES:
        place = tmp_path / phase.replace(" ", "-") / "best-adapter"
        if known:
            write_adapters_of(1.0, place)

        (ended,) = run_doomed(write_and_die, 1, place, phase)

        assert ended.was_killed
        if phase == EXPORT_PHASES[-1]:
            assert files_of(place) == new
        elif known:
            assert files_of(place) == old
        else:
            assert not place.exists()
            assert list(place.parent.glob(".staging-*")) != []
        clean_exports(place.parent)
        assert [path.name for path in place.parent.iterdir()] == ["best-adapter"] * place.exists()
        write_adapters_of(2.0, place)
        assert files_of(place) == new


def replace_and_die_between_two_renames(_: World, place: Path) -> None:
    refuse_to_exchange()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and Path(arguments[1]) == place:
            die()

    sys.addaudithook(watch)
    write_adapters_of(2.0, place)


def replace_by_what_is_not_there(_: World, place: Path) -> None:
    refuse_to_exchange()
    with pytest.raises(FileNotFoundError):
        replace_directory(place.parent / ".staging-best-adapter-0", place)


@KNOWN_MACHINE
def test_an_export_whose_replacement_cannot_get_its_name_keeps_it(tmp_path: Path) -> None:
    place = tmp_path / "exports" / "best-adapter"
    write_adapters_of(1.0, place)
    before = files_of(place)

    (ended,) = run_doomed(replace_by_what_is_not_there, 1, place)

    assert (ended.code, ended.error) == (0, None)
    assert files_of(place) == before
    assert [path.name for path in place.parent.iterdir()] == ["best-adapter"]


@KNOWN_MACHINE
def test_a_kill_between_the_two_renames_of_a_file_system_without_an_exchange_loses_no_export(tmp_path: Path) -> None:
    place = tmp_path / "exports" / "best-adapter"
    write_adapters_of(2.0, tmp_path / "new")
    write_adapters_of(1.0, place)

    (ended,) = run_doomed(replace_and_die_between_two_renames, 1, place)
    there = place.exists()
    clean_exports(place.parent)

    assert ended.was_killed, ended
    assert not there
    assert files_of(place) == files_of(tmp_path / "new")
    assert [path.name for path in place.parent.iterdir()] == ["best-adapter"]


def test_an_export_that_is_replaced_is_never_absent_and_never_mixed(tmp_path: Path) -> None:
    place, stop = tmp_path / "best", threading.Event()
    seen: set[str] = set()

    def write(folder: Path, number: int) -> Path:
        folder.mkdir()
        (folder / "number").write_text(str(number))
        return folder

    def look() -> None:
        while not stop.is_set():
            try:
                with (place / "number").open() as file:
                    seen.add("there" if file.read() else "empty")
            except FileNotFoundError:
                seen.add("there" if place.exists() else "absent")
            time.sleep(0.0001)

    replace_directory(write(tmp_path / ".staging-0", 0), place)
    thread = threading.Thread(target=look)
    thread.start()
    for number in range(1, 60):
        replace_directory(write(tmp_path / ".staging-1", number), place)
    stop.set()
    thread.join()

    assert seen == {"there"}
    assert (place / "number").read_text() == "59"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


class Spoiler:
    """A failure channel that flips a bit of a staged file just before it is read back."""

    def __init__(self, inner: Any, exports: Path, file: str, at: float) -> None:
        self._inner, self._exports, self._file, self._at = inner, exports, file, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def phase(self, name: str) -> Any:
        if name == "export: read back":
            (staged,) = self._exports.glob(f".staging-*/{self._file}")
            data = bytearray(staged.read_bytes())
            data[int(len(data) * self._at)] ^= 4
            staged.write_bytes(data)
        return self._inner.phase(name)


def run_and_spoil(world: World, directory: Path, file: str, at: float) -> Any:
    channel: Any = Spoiler(world.failure, directory / "r" / "exports", file, at)
    return run(replace(world, failure=channel), tree(str(directory), steps=1))


@pytest.mark.parametrize(
    ("file", "at"),
    [("model.safetensors", 0.5), ("model.safetensors", 0.999), ("config.json", 0.5), ("tokenizer.json", 0.2)],
)
def test_one_bit_that_flips_in_a_staged_export_is_found_and_nothing_is_published(
    pools: Any, tmp_path: Path, file: str, at: float
) -> None:
    errors = pools(2).errors(run_and_spoil, tmp_path, file, at)

    assert {name for name, _ in errors} == {"ExportFailed"}
    assert errors[0] == errors[1]
    assert f"{file} reads back differently from what was written" in errors[0][1]
    assert list((tmp_path / "r" / "exports").iterdir()) == []


class Failing:
    """A failure channel whose rank has an error of its own as its export begins."""

    def __init__(self, inner: Any, error: Exception) -> None:
        self._inner, self._error = inner, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def phase(self, name: str) -> Any:
        if name == "export: tensors":
            raise self._error
        return self._inner.phase(name)


def run_with_an_error(world: World, directory: Path, error: Exception) -> Any:
    channel: Any = Failing(world.failure, error)
    return run(replace(world, failure=channel), tree(str(directory), steps=1))


@pytest.mark.parametrize("error", [MemoryError("no room"), RunStopped("asked to end")])
def test_an_error_of_the_rank_that_writes_ends_an_export_on_all_ranks(
    pools: Any, tmp_path: Path, error: Exception
) -> None:
    errors = pools(2).errors(run_with_an_error, tmp_path, error, timeout_seconds=60)

    assert errors[0] == errors[1]
    assert errors[0][0] == ("RunStopped" if isinstance(error, RunStopped) else "ExportFailed")
    assert str(error) in errors[0][1]
    assert list((tmp_path / "r" / "exports").iterdir()) == []


def counting_model() -> Any:
    """Return a Llama with an integer buffer that its state dict holds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Counting(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for name, value in INTEGERS.items():
                self.model.register_buffer(name, value.clone())

    section = tree("")["model"]["config"]
    return Counting(LlamaConfig(**{key: value for key, value in section.items() if key != "model_type"}))


INTEGERS = {
    "calls": torch.tensor([3, 2**40], dtype=torch.int64),
    "count": torch.tensor(7, dtype=torch.int32),
    "small": torch.tensor([[-128, 127], [0, 1]], dtype=torch.int8),
    "bytes": torch.arange(256, dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
}
"""Buffers of a model that are no floating-point numbers, one of them without dimensions."""


def train_counting_model(world: World, directory: str, checkpoint: dict[str, Any]) -> Any:
    values = tree(directory, steps=2, model={"config": None, "path": "(given in Python)"}, checkpoint=checkpoint)
    live = Live(model=counting_model(), tokenizer=character_tokenizer())
    return sft(from_mapping(values, SFTConfig), Path(), world, live)


FORMS: list[Any] = [
    pytest.param(1, {}, id="43-export with integer buffers, 1 rank"),
    pytest.param(2, {}, id="43-export with integer buffers, 2 ranks"),
    pytest.param(3, {"export_dtype": "bfloat16"}, id="43-export with integer buffers, cast to bfloat16"),
    pytest.param(2, {"export_shard_bytes": 3000}, id="43-export with integer buffers, in many files"),
]


@pytest.mark.parametrize(("ranks", "checkpoint"), FORMS)
def test_integer_buffers_are_exported_and_saved_as_integers(
    pools: Any, tmp_path: Path, ranks: int, checkpoint: dict[str, Any]
) -> None:
    outcome = pools(ranks).run(train_counting_model, str(tmp_path), checkpoint)[0]

    exported = {}
    for file in Path(outcome.export).glob("*.safetensors"):
        exported |= load_file(file)
    for name, value in INTEGERS.items():
        assert exported[f"model.{name}"].dtype == value.dtype
        assert torch.equal(exported[f"model.{name}"], value)
    floating = {tensor.dtype for tensor in exported.values() if tensor.is_floating_point()}
    assert floating == {torch.bfloat16 if "export_dtype" in checkpoint else torch.float32}
    found = find.one(str(tmp_path / "r"))
    for name, value in INTEGERS.items():
        assert found.manifest.tensors[f"model.model.{name}"].dtype == str(value.dtype).removeprefix("torch.")
        assert torch.equal(found.read(f"model.model.{name}"), value)
    shutil.rmtree(tmp_path / "r")
