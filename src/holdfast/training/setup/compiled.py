"""Compiled blocks stay compiled where the check before step 1 finds transformers' numbers with them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast.parallel.apply import compiled_blocks, leave_compiled
from holdfast.training.run import ShardedModel


def check_compiled(sharded: ShardedModel, check: Callable[[], list[str]]) -> list[str]:
    """Check a model; where it fails with compiled blocks, leave them uncompiled and check it again.

    All ranks call this together. What is compiled later and fails runs uncompiled, with a warning of torch's.

    Args:
        sharded: The model.
        check: Compares it with transformers', and returns what to print.

    Returns:
        What to print.

    Raises:
        ModelError: The model fails the check without compiled blocks too; the same on all ranks.
    """
    policy = sharded.model
    if not compiled_blocks(policy):
        reason = sharded.setting.config.left_uncompiled(sharded.setting.world.device.type)
        return [*check(), *([f"blocks: not compiled, since {reason}"] if reason else [])]
    torch._dynamo.config.suppress_errors = False  # that of a model before is still set
    before = _seconds_of_compiling()
    lines, reason = [], ""
    # A compiler raises errors of many kinds, and those of the check are among them: the second check tells which.
    try:
        lines = check()
    except Exception as error:  # noqa: BLE001 - as the comment says
        lines_of_error = [line.strip() for line in str(error).splitlines() if line.strip()]
        # A compiler's first line names the backend, and the second says what it refused.
        reason = f"{type(error).__name__}: {' '.join(lines_of_error[:2])}"
    reason = next(filter(None, sharded.setting.ranks.gather(reason)), "")
    if reason:
        leave_compiled(policy)
        return [*check(), f"blocks: not compiled, since the check before step 1 failed with them ({reason})"]
    torch._dynamo.config.suppress_errors = True
    return [*lines, f"blocks: compiled in {_seconds_of_compiling() - before:.1f} s"]


def _seconds_of_compiling() -> float:
    return float(torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0))
