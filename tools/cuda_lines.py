"""List the lines of `src` that only a GPU takes, and say which of them the lane of fake devices executes.

    python tools/cuda_lines.py list
    python tools/cuda_lines.py run          # executes the lane with a tracer, minutes; exit 1 below 90 %

A line is one of them where it stands under a test of the device (`device.type == "cuda"`, behind an early return of the
CPU, `torch.cuda...`, or a function whose answer is such a test), or in a function that is called from such lines alone.
What the lane does not execute is named in REASONS.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "holdfast"
LEAST = 0.9
LEFT_OUT = ("plan/", "report/", "cli/", "launch/", "config/")
"""The plan's own files, and what no step enters: commands and the launcher look for GPUs, and compute on none."""
REASONS = {
    "models/layers/attention.py": "torch 2.11, whose kernel wants as many key heads as query heads",
    "training/engines.py": "words of a refusal",
    "rollout/local/graphs.py": "capture: recording a graph needs a driver",
    "rollout/local/rows.py": "capture: rows whose steps are replayed from a graph",
    "features/vllm/extension.py": "runs in the processes of vLLM",
    "parallel/mesh.py": "NCCL: ranks join through a driver",
    "checkpoint/format/snapshot.py": "random state of a real generator",
    "training/fit.py": "the loop around steps, which asks the driver what it measured",
    "training/run.py": "asks the driver what it measured",
    "training/setup/gradient_check.py": "compares numbers, of which there are none",
    "optim/randomness.py": "random state of a real generator",
    "models/check": "compares numbers, of which there are none",
    "training/policy/reward_model.py": "a reward model is built from weights, of which there are none",
    "parallel/failure": "ends a rank that waits in NCCL",
}
"""Of lines that are not executed: path -> why."""


def is_test_of_device(node: ast.expr, predicates: frozenset[str]) -> bool | None:
    """Return whether an expression is true on a GPU, False where it is true on the CPU; None if it is no such test."""
    match node:
        case ast.UnaryOp(op=ast.Not()):
            inner = is_test_of_device(node.operand, predicates)
            return None if inner is None else not inner
        case ast.BoolOp():
            parts = [is_test_of_device(value, predicates) for value in node.values]
            return next((each for each in parts if each is not None), None)
        case ast.Compare(ops=[operator]):
            return _compared(ast.unparse(node), isinstance(operator, ast.Eq | ast.In))
        case ast.Call(func=ast.Name(id=name)) | ast.Name(id=name):
            return True if name in predicates else None
        case _:
            return True if re.match(r"torch\.cuda\.is_|.*\.is_cuda$", ast.unparse(node)) else None


def _compared(text: str, equal: bool) -> bool | None:
    named = re.search(r"'(cuda|cpu)'", text)
    if named is None or not ("device" in text or "type" in text):
        return None
    return equal is (named[1] == "cuda")


def predicates_of(trees: Mapping[str, ast.Module]) -> frozenset[str]:
    """Return functions whose answer is a test of the device, and names that hold one."""
    names: set[str] = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or ast.Constant(None)) == "bool":
            names |= {node.name} if "== 'cuda'" in ast.unparse(node) else set()
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            tested = isinstance(node.value, ast.BoolOp | ast.Compare) and "== 'cuda'" in ast.unparse(node.value)
            names |= {node.targets[0].id} if tested else set()
    return frozenset(names)


def lines_of(node: ast.AST) -> Iterator[int]:
    """Yield the first line of every statement below a node."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.stmt) and not isinstance(
            inner, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
        ):
            if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant):
                continue
            yield inner.lineno


def under_tests(tree: ast.Module, predicates: frozenset[str]) -> set[int]:
    """Return the lines that stand under a test of the device."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        for block in (getattr(node, name, []) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list):
                lines |= set(_of_block(block, predicates))
        if isinstance(node, ast.IfExp) and is_test_of_device(node.test, predicates) is not None:
            lines.add(node.lineno)
    return lines


def _of_block(block: list[ast.stmt], predicates: frozenset[str]) -> Iterator[int]:
    for place, statement in enumerate(block):
        if not isinstance(statement, ast.If):
            continue
        on_gpu = is_test_of_device(statement.test, predicates)
        if on_gpu is None:
            continue
        taken = statement.body if on_gpu else statement.orelse
        if not on_gpu and not taken and isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue):
            taken = block[place + 1 :]
        for inner in taken:
            yield from lines_of(inner)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Yield the functions of a module, methods and classes too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef))


def cuda_lines() -> dict[str, set[int]]:
    """Return path -> lines, those of functions that are called from such lines alone included."""
    trees = {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    trees = {path: tree for path, tree in trees.items() if not path.startswith(LEFT_OUT)}
    predicates = predicates_of(trees)
    lines = {path: under_tests(tree, predicates) for path, tree in trees.items()}
    while more := _called_from_them_alone(trees, lines):
        for path, added in more.items():
            lines[path] |= added
    return {path: numbers for path, numbers in lines.items() if numbers}


def _called_from_them_alone(trees: Mapping[str, ast.Module], lines: Mapping[str, set[int]]) -> dict[str, set[int]]:
    calls = _uses(trees, lines)
    more: dict[str, set[int]] = {}
    for path, tree in trees.items():
        for function in functions(tree):
            used = calls.get(function.name, [])
            own = {line for statement in function.body for line in lines_of(statement)}
            if used and all(used) and not own <= lines[path]:
                more.setdefault(path, set()).update(own)
    return more


def _uses(trees: Mapping[str, ast.Module], lines: Mapping[str, set[int]]) -> dict[str, list[bool]]:
    """Return, for every name that is read, whether each of its places is on such a line."""
    uses: dict[str, list[bool]] = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                name = node.id if isinstance(node, ast.Name) else node.attr
                uses[name].append(node.lineno in lines[path])
    return uses


def executed_lines(files: Mapping[str, set[int]]) -> dict[str, set[int]]:
    """Return the lines of some files that the lane executes as rank 0 of 8 and alone."""
    sys.path.insert(0, str(ROOT))
    from tests.fake_devices.lane import make_models

    seen: dict[str, set[int]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as place:
        make_models(Path(place))
        for ranks in ("8", "1"):
            output = Path(place) / f"lines-{ranks}.json"
            environment = os.environ | {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "HF_HUB_OFFLINE": "1",
                "LANE_FILES": json.dumps([str(PACKAGE / path) for path in files]),
                "LANE_LINES": str(output),
            }
            command = [sys.executable, "-m", "tests.fake_devices.lane", place, ranks, "0"]
            subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True)
            for path, lines in json.loads(output.read_text(encoding="utf-8")).items():
                seen[str(Path(path).relative_to(PACKAGE))] |= set(lines)
    return seen


def main() -> int:
    """List them, or execute the lane and say which were executed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["list", "run"])
    lines = cuda_lines()
    if parser.parse_args().what == "list":
        for path, numbers in lines.items():
            print(f"{path}: {', '.join(map(str, sorted(numbers)))}")
        print(f"{sum(map(len, lines.values()))} lines in {len(lines)} files")
        return 0
    seen = executed_lines(lines)
    total = executed = excused = 0
    for path, numbers in lines.items():
        left = numbers - seen[path]
        total, executed = total + len(numbers), executed + len(numbers) - len(left)
        reason = next((why for prefix, why in REASONS.items() if path.startswith(prefix)), None)
        excused += len(left) if reason else 0
        if left:
            print(f"{path}: not executed {', '.join(map(str, sorted(left)))} ({reason or 'NO REASON GIVEN'})")
    share = executed / (total - excused)
    print(f"{executed} of {total} lines executed; {excused} of the others have a reason; {share:.1%} of those without")
    return int(share < LEAST)


if __name__ == "__main__":
    sys.exit(main())
