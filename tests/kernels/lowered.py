"""Lowers a block of each of some models by inductor for an H100 that is not here: python -m tests.kernels.lowered

A run's first step is executed without a GPU, and its blocks go through the compiler of training. A lowering ends where
Triton's compiler would begin, and its graph then runs as it is, so that the backward pass is lowered too. The table has
the program for rows of any length; it says nothing of time. The guard of fake devices must be there before torch.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from holdfast.features.plan.execution.process import load_guard

LENGTH = 1024
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen2": (16, {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}),
    "llama": (8, {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}),
    "gemma2": (
        8,
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
        },
    ),
}
"""Type of model -> rows of `LENGTH` tokens in a micro-batch, and the widths of Qwen2 0.5B, Llama 3.2 1B, Gemma 2 2B.

Scores of Gemma 2 have a soft cap, so its attention is our own operation, and that of the others torch's kernel.
"""
CARD = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    L2_cache_size=50 * 2**20,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=2**16,
    warp_size=32,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    gcnArchName="",
)
LAUNCHES = r"\.run\(|extern_kernels\.\w+\(|torch\.ops\.[\w.]+\(|\.sum\(dim=0\)|\.to\(torch\."
"""In a program's text: a Triton kernel, a product, an operation of a library, and sums of partial sums."""


class Lowered(NamedTuple):
    """One pass of one graph."""

    is_backward: bool
    sizes: set[int]
    """Values that sizes which may change have in this step; empty where all are constants."""
    launches: int
    kernels: int
    """Launches that are Triton kernels."""
    fused_bytes: int
    """What Triton kernels read and write."""
    all_bytes: int


class LoweringEndsError(Exception):
    """Ends a lowering that has been recorded."""


def lowered_as(graph: Any) -> Lowered:
    """Return what inductor makes of a graph."""
    program = graph.codegen()[0].value
    called = program[program.index("def call(") :]
    traffic = {node: node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes}
    symbols = [value for value in graph.graph_inputs.values() if getattr(value, "is_Symbol", False)]
    return Lowered(
        graph.is_backward,
        {int(graph.sizevars.optimization_hint(symbol)) for symbol in symbols},
        len(re.findall(LAUNCHES, called)),
        called.count(".run("),
        sum(size for node, size in traffic.items() if not node.is_extern()),
        sum(traffic.values()),
    )


def pretend_a_card() -> None:
    """Let inductor and Triton find an H100; what they keep of it at import is replaced before they are imported."""
    import torch

    torch.cuda.get_device_properties = lambda *_: CARD
    torch.cuda.current_device = lambda: 0
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from holdfast.features.plan.execution import fake_devices

    driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    # Inductor takes a pinned tensor for one of the host.
    fake_devices.REPLACED["torch:Tensor.is_pinned"] = lambda *_, **__: False


def record_lowerings(into: list[Lowered]) -> Any:
    """Let every lowering end with a record of it; return the compiler of blocks, which notes why lowerings ended."""
    import torch
    import torch.utils._triton
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch._inductor.graph import GraphLowering
    from torch.utils._python_dispatch import TorchDispatchMode

    from holdfast.parallel.compiler import BlockCompiler

    class OnHost(TorchDispatchMode):
        """Constants have numbers, which the compiler computes; there is no device to hold them."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002, PLW3201
            kwargs = kwargs or {}
            return func(*args, **kwargs | ({"device": "cpu"} if "device" in kwargs else {}))

    fold = UniformValueConstantFolder.run

    def folded(folder: Any) -> Any:
        with OnHost():
            return fold(folder)

    def end(graph: Any) -> None:
        into.append(lowered_as(graph))
        raise LoweringEndsError

    UniformValueConstantFolder.run = folded
    GraphLowering.compile_to_module = end
    torch._inductor.config.compile_threads, torch._inductor.config.fx_graph_cache = 1, False
    compiler = BlockCompiler()
    compiler.begins = torch.utils._triton.has_triton.cache_clear  # asked before there were devices
    from holdfast.features.plan.execution import shapes

    setattr(shapes, "COMPILER", compiler)  # noqa: B010 - the compiler of blocks on fake devices
    return compiler


def block(kind: str, lowered: list[Lowered], compiler: Any) -> list[Lowered]:
    """Return the passes of a model's block for rows of any length."""
    from holdfast.features.plan.execution.execute import execute
    from holdfast.features.plan.records import RankSpec
    from tests.trees import run_from_mapping

    rows, widths = MODELS[kind]
    config = {"model_type": kind, "vocab_size": 512, "num_hidden_layers": 1, "tie_word_embeddings": False} | widths
    run = {
        "steps": 2,
        "model": {"config": config, "tokenizer": "builtin:characters"},
        # Two micro-batches, of one row more and of these rows: the second has another length.
        "data": {
            "synthetic": {"task": "sort", "rows": 2 * rows + 1},
            "batch_size": 2 * rows + 1,
            "max_length": LENGTH,
            "tokens_per_micro_batch": (rows + 1) * LENGTH,
        },
        "optim": {"lr": 1e-3, "schedule": "constant"},
    }
    lowered.clear()
    with tempfile.TemporaryDirectory() as folder:
        made = execute(run_from_mapping(run), Path(folder), RankSpec(1, 0))
    failed = [reason for reason in compiler.reasons if LoweringEndsError.__name__ not in reason]
    assert not failed, failed
    assert (made.notes, len(made.plan.compile_blocks)) == ([], 1), made.notes
    return [one for one in lowered if rows * LENGTH in one.sizes]


def main(*kinds: str) -> None:
    """Print the table."""
    load_guard()
    pretend_a_card()
    lowered: list[Lowered] = []
    compiler = record_lowerings(lowered)
    print("| block | tokens | pass | graphs | launches | Triton kernels | their MB | all MB |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in kinds or MODELS:
        passes = block(kind, lowered, compiler)
        for name, is_backward in (("forward", False), ("backward", True)):
            parts = [part for part in passes if part.is_backward is is_backward]
            launches, kernels, fused, whole = (
                sum(part[at] for part in parts) for at in map(Lowered._fields.index, Lowered._fields[2:])
            )
            tokens = MODELS[kind][0] * LENGTH
            print(
                f"| {kind} | {tokens:,} | {name} | {len(parts)} | {launches} | {kernels} | "
                f"{fused / 1e6:,.1f} | {whole / 1e6:,.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
