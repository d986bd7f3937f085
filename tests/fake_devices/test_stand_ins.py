"""What stands in for GPUs, seen from a process that has the guard."""

from __future__ import annotations

from holdfast.features.plan.counting.memory import HOOKED
from holdfast.features.plan.execution.fake_devices import absent_names


def test_this_torch_has_every_name_that_is_stood_in_for() -> None:
    assert absent_names() == []


def test_this_torch_has_every_method_that_tells_gathered_parameters_apart() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    assert [name for name in HOOKED if not hasattr(FSDPParamGroup, name)] == []
