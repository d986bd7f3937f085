"""The five reports where they came from: with the plug-ins, the checks for any script, or an import."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from holdfast.features.rescue.reading.examine import examine
from holdfast.features.rescue.reading.recognise import open_foreign
from holdfast.features.rescue.reading.record import ForeignCheckpoint
from tests.archives import unpack
from tests.failures import saving
from tests.failures.lab import Lab, Observed, last_words
from tests.features.rescue.damages import rank_file, state_of
from tests.features.rescue.reading import ARCHIVE, place_of, truth_of
from tests.features.trainers.test_checks import recomputed, references
from tests.features.trainers.test_trainers import result_of

HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None


def _read(path: Path) -> ForeignCheckpoint:
    checkpoint = open_foreign(path)
    examine(checkpoint)
    return checkpoint


def _repairs(checkpoint: ForeignCheckpoint) -> str:
    return "; ".join(each.text for each in checkpoint.of_kind("repair") if "report" in each.text)


def frozen_tower(lab: Lab) -> Observed:
    """Read what verl saved of an optimizer that its own offloading had put empty entries into (000)."""
    fixture = unpack(ARCHIVE, lab.folder) / "verl-fsdp2-poison"
    checkpoint, truth = _read(place_of(fixture)), truth_of(fixture)["optim"]
    exact = checkpoint.states.keys() == truth.keys() and all(
        torch.equal(checkpoint.states[name][key].read(), torch.as_tensor(value))
        for name, slots in truth.items()
        for key, value in slots.items()
    )
    words = f"checkpoint import: {_repairs(checkpoint)}; states of {len(truth)} parameters, bit for bit"
    return Observed(exact and not checkpoint.of_kind("damage"), words)


def dtype_in_a_group(lab: Lab) -> Observed:
    """Read rank files whose param groups hold a torch.dtype (001)."""
    path = place_of(unpack(ARCHIVE, lab.folder) / "verl-fsdp2")
    for rank in range(2):
        state_of(rank_file(path, "optim", rank), lambda content: content["param_groups"][0].update(momentum=torch.half))
    checkpoint = _read(path)
    holds = checkpoint.groups[0].settings["momentum"] is torch.half and not checkpoint.of_kind("damage")
    return Observed(holds, f"checkpoint import: {_repairs(checkpoint)}")


def recomputation(lab: Lab) -> Observed:
    """Ask a sharded model with and without its cache (002)."""
    with_cache, without = lab.pool(2).run(recomputed, True)[0], lab.pool(2).run(recomputed, False)[0]
    holds = not with_cache[0] and "use_cache = False" in with_cache[1] and without[0]
    return Observed(
        holds, f"recomputation_is_exact: no, {with_cache[1][:120]}...; with use_cache = False: {without[1]}"
    )


def naive_weights(lab: Lab) -> Observed:
    """Go on from weights alone with Lightning itself where it is installed, else by the lines of DCP (003)."""
    if not HAS_LIGHTNING:
        return saving.naive_weights(lab)
    answer = _resumed(lab.folder / "own", "own")
    return Observed(False, f"Lightning: {last_words(answer['words'], 110)}, when the weights were overwritten")


def weights_alone(lab: Lab) -> Observed:
    """Go on from weights alone with Lightning and the plug-in."""
    if not HAS_LIGHTNING:
        return Observed(True, "Lightning is not installed here: tools/test_rescue.sh asks the plug-in")
    answer = _resumed(lab.folder / "ours")
    holds = answer["error"] == "CheckpointMismatch" and "Nothing was changed" in answer["words"]
    return Observed(holds, f"ModelParallelStrategy of holdfast: {answer['error']}: {answer['words'][-230:]}")


def _resumed(out: Path, *flags: str) -> dict[str, Any]:
    """Save weights alone in a fit, and fit again from them; return the error."""
    result_of("lightning_script.py", str(out), "mp", "weights", *flags)
    return result_of("lightning_script.py", str(out), "mp", f"resume={out}/sstep=4.ckpt", *flags)


def reference(lab: Lab) -> Observed:
    """Ask for references that were sharded by layers, at the root alone, and in part (004)."""
    answers = lab.pool(2).run(references)[0]
    holds = {name: well for name, (well, _) in answers.items()} == {
        "layers": True, "root": False, "trained": False, "partly": False, "FSDP1": True,
    }  # fmt: skip
    return Observed(
        holds, f"reference_is_sharded: no, {answers['partly'][1][:110]}...; by layers: {answers['layers'][1]}"
    )
