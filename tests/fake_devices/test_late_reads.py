"""Two updates are started on a GPU before the numbers of the first are read."""

from __future__ import annotations

import json

import pytest

from tests.fake_devices.conftest import child, needs_guard

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__), pytest.mark.timeout(1800)]

UPDATE = "sums and gradient norm of an update"
LATE = ["started", "started", UPDATE, "read", UPDATE, "read"]


@pytest.mark.parametrize("ranks", ["1", "8"])
def test_nothing_is_read_between_two_updates_where_the_optimizer_decides_by_tensors(ranks: str) -> None:
    needs_guard()

    done = child("tests.fake_devices.late_reads", ranks)

    assert done.returncode == 0, done.stderr[-3000:]
    orders = dict(json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("order "))
    at_once = orders.pop("8 bits")
    assert orders == {"sft": LATE, "experts": LATE, "averages": LATE}
    assert at_once == [UPDATE, "started", UPDATE, "started", "read", "read"], "its steps need the norm on the host"
