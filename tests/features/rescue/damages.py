"""Ways in which a checkpoint of another system is damaged, each with words that name it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class Damage:
    """One way, on one fixture."""

    fixture: str
    do: Callable[[Path], None]
    """Changes a copy of the fixture's checkpoint."""
    named: str
    """What the check must say, as a regular expression."""


def actor(folder: Path) -> Path:
    return folder / "global_step_2" / "actor"


def rank_file(folder: Path, kind: str = "model", rank: int = 1) -> Path:
    return next(actor(folder).glob(f"{kind}_world_size_*_rank_{rank}.pt"))


def cut(path: Path, share: float = 0.6) -> None:
    os.truncate(path, int(path.stat().st_size * share))


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def sparse(path: Path) -> None:
    size = path.stat().st_size
    path.unlink()
    with path.open("wb") as file:
        file.truncate(size)


def members(path: Path) -> list[tuple[zipfile.ZipInfo, bytes]]:
    with zipfile.ZipFile(path) as archive:
        return [(entry, archive.read(entry)) for entry in archive.infolist()]


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None], kind: int = zipfile.ZIP_STORED) -> None:
    """Write an archive again, each member as `change` returns it; None leaves it out."""
    entries = members(path)
    with zipfile.ZipFile(path, "w", kind) as archive:
        for entry, data in entries:
            new = change(entry.filename, data)
            if new is not None:
                archive.writestr(entry.filename, new)


def storage(path: Path, number: int) -> Callable[[str], bool]:
    return lambda name: name.endswith(f"/data/{number}")


def without_storage(path: Path, number: int = 0) -> None:
    rewritten(path, lambda name, data: None if storage(path, number)(name) else data)


def short_storage(path: Path, number: int = 0) -> None:
    rewritten(path, lambda name, data: data[:-4] if storage(path, number)(name) else data)


def nan_in(path: Path, number: int = 0) -> None:
    nan = torch.tensor([float("nan")]).numpy().tobytes()
    rewritten(path, lambda name, data: nan + data[4:] if storage(path, number)(name) else data)


def flipped(path: Path, number: int = 0) -> None:
    """Change bytes of a storage in the file itself, so that the archive's checksum tells."""
    data = bytearray(path.read_bytes())
    content = next(content for entry, content in members(path) if storage(path, number)(entry.filename))
    at = bytes(data).find(content)
    data[at] ^= 0xFF
    path.write_bytes(bytes(data))


def flipped_at(path: Path, text: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[bytes(data).index(text)] ^= 1
    path.write_bytes(bytes(data))


def zeroed_storage(path: Path, number: int = 0) -> None:
    data = path.read_bytes()
    content = next(content for entry, content in members(path) if storage(path, number)(entry.filename))
    at = data.find(content)
    path.write_bytes(data[:at] + bytes(len(content)) + data[at + len(content) :])


def compressed(path: Path) -> None:
    rewritten(path, lambda _, data: data, zipfile.ZIP_DEFLATED)


def pickled(path: Path, value: Any) -> None:
    """Replace the pickle of a torch file."""
    rewritten(path, lambda name, data: value if name.endswith("data.pkl") else data)


class _Runs:
    """Would run a command, if anybody let it."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def hostile(path: Path) -> None:
    pickled(path, pickle.dumps(_Runs(f"touch {path.parent}/owned"), protocol=2))


def huge_memo(path: Path) -> None:
    pickled(path, b"\x80\x02}r\xff\xff\xff\x7f.")


def outside(path: Path) -> None:
    target = path.parent.parent / "elsewhere.pt"
    shutil.move(path, target.parent.parent.parent / "elsewhere.pt")
    path.symlink_to(target.parent.parent.parent / "elsewhere.pt")


def changed_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def state_of(path: Path, change: Callable[[Any], None]) -> None:
    """Load a plain torch file, change what it holds, and save it again."""
    if version("torch").startswith("2.11."):
        pytest.skip("the file holds a mesh of a newer torch, which 2.11 cannot read to change it")
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def other_schedule(folder: Path, step: int = 5, ranks: Sequence[int] = (1,)) -> None:
    for rank in ranks:
        path = rank_file(folder, "extra_state", rank)
        data = next(data for entry, data in members(path) if entry.filename.endswith("data.pkl"))
        at = data.find(b"last_epoch")
        number = data.find(b"K\x02", at)
        pickled(path, data[: number + 1] + bytes([step]) + data[number + 2 :])


def step_on_one_rank(folder: Path) -> None:
    """Let one rank's optimizer be of a later save: its step counters say another number."""
    path = rank_file(folder, "optim")
    five = torch.tensor(5.0).numpy().tobytes()
    two = torch.tensor(2.0).numpy().tobytes()
    rewritten(path, lambda _, data: five if data == two else data)


def each(folder: Path, *changes: Callable[[Path], None]) -> None:
    for change in changes:
        change(folder)


def copy_rank(folder: Path, kind: str = "model") -> None:
    shutil.copyfile(rank_file(folder, kind, 0), rank_file(folder, kind, 1))


def swap_ranks(folder: Path, kind: str = "optim", ranks: tuple[int, int] = (0, 1)) -> None:
    first, second = (rank_file(folder, kind, rank) for rank in ranks)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def anonymous(folder: Path, *kinds: str) -> None:
    """Give the rank files of some kinds the archive name that torch.save writes into an open file."""
    for kind in kinds:
        for path in actor(folder).glob(f"{kind}_world_size_*.pt"):
            entries = members(path)
            with zipfile.ZipFile(path, "w") as archive:
                for entry, data in entries:
                    archive.writestr(f"archive/{entry.filename.partition('/')[2]}", data)


def group_of_one_rank(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    state_of(rank_file(folder, "optim"), lambda content: change(content["param_groups"][0]))


def fewer_parameters(group: dict[str, Any]) -> None:
    del group["params"][-12:]


def other_world(folder: Path) -> None:
    path = rank_file(folder)
    shutil.copyfile(path, path.with_name(path.name.replace("world_size_2", "world_size_4")))


def swap_config(folder: Path) -> None:
    changed_json(actor(folder) / "huggingface" / "config.json", hidden_size=16, intermediate_size=24)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def reset_metadata(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))


def stray_shard(folder: Path) -> None:
    shutil.copyfile(folder / "__0_0.distcp", folder / "__7_0.distcp")


def flipped_shard(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    at = bytes(data).find(b"/data/0")
    data[at + 100] ^= 0xFF  # behind the name there is padding up to 64 bytes, then the numbers
    path.write_bytes(bytes(data))


VERL, FLAT, ORIG = "verl-fsdp2", "verl-fsdp1-flat", "verl-fsdp1-orig"
DAMAGES = {
    "a rank's weights are missing": Damage(
        VERL, lambda f: rank_file(f).unlink(), r"model_world_size_2_rank_1\.pt is missing"
    ),
    "a rank's optimizer is missing": Damage(VERL, lambda f: rank_file(f, "optim").unlink(), r"optim_world.*is missing"),
    "a rank's rest is missing": Damage(
        VERL, lambda f: rank_file(f, "extra_state").unlink(), r"extra_state.*is missing"
    ),
    "weights are cut short": Damage(VERL, lambda f: cut(rank_file(f)), r"model.*rank_1\.pt is cut short"),
    "an optimizer is cut short": Damage(FLAT, lambda f: cut(rank_file(f, "optim")), r"optim.*is cut short"),
    "weights are empty": Damage(VERL, lambda f: empty(rank_file(f)), r"rank_1\.pt is empty"),
    "weights are zeros": Damage(VERL, lambda f: zeros(rank_file(f)), r"rank_1\.pt holds zeros"),
    "weights are a hole": Damage(VERL, lambda f: sparse(rank_file(f)), r"rank_1\.pt holds zeros"),
    "a storage is missing": Damage(VERL, lambda f: without_storage(rank_file(f)), r"lacks .*data/0"),
    "a storage is short": Damage(VERL, lambda f: short_storage(rank_file(f)), r"bytes in .*data/0"),
    "a weight is NaN": Damage(VERL, lambda f: nan_in(rank_file(f)), r"NaN or infinite"),
    "a moment is NaN": Damage(FLAT, lambda f: nan_in(rank_file(f, "optim"), 1), r"of .* holds 1 numbers that are NaN"),
    "a byte flipped": Damage(VERL, lambda f: flipped(rank_file(f)), r"checksum of storage 0"),
    "a storage is zeros": Damage(VERL, lambda f: zeroed_storage(rank_file(f)), r"checksum of storage 0.*only zeros"),
    "members are compressed": Damage(VERL, lambda f: compressed(rank_file(f)), r"compressed members"),
    "one rank's file twice": Damage(VERL, copy_rank, r"rank_1\.pt was written as model_world_size_2_rank_0\.pt"),
    "one rank's file twice, without a name": Damage(
        VERL, lambda f: each(f, copy_rank, lambda f: anonymous(f, "model")), r"there twice"
    ),
    "swapped optimizers of flat parameters": Damage(FLAT, swap_ranks, r"rank_0\.pt was written as .*rank_1\.pt"),
    "swapped optimizers of original parameters": Damage(ORIG, swap_ranks, r"rank_0\.pt was written as .*rank_1\.pt"),
    "swapped optimizers without a mesh": Damage("verl-fsdp1-nomesh", swap_ranks, r"was written as .*rank_1\.pt"),
    "swapped optimizers without a name": Damage(
        ORIG,
        lambda f: each(f, swap_ranks, lambda f: anonymous(f, "optim")),
        r"optim\S*rank_0\.pt and optim\S*rank_1\.pt hold the runs that others of them have",
    ),
    "swapped optimizers of four ranks without a name": Damage(
        "verl-fsdp1-orig-4",
        lambda f: each(f, lambda f: swap_ranks(f, ranks=(1, 2)), lambda f: anonymous(f, "optim")),
        r"rank_1\.pt and optim\S*rank_2\.pt hold the runs that others of them have",
    ),
    "optimizers of two models": Damage(
        ORIG,
        lambda f: group_of_one_rank(f, fewer_parameters),
        r"optim\S*rank_0\.pt has 27 parameters, optim\S*rank_1\.pt 15",
    ),
    "optimizers of two learning rates": Damage(
        VERL,
        lambda f: group_of_one_rank(f, lambda group: group.update(lr=0.5)),
        r"optim\S*rank_0\.pt and optim\S*rank_1\.pt are of two saves: lr",
    ),
    "a state that no group has": Damage(
        "verl-fsdp2-1",
        lambda f: state_of(rank_file(f, "optim", 0), lambda content: content["state"].update({99: {}})),
        r"parameter 99, which none of its groups has",
    ),
    "a setting of the optimizer flipped": Damage(
        FLAT, lambda f: flipped_at(rank_file(f, "optim"), b"weight_decay"), r"checksum of .*data\.pkl does not fit"
    ),
    "two world sizes": Damage(VERL, other_world, r"several world sizes"),
    "the configuration says other ranks": Damage(
        VERL, lambda f: changed_json(actor(f) / "fsdp_config.json", world_size=8), r"says 8 ranks"
    ),
    "another model's configuration": Damage(VERL, swap_config, r"another model's"),
    "schedules of two steps": Damage(VERL, other_schedule, r"of different steps"),
    "optimizers of two steps": Damage(VERL, step_on_one_rank, r"are of two steps"),
    "flat optimizers of two steps": Damage(FLAT, step_on_one_rank, r"are of two steps"),
    "the tracker names no step": Damage(
        VERL, lambda f: (f / "latest_checkpointed_iteration.txt").write_text("9") and None, r"names step 9"
    ),
    "a run of parameters is lost": Damage(
        ORIG,
        lambda f: state_of(rank_file(f, "optim"), lambda content: content["state"].clear()),
        r"has .* numbers for",
    ),
    "weights are another pickle": Damage(
        VERL, lambda f: pickled(rank_file(f), pickle.dumps([1, 2], 2)), r"no state of a model"
    ),
    "weights are a pickle of another protocol": Damage(
        VERL, lambda f: pickled(rank_file(f), pickle.dumps({}, 4)), r"pickle of protocol 4"
    ),
    "DCP's list is missing": Damage("dcp", lambda f: (f / ".metadata").unlink(), r"lacks \.metadata.*never ended"),
    "DCP's list is cut short": Damage("dcp", lambda f: cut(f / ".metadata"), r"\.metadata cannot be read"),
    "DCP's list is empty": Damage("dcp", lambda f: empty(f / ".metadata"), r"\.metadata is empty"),
    "DCP's list is another pickle": Damage("dcp", reset_metadata, r"\.metadata cannot be read"),
    "a shard is missing": Damage(
        "titan", lambda f: (f / "step-2" / "__1_0.distcp").unlink(), r"__1_0\.distcp is missing"
    ),
    "a shard is cut short": Damage(
        "titan", lambda f: cut(f / "step-2" / "__1_0.distcp"), r"__1_0\.distcp has .* were written"
    ),
    "a shard of another save": Damage("dcp", stray_shard, r"__7_0\.distcp is not in \.metadata"),
    "a chunk is damaged": Damage("dcp", flipped_shard, r"__0_0\.distcp"),
    "the step in the name is another": Damage("titan", lambda f: (f / "step-2").rename(f / "step-4"), r"of step 2"),
    "the optimizer's DCP is missing a shard": Damage(
        "accelerate-v2-sharded",
        lambda f: (f / "optimizer_0" / "__1_0.distcp").unlink(),
        r"optimizer_0/__1_0\.distcp is missing",
    ),
    "a rank's random state is missing": Damage(
        "accelerate-v2-sharded", lambda f: (f / "random_states_0.pkl").unlink(), r"random state of rank 0"
    ),
    "the full optimizer is cut short": Damage("accelerate-v2-full", lambda f: cut(f / "optimizer.bin"), r"cut short"),
    "the weights are gone": Damage(
        "accelerate-v2-full", lambda f: (f / "pytorch_model_fsdp.bin").unlink(), r"no weights"
    ),
    "progress and directory differ": Damage(
        "trainer-full", lambda f: changed_json(f / "trainer_state.json", global_step=4), r"is of step 4"
    ),
    "progress is missing": Damage(
        "trainer-sharded", lambda f: (f / "trainer_state.json").unlink(), r"trainer_state\.json is missing"
    ),
    "progress is cut short": Damage(
        "trainer-full", lambda f: cut(f / "trainer_state.json"), r"trainer_state\.json cannot be read"
    ),
    "meta.pt is missing": Damage("lightning-mp-sharded", lambda f: (f / "meta.pt").unlink(), r"meta\.pt is missing"),
    "meta.pt is empty": Damage("lightning-fsdp-sharded", lambda f: empty(f / "meta.pt"), r"meta\.pt is empty"),
    "one file is cut short": Damage("lightning-mp-full", cut, r"cut short"),
}


def without_slot(path: Path) -> None:
    state_of(path, lambda content: content["state"][list(content["state"])[3]].pop("exp_avg"))


def steps(value: float) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for slots in content["state"].values():
            slots["step"] = torch.tensor(value)

    return change


def vector_step(content: Any) -> None:
    for slots in content["state"].values():
        slots["step"] = torch.ones(3)


def mixed_steps(content: Any) -> None:
    for number, slots in enumerate(content["state"].values()):
        slots["step"] = torch.tensor(1.0 + number % 2)


def overlap(folder: Path) -> None:
    """Let the second chunk of a tensor begin two rows earlier than it was cut."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    name = next(key for key, value in metadata.state_dict_metadata.items() if len(getattr(value, "chunks", ())) == 2)
    chunk = metadata.state_dict_metadata[name].chunks[1]
    old = chunk.offsets
    chunk.offsets = torch.Size([old[0] - 2, *old[1:]])
    metadata.storage_data = {
        dataclasses.replace(index, offset=chunk.offsets) if (index.fqn, index.offset) == (name, old) else index: info
        for index, info in metadata.storage_data.items()
    }
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def two_models(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    name = next(key for key in metadata.state_dict_metadata if key.startswith("model."))
    other = name.replace("model.", "module.", 1)
    metadata.state_dict_metadata[other] = metadata.state_dict_metadata[name]
    metadata.planner_data[other] = ("module", *metadata.planner_data[name][1:])
    for index, info in list(metadata.storage_data.items()):
        if index.fqn == name:
            metadata.storage_data[dataclasses.replace(index, fqn=other)] = info
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def outside_folder(path: Path) -> None:
    target = next(each for each in path.parents if each.name == "copy").parent / "elsewhere"
    shutil.move(path, target)
    path.symlink_to(target)


def nested(path: Path) -> None:
    """Let a setting be a list of lists whose text would be 2**40 words long."""
    value: Any = "x"
    for _ in range(40):
        value = [value, value]
    pickled(path, pickle.dumps({"state": {}, "param_groups": [{"params": [], "x": value}]}, 2))


def shared_keys(made: bytes) -> bytes:
    """Return a pickle whose key is a tuple of the same tuple twice, sixty times: 2**60 elements to look at."""
    words = [b"\x80\x02ctorch\nSize\nr\xff\x00\x00\x000})q\x00"]
    for level in range(60):
        words.append(b"0" + made % {b"one": bytes([level])} + b"q" + bytes([level + 1]))
    return b"".join(words) + b"K\x01s."


SHARED = {
    "remembered": b"h%(one)bh%(one)b\x86",
    "copied": b"h%(one)b2\x86",
    "of a list": b"j\xff\x00\x00\x00](h%(one)bh%(one)be\x85R",
    "of a list that is remembered": b"]r\xfe\x00\x00\x00(h%(one)bh%(one)be0j\xff\x00\x00\x00j\xfe\x00\x00\x00\x85R",
}
"""How a tuple comes to hold another one twice, in the words of a pickle."""

FULL, SHARDED = "accelerate-v2-full", "accelerate-v2-sharded"
DAMAGES |= {
    "a parameter lacks a moment": Damage(
        "trainer-full", lambda f: without_slot(f / "optimizer.bin"), r"lacks exp_avg of"
    ),
    "a step below zero": Damage(FULL, lambda f: state_of(f / "optimizer.bin", steps(-7)), r"optimizer's step is -7"),
    "a step that is NaN": Damage(FULL, lambda f: state_of(f / "optimizer.bin", steps(float("nan"))), r"step is nan"),
    "a step without end": Damage(FULL, lambda f: state_of(f / "optimizer.bin", steps(float("inf"))), r"step is inf"),
    "an optimizer of another step": Damage(
        "trainer-full",
        lambda f: state_of(f / "optimizer.bin", steps(1)),
        r"made 1 updates, the checkpoint is of step 2",
    ),
    "a step of three numbers": Damage(
        FULL, lambda f: state_of(f / "optimizer.bin", vector_step), r"step is no such number"
    ),
    "states of two steps": Damage(
        FULL, lambda f: state_of(f / "optimizer.bin", mixed_steps), r"updates of .* of two saves"
    ),
    "the configuration is cut short": Damage("trainer-full", lambda f: cut(f / "config.json"), r"config\.json cannot"),
    "a flat optimizer's file twice, without a name": Damage(
        FLAT,
        lambda f: each(f, lambda f: copy_rank(f, "optim"), lambda f: anonymous(f, "optim")),
        r"rank_1\.pt is optim.*rank_0\.pt once more",
    ),
    "a pass below zero": Damage(
        "trainer-full", lambda f: changed_json(f / "trainer_state.json", epoch=-1.5), r"epoch is -2"
    ),
    "a pass without end": Damage(
        "trainer-full", lambda f: changed_json(f / "trainer_state.json", epoch=float("inf")), r"trainer_state\.json"
    ),
    "a schedule of five hundred digits": Damage(
        "trainer-full",
        lambda f: state_of(f / "scheduler.pt", lambda content: content.update(last_epoch=10**500)),
        r"step of the schedule is no such number",
    ),
    "groups that are numbers": Damage(
        FULL,
        lambda f: torch.save({"state": {}, "param_groups": [5]}, f / "optimizer.bin"),
        r"holds what its system never writes",
    ),
    "chunks overlap": Damage("dcp", overlap, r"its parts overlap"),
    "two models in one": Damage("dcp", two_models, r"two weights are called .*model\..* and module\."),
    "a second model's folder": Damage(
        SHARDED,
        lambda f: shutil.copytree(f / "pytorch_model_fsdp_0", f / "pytorch_model_fsdp_1") and None,
        r"pytorch_model_fsdp_1 beside",
    ),
    "a second optimizer's folder": Damage(
        SHARDED, lambda f: shutil.copytree(f / "optimizer_0", f / "optimizer_1") and None, r"optimizer_1 beside"
    ),
    "weights as a folder and as a file": Damage(
        SHARDED, lambda f: (f / "pytorch_model_fsdp.bin").write_bytes(b"x") and None, r"holds its weights twice"
    ),
    "the model's folder is elsewhere": Damage(
        SHARDED, lambda f: outside_folder(f / "pytorch_model_fsdp_0"), r"link that leads out"
    ),
    "the configuration's folder is elsewhere": Damage(
        VERL, lambda f: outside_folder(actor(f) / "huggingface"), r"huggingface is a link that leads out"
    ),
    "the loader's state is elsewhere": Damage(
        VERL, lambda f: outside_folder(f / "global_step_2" / "data.pt"), r"data\.pt is a link that leads out"
    ),
    "progress is elsewhere": Damage(
        "trainer-full", lambda f: outside_folder(f / "trainer_state.json"), r"trainer_state\.json is a link that leads"
    ),
}

HOSTILE = {
    "a pickle that runs a command": Damage(VERL, lambda f: hostile(rank_file(f)), r"asks for (posix|os)\.system"),
    "a pickle in the rest": Damage(
        VERL, lambda f: hostile(rank_file(f, "extra_state")), r"asks for (posix|os)\.system"
    ),
    "a pickle in the schedule": Damage(
        "trainer-full", lambda f: hostile(f / "scheduler.pt"), r"asks for (posix|os)\.system"
    ),
    "a pickle in meta.pt": Damage(
        "lightning-mp-sharded", lambda f: hostile(f / "meta.pt"), r"asks for (posix|os)\.system"
    ),
    "a pickle as one file": Damage("lightning-mp-full", hostile, r"asks for (posix|os)\.system"),
    "a pickle in DCP's list": Damage(
        "dcp",
        lambda f: (f / ".metadata").write_bytes(pickle.dumps(_Runs(f"touch {f}/owned"))) and None,
        r"asks for posix\.system",
    ),
    "a table of two thousand million entries": Damage(
        VERL, lambda f: huge_memo(rank_file(f)), r"more memory or time than goes"
    ),
    "a link out of the directory": Damage(VERL, lambda f: outside(rank_file(f)), r"link that leads out"),
    "a pipe in the place of a file": Damage(VERL, lambda f: fifo(rank_file(f)), r"is a pipe"),
    "a pipe in the place of DCP's list": Damage("dcp", lambda f: fifo(f / ".metadata"), r"is a pipe"),
}


def bomb(path: Path) -> None:
    """Make an archive that grows a thousandfold when it is unpacked."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(10**7))
    path.write_bytes(buffer.getvalue())


HOSTILE |= {
    f"a key of the same tuple twice, {name}": Damage(
        VERL, lambda f, made=made: pickled(rank_file(f), shared_keys(made)), r"more memory or time than goes"
    )
    for name, made in SHARED.items()
}
HOSTILE["a key of the same tuple twice, in DCP's list"] = Damage(
    "dcp",
    lambda f: (f / ".metadata").write_bytes(shared_keys(SHARED["remembered"])) and None,
    r"more memory or time than goes",
)
HOSTILE["an archive that grows"] = Damage(VERL, lambda f: bomb(rank_file(f)), r"compressed members")
