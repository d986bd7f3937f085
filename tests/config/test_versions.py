"""Versions that Holdfast does not work with are refused, and packages beside it that cannot work are left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from holdfast.config.quiet import broken, unfit_torchvision
from holdfast.config.versions import check_versions, installed, unmet_requirements
from holdfast.errors import UserError
from tests.cli.fixtures import write_run
from tests.cli.in_process import cli_in_process
from tests.messages import lacks


def write_metadata(folder: Path, name: str, version: str, *lines: str) -> None:
    directory = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    directory.mkdir(parents=True)
    text = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
    (directory / "METADATA").write_text(f"{text}\n", encoding="utf-8")


def write_package(folder: Path, name: str, version: str, error: str) -> None:
    """Write a package whose import raises an error."""
    write_metadata(folder, name, version)
    package = folder / name.replace("-", "_")
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {error}\n", encoding="utf-8")


def test_what_is_installed_is_what_the_package_asks_for() -> None:
    assert unmet_requirements() == {}
    check_versions()


@pytest.mark.parametrize("bound", ["torch<2", "torch>=99", "no-such-package>=1"])
def test_a_version_out_of_bounds_is_refused_before_anything_is_written(
    tmp_path: Path, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    write_metadata(tmp_path / "installed", "holdfast", "9.0", f"Requires-Dist: {bound}", "Requires-Dist: numpy>=1")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    file = write_run(tmp_path / "run.yaml", tree)
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(UserError) as refused:
        check_versions()
    done = cli_in_process("sft", file, cwd=tmp_path)

    name = bound.partition("<")[0].partition(">")[0]
    assert (done.code, lacks(done.err, f"{name} {bound.removeprefix(name)}")) == (2, [])
    assert f"pip install -U '{bound}'" in done.err
    assert done.err.strip() == str(refused.value)
    assert "numpy" not in done.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("number", ["2.11.0a0+git1a2b", "2.16.0.dev20261120+cu130", "2.11.0+cpu"])
def test_a_build_before_a_release_counts_as_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    write_metadata(tmp_path, "holdfast", "9.0", "Requires-Dist: torch>=2.11")
    write_metadata(tmp_path, "torch", number)
    monkeypatch.syspath_prepend(str(tmp_path))

    assert installed("torch") == number
    assert unmet_requirements() == {}


def test_a_version_that_nobody_can_order_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_metadata(tmp_path, "holdfast", "9.0", "Requires-Dist: no-such-package>=2")
    write_metadata(tmp_path, "no-such-package", "2.4-mine-x")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(UserError) as refused:
        check_versions()

    assert lacks(str(refused.value), "no-such-package 2.4-mine-x >=2") == []


@pytest.mark.parametrize(
    ("torch", "torchvision", "fits"),
    [
        ("2.13.0+cpu", "0.28.0+cpu", True),
        ("2.13.0", "0.28.1", True),
        ("2.15.0", "0.30.0", True),
        ("2.13.0+cpu", "0.27.0", False),
        ("2.13.0+cpu", "0.28.0+cu130", False),
        ("2.13.0a0+git1a2b", "0.28.0a0+git3c4d", True),
        ("2.13.0", None, True),
        ("2.13.0", "0.28rc1", True),
        ("2.14a0+git", "0.29", True),
        ("2.13.0", "1", False),
        ("2.13.0", "0.28-mine-x", True),
    ],
)
def test_torchvision_fits_the_torch_that_it_was_built_for(torch: str, torchvision: str | None, fits: bool) -> None:
    reason = unfit_torchvision({"torch": torch, "torchvision": torchvision}.get)

    assert (reason == "") == fits
    assert fits or lacks(reason, f"{torch} {torchvision}") == []


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError", "SystemExit"])
def test_a_package_that_fails_at_its_import_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    name = f"fails_with_{error.lower()}"
    write_package(tmp_path, name, "1.5", f"{error}('built for another torch')")
    monkeypatch.syspath_prepend(str(tmp_path))

    first, second = broken(name), broken(name)

    assert lacks(first, f"{name} 1.5 {error} built for another torch") == []
    assert first == second
    assert sys.modules.pop(name) is None


SOUND_NUMBER = f"0.{Version(str(installed('torch'))).minor + 15}.0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("torchvision", "bitsandbytes"),
    [
        ("0.20.0", "ImportError('libbitsandbytes_cpu.so: cannot open shared object file')"),
        (SOUND_NUMBER, "RuntimeError('CUDA Setup failed despite GPU being available')"),
    ],
)
def test_a_run_beside_broken_packages_names_those_that_it_leaves_out(
    tmp_path: Path, tree: dict[str, Any], torchvision: str, bitsandbytes: str
) -> None:
    """Each raises what the real one does when it was built for another torch."""
    packages = {
        "torchvision": (torchvision, "RuntimeError('operator torchvision::nms does not exist')"),
        "torchao": ("0.18.0", "ImportError('undefined symbol: _ZN3c108ListType')"),
        "flash-attn": ("2.7.0", "ImportError('undefined symbol: _ZN3c105ErrorC2E')"),
        "bitsandbytes": ("0.46.0", bitsandbytes),
    }
    for name, (version, error) in packages.items():
        write_package(tmp_path / "broken", name, version, error)
    file = write_run(tmp_path / "run.yaml", tree)
    paths = [str(tmp_path / "broken"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def holdfast(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "holdfast.cli.main", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    done = holdfast("sft", file)
    adapted = holdfast("sft", file, "model.lora={rank: 2}", "run.name=adapted")
    refused = holdfast("sft", file, "model.lora={rank: 2, quantize: nf4}", "run.name=refused")
    low_bit = holdfast("sft", file, "optim.kind=adamw_8bit", "run.name=low_bit")
    doctor = holdfast("doctor", "--only", "versions")

    assert done.returncode == 0, done.stderr
    assert lacks(done.stderr, f"torchvision {torchvision} torchao 0.18.0") == []
    assert adapted.returncode == 0, adapted.stderr
    assert lacks(adapted.stdout + adapted.stderr, f"bitsandbytes 0.46.0 {bitsandbytes.partition('(')[0]}") == []
    assert "Traceback" not in "".join(each.stderr for each in (done, adapted, refused, low_bit, doctor))
    assert len(list((tmp_path / "runs").rglob("exports/final/config.json"))) == 2
    assert (refused.returncode, lacks(refused.stderr, "model.lora.quantize bitsandbytes 0.46.0 nf4")) == (2, [])
    assert (low_bit.returncode, lacks(low_bit.stderr, "optim.kind torchao 0.18.0 ImportError")) == (2, [])
    assert (doctor.returncode, lacks(doctor.stdout, f"torchvision {torchvision} torchao 0.18.0")) == (0, [])
