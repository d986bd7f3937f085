"""Whether something is there is answered, or it is said why nobody can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.files import is_there


def test_what_is_not_there_is_told_from_what_nobody_can_look_at(tmp_path: Path) -> None:
    file, dangling, loop = tmp_path / "file", tmp_path / "dangling", tmp_path / "loop"
    file.write_text("")
    dangling.symlink_to("nowhere")
    loop.symlink_to(loop)

    assert is_there(file)
    assert is_there(tmp_path)
    assert [is_there(each) for each in (dangling, loop, file / "below", tmp_path / "nothing")] == [False] * 4
    with pytest.raises(OSError, match="File name too long"):
        is_there(tmp_path / ("x" * 300))
