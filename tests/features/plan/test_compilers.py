"""Compilers are tried by building; what lacks is named, and is no reason not to run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.config.sections.launch import LaunchConfig
from holdfast.features.plan.checks.compilers import built_on, look_at_compilers
from holdfast.features.plan.checks.findings import Grade
from tests.messages import lacks


def test_where_no_gpu_is_used_nothing_is_built() -> None:
    assert list(look_at_compilers(LaunchConfig(device="cpu"))) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lacking", "grade", "named"), [("", Grade.ok, "block"), ("g++", Grade.warn, "g++"), ("all", Grade.warn, "gcc g++")]
)
def test_a_block_is_built_or_what_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str, grade: Grade, named: str
) -> None:
    """Real compilers, on a PATH that has all of them, gcc alone, or none."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    if lacking:
        (tmp_path / "bin").mkdir()
        for name in ("gcc", "as", "ld") * (lacking == "g++"):
            (tmp_path / "bin" / name).symlink_to(Path("/usr/bin") / name)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        monkeypatch.delenv("CXX", raising=False)

    (finding,) = built_on("cpu")

    assert (finding.grade, lacks(finding.text, named)) == (grade, [])
    assert ("gcc is not here" in finding.text) == (lacking == "all")


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(9)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    (finding,) = built_on("cpu")

    assert (finding.grade, lacks(finding.text, "9")) == (Grade.warn, [])
