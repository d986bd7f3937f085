"""Damage in every range of bytes of every fixture: refused, called untold, or without effect on what is read."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.features.rescue.reading.record import ForeignCheckpoint, UnreadableForeign, plain_settings
from tests.features.rescue.test_damage import copied
from tests.features.rescue.test_readers import WHOSE
from tests.features.rescue.test_verdict import examined

NAMES = [*WHOSE, "easyr1_adamw_bf16_frozen"]
EACH = 14
"""Mutations of a fixture, one in each fourteenth of its bytes: 616 in all."""
BESIDE = Path(__file__).resolve().parents[4] / "shared" / "data" / "foreign"
"""Larger checkpoints of verl and EasyR1, which lie beside some checkouts."""
NAMES_BESIDE = ["easyr1_adamw_all", "easyr1_adamw_bf16_frozen", "easyr1_adamw_frozen", "easyr1_empty_entries",
                "verl_fsdp1_flat", "verl_fsdp1_frozen", "verl_fsdp2_frozen"]  # fmt: skip


def reading_of(checkpoint: ForeignCheckpoint) -> dict[str, Any]:
    """Return all that an import would take."""
    tensors = dict(checkpoint.weights)
    tensors |= {
        f"{slot} of {name}": value for name, slots in checkpoint.states.items() for slot, value in slots.items()
    }
    return {
        **{name: value.read() for name, value in tensors.items()},
        "step": checkpoint.step,
        "schedule": (checkpoint.schedule or {}).get("last_epoch"),
        "groups": [(group.names, plain_settings(group.settings)) for group in checkpoint.groups],
        "tied": checkpoint.tied_away,
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [
        key
        for key in {**one, **other}
        if key not in one
        or key not in other
        or type(one[key]) is not type(other[key])
        or not _is_same(one[key], other[key])
    ]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))
    return bool(one == other)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)  # of which -0.0 and 0.0 are two


def mutation(draw: random.Random, path: Path, share: tuple[float, float]) -> tuple[str, dict[Path, bytes]]:
    """Damage a checkpoint in a range of its bytes, counted over all of its files.

    Returns what was done, and what the changed files held.


    Bits flip, ranges become zeros or noise, a file ends there; or two ranks' files are swapped.
    """
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    sizes = [file.stat().st_size for file in files]
    at = int(sum(sizes) * draw.uniform(*share))
    number = next(number for number in range(len(files)) if at < sum(sizes[: number + 1]) or number == len(files) - 1)
    file, at = files[number], min(at - sum(sizes[:number]), sizes[number] - 1)
    before, data = file.read_bytes(), bytearray(file.read_bytes())
    twin = next((each for each in files if each != file and _kind(each) == _kind(file)), None)
    way = draw.choice(["flip", "flip", "zeros", "zeros", "noise", "cut", *(["swap"] * 2 if twin else [])])
    if way == "swap":
        assert twin is not None
        twin_before = twin.read_bytes()
        file.write_bytes(twin_before)
        twin.write_bytes(before)
        return f"{file.name} and {twin.name} swapped", {file: before, twin: twin_before}
    count = {"flip": 1, "zeros": 512, "noise": 64}.get(way, 0)
    if way == "cut":
        del data[at:]
    elif way == "flip":
        data[at] ^= 1 << draw.randrange(8)
    else:
        count = min(count, len(data) - at)
        data[at : at + count] = bytes(count) if way == "zeros" else draw.randbytes(count)
    file.write_bytes(bytes(data))
    return f"{way} at {at} of {file.name}", {file: before}


def _kind(file: Path) -> str:
    return file.name.partition("_rank_")[0] if "_rank_" in file.name else str(file)


def silent_mutations(path: Path, seeds: range, shares: int) -> list[str]:
    """Return the mutations that nothing is said of though what is read differs."""
    sound = reading_of(examined(path))
    silent = []
    for number, seed in enumerate(seeds):
        what, before = mutation(random.Random(seed), path, (number % shares / shares, (number % shares + 1) / shares))
        try:
            checkpoint = examined(path)
            if checkpoint.verdict == "whole" and (different := differences(sound, reading_of(checkpoint))):
                silent.append(f"seed {seed}: {what}: {different[:4]}")
        except UnreadableForeign:
            pass
        finally:
            for file, data in before.items():
                file.write_bytes(data)
    return silent


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_no_damage_of_a_fixture_is_silent(fixtures: Path, name: str, tmp_path: Path) -> None:
    first = EACH * NAMES.index(name)

    assert silent_mutations(copied(fixtures, name, tmp_path), range(first, first + EACH), EACH) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES_BESIDE)
def test_no_damage_of_a_larger_checkpoint_is_silent(name: str, tmp_path: Path) -> None:
    if not (BESIDE / name).is_dir():
        pytest.skip(f"no copy of {name} beside this checkout")
    shutil.copytree(BESIDE / name, tmp_path / name)
    (tmp_path / name / "truth.pt").unlink()
    first = 10_000 + EACH * NAMES_BESIDE.index(name)

    assert silent_mutations(tmp_path / name, range(first, first + EACH), EACH) == []
