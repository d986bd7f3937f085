"""Bad input gets one paragraph that names it, an exit code, and changes nothing; by the commands as users have them."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.in_process import cli_in_process
from tests.cli.warm import Done, WarmPython
from tests.crash.disks import Remount, disk
from tests.features.rescue import damages
from tests.features.rescue.reading import hash_of, place_of
from tests.features.rescue.test_damage import copied
from tests.features.rescue.test_import import run_file, tokens

__all__ = ["disk", "tokens"]  # fixtures of these tests, too

BAD: dict[str, tuple[str, Callable[[Path], object], int, str]] = {
    "a directory of nothing": ("", lambda path: path, 2, "is an empty directory"),
    "two systems in one": (
        "verl-fsdp2",
        lambda path: (damages.actor(path) / "meta.pt").write_bytes(b"x"),
        2,
        "holds checkpoints of two systems: verl or EasyR1 and Lightning",
    ),
    "a step half-written": ("dcp", lambda path: (path / ".metadata").unlink(), 1, "the save never ended"),
    "a missing rank file": (
        "verl-fsdp2-4",
        lambda path: damages.rank_file(path, rank=2).unlink(),
        1,
        "model_world_size_4_rank_2.pt is missing",
    ),
    "another model's configuration": ("verl-fsdp2", damages.swap_config, 1, "is another model's"),
    "a class not listed": (
        "verl-fsdp2",
        lambda path: damages.pickled(damages.rank_file(path), pickle.dumps(Path("x"), protocol=2)),
        1,
        "asks for pathlib.PosixPath",
    ),
    "two world sizes": ("verl-fsdp2", damages.other_world, 2, "rank files of several world sizes (2, 4)"),
    "a world size other than the names say": (
        "verl-fsdp2",
        lambda path: damages.changed_json(damages.actor(path) / "fsdp_config.json", world_size=8),
        1,
        "fsdp_config.json says 8 ranks, the names of the files say 2",
    ),
}


def ran(*words: object, cwd: Path) -> Done:
    return cli_in_process("checkpoint", *words, cwd=cwd)


def spawned(warm: WarmPython, *words: object, cwd: Path) -> Done:
    """Run what has begun to write before it fails, whose threads end with their process."""
    return warm.run("-m", "holdfast.cli.main", "checkpoint", *words, cwd=cwd)


def is_one_paragraph(text: str) -> bool:
    return bool(text.strip()) and "\n\n" not in text.strip() and "Traceback" not in text


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_nothing_is_touched(fixtures: Path, tokens: Path, name: str, tmp_path: Path) -> None:
    fixture, damage, code, words = BAD[name]
    path = copied(fixtures, fixture, tmp_path) if fixture else tmp_path / "copy"
    path.mkdir(exist_ok=True)
    damage(path)
    before, file = hash_of(path), run_file(tmp_path, tokens)

    checked = ran("check", path, cwd=tmp_path)
    exported = ran("import", path, "--export", tmp_path / "out", "--model", tokens, cwd=tmp_path)
    imported = ran("import", path, "--as", file, cwd=tmp_path)

    assert checked.code == code
    assert words in checked.out + checked.err
    for done in (exported, imported):
        assert done.code == code, done
        assert words in done.err
        assert is_one_paragraph(done.err)
    assert hash_of(path) == before
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "runs").exists()


def test_no_room_is_said_and_nothing_is_left(
    warm: WarmPython, fixtures: Path, tokens: Path, disk: tuple[Path, Remount], tmp_path: Path
) -> None:
    folder, remount = disk
    path, file = place_of(fixtures / "verl-fsdp2"), run_file(tmp_path, tokens, run__dir=str(folder / "runs"))
    before = hash_of(path)
    remount("size=80k")

    imported = spawned(warm, "import", path, "--as", file, cwd=tmp_path)
    left = [str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()]
    shutil.rmtree(folder / "runs", ignore_errors=True)
    remount("size=12k")
    exported = spawned(warm, "import", path, "--export", folder / "out", "--model", tokens, cwd=tmp_path)

    assert imported.code == 3, imported
    assert "No space left on device" in imported.err or "free, a checkpoint needs" in imported.err
    assert left == []
    assert exported.code == 3, exported
    assert "No space left on device" in exported.err
    for done in (imported, exported):
        assert is_one_paragraph(done.err)
    assert list(folder.iterdir()) == []
    assert hash_of(path) == before


def test_a_number_that_is_not_finite_reaches_neither_an_export_nor_a_run(
    warm: WarmPython, fixtures: Path, tokens: Path, tmp_path: Path
) -> None:
    path, file = copied(fixtures, "trainer-full", tmp_path), run_file(tmp_path, tokens, model__freeze=[])
    damages.state_of(
        path / "pytorch_model_fsdp.bin", lambda content: next(iter(content.values())).view(-1)[:1].fill_(float("nan"))
    )

    exported = spawned(warm, "import", path, "--export", tmp_path / "out", "--model", tokens, cwd=tmp_path)
    imported = spawned(warm, "import", path, "--as", file, cwd=tmp_path)

    for done in (exported, imported):
        assert done.code == 1, done
        assert "has a number that is not finite" in done.err
        assert is_one_paragraph(done.err)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("runs/*/checkpoints/step-*"))


def test_an_export_carries_nothing_out_that_a_link_in_the_checkpoint_leads_to(
    warm: WarmPython, fixtures: Path, tokens: Path, tmp_path: Path
) -> None:
    path = copied(fixtures, "trl-full", tmp_path)
    (tmp_path / "secret").write_text("not for anybody")
    (path / "chat_template.jinja").unlink(missing_ok=True)
    (path / "chat_template.jinja").symlink_to(tmp_path / "secret")

    done = spawned(warm, "import", path, "--export", tmp_path / "out", "--model", tokens, cwd=tmp_path)

    assert done.code == 2, done
    assert "chat_template.jinja is a link that leads out of its directory" in done.err
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_into_the_source(fixtures: Path, tokens: Path, tmp_path: Path) -> None:
    path = copied(fixtures, "verl-fsdp2", tmp_path)
    before, file = hash_of(path), run_file(tmp_path, tokens, run__dir=str(path / "runs"))

    exported = ran("import", path, "--export", path / "out", "--model", tokens, cwd=tmp_path)
    imported = ran("import", path, "--as", file, cwd=tmp_path)

    for done in (exported, imported):
        assert done.code == 2, done
        assert "which is read and never written" in done.err
    assert hash_of(path) == before


def test_a_snapshot_of_hugging_faces_cache_is_exported_though_its_files_are_links(
    fixtures: Path, tokens: Path, tmp_path: Path
) -> None:
    source = copied(fixtures, "trl-full", tmp_path)
    cached, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(source / name, cached / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")

    done = ran("import", snapshot, "--export", tmp_path / "out", cwd=tmp_path)

    assert done.code == 0, done
    assert (tmp_path / "out" / "chat_template.jinja").read_bytes() == (source / "chat_template.jinja").read_bytes()
