"""Compiles the kernel that reads blocks in place for cards that are not here: python -m tests.kernels.compiled

The interpreter runs what Triton's compiler refuses. A line says, of each case, the shared memory that it takes, and
whether it copies tiles ahead and multiplies in tensor cores.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from holdfast.rollout.local.block_attention import Operands
from holdfast.rollout.local.block_kernels import STAGES, Launch, launches
from holdfast.rollout.local.cache import BLOCK_SIZE

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64"}
CASES: dict[str, tuple[int, torch.dtype, int, int, int, dict[str, Any]]] = {
    "plain": (90, torch.bfloat16, 128, 128, 4, {}),
    "sinks and a window": (90, torch.bfloat16, 64, 64, 8, {"window": 128, "sinks": torch.zeros(16).bfloat16()}),
    "large heads with a soft cap": (80, torch.bfloat16, 256, 256, 2, {"window": 4096, "softcap": 50.0}),
    "other values": (80, torch.float16, 80, 64, 7, {}),
    "single precision": (80, torch.float32, 128, 128, 4, {}),
}
"""(compute capability x 10, dtype, size of keys, of values, queries of a key head, options)"""


def compiled(launch: Launch, capability: int) -> Any:
    """Return what the compiler makes of a call, knowing that pointers are aligned, as a launch would tell it."""
    arguments, names = launch.arguments, launch.kernel.arg_names
    signature = dict.fromkeys(launch.constants, "constexpr")
    for name, argument in zip(names, arguments, strict=False):
        signature[name] = f"*{TYPES[argument.dtype]}" if isinstance(argument, Tensor) else "i32"
    aligned = {(at,): [["tt.divisibility", 16]] for at, one in enumerate(arguments) if isinstance(one, Tensor)}
    source = ASTSource(launch.kernel, {name: signature[name] for name in names}, launch.constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_stages": STAGES})


def main() -> None:
    for name, (capability, dtype, size, value_size, group, options) in CASES.items():
        pair = [torch.zeros(4, BLOCK_SIZE, 2, some, dtype=dtype) for some in (size, value_size)]
        query = torch.zeros(3, 2 * group, size, dtype=dtype)
        tables, positions = torch.zeros(3, 256, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        for longest in (1024, 4096):
            given = Operands.of(query, (pair[0], pair[1]), tables, positions, longest, **options)
            for launch in launches(given):
                found = compiled(launch, capability)
                words = [word for word in ("cp.async", "mma") if word in found.asm["ptx"]]
                kernel = launch.kernel.__name__
                print(f"{name}, {longest} tokens: {kernel}, {found.metadata.shared} bytes,", *words, flush=True)


if __name__ == "__main__":
    main()
