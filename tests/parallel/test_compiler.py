"""The compiler of blocks: what it compiles deterministically, what it runs where it fails, and what it lets out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import compile_fx

from holdfast.parallel.compiler import BlockCompiler


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 3).sin() @ x


@pytest.fixture(autouse=True)
def without_a_cpp_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.cxx": ("/nowhere/g++",), "fx_graph_cache": False}):
        yield
    torch._dynamo.reset()


def compiled(compiler: BlockCompiler) -> tuple[Tensor, Tensor]:
    """Return the loss of a block that is compiled, and the gradient of its input."""
    block, x = Block(), torch.linspace(0, 1, 16).reshape(4, 4).requires_grad_()
    compiler.compile(block)
    loss = block(x).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return loss.detach(), x.grad


def eager() -> tuple[Tensor, Tensor]:
    x = torch.linspace(0, 1, 16).reshape(4, 4).requires_grad_()
    loss = Block()(x).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return loss.detach(), x.grad


@pytest.mark.parametrize("part", ["joint_graph_passes", "compile_fx_inner"])
def test_every_part_of_a_compilation_is_deterministic(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    original, seen = getattr(compile_fx, part), []

    def spied(*arguments: Any, **options: Any) -> Any:
        seen.append(torch._inductor.config.deterministic)
        return original(*arguments, **options)

    monkeypatch.setattr(compile_fx, part, spied)

    compiled(BlockCompiler())

    assert seen
    assert all(seen)
    assert not torch._inductor.config.deterministic


def fails(graph: fx.Graph) -> None:  # noqa: ARG001 - a pass's
    raise RuntimeError("this pass fails")


@pytest.mark.parametrize(
    ("stage", "passes", "reason"),
    [
        ("pre_grad_custom_pass", {"joint_custom_pre_pass": fails}, "this pass fails"),
        ("post_grad_custom_pre_pass", {}, "InvalidCxxCompiler"),
    ],
)
def test_a_graph_that_fails_runs_as_it_was_before_the_compilers_passes(
    stage: str, passes: dict[str, Any], reason: str
) -> None:
    def changes(graph: fx.Graph) -> None:
        for node in graph.nodes:
            for factor in (3, 3.0):
                node.args = tuple(5 if argument == factor else argument for argument in node.args)

    compiler = BlockCompiler()

    with torch._inductor.config.patch({stage: changes, **passes}):
        loss, gradient = compiled(compiler)

    assert any(reason in given for given in compiler.reasons)
    torch.testing.assert_close((loss, gradient), eager(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("place", ["compile_fx", "compile_fx_inner", "backward"])
def test_a_lack_of_memory_is_no_reason_to_run_uncompiled(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    original, part = compile_fx.compile_fx_inner, "compile_fx_inner" if place == "backward" else place

    def exhausted(*arguments: Any, **options: Any) -> Any:
        if place == "backward" and not options.get("is_backward"):
            return original(*arguments, **options)
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(compile_fx, part, exhausted)
    compiler = BlockCompiler()

    with pytest.raises(torch.OutOfMemoryError):
        compiled(compiler)

    assert not any("OutOfMemory" in reason for reason in compiler.reasons)
