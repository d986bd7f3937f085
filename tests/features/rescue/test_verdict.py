"""`whole` is said only of bytes that were compared: damage is named, and what cannot be told is called that."""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.errors import HoldfastError
from holdfast.features.rescue.reading.examine import examine
from holdfast.features.rescue.reading.recognise import open_foreign
from holdfast.features.rescue.reading.record import ForeignCheckpoint
from tests.features.rescue.damages import actor, anonymous, rank_file, swap_ranks
from tests.features.rescue.reading import place_of, truth_of
from tests.features.rescue.test_damage import copied
from tests.features.rescue.test_import import imported, run_file, stored_at, tokens

__all__ = ["tokens"]  # a fixture of these tests, too


def checked(path: Path, *options: str) -> tuple[int, str]:
    """Run `holdfast checkpoint check`; return its exit code and what it printed."""
    result = CliRunner().invoke(app, ["checkpoint", "check", str(path), *options])
    return result.exit_code, result.output


def examined(path: Path) -> ForeignCheckpoint:
    checkpoint = open_foreign(path)
    examine(checkpoint)
    return checkpoint


def storages(path: Path) -> dict[str, tuple[int, int]]:
    """Return where in a torch file the bytes of each storage begin and end."""
    data = path.read_bytes()
    places = {}
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            at = entry.header_offset
            start = at + 30 + sum(int.from_bytes(data[at + k : at + k + 2], "little") for k in (26, 28))
            if "/data/" in entry.filename and entry.file_size:
                places[entry.filename] = (start, start + entry.file_size)
    return places


def zeroed(path: Path, start: int, count: int = 512) -> None:
    data = bytearray(path.read_bytes())
    assert any(data[start : start + count])
    data[start : start + count] = bytes(len(data[start : start + count]))
    path.write_bytes(bytes(data))


def test_zeros_in_a_storage_that_many_parameters_share_are_damage(fixtures: Path, tmp_path: Path) -> None:
    path = copied(fixtures, "verl-fsdp1-flat", tmp_path)
    file = rank_file(path, "optim", 1)
    largest = max(storages(file).values(), key=lambda place: place[1] - place[0])
    zeroed(file, largest[0] + 64)

    code, said = checked(path)

    assert code == 1
    assert "optim_world_size_2_rank_1.pt is damaged: the checksum of storage" in said
    assert said.splitlines()[-1].startswith("damaged: ")


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["verl-fsdp1-flat", "verl-fsdp1-orig", "verl-fsdp1-nomesh", "lightning-mp-full"])
def test_one_bit_of_any_storage_is_damage(fixtures: Path, name: str, tmp_path: Path) -> None:
    path = copied(fixtures, name, tmp_path)
    draw = random.Random(name)
    files = [path] if path.is_file() else [*actor(path).glob("optim*.pt"), *actor(path).glob("model*.pt")]
    silent = []
    for file in files:
        sound = file.read_bytes()
        for storage, (start, end) in storages(file).items():
            data = bytearray(sound)
            data[draw.randrange(start, end)] ^= 1 << draw.randrange(8)
            file.write_bytes(bytes(data))
            if examined(path).verdict != "damaged":
                silent.append(f"{file.name} {storage}")
        file.write_bytes(sound)

    assert silent == []


def test_weights_that_are_views_of_one_storage_are_compared_with_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "views.ckpt"
    flat = torch.arange(8000.0)
    weights = {f"layer{index}.weight": part for index, part in enumerate(flat.split(500))}
    torch.save({"state_dict": weights, "global_step": 1}, path)
    sound = examined(path)
    assert sound.verdict == "whole"
    assert all(torch.equal(sound.weights[name].read(), value) for name, value in weights.items())
    start, _ = storages(path)["views/data/0"]
    zeroed(path, start + 4 * 7000)

    code, said = checked(path)

    assert code == 1
    assert "views.ckpt is damaged: the checksum of storage 0" in said


def test_names_of_one_storage_are_tied(tmp_path: Path) -> None:
    """No configuration lies beside one file of Lightning: what it stored once, it held once."""
    shared, apart = torch.ones(4), torch.ones(4)
    torch.save({"state_dict": {"a": shared, "b": apart, "c": shared}, "global_step": 1}, tmp_path / "tied.ckpt")

    assert examined(tmp_path / "tied.ckpt").tied_away == {"c": "a"}


def test_numbers_without_checksums_cannot_be_told(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"state_dict": {"layer.weight": torch.ones(4)}, "global_step": 1}, tmp_path / "bare.ckpt")
    finally:
        torch.serialization.set_crc32_options(before)

    code, said = checked(tmp_path / "bare.ckpt")

    assert code == 0
    assert "unverified bare.ckpt has no checksums" in said
    assert said.splitlines()[-1] == "cannot be told: 1 finding"
    assert json.loads(checked(tmp_path / "bare.ckpt", "--json")[1])["verdict"] == "cannot be told"


def test_headers_alone_are_not_called_whole(fixtures: Path) -> None:
    place = place_of(fixtures / "verl-fsdp2")

    assert checked(place)[1].splitlines()[-1].startswith("whole: ")
    assert checked(place, "--level", "headers")[1].splitlines()[-1] == "cannot be told: 1 finding"


@pytest.mark.parametrize(
    ("fixture", "swapped", "verdict"),
    [
        ("verl-fsdp1-orig", False, "whole"),
        ("verl-fsdp1-orig", True, "damaged"),
        ("verl-fsdp1-orig-4", False, "whole"),
        ("verl-fsdp1-orig-4", True, "damaged"),
        ("verl-fsdp1-flat", False, "cannot be told"),
        ("verl-fsdp1-flat", True, "cannot be told"),
        ("verl-fsdp2", False, "whole"),
        ("verl-fsdp2", True, "whole"),  # DTensors say whose they are, and are put where they belong
    ],
)
def test_files_without_a_name_are_told_by_what_they_hold_or_not_at_all(
    fixtures: Path, fixture: str, swapped: bool, verdict: str, tmp_path: Path
) -> None:
    path, truth = copied(fixtures, fixture, tmp_path), truth_of(fixtures / fixture)
    if swapped:
        swap_ranks(path)
    anonymous(path, "model", "optim", "extra_state")

    checkpoint = examined(path)

    assert checkpoint.verdict == verdict
    if verdict == "whole":
        for name, slots in truth["optim"].items():
            assert torch.equal(checkpoint.states[name]["exp_avg"].read(), slots["exp_avg"]), name


def test_an_order_that_nothing_tells_is_imported_by_a_word(fixtures: Path, tokens: Path, tmp_path: Path) -> None:
    path, file = copied(fixtures, "verl-fsdp1-flat", tmp_path), run_file(tmp_path, tokens, model__freeze=[])
    anonymous(path, "optim")

    with pytest.raises(HoldfastError, match="which rank wrote which file of its optimizer.*--trust-rank-order"):
        imported(path, "--as", file)
    assert not (tmp_path / "runs").exists()
    imported(path, "--export", tmp_path / "out", "--model", tokens)  # weights say whose they are
    imported(path, "--as", file, "--trust-rank-order")

    stored = stored_at(tmp_path / "runs/rescued/checkpoints/step-00000002")
    for name, slots in truth_of(fixtures / "verl-fsdp1-flat")["optim"].items():
        assert torch.equal(stored.read(f"optim.{name}.exp_avg"), slots["exp_avg"]), name
    assert "order of ranks taken from the names" in stored.manifest.deviations[0]


def test_weights_that_are_stored_once_more_are_said_to_be_left_out(fixtures: Path) -> None:
    code, said = checked(place_of(fixtures / "trainer-full"))

    assert code == 0
    assert "note       model.safetensors is not looked at: the weights are those of pytorch_model_fsdp.bin" in said


def test_an_optimizer_that_could_not_be_read_is_not_called_frozen(fixtures: Path, tmp_path: Path) -> None:
    path = copied(fixtures, "verl-fsdp1-flat", tmp_path)
    swap_ranks(path)

    code, said = checked(path)

    assert code == 1
    assert "was written as" in said
    assert "have no state" not in said
