"""Counts the operations that an update of a small model runs on a device: python -m tests.fake_devices.operations

It prints a line of JSON: of models with one block and with two, how many operations each phase has. The guard must be
there before torch.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

NO_LAUNCH = ("prim::", "aten::empty", "aten::new_empty", "aten::_unsafe_view")
"""Beginnings of the names of operations, besides views, that run nothing on a device."""


def main() -> None:
    """Execute an uncompiled update of SFT on one rank, of one micro-batch."""
    from holdfast.features.plan.execution.process import load_guard

    load_guard()
    import torch
    from torch.utils._pytree import tree_leaves

    from holdfast.features.plan.counting.memory import Ledger
    from holdfast.features.plan.counting.observer import TensorObserver
    from holdfast.features.plan.execution import execute
    from holdfast.features.plan.records import RankSpec
    from tests.fake_devices.cases import DENSE, tree
    from tests.trees import run_from_mapping

    counts: Counter[str] = Counter()

    class CountedLedger(Ledger):
        def restart(self) -> None:
            super().restart()
            counts.clear()

    class CountingObserver(TensorObserver):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if result is not NotImplemented:
                tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
                runs = not func.is_view and not func.name().startswith(NO_LAUNCH)
                counts[self._ledger.moment] += runs and any(tensor.is_cuda for tensor in tensors)
            return result

    setattr(execute, "Ledger", CountedLedger)  # noqa: B010 - the names that the module imported
    setattr(execute, "TensorObserver", CountingObserver)  # noqa: B010
    found = {}
    for blocks in (1, 2):
        run = tree(
            model={"config": DENSE | {"num_hidden_layers": blocks}},
            data={"batch_size": 2, "tokens_per_micro_batch": 256},
            parallel={"compile": "off"},
        )
        with tempfile.TemporaryDirectory() as folder:
            assert execute.execute(run_from_mapping(run), Path(folder), RankSpec(1, 0)).micro_batches == 1
        found[blocks] = dict(counts)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
