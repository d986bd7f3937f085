"""Formats a plan as a table for people. This module imports nothing heavy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from holdfast.features.plan.counting.kinds import KINDS, RESUME
from holdfast.features.plan.devices import GIB
from holdfast.files import size_words

_SHORT = {
    "parameters": "params",
    "gathered": "gathered",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ.",
    "head": "head",
    "temporary": "temp.",
    "rollout_weights": "rollout w.",
    "key_value_cache": "k/v cache",
    "reference": "reference",
    "checkpoint": "ckpt copy",
}


def table(plan: Mapping[str, Any]) -> list[str]:
    """Return the lines that people read."""
    blocks = plan["compiled_blocks"]
    how = "executed on devices that compute nothing" + (f", {_several(blocks, 'compiled block')}" if blocks else "")
    if not plan["executed"]:
        how = "BY FORMULAS: nothing could be executed here, see the notes"
    counts = Counter(f"{value['phase']}: {value['reason']}" for value in plan["host_values"])
    waits = [wait if count == 1 else f"{wait} ({count} times)" for wait, count in counts.items()]
    return [
        f"plan of rank {plan['rank']} of {plan['ranks']} on {plan['device'] or 'cpu'}, {plan['parameters']:,} "
        f"parameters in {len(plan['units'])} units, {_several(plan['micro_batches'], 'micro-batch')} of up to "
        f"{plan['tokens_per_micro_batch']} tokens in an update",
        how,
        "",
        *_memory_lines(plan),
        *(
            f"on the host, {_title(row)}: {phase['total'] / GIB:.2f} GiB"
            for row, phase in plan["host"].items()
            if phase["total"] >= 2**26
        ),
        "",
        *([f"the host waits {_several(len(plan['host_values']), 'time')}: {'; '.join(waits)}"] if waits else []),
        f"a checkpoint takes {size_words(plan['checkpoint_bytes'])}, an export {size_words(plan['export_bytes'])}",
        *(f"server {number}: {command}" for number, command in enumerate(plan["servers"], 1)),
        *(f"note: {note}" for note in plan["notes"]),
        *verdict_lines(plan),
    ]


def _memory_lines(plan: Mapping[str, Any]) -> list[str]:
    kinds = [kind for kind in KINDS if any(phase["parts"].get(kind, 0) >= 2**20 for phase in plan["phases"].values())]
    lines = [_line("GiB at the peak", ["total", *(_SHORT[kind] for kind in kinds)])]
    for row, phase in plan["phases"].items():
        cells = [f"{phase['total'] / GIB:.2f}", *(_cell(phase["parts"].get(kind, 0)) for kind in kinds)]
        lines.append(_line(_title(row), cells))
    return lines


def verdict_lines(plan: Mapping[str, Any]) -> list[str]:
    """Say whether it fits, and what to turn where it does not."""
    peak, spare, memory = (plan[name] / GIB for name in ("peak_bytes", "allowance_bytes", "memory_bytes"))
    sum_ = f"{peak:.2f} GiB and {spare:.2f} GiB beside tensors (stated, not measured) of {memory:.2f} GiB"
    if plan["fits"]:
        return [f"it fits: {sum_}"]
    if plan["uncounted"] and "turns" not in plan:
        return [f"NOTHING SAYS THAT IT FITS: {plan['uncounted']} are not counted. What is counted takes {sum_}"]
    lines = [f"IT DOES NOT FIT: {sum_}. What to turn, the cheapest first, each with those above it; by formulas:"]
    for turn in plan.get("turns", []):
        fits = "should fit" if turn["fits"] else "does not fit yet"
        size = f"about {turn['peak_bytes'] / GIB:.2f} GiB"
        lines.append(f"  {turn['key']}: {turn['value']} -> {size}, {fits} ({turn['cost']})")
    if not any(turn["fits"] for turn in plan.get("turns", [])):
        lines.append("  nothing of this is enough: use more ranks, devices with more memory, or a smaller model")
    return lines


def longest_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the table of the longest rows that fit, one line for each `parallel.context`, by `parallel.offload`."""
    executed = f"{_several(found['executions'], 'execution')} of steps on devices that compute nothing"
    how = executed if found["executed"] else f"BY FORMULAS: {executed} were not possible, see the notes"
    memory = f"{found['memory_bytes'] / GIB:.2f} GiB"
    lines = [
        f"the longest row that fits, on {_several(found['ranks'], 'rank')} of {found['device'] or 'cpu'} with {memory} "
        "each; planned, one row to a micro-batch",
        f"{how}, {found['cpu_seconds']:.0f} s of CPU",
    ]
    for offload, answers in groupby(found["longest"], key=lambda answer: answer["offload"]):
        head = ("context", "tokens a row", "a rank", "GiB", "on host")
        lines += ["", f"parallel.offload: [{', '.join(offload)}]"]
        lines.append(_longest_cells(head, "at the peak of (largest parts)"))
        lines += map(_longest_line, answers)
    return [*lines, "", *(f"note: {note}" for note in found["notes"])]


def _longest_line(answer: Mapping[str, Any]) -> str:
    context = str(answer["context"])
    if "refused" in answer:
        return _longest_cells((context, "-", "", "", ""), answer["refused"])
    tokens = f"{answer['tokens']:,}" if answer["tokens"] else "none"
    of_rank = f"{answer['tokens_per_rank']:,}" if answer["tokens"] else ""
    parts = sorted(answer["parts"].items(), key=lambda part: -part[1])[:3]
    sizes = ", ".join(f"{_SHORT[kind]} {size / GIB:.2f}" for kind, size in parts)
    device, host = (f"{answer[name] / GIB:.2f}" for name in ("peak_bytes", "host_bytes"))
    return _longest_cells((context, tokens, of_rank, device, host), f"{_title(answer['phase'])} ({sizes})")


def _longest_cells(cells: Sequence[str], text: str) -> str:
    widths = (7, 15, 11, 9, 9)
    return "".join(f"{cell:>{width}s}" for cell, width in zip(cells, widths, strict=True)) + f"  {text}"


def _title(row: str) -> str:
    return "load + step, resumed" if row == RESUME else row


def _several(count: int, thing: str) -> str:
    plural = "es" if thing.endswith("ch") else "s"
    return f"{count} {thing}{plural if count != 1 else ''}"


def _cell(value: float) -> str:
    return f"{value / GIB:.2f}" if value else ""


def _line(head: str, cells: list[str]) -> str:
    return f"{head:21s}" + "".join(f"{cell:>11s}" for cell in cells)
