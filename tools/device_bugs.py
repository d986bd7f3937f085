"""Plant device bugs in `src`, one at a time, and say whether the lane of fake devices notices.

    python tools/device_bugs.py planted
    python tools/device_bugs.py drawn --seed 19 --count 10

A bug is noticed where a run of the lane is not executed any more, or says something else than is written down in
tests/fake_devices/expected.json, which the lane compares: values that the host waits for, messages, the peak of each
kind of bytes, and what is made of each dtype. Twenty are written down here; others are drawn by a seeded mutator: it
drops a `.to(...)`, swaps a dtype, or drops a reshard. A `.to(...)` that every run of the
lane that comes by leaves as it was is no bug where it is dropped, and another is drawn: a probe in its place sees that.
The script writes to a copy of `src` in a temporary folder.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.fake_devices.cases import RUNS  # noqa: E402 - the tests are beside tools
from tests.fake_devices.expected import difference, expected  # noqa: E402 - same
from tests.fake_devices.lane import make_models  # noqa: E402 - same

SOURCE = Path("src/holdfast")


@dataclass(frozen=True)
class Bug:
    """One change of a file, and the runs that go through it."""

    name: str
    path: str
    old: str
    new: str
    runs: tuple[str, ...]
    probe: str = ""
    """What stands there instead to see whether a conversion changes anything: it fails by a name where it does."""


SFT, REFERENCE, POLICY = ("sft",), ("dpo offloaded reference", "dpo"), ("grpo",)
PLANTED = (
    Bug("batch left on the CPU", "training/step.py", "batch = to_device(micro_batch, model.run.world.device)",
        "batch = micro_batch", SFT),
    Bug("offsets left on the CPU", "models/layers/document_attention.py",
        "(numbers.pin_memory() if device.type == \"cuda\" else numbers).to(device, non_blocking=True)", "numbers", SFT),
    Bug("an item of the loss", "training/step.py", "assert isinstance(output, LossSum)\n            torch",
        "assert isinstance(output, LossSum)\n            output.loss.item()\n            torch", SFT),
    Bug("a data-dependent index", "models/heads/policy.py", "batch.tokens.flatten()[spans.scored_here(batch)]",
        "batch.tokens.flatten()[batch.loss_mask.flatten()]", SFT),
    Bug("slopes copied for the product", "models/scores.py", "narrow = slopes.to(states.dtype)",
        "narrow = slopes.to(states.dtype).clone()", SFT),
    Bug("a head gradient in float64", "models/scores.py", "else torch.float32\n        self._states",
        "else torch.float64\n        self._states", SFT),
    Bug("a buffer for every chunk of logits", "models/chunks/kernel_form.py", "if self._buffer is None:",
        "if (last := self._buffer) is not None or not last:", ("sft chunks of logits",)),
    Bug("a missing reshard", "parallel/apply.py", "reshard_after_forward=unit.reshard", "reshard_after_forward=False",
        SFT),
    Bug("sums reduced in float32", "parallel/collectives.py",
        "stacked = torch.stack([value.to(device=device, dtype=torch.float64)",
        "stacked = torch.stack([value.to(device=device, dtype=torch.float32)", SFT),
    Bug("gradients reduced in bfloat16", "parallel/apply.py", "reduce_dtype=getattr(torch, plan.reduce_dtype)",
        "reduce_dtype=compute", SFT),
    Bug("every micro-batch reduced", "parallel/shards.py", "policy.set_requires_gradient_sync(last)",
        "policy.set_requires_gradient_sync(True)", ("sft bfloat16",)),
    Bug("a reference that is not offloaded", "training/other_models/reference.py",
        'offload = "parameters" in config.parallel.offloads or kind == "offloaded"',
        'offload = "parameters" in config.parallel.offloads', REFERENCE),
    Bug("a reference with gradients", "training/setup/model.py",
        "origin.model.requires_grad_(False)", "origin.model.requires_grad_(True)", REFERENCE),
    Bug("a doubled gather", "parallel/stream.py",
        "return tensor.full_tensor() if isinstance(tensor, DTensor)",
        "return (tensor.full_tensor(), tensor.full_tensor())[0] if isinstance(tensor, DTensor)", POLICY),
    Bug("a copy for sampling in float32", "training/engines.py",
        "stops_of(model), getattr(torch, model.plan.compute_dtype)", "stops_of(model), torch.float32", POLICY),
    Bug("a copy that is not given back", "training/policy/run.py", "self.engine.sleep()", "False", POLICY),
    Bug("tokens looked at one by one", "rollout/local/rows.py",
        "        now.cursor.add_(1)\n",
        "        now.cursor.add_(1)\n        tokens.tolist()\n", POLICY),
    Bug("a cache in float32", "rollout/local/cache.py", "return states.new_zeros(self.capacity",
        "return states.float().new_zeros(self.capacity", POLICY),
    Bug("gradients that stay after the update", "training/step.py",
        "model.updater.zero_grad(set_to_none=True)", "model.updater.zero_grad(set_to_none=False)",
        ("sft one pass",)),
    Bug("a norm over ranks summed twice", "parallel/collectives.py",
        "    dist.all_reduce(stacked)\n", "    dist.all_reduce(stacked)\n    dist.all_reduce(stacked)\n", SFT),
)  # fmt: skip

DRAWN_FROM = (
    "training/step.py", "models/scores.py", "models/chunks/kernel_form.py", "models/heads/policy.py",
    "models/layers/attention.py", "models/layers/document_attention.py",
    "models/layers/routers.py", "parallel/apply.py", "parallel/shards.py", "parallel/collectives.py", "optim/lowbit.py",
    "optim/muon.py", "data/batches/packing.py", "training/other_models/reference.py", "training/policy/critic.py",
    "rollout/local/inprocess.py", "rollout/local/cache.py", "rollout/local/replica.py", "rollout/local/predictor.py",
    "objectives/base.py",
)  # fmt: skip
"""Files of the step. A drawn bug meets all runs of the lane."""
_MOVED = "holdfast_moved"
_IS_SAME = "(a.dtype, a.device) == (b.dtype, b.device)"
_PROBE = f"(lambda a: (lambda b: b if {_IS_SAME} else {_MOVED}())(a{{call}}))({{of}})"
"""A conversion of `of` that changes nothing, or fails by a name that nobody has."""
_DTYPES = {"float32": "bfloat16", "bfloat16": "float32", "float64": "float32"}


def mutants() -> list[Bug]:
    """Return every place that the mutator can change, in order."""
    made = []
    for path in DRAWN_FROM:
        text = (ROOT / SOURCE / path).read_text(encoding="utf-8")
        for line, old, new, probe in _changes(text):
            made.append(Bug(f"{path}:{line} {old!r} becomes {new!r}", path, old, new, (), probe))
    return made


def _changes(text: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield (line, what stands there, what shall, a probe): the text of a whole line, once in its file."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        change = _change(node, text)
        if change is None or not isinstance(node, ast.expr):
            continue
        line = lines[node.lineno - 1]
        old, new = change
        if text.count(line) == 1 and old in line:
            probe = _PROBE.format(of=new, call=old.removeprefix(new)) if old.startswith(f"{new}.to(") else ""
            yield node.lineno, line, line.replace(old, new, 1), line.replace(old, probe, 1) if probe else ""


def _change(node: ast.AST, text: str) -> tuple[str, str] | None:
    match node:
        case ast.Call(func=ast.Attribute(attr="to", value=inner), args=[_, *_]):
            return _in_a_line(ast.get_source_segment(text, node), ast.get_source_segment(text, inner))
        case ast.Call(func=ast.Attribute(attr="reshard" | "set_reshard_after_forward")):
            return _in_a_line(ast.get_source_segment(text, node), "None")
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in _DTYPES:
            return f"torch.{name}", f"torch.{_DTYPES[name]}"
        case _:
            return None


def _in_a_line(old: str | None, new: str | None) -> tuple[str, str] | None:
    return None if old is None or new is None or "\n" in old else (old, new)


def drawn(seed: int) -> list[Bug]:
    """Return all of them in the order in which they are drawn."""
    bugs = mutants()
    return random.Random(seed).sample(bugs, len(bugs))


def first_difference(source: Path, runs: Sequence[str], folder: Path) -> str:
    """Return what the lane says otherwise than is written down, of the first run that does; "" if none does.

    Two processes share the runs, and end as soon as one of them differs.
    """
    names = list(runs or RUNS)
    shares = [share for share in (names[::2], names[1::2]) if share]
    errors = folder / "errors.txt"  # among the lines of JSON they could cut one in two
    errors.unlink(missing_ok=True)
    processes = [_lane(source, share, folder, errors) for share in shares]
    try:
        with ThreadPoolExecutor(len(shares)) as pool:
            answers = [pool.submit(_compared, *each) for each in zip(processes, shares, strict=True)]
            for answer in as_completed(answers):
                if words := answer.result():
                    for process in processes:
                        process.kill()
                    return f"{words}: {errors.read_text()[-160:]}" if words.endswith(_ENDED) else words
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return ""


def _lane(source: Path, runs: Sequence[str], folder: Path, errors: Path) -> subprocess.Popen[str]:
    """Start the lane as rank 0 of 8."""
    environment = os.environ | {
        "PYTHONPATH": f"{source / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.fake_devices.lane", str(folder), "8", "0", *runs]
    with errors.open("a") as end:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end, text=True, cwd=ROOT, env=environment)


_ENDED = "is not executed"


def _compared(process: subprocess.Popen[str], runs: Sequence[str]) -> str:
    """Return how a run differs from what is written down, the first that does; a run that is not executed does."""
    left = set(runs)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("lane "):
            said = json.loads(line[5:])
            left.discard(said["run"])
            if words := difference(expected(said["run"]), said):
                return words
    return f"{min(left)} {_ENDED}" if left else ""


def main() -> int:
    """Plant the bugs, and print a line for each; return 1 where too few are noticed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("which", choices=["planted", "drawn"])
    parser.add_argument("--seed", type=int, default=19)
    parser.add_argument("--count", type=int, default=10)
    options = parser.parse_args()
    bugs = list(PLANTED) if options.which == "planted" else drawn(options.seed)
    count = len(PLANTED) if options.which == "planted" else options.count
    noticed = missed = 0
    with tempfile.TemporaryDirectory(prefix="holdfast-bugs-") as folder:
        place = Path(folder)
        make_models(place)
        for bug in bugs:
            why = _difference(bug, bug.new, place)
            is_bug = bool(why) or _changes_something(bug, place)
            noticed, missed = noticed + bool(why), missed + (is_bug and not why)
            word = "noticed" if why else "MISSED " if is_bug else "no bug "
            print(f"{word}  {bug.name}: {why or 'nothing differs'}", flush=True)
            if noticed + missed == count:
                break
    least = count if options.which == "planted" else round(0.9 * count)
    print(f"{noticed} of {count} noticed, at least {least} are asked for")
    return int(noticed < least)


def _changes_something(bug: Bug, place: Path) -> bool:
    """Return whether a conversion that was dropped does anything in the lane, or no run comes by it."""
    if not bug.probe or _difference(bug, bug.probe, place):
        return True
    return not _difference(bug, bug.probe.replace(_IS_SAME, "False"), place)


def _difference(bug: Bug, new: str, place: Path) -> str:
    """Return what the lane says otherwise with `new` in the place of what stands there; "" if nothing."""
    copy = place / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "src", copy / "src")
    file = copy / SOURCE / bug.path
    text = file.read_text(encoding="utf-8")
    assert bug.old in text, f"{bug.path} has no {bug.old!r} any more"
    changed = text.replace(bug.old, new, 1)
    ast.parse(changed)  # a text that is no program is noticed by anybody
    file.write_text(changed, encoding="utf-8")
    return first_difference(copy, bug.runs, place)


if __name__ == "__main__":
    sys.exit(main())
