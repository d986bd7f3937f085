"""Sends the lengths of documents to a fake GPU: python -m tests.fake_devices.pinned

It prints the bytes of each copy to the device, and whether they lay in pinned memory.
"""

from __future__ import annotations

import json
from typing import Any


def main() -> None:
    """Lay documents out, some with branches."""
    from holdfast.features.plan.execution.process import load_guard

    load_guard()
    import torch
    import torch._dynamo
    from torch.utils._python_dispatch import TorchDispatchMode

    from holdfast.features.plan.execution.fake_devices import fake_devices
    from holdfast.models.layers.document_attention import Documents

    torch._dynamo.trace_rules.get_torch_obj_rule_map()  # before one stand-in is several of its functions
    pinned: list[torch.Tensor] = []
    copies: list[tuple[int, bool]] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and result.is_cuda:
                copies.append((args[0].nbytes, any(args[0] is tensor for tensor in pinned)))
            return result

    with fake_devices("cuda", lambda: 2**40, 2**40) as mode, mode, Copies():
        unchanged = torch.Tensor.pin_memory

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            pinned.append(unchanged(tensor))
            return pinned[-1]

        torch.Tensor.pin_memory = pin  # type: ignore[method-assign,assignment]
        Documents.of((9, 9_000), torch.device("cuda"), ((), (100, 200)))
    print(json.dumps(copies))


if __name__ == "__main__":
    main()
