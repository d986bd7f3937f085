"""What stands in for GPUs, seen from a process that has the guard."""

from __future__ import annotations

from tools.device_bugs import PLANTED, SOURCE

from holdfast.features.plan.counting.memory import HOOKED
from holdfast.features.plan.execution.fake_devices import absent_names
from tests.fake_devices.conftest import ROOT


def test_this_torch_has_every_name_that_is_stood_in_for() -> None:
    assert absent_names() == []


def test_this_torch_has_every_method_that_tells_gathered_parameters_apart() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    assert [name for name in HOOKED if not hasattr(FSDPParamGroup, name)] == []


def test_every_bug_that_is_planted_slowly_has_its_place_in_the_source() -> None:
    texts = {bug.name: (ROOT / SOURCE / bug.path).read_text(encoding="utf-8") for bug in PLANTED}

    assert [bug.name for bug in PLANTED if bug.old not in texts[bug.name]] == []
