"""What is no checkpoint, too new, damaged or not to be written: one paragraph, the right exit code, nothing touched."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from holdfast.checkpoint.format.manifest import FORMAT
from holdfast.checkpoint.format.shards import shard_file
from holdfast.checkpoint.place.hashing import hash_bytes
from tests.checkpoint.damage import rewrite_manifest
from tests.cli.fixtures import Command, of_step
from tests.cli.screens import numbers
from tests.cli.warm import WarmPython
from tests.crash.disks import Remount, disk
from tests.messages import Said, lacks

__all__ = ["disk"]

FOREIGN = {
    "verl": (["model_world_size_2_rank_0.pt"], "verl EasyR1 pickle"),
    "EasyR1": (["actor/model_world_size_8_rank_3.pt"], "verl EasyR1"),
    "Lightning": ([".metadata", "__0_0.distcp", "meta.pt"], "sharded Lightning"),
    "verl's run": (
        ["global_step_10/actor/model_world_size_2_rank_0.pt", "latest_checkpointed_iteration.txt"],
        "run verl EasyR1 `holdfast checkpoint import`",
    ),
    "EasyR1's run": (
        ["global_step_5/actor/model_world_size_1_rank_0.pt", "global_step_5/dataloader.pt"],
        "run verl EasyR1",
    ),
    "torchtitan's outputs": (
        ["checkpoint/step-10/.metadata", "checkpoint/step-10/__0_0.distcp", "tb/events"],
        "torchtitan checkpoint/step-10",
    ),
    "torchtitan's checkpoints": (["step-10/.metadata"], "DCP"),
    "Trainer's outputs": (
        ["checkpoint-5/model.safetensors", "checkpoint-5/trainer_state.json", "config.json", "model.safetensors"],
        "transformers Trainer",
    ),
    "Trainer's checkpoint": (
        ["config.json", "model.safetensors", "optimizer.pt", "trainer_state.json"],
        "Hugging Face",
    ),
    "accelerate": (["pytorch_model_fsdp_0/.metadata"], "accelerate transformers"),
    "Trainer": (["random_states_0.pkl", "model.safetensors"], "accelerate transformers"),
    "DCP": ([".metadata", "__0_0.distcp"], "DCP torchtitan"),
    "torchtitan": (["step-10/.metadata", "step-10/__0_0.distcp"], "DCP torchtitan"),
    "Hugging Face": (["config.json", "model.safetensors"], "Hugging Face"),
    "anything": (["notes.txt"], "notes.txt"),
}
"""Files of somebody else's directory, and the words that name it."""

SINGLE = {
    "last.ckpt": "Lightning",
    "model.safetensors": "weights model.path",
}
"""Single files."""


def verbs(path: str) -> list[tuple[str, ...]]:
    """Return every command on a path, beside a whole checkpoint where it takes two."""
    return [
        ("verify", path), ("show", path), ("ls", path), ("path", path), ("path", path, "--best", "loss"),
        ("diff", path, of_step(1)), ("diff", of_step(1), path), ("export", path, "-o", "out"),
        ("export", path, "--format", "torch", "-o", "out.pt"), ("average", path, of_step(1), "-o", "out"),
        ("average", of_step(1), path, "-o", "out"), ("prune", path), ("prune", path, "--dry-run"), ("pin", path, "1"),
    ]  # fmt: skip


def later_format(place: Path, step: int) -> None:
    """Give a checkpoint the whole manifest of a version to come."""
    file = place / of_step(step) / "manifest.json"
    body = json.loads(file.read_text())["manifest"] | {"format": FORMAT + 1, "invented": "later"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    file.write_text(f'{{"manifest":{canonical},"xxh3_128":"{hash_bytes(canonical.encode())}"}}')


def lay(place: Path, kind: str) -> tuple[str, str]:
    """Make what is no checkpoint; return its path and the words that name it."""
    path = place / "odd"
    match kind:
        case "nothing":
            return "odd", "odd nothing"
        case "a file":
            path.write_text("text")
            return "odd", "odd file"
        case "an empty directory":
            path.mkdir()
            return "odd", "odd directory nothing"
        case "a later version's":
            later_format(place, 4)
            return of_step(4), f"{of_step(4)}/manifest.json {FORMAT + 1} {FORMAT}"
        case "last.ckpt" | "model.safetensors":
            (place / kind).write_bytes(b"x")
            return kind, SINGLE[kind]
    files, named = FOREIGN[kind]
    for name in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"x")
    return "odd", f"odd {named}"


def contents(place: Path) -> dict[str, bytes]:
    """Return every file below a directory, but for leases."""
    files = (path for path in place.rglob("*") if path.is_file() and not path.name.startswith(".lease-"))
    return {str(path.relative_to(place)): path.read_bytes() for path in files}


NONE = ["nothing", "a file", "an empty directory", "a later version's", *SINGLE, *FOREIGN]
ALL_COMMANDS = ["nothing", "Lightning"]
"""What every command is tried on in the fast tests; on the rest, two commands, in turn."""


@pytest.mark.parametrize(
    ("kind", "every"),
    [
        *(pytest.param(kind, kind in ALL_COMMANDS, id=kind) for kind in NONE),
        *(
            pytest.param(kind, True, id=f"{kind}, all commands", marks=pytest.mark.slow)
            for kind in NONE
            if kind not in ALL_COMMANDS
        ),
    ],
)
def test_every_command_names_what_is_no_checkpoint_and_touches_nothing(
    checkpoint: Command, place: Path, kind: str, every: bool
) -> None:
    path, named = lay(place, kind)
    before = contents(place)
    commands, first = verbs(path), NONE.index(kind)

    for arguments in commands if every else [commands[(first + turn) % len(commands)] for turn in (0, 3)]:
        done = checkpoint(*arguments)

        assert done.code == 2, (arguments, done)
        assert lacks(done.err, named) == [], arguments
        assert len(done.err.splitlines()) == 1, arguments
        assert done.out == "", arguments
    assert contents(place) == before


@pytest.mark.parametrize("kind", NONE)
def test_what_is_no_checkpoint_is_called_what_it_is(checkpoint: Command, place: Path, said: Said, kind: str) -> None:
    path, named = lay(place, kind)

    done = checkpoint("verify", path)

    assert lacks(done.err, named) == []
    said(done.err.strip())


@pytest.mark.parametrize("kind", ["nothing", "a later version's", "verl", "Lightning", "DCP", "Hugging Face"])
def test_a_run_that_starts_from_no_checkpoint_is_refused_and_leaves_nothing(
    warm: WarmPython, place: Path, kind: str
) -> None:
    path, named = lay(place, kind)
    before = contents(place)

    done = warm.run(
        "-m", "holdfast.cli.main", "sft", "run.yaml", "run.name=new", f"checkpoint.init_from={path}", cwd=place
    )

    assert done.code == 2, done.err
    assert lacks(done.err, named) == []
    assert "Traceback" not in done.err
    assert contents(place) == before


def test_every_command_names_a_configuration_that_is_a_pipe_and_waits_for_nobody(
    checkpoint: Command, place: Path
) -> None:
    file = place / of_step(4) / "assets/holdfast.yaml"
    file.unlink()
    os.mkfifo(file)
    before = contents(place)
    of_one = [arguments for arguments in verbs(of_step(4)) if arguments[0] not in {"ls", "prune", "pin"}]
    of_a_run = [arguments for arguments in verbs("runs/run") if arguments[0] not in {"ls", "pin"}]

    for arguments in [*(each for each in of_one if "--best" not in each), *of_a_run]:
        done = checkpoint(*arguments)  # a command that waits is killed after two minutes

        assert done.code in {1, 2}, (arguments, done)
        words = [line for line in (done.out + done.err).splitlines() if " pipe" in line]
        assert len(words) == 1, (arguments, done)
        assert f"{of_step(4)}/assets/holdfast.yaml" in words[0], arguments
        assert "Traceback" not in done.err, arguments
    assert contents(place) == before


def resume(warm: WarmPython, place: Path) -> Any:
    return warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", "steps=5", cwd=place)


def test_a_run_with_a_later_version_s_checkpoint_is_neither_resumed_nor_set_back(
    warm: WarmPython, place: Path, said: Said
) -> None:
    later_format(place, 4)
    before = contents(place / "runs/run/checkpoints")

    done = resume(warm, place)

    assert done.code == 2
    assert lacks(done.err, f"{of_step(4)}/manifest.json {FORMAT + 1} {FORMAT}") == []
    said(done.err.strip())
    after = contents(place / "runs/run/checkpoints")
    assert after == before


def without_manifest(place: Path) -> None:
    (place / of_step(2) / "manifest.json").unlink()


def renamed(place: Path) -> None:
    (place / of_step(2)).rename(place / of_step(7))


def manifest_of_another(place: Path) -> None:
    shutil.copyfile(place / of_step(1) / "manifest.json", place / of_step(2) / "manifest.json")


def linked_to_itself(place: Path) -> None:
    shutil.rmtree(place / of_step(2))
    (place / of_step(2)).symlink_to("step-00000002")


def link_inside(place: Path) -> None:
    (place / of_step(2) / "assets" / "more").symlink_to(place / of_step(1))


def shards_changed_places(place: Path) -> None:
    """Lay a shard of another step, of the same name and size, in its place."""
    one, two = (place / of_step(step) / shard_file(0) for step in (1, 2))
    assert one.stat().st_size == two.stat().st_size
    shutil.copyfile(one, two)


def someone_else_s(place: Path) -> None:
    shutil.rmtree(place / of_step(2))
    (place / of_step(2)).mkdir()
    (place / of_step(2) / ".metadata").write_bytes(b"x")
    (place / of_step(2) / "__0_0.distcp").write_bytes(b"x")


ODD_MEMBERS: dict[Callable[[Path], None], str] = {
    without_manifest: "step-00000002 assets rank tensors trainer.json",
    renamed: "step-00000007 2",
    manifest_of_another: "step-00000002 1",
    linked_to_itself: "step-00000002 nothing",
    link_inside: "step-00000002 assets/more",
    shards_changed_places: f"step-00000002/{shard_file(0)} hash",
    someone_else_s: "step-00000002 DCP",
}
"""Each with the words that its line has to name."""


@pytest.mark.parametrize("spoil", ODD_MEMBERS)
def test_one_odd_checkpoint_of_a_run_is_told_beside_the_whole_ones(
    checkpoint: Command, place: Path, spoil: Callable[[Path], None], said: Said
) -> None:
    spoil(place)

    done = checkpoint("verify", "runs/run")
    listed = checkpoint("ls", "runs/run")

    assert done.code == 1
    lines = done.out.splitlines()
    assert sorted(line.split(":")[0] for line in lines) == ["damaged", "whole", "whole", "whole"]
    (damaged,) = [line for line in lines if line.startswith("damaged")]
    assert lacks(damaged, ODD_MEMBERS[spoil]) == []
    said(damaged)
    assert listed.code == 0
    assert len(listed.out.splitlines()) == 4
    assert "Traceback" not in done.err + listed.err


def test_a_later_version_s_checkpoint_does_not_hide_the_others_of_its_run(checkpoint: Command, place: Path) -> None:
    later_format(place, 3)

    listed, verified = checkpoint("ls", "runs/run"), checkpoint("verify", "runs/run")
    pruned = checkpoint("prune", "runs/run", "--keep-last", "2")

    assert (listed.code, verified.code) == (0, 1)
    assert [line.split()[1] for line in listed.out.splitlines()] == ["0.1", "0.1", "unknown:", "0.1"]
    assert [line.split(":")[0] for line in verified.out.splitlines()] == ["whole", "whole", "unknown", "whole"]
    assert numbers(pruned.out) == [1, 2]  # the step that is deleted, and how many stay
    assert (place / of_step(3)).is_dir()


def test_two_names_of_one_step_are_one_step(checkpoint: Command, place: Path) -> None:
    (place / "runs/run/checkpoints/step-000000004").mkdir()

    assert checkpoint("path", "runs/run").out.endswith("step-00000004\n")
    assert checkpoint("verify", "runs/run").code == 0


@pytest.mark.parametrize(
    "words",
    [
        "path runs/run --best loss --last",
        "path runs/run --best loss --mode most",
        f"export {of_step(4)} -o out --adapter --format torch",
    ],
)
def test_options_that_do_not_go_together_are_refused(checkpoint: Command, place: Path, words: str, said: Said) -> None:
    done = checkpoint(*words.split())

    assert (done.code, done.out) == (2, "")
    said(done.err.strip())
    assert not (place / "out").exists()


@pytest.mark.parametrize("form", ["hf", "torch"])
@pytest.mark.parametrize(
    "output",
    [
        of_step(4),
        f"{of_step(4)}/assets",
        f"{of_step(4)}/new",
        f"{of_step(4)}/tensors/deep/new",
        "rows.jsonl",
        "rows.jsonl/new",
        "runs",
        ".",
        "/proc/new",
    ],
)
def test_an_export_is_never_written_over_or_into_something_else(
    checkpoint: Command, place: Path, output: str, form: str, said: Said
) -> None:
    before = contents(place)

    done = checkpoint("export", of_step(4), "--format", form, "-o", output)

    assert done.code in ({2, 3} if output == "/proc/new" else {2}), done
    assert done.err.startswith(f"{output} ")
    if output != "/proc/new":  # who may write there is another question on each machine
        said(done.err.strip())
    assert "Traceback" not in done.err
    assert contents(place) == before


def test_a_diff_says_identical_only_of_bytes_that_are_what_the_manifests_say(
    checkpoint: Command, place: Path, said: Said
) -> None:
    shutil.copytree(place / of_step(4), place / "copy")
    shard = place / of_step(4) / shard_file(0)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1

    whole = checkpoint("diff", "copy", of_step(4))
    shard.write_bytes(data)
    flipped = checkpoint("diff", "copy", of_step(4))
    (place / of_step(3) / "trainer.json").write_bytes(b"x" * (place / of_step(3) / "trainer.json").stat().st_size)
    state = checkpoint("diff", of_step(3), "copy", "--all")

    assert (whole.code, whole.out) == (0, "identical\n")
    assert (flipped.code, flipped.out) == (1, "")
    assert f"{of_step(4)}/{shard_file(0)}" in flipped.err
    said(flipped.err.partition(" Damaged")[0])
    assert state.code == 1
    assert f"{of_step(3)}/trainer.json" in state.err
    said(state.err.strip())
    assert "Traceback" not in state.err


def writing(folder: Path) -> list[tuple[str, ...]]:
    """Return commands that write to a directory."""
    return [
        ("export", of_step(4), "-o", f"{folder}/out"),
        ("export", of_step(4), "--format", "torch", "-o", f"{folder}/out.pt"),
        ("average", of_step(3), of_step(4), "-o", f"{folder}/out"),
    ]


def test_a_read_only_directory_is_refused_by_what_writes_and_read_by_the_rest(
    checkpoint: Command, place: Path, disk: tuple[Path, Remount]
) -> None:
    folder, remount = disk
    shutil.copytree(place / "runs/run", folder / "run", ignore=shutil.ignore_patterns("report.html"))  # a small disk
    remount("ro")

    for arguments in [*writing(folder), ("prune", f"{folder}/run"), ("pin", f"{folder}/run", "1")]:
        done = checkpoint(*arguments)

        assert done.code == 2, (arguments, done)
        assert str(folder) in done.err
        assert len(done.err.splitlines()) == 1
    for arguments in [("verify",), ("ls",), ("show",), ("path",), ("prune", "--dry-run")]:
        assert checkpoint(arguments[0], f"{folder}/run", *arguments[1:]).code == 0, arguments
    assert checkpoint("export", f"{folder}/run", "-o", "out").code == 0


def test_a_full_disk_fails_an_export_and_gets_its_room_back(
    checkpoint: Command, place: Path, disk: tuple[Path, Remount]
) -> None:
    folder, remount = disk
    remount("size=20k")

    for arguments in writing(folder):
        done = checkpoint(*arguments)

        assert done.code == 3, (arguments, done)
        assert lacks(done.err, f"{folder}/out [Errno 28]") == []
        assert len(done.err.splitlines()) == 1
        assert list(folder.iterdir()) == []


def test_exports_at_once_to_one_name_leave_one_of_them_whole(warm: WarmPython, place: Path) -> None:
    def at_once(*arguments: str) -> list[tuple[int, str]]:
        """Export steps 1 to 4 to one name, all started together."""
        started = [
            subprocess.Popen(
                [warm.program, "-m", "holdfast.cli.main", "checkpoint", "export", of_step(step), *arguments],
                cwd=place,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for step in (1, 2, 3, 4)
        ]
        told = [process.communicate(timeout=60)[1] for process in started]
        return [(process.returncode, text) for process, text in zip(started, told, strict=True)]

    directories = at_once("-o", "out")
    files = at_once("--format", "torch", "-o", "out.pt")

    name = "model.embed_tokens.weight"
    held = {load_file(path)[name].numpy().tobytes() for path in place.glob("out/*.safetensors")}
    state = torch.load(place / "out.pt", weights_only=True)
    assert [code for code, _ in directories] == [0] * 4, directories
    assert len(held) == 1
    assert sorted(code for code, _ in files) == [0, 2, 2, 2], files
    assert all("out.pt" in text for code, text in files if code == 2)
    assert float(state["optimizer"]["state"][name]["step"]) == files.index((0, "")) + 1
    assert sorted(path.name for path in place.iterdir()) == ["out", "out.pt", "rows.jsonl", "run.yaml", "runs"]


@pytest.mark.slow
def test_commands_beside_a_run_that_goes_on_see_whole_checkpoints_and_delete_none(
    warm: WarmPython, checkpoint: Command, place: Path
) -> None:
    """Retention deletes older checkpoints all the while."""
    command = [warm.program, "-m", "holdfast.cli.main", "sft", "run.yaml", "steps=100000", "checkpoint.keep.last=2"]
    with (place / "told").open("w") as told:
        run = subprocess.Popen(command, cwd=place, stdout=told, stderr=subprocess.STDOUT)
    try:
        while "checkpoint of step 8" not in (place / "told").read_text():
            assert run.poll() is None, (place / "told").read_text()
        pruned, second = checkpoint("prune", "runs/run"), resume(warm, place)
        looked = [checkpoint("verify", "runs/run") for _ in range(6)]
        listed = [checkpoint("ls", "runs/run") for _ in range(6)]
    finally:
        run.terminate()
        assert run.wait(60) == 3

    for refused in (pruned, second):
        assert refused.code == 2
        assert "runs/run" in refused.err
        assert re.search(r"\(process \d+ ", refused.err)
        assert "Traceback" not in refused.err
    assert [done.code for done in looked + listed] == [0] * 12, looked
    assert not [done for done in listed if "damaged" in done.out]
    assert checkpoint("verify", "runs/run").code == 0


def moved(place: Path) -> str:
    for step in (1, 2, 3, 4):
        (place / of_step(step)).rename(place / f"step-{step}")
    return f"checkpoint.storage={place / 'runs/run/checkpoints'}"


def another_storage(place: Path) -> str:
    return f"checkpoint.storage={place / 'elsewhere'}"


@pytest.mark.parametrize("lose", [moved, another_storage])
def test_a_run_whose_checkpoints_are_gone_does_not_start_again_at_step_0(
    warm: WarmPython, place: Path, lose: Callable[[Path], str], said: Said
) -> None:
    storage = lose(place)
    before = (place / "runs/run/metrics.jsonl").read_bytes()

    done = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", "steps=5", storage, cwd=place)

    assert done.code == 2, done
    assert lacks(done.err, f"runs/run 4 {storage.partition('=')[2]} run.name 0") == []
    said(done.err.strip())
    assert "Traceback" not in done.err
    assert (place / "runs/run/metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.config.hidden_size=32"], "model head_dim hidden_size"),
        (["optim.kind=sgd"], "torch.optim.adamw.AdamW torch.optim.sgd.SGD"),
        (
            ["model.config.num_hidden_layers=2", "checkpoint.resume.changed=[model]"],
            "model.layers.1.mlp.down_proj.weight resume.add",
        ),
    ],
)
@pytest.mark.cases(1)
def test_a_run_that_changed_its_model_or_optimizer_is_not_resumed(
    warm: WarmPython, place: Path, overrides: list[str], named: str, said: Said
) -> None:
    before = contents(place / "runs/run/checkpoints") | contents(place / "runs/run/exports")

    done = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", "steps=5", *overrides, cwd=place)

    assert done.code == 2, done
    assert lacks(done.err, named) == []
    said(done.err.strip())
    assert "Traceback" not in done.err
    assert contents(place / "runs/run/checkpoints") | contents(place / "runs/run/exports") == before


@pytest.mark.parametrize("verb", ["export", "average"])
def test_code_that_lies_in_a_checkpoint_is_run_only_on_demand(
    checkpoint: Command, warm: WarmPython, place: Path, verb: str, said: Said
) -> None:
    assets, target = place / of_step(4) / "assets", place / "executed"
    yaml = (assets / "holdfast.yaml").read_text()
    (assets / "holdfast.yaml").write_text(yaml.replace("trust_remote_code: false", "trust_remote_code: true"))
    config = json.loads((assets / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (assets / "config.json").write_text(json.dumps(config))
    (assets / "evil.py").write_text(
        f"import pathlib; pathlib.Path({str(target)!r}).touch()\n"
        "from transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
    )
    rewrite_manifest(place / of_step(4))

    done = checkpoint(verb, of_step(4), "-o", "out")
    executed = target.exists()
    words = ("checkpoint", verb, of_step(4), "-o", "out", "--trust-remote-code")
    warm.run("-m", "holdfast.cli.main", *words, cwd=place)  # it changes classes of transformers

    assert done.code == 2
    assert lacks(done.err, "--trust-remote-code") == []
    said(done.err.strip())
    assert not executed
    assert target.exists(), "the code does nothing, so the test shows nothing"


def test_a_run_whose_every_checkpoint_was_put_aside_is_still_one(checkpoint: Command, place: Path) -> None:
    folder = place / "runs/run/checkpoints"
    steps = sorted(path.name for path in folder.glob("step-*"))
    for name in steps:
        (folder / name).rename(folder / f".quarantine-{name}-12345678")

    listed, verified = checkpoint("ls", "runs/run"), checkpoint("verify", "runs/run")

    assert (listed.code, verified.code) == (0, 1)
    assert [line.split()[:2] for line in listed.out.splitlines()] == [
        [f".quarantine-{name}-12345678", "damaged,"] for name in steps
    ]
    assert all(f".quarantine-{name}-12345678" in verified.out + verified.err for name in steps)
