"""Compiled blocks stay compiled where the check before step 1 finds transformers' numbers with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from holdfast.errors import HoldfastError
from holdfast.parallel.apply import compiled_blocks, leave_compiled
from holdfast.parallel.compiler import BlockCompiler
from holdfast.text.escaping import error_words
from holdfast.training.run import ShardedModel


def check_compiled(sharded: ShardedModel, compiler: BlockCompiler, check: Callable[[], list[str]]) -> list[str]:
    """Check a model; where its blocks fail the check or do not compile on some rank, check it again uncompiled.

    All ranks call this together. A graph that fails to compile later runs uncompiled on its rank, which is printed.
    An error of one rank alone, such as for want of memory, is raised as it is: the others wait within a pass.

    Args:
        sharded: The model.
        compiler: Of its blocks.
        check: Compares it with transformers', and returns what to print.

    Returns:
        What to print.

    Raises:
        ModelError: The model fails the check without compiled blocks too; the same on all ranks.
    """
    policy, setting = sharded.model, sharded.setting
    if not compiled_blocks(policy):
        reason = setting.config.left_uncompiled(setting.world.device.type)
        return [*check(), *([f"blocks: not compiled, since {reason}"] if reason else [])]
    before, all_raise = _seconds_of_compiling(), setting.whether_all_raise()
    lines, failed = [], ""
    try:
        lines = check()
    except Exception as error:  # compiled code raises errors of many kinds; the second check tells which
        if not (isinstance(error, HoldfastError) or all_raise()):
            raise
        failed = error_words(error)
    reason = next(filter(None, setting.ranks.gather(next(iter(compiler.reasons), failed))), "")
    if reason:
        leave_compiled(policy)
        return [*check(), f"blocks: not compiled, since the check before step 1 failed with them ({reason})"]
    compiler.tell = partial(_tell, setting.world.rank)
    if setting.world.is_first:
        compiler.begins = partial(_say_once, compiler)
    return [*lines, f"blocks: compiled in {_seconds_of_compiling() - before:.1f} s"]


def _say_once(compiler: BlockCompiler) -> None:
    """Say that a step waits for a compilation: rows of the check have one length, and lengths differ from step 1 on."""
    print("blocks: compiled once more, for rows of any length; this step waits for it", flush=True)
    compiler.begins = None


def _tell(rank: int, reason: str) -> None:
    print(f"blocks: rank {rank} runs a part of them uncompiled from here on ({reason})", flush=True)


def _seconds_of_compiling() -> float:
    return float(torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0))
