"""Documents reach a GPU without a wait: what is copied to it lies in pinned memory."""

from __future__ import annotations

import json

from tests.fake_devices.conftest import child, needs_guard


def test_documents_are_sent_from_pinned_memory() -> None:
    needs_guard()

    done = child("tests.fake_devices.pinned")

    assert done.returncode == 0, done.stderr[-3000:]
    copies = json.loads(done.stdout.splitlines()[-1])
    assert max(size for size, _ in copies) > 2**16
    assert all(pinned for _, pinned in copies)
