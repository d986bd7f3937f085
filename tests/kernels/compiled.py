"""Compiles our Triton kernels at real sizes for cards that are not here: python -m tests.kernels.compiled

The interpreter runs what Triton's compiler refuses. A line of JSON says, of each program, the shared memory that it
takes, its registers, the bytes of them that spill, and what it copies and multiplies by.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from holdfast.models.chunks import kernels
from holdfast.models.chunks.kernel_form import columns_of
from holdfast.rollout.local.block_attention import Operands
from holdfast.rollout.local.block_kernels import STAGES, Launch, launches
from holdfast.rollout.local.cache import BLOCK_SIZE

CAPABILITIES = (80, 89, 90)
"""Compute capabilities x 10: A100; RTX 40, whose shared memory is that of RTX 30 (8.6); H100."""
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64"}
ATTENTION: dict[str, tuple[torch.dtype, int, int, int, dict[str, Any]]] = {
    "plain": (torch.bfloat16, 128, 128, 4, {}),
    "small heads": (torch.bfloat16, 64, 64, 7, {}),
    "sinks and a window": (torch.bfloat16, 64, 64, 8, {"window": 128, "sinks": torch.zeros(16).bfloat16()}),
    "large heads with a soft cap": (torch.bfloat16, 256, 256, 2, {"window": 4096, "softcap": 50.0}),
    "other values": (torch.float16, 80, 64, 7, {}),
    "many queries of a key head": (torch.bfloat16, 128, 128, 32, {}),
    "latent keys": (torch.bfloat16, 576, 512, 16, {}),
    "single precision": (torch.float32, 128, 128, 4, {}),
}
"""(dtype, size of keys, of values, queries of a key head, options)

Latent keys in float32 are left out. They take 164,928 bytes, more than compute capabilities 8.6 and 8.9 have, and a
minute of compiling; such a card decodes by torch's operations and says so.
"""
VOCABULARIES = (151_936, 32_001)
"""A multiple of 16, and one that is none: its logits have columns besides."""
ROWS = 4096


class Recorded:
    """Replaces a kernel, and keeps its calls."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.calls = kernel, list[Launch]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **constants: self.calls.append(Launch(self.kernel, grid, arguments, constants))


def head_launches(dtype: torch.dtype, vocabulary: int, *, all_options: bool) -> Iterator[Launch]:
    """Yield the calls of the head for a chunk of rows, of tensors without data."""
    columns = columns_of(vocabulary)
    products = torch.empty(ROWS, columns, dtype=dtype, device="meta")
    bias = torch.empty(columns, dtype=dtype, device="meta") if all_options else None
    targets = torch.empty(ROWS, dtype=torch.int64, device="meta")
    numbers = torch.empty(6, ROWS, device="meta")
    inner, factor = 0.03 if all_options else None, 0.7
    read = partial(kernels.read_rows, products, bias, targets, inner, factor, entropy=all_options)
    write = partial(kernels.write_slopes, products, bias, targets, numbers, inner, factor, entropy=all_options)
    for name, call in (("_read_rows", read), ("_write_slopes", write)):
        kernel = getattr(kernels, name)
        recorded = Recorded(kernel)
        setattr(kernels, name, recorded)
        call()
        setattr(kernels, name, kernel)
        yield from recorded.calls


def attention_launches(name: str) -> Iterator[Launch]:
    """Yield the calls of attention over blocks, of one split of a row's tokens and of several."""
    dtype, size, value_size, group, options = ATTENTION[name]
    pair = [torch.zeros(4, BLOCK_SIZE, 2, some, dtype=dtype) for some in (size, value_size)]
    query = torch.zeros(3, 2 * group, size, dtype=dtype)
    tables, positions = torch.zeros(3, 256, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    for longest in (1024, 4096):
        given = Operands.of(query, (pair[0], pair[1]), tables, positions, longest, **options)
        for launch in launches(given):
            yield launch._replace(constants=launch.constants | {"num_stages": STAGES})


def compiled(launch: Launch, capability: int) -> tuple[Any, str]:
    """Return what the compiler makes of a call, and the log of its assembler.

    It is told what a launch would tell it: which pointers and numbers are multiples of 16, and which numbers are 1.
    """
    options = {name: value for name, value in launch.constants.items() if name.startswith("num_")}
    constants = {name: value for name, value in launch.constants.items() if name not in options}
    signature, aligned = dict.fromkeys(constants, "constexpr"), {}
    for at, (name, argument) in enumerate(zip(launch.kernel.arg_names, launch.arguments, strict=False)):
        if isinstance(argument, Tensor):
            signature[name] = f"*{TYPES[argument.dtype]}"
        elif argument == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32" if isinstance(argument, int) else "fp32"
        if isinstance(argument, Tensor) or (signature[name] == "i32" and argument % 16 == 0):
            aligned[at,] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, {name: signature[name] for name in launch.kernel.arg_names}, constants, aligned)
    with contextlib.redirect_stdout(io.StringIO()) as log:
        found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return found, log.getvalue()


def line(name: str, launch: Launch, capability: int) -> str:
    """Compile a call, and return its line."""
    found, log = compiled(launch, capability)
    ptx = found.asm["ptx"]
    return json.dumps({
        "case": name,
        "capability": capability,
        "kernel": launch.kernel.__name__,
        "shared": found.metadata.shared,
        "registers": sum(map(int, re.findall(r"Used (\d+) registers", log))),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", log))),
        "copies_ahead": "cp.async" in ptx,
        "tensor_cores": "mma" in ptx,
        "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v[48]", ptx)),
        "loads": ptx.count("ld.global"),
    })  # fmt: skip


def main() -> None:
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
    for capability in CAPABILITIES:
        for name in ATTENTION:
            for launch in attention_launches(name):
                print(line(name, launch, capability), flush=True)
        for dtype in (torch.bfloat16, torch.float32):
            for vocabulary in VOCABULARIES:
                for all_options in (False, True):
                    name = f"head {TYPES[dtype]} {vocabulary}{' with all options' if all_options else ''}"
                    for launch in head_launches(dtype, vocabulary, all_options=all_options):
                        print(line(name, launch, capability), flush=True)


if __name__ == "__main__":
    main()
