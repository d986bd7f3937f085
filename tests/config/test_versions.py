"""Versions that Holdfast does not work with are refused, and packages beside it that cannot work are left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.quiet import unfit_torchvision
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


def test_what_is_installed_is_what_the_package_asks_for() -> None:
    assert unmet_requirements() == []
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
    assert done.err.strip() == str(refused.value)
    assert "numpy" not in done.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("number", ["2.11.0a0+git1a2b", "2.16.0.dev20261120+cu130", "2.11.0+cpu"])
def test_a_build_before_a_release_counts_as_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    write_metadata(tmp_path, "holdfast", "9.0", "Requires-Dist: torch>=2.11")
    write_metadata(tmp_path, "torch", number)
    monkeypatch.syspath_prepend(str(tmp_path))

    assert installed("torch") == number
    assert unmet_requirements() == []


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
    ],
)
def test_torchvision_fits_the_torch_that_it_was_built_for(torch: str, torchvision: str | None, fits: bool) -> None:
    reason = unfit_torchvision({"torch": torch, "torchvision": torchvision}.get)

    assert (reason == "") == fits
    assert fits or lacks(reason, f"{torch} {torchvision}") == []


@pytest.mark.slow
def test_a_run_beside_broken_packages_names_the_one_that_it_leaves_out(tmp_path: Path, tree: dict[str, Any]) -> None:
    """Each raises what the real one does when it was built for another torch."""
    broken = {
        "torchvision": ("0.20.0", "RuntimeError('operator torchvision::nms does not exist')"),
        "flash-attn": ("2.7.0", "ImportError('undefined symbol: _ZN3c105ErrorC2E')"),
        "bitsandbytes": ("0.46.0", "ImportError('libbitsandbytes_cpu.so: cannot open shared object file')"),
    }
    for name, (version, error) in broken.items():
        write_metadata(tmp_path / "broken", name, version)
        package = tmp_path / "broken" / name.replace("-", "_")
        package.mkdir()
        (package / "__init__.py").write_text(f"raise {error}\n", encoding="utf-8")
    file = write_run(tmp_path / "run.yaml", tree)
    paths = [str(tmp_path / "broken"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def holdfast(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "holdfast.cli.main", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    done = holdfast("sft", file)
    adapted = holdfast("sft", file, "model.lora={rank: 2}", "run.name=adapted")
    refused = holdfast("sft", file, "model.lora={rank: 2, quantize: nf4}", "run.name=refused")

    assert done.returncode == 0, done.stderr
    assert lacks(done.stderr, f"torchvision 0.20.0 {installed('torch')}") == []
    assert adapted.returncode == 0, adapted.stderr
    assert lacks(adapted.stdout + adapted.stderr, "bitsandbytes 0.46.0 ImportError") == []
    assert "Traceback" not in done.stderr + adapted.stderr + refused.stderr
    assert len(list((tmp_path / "runs").rglob("exports/final/config.json"))) == 2
    assert (refused.returncode, lacks(refused.stderr, "model.lora.quantize bitsandbytes 0.46.0 nf4")) == (2, [])
