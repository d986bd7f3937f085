"""A lease whose file is deleted while its run goes on, which is no moved run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from holdfast.checkpoint.errors import DirectoryTaken, PlaceLost, SaveFailed
from holdfast.checkpoint.place.layout import lease_name
from holdfast.checkpoint.place.lease import Lease
from holdfast.checkpoint.place.storage import LocalStorage

LEASE = lease_name(1)


def test_a_deleted_lease_is_written_again_and_keeps_other_jobs_away(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    with Lease(LocalStorage(place)) as lease:
        (place / LEASE).unlink()

        lease.check()

        assert "token" in json.loads((place / LEASE).read_bytes())
        with pytest.raises(DirectoryTaken, match="is in use by another job"), Lease(LocalStorage(place)):
            pass
        lease.check()


def test_a_lease_that_another_job_took_after_it_was_deleted_is_lost(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    with Lease(LocalStorage(place)) as lease:
        (place / LEASE).unlink()
        (place / LEASE).write_bytes(json.dumps({"host": "another", "token": "another"}).encode())

        with pytest.raises(PlaceLost, match="is in use by another job"):
            lease.check()


def test_a_directory_that_was_replaced_is_still_told_as_one(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    with Lease(LocalStorage(place)) as lease:
        place.rename(tmp_path / "elsewhere")
        shutil.copytree(tmp_path / "elsewhere", place)

        with pytest.raises(SaveFailed, match="was moved, deleted or replaced while its run goes on"):
            lease.check()
