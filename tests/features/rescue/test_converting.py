"""`holdfast checkpoint convert`: format 2 becomes the present format with every number, or stays byte for byte."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointCorrupt, DirectoryTaken
from holdfast.checkpoint.format.manifest import FORMAT, NAME, OtherFormat
from holdfast.checkpoint.keep import find
from holdfast.checkpoint.place.lease import Lease
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.features.rescue.converting import convert
from tests.checkpoint.damage import Touch, all_files
from tests.cli.in_process import cli_in_process
from tests.features.rescue.format_2 import STEP_2, body_of, follow, rewritten, run_of_format_2, write_checkpoint
from tests.messages import lacks

FILES = [
    "assets/chat_template.jinja", "assets/config.json", "assets/generation_config.json", "assets/holdfast.yaml",
    "assets/tokenizer.json", "assets/tokenizer_config.json", "dcp/.metadata", "dcp/__0_0.distcp", "dcp/__1_0.distcp",
    "manifest.json", "rank/replicate-0.shard-0.json", "rank/replicate-0.shard-1.json", "trainer.json",
]  # fmt: skip
"""Files of the archived checkpoint."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the directory of a run with a checkpoint of format 2."""
    return run_of_format_2(tmp_path)


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Return every file below a directory, but for leases."""
    files = (file for file in all_files(folder) if not file.name.startswith(".lease-"))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_converted_checkpoint_says_what_it_said_and_has_no_pickle(run: Path) -> None:
    step = run / "checkpoints" / STEP_2
    before, files = body_of(step), bytes_of(step)
    assert sorted(files) == FILES

    lines = list(convert(str(run)))

    after = body_of(step)
    assert [line.split(" has ")[0] for line in lines] == [str(step)]
    assert checkpoint.verify(str(step)).format == FORMAT
    fields = before.keys() - {"files", "tensors", "format"}
    assert {name: after[name] for name in fields} == {name: before[name] for name in fields}
    for entry in after["tensors"].values():
        for chunk in entry["chunks"]:
            del chunk["file"]
    assert after["tensors"] == before["tensors"]
    kept = {name: data for name, data in files.items() if not name.startswith(("dcp/", "manifest"))}
    assert {name: data for name, data in bytes_of(step).items() if name in kept} == kept
    assert sorted(bytes_of(step).keys() - kept) == [
        "manifest.json",
        *(f"tensors/shard-{number:05d}-model-00001-of-00001.safetensors" for number in (1, 2)),
    ]
    assert {path.name for path in step.parent.iterdir()} == {STEP_2, ".lease-00000001.json"}


def test_a_second_conversion_says_so_and_changes_nothing(run: Path) -> None:
    first = cli_in_process("checkpoint", "convert", "run", cwd=run.parent)
    before = bytes_of(run)

    second = cli_in_process("checkpoint", "convert", "run", cwd=run.parent)

    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert lacks(first.out, f"{STEP_2} {FORMAT} now") == []
    assert lacks(second.out, f"{STEP_2} {FORMAT} already") == []
    assert bytes_of(run) == before


@pytest.mark.parametrize("words", ["verify", "show", "export", "diff"])
def test_commands_refuse_the_earlier_format_and_name_what_converts_it(run: Path, words: str) -> None:
    step, before = f"run/checkpoints/{STEP_2}", bytes_of(run)
    more = {"export": ["-o", "out"], "diff": [step]}.get(words, [])

    done = cli_in_process("checkpoint", words, step, *more, cwd=run.parent)

    assert (done.code, done.out) == (2, "")
    assert lacks(done.err, f"{step}/{NAME} 2 {FORMAT} `holdfast convert {step}`") == []
    assert bytes_of(run) == before
    with pytest.raises(OtherFormat):
        checkpoint.verify(str(run / "checkpoints" / STEP_2))


TENSORS = {
    "bool": torch.tensor([True, False, True]),
    "float8": torch.arange(-3, 3).to(torch.float8_e4m3fn),
    "bfloat16": torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
    "float16": torch.tensor([65504.0, 6e-8], dtype=torch.float16),
    "int64": torch.tensor([[2**62, -1]]),
    "float8_fnuz": torch.arange(-3, 3).to(torch.float8_e4m3fnuz),
    "e8m0": torch.tensor([1.0, 2.0]).to(torch.float8_e8m0fnu),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "uint64": torch.tensor([2**63], dtype=torch.uint64),
    "complex64": torch.complex(torch.tensor([1.0, float("nan")]), torch.tensor([float("inf"), -0.0])),
    "uint8": torch.arange(7, dtype=torch.uint8),
    "scalar": torch.tensor(0.1, dtype=torch.float64),
    "empty": torch.empty(0, 3),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_dtype_and_shape_comes_through_bit_for_bit(tmp_path: Path, name: str) -> None:
    tensor = TENSORS[name]
    write_checkpoint(tmp_path / "step-00000007", {"model.a": tensor, "model.b": torch.ones(2)})

    list(convert(str(tmp_path / "step-00000007")))

    read = find.one(str(tmp_path / "step-00000007")).read("model.a")
    checkpoint.verify(str(tmp_path / "step-00000007"))
    assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
    assert read.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_in_any_file_is_refused_and_stays(run: Path, file: str) -> None:
    step = run / "checkpoints" / STEP_2
    flip(step / file, (step / file).stat().st_size // 2)
    before = bytes_of(step)

    done = cli_in_process("checkpoint", "convert", "run", cwd=run.parent)

    assert (done.code, done.out) == (1, "")
    assert f"{STEP_2}/{file} is damaged" in done.err
    assert bytes_of(step) == before
    assert {path.name for path in step.parent.iterdir()} == {STEP_2, ".lease-00000001.json"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("dcp/")])
def test_bits_flipped_in_dcp_that_the_manifest_hides_are_refused_or_change_no_number(
    run: Path, file: str, seed: int
) -> None:
    step, chance = run / "checkpoints" / STEP_2, random.Random(seed)
    hashes = body_of(step)["tensors"]
    whole = bytes_of(step)
    for _ in range(6):
        flip(step / file, chance.randrange(len(whole[file])))
        rewritten(step)
        before = bytes_of(step)
        try:
            list(convert(str(step)))
        except CheckpointCorrupt as error:
            assert f"{STEP_2}/dcp" in str(error)
            assert bytes_of(step) == before
        else:
            assert {
                key: [chunk["hash"] for chunk in entry["chunks"]] for key, entry in body_of(step)["tensors"].items()
            } == {key: [chunk["hash"] for chunk in entry["chunks"]] for key, entry in hashes.items()}
            assert checkpoint.verify(str(step)).format == FORMAT
        shutil.rmtree(step)
        for name, data in whole.items():
            (step / name).parent.mkdir(parents=True, exist_ok=True)
            (step / name).write_bytes(data)


def test_a_number_that_the_manifest_hides_is_found_by_the_hash_of_its_tensor(run: Path) -> None:
    step = run / "checkpoints" / STEP_2
    list(convert(str(Path(shutil.copytree(step, run.parent / "copy" / STEP_2)))))
    weight = find.one(str(run.parent / "copy" / STEP_2)).read("model.model.norm.weight")
    shards = [step / file for file in FILES if file.endswith(".distcp")]
    held = next(
        (file, place) for file in shards if (place := file.read_bytes().find(weight[:8].numpy().tobytes())) >= 0
    )
    flip(*held)
    rewritten(step)
    before = bytes_of(step)

    with pytest.raises(CheckpointCorrupt, match=f"{STEP_2}/dcp.*{held[0].name}|norm"):
        list(convert(str(step)))

    assert bytes_of(step) == before


def test_a_pickle_in_the_place_of_the_list_of_contents_is_not_run(run: Path) -> None:
    step, target = run / "checkpoints" / STEP_2, run.parent / "executed"
    (step / "dcp" / ".metadata").write_bytes(pickle.dumps(Touch(target)))
    rewritten(step)
    before = bytes_of(step)

    done = cli_in_process("checkpoint", "convert", f"run/checkpoints/{STEP_2}", cwd=run.parent)

    assert (done.code, done.out) == (1, "")
    assert f"{STEP_2}/dcp" in done.err
    assert "Traceback" not in done.err
    assert not target.exists()
    assert bytes_of(step) == before


def test_a_missing_and_an_unlisted_file_are_refused(run: Path) -> None:
    step = run / "checkpoints" / STEP_2
    (step / "rank" / "more.json").write_text("{}")
    with pytest.raises(CheckpointCorrupt, match=r"rank/more\.json"):
        list(convert(str(step)))
    (step / "rank" / "more.json").unlink()
    (step / "dcp" / "__1_0.distcp").unlink()

    with pytest.raises(CheckpointCorrupt, match=r"dcp/__1_0\.distcp"):
        list(convert(str(step)))


@pytest.mark.parametrize("calls", [["run"], ["run/checkpoints/step-00000002", "run"], ["run", "run"]], ids=len)
def test_each_checkpoint_names_the_one_before_it_by_its_new_hash(run: Path, calls: list[str]) -> None:
    steps = [run / "checkpoints" / STEP_2]
    for step in (4, 6):
        steps.append(follow(steps[-1], step))

    for path in calls:
        list(convert(str(run.parent / path)))

    manifests = [checkpoint.verify(str(step)) for step in steps]
    assert [manifest.step for manifest in manifests] == [2, 4, 6]
    assert [manifest.parent_step for manifest in manifests[1:]] == [2, 4]
    assert [manifest.parent for manifest in manifests[1:]] == [manifest.hash for manifest in manifests[:-1]]


def test_a_damaged_step_stays_and_the_others_are_converted(run: Path) -> None:
    first = run / "checkpoints" / STEP_2
    second = follow(first, 4)
    third = follow(second, 6)
    flip(second / "trainer.json", 5)
    before = bytes_of(second)
    (run / "checkpoints" / "step-00000005").mkdir()

    done = cli_in_process("checkpoint", "convert", "run", cwd=run.parent)

    assert done.code == 1
    assert lacks(done.out, f"{STEP_2} {third.name} now step-00000005 {NAME}") == []
    assert f"{second.name}/trainer.json is damaged" in done.err
    assert bytes_of(second) == before
    assert [checkpoint.verify(str(step)).format for step in (first, third)] == [FORMAT, FORMAT]


def test_a_checkpoint_on_another_disk_stays_there(run: Path, tmp_path: Path) -> None:
    step, other = run / "checkpoints" / STEP_2, tmp_path / "other" / "saved"
    other.parent.mkdir()
    step.rename(other)
    step.symlink_to(other)

    list(convert(str(run)))

    assert step.is_symlink()
    assert checkpoint.verify(str(step)).format == checkpoint.verify(str(other)).format == FORMAT
    assert [path.name for path in other.parent.iterdir()] == ["saved"]


def test_bytes_that_change_after_they_were_compared_are_not_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = run / "checkpoints" / STEP_2
    before, read, wrong = bytes_of(step), LocalStorage.read, 1

    def misread(self: LocalStorage, path: str) -> bytes:
        nonlocal wrong
        data = read(self, path)
        if path == f"{STEP_2}/trainer.json" and wrong:
            wrong -= 1
            return data.replace(b"1", b"2", 1)
        return data

    monkeypatch.setattr(LocalStorage, "read", misread)

    list(convert(str(run)))

    assert wrong == 0
    assert bytes_of(step)["trainer.json"] == before["trainer.json"]


def test_the_earlier_checkpoint_that_a_crash_left_after_the_exchange_is_removed(run: Path) -> None:
    step = run / "checkpoints" / STEP_2
    aside = step.with_name(f"{STEP_2}.format-2")
    shutil.copytree(step, aside)
    list(convert(str(step)))

    assert not aside.exists() or checkpoint.verify(str(step)).format == FORMAT
    list(convert(str(aside)))

    assert not aside.exists()
    assert checkpoint.verify(str(step)).format == FORMAT


def test_a_job_in_the_directory_is_not_disturbed(run: Path) -> None:
    before = bytes_of(run / "checkpoints" / STEP_2)

    with Lease(LocalStorage(run / "checkpoints")), pytest.raises(DirectoryTaken):
        list(convert(str(run)))

    assert bytes_of(run / "checkpoints" / STEP_2) == before


@pytest.mark.parametrize("path", ["run", f"run/checkpoints/{STEP_2}"])
def test_a_checkpoint_that_a_crash_left_beside_its_name_is_found(run: Path, path: str) -> None:
    """The state between the two renames on a file system that cannot exchange names."""
    step = run / "checkpoints" / STEP_2
    shutil.copytree(step, step.with_name(f".staging-{STEP_2}-12345678"))
    step.rename(step.with_name(f"{STEP_2}.format-2"))

    list(convert(str(run.parent / path)))

    assert checkpoint.verify(str(step)).format == FORMAT
    assert not step.with_name(f"{STEP_2}.format-2").exists()


@pytest.mark.parametrize("path", ["s3://bucket/run", "nowhere", "."])
def test_what_holds_no_checkpoint_on_a_disk_is_refused(tmp_path: Path, path: str) -> None:
    done = cli_in_process("checkpoint", "convert", path, cwd=tmp_path)

    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(path if path != "." else "")
    assert list(tmp_path.iterdir()) == []


CHANGES = {"os.mkdir", "os.rename", "os.remove", "shutil.rmtree"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def changes(event: str, arguments: tuple[Any, ...], folder: str) -> bool:
    """Return whether an audited event is about to change a folder, or to open one of its directories for an fsync."""
    if event not in {"open", *CHANGES} or not isinstance(arguments[0], str | os.PathLike):
        return False
    path = os.fspath(arguments[0])
    writes = event in CHANGES or bool(arguments[2] & WRITES) or os.path.isdir(path)  # noqa: PTH112 - raises nothing
    return path.startswith(folder) and writes


def converted_until(run: str, last: int) -> None:
    """Convert, and be killed before the change of the run's files that has a number."""
    count = 0

    def seen(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if changes(event, arguments, run):
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(seen)
    list(convert(run))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_kill_before_any_change_leaves_the_old_or_the_new_checkpoint_whole(tmp_path: Path, part: int) -> None:
    context = multiprocessing.get_context("forkserver")
    original = run_of_format_2(tmp_path / "original")
    before = bytes_of(original / "checkpoints" / STEP_2)
    for last in range(1 + part, 200, 4):
        run = Path(shutil.copytree(original, tmp_path / f"run-{last}"))
        step = run / "checkpoints" / STEP_2
        process = context.Process(target=converted_until, args=(str(run), last))
        process.start()
        process.join(120)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        if body_of(step)["format"] == FORMAT:
            assert checkpoint.verify(str(step)).step == 2
        else:
            assert bytes_of(step) == before
        assert len(list(convert(str(run)))) == 1
        assert checkpoint.verify(str(step)).format == FORMAT
        shutil.rmtree(run)
    assert process.exitcode == 0
    assert last > 20
