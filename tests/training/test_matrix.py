"""Architectures of transformers, each from its files to an export that plain transformers reads and agrees with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tools.architectures import row_of, table_in

from tests.training.matrix import ARCHITECTURES, LARGEST_DIFFERENCE, MIXTURES, VISION, walk

QUICK = {"gemma2", "falcon_h1", "gpt_oss", "deepseek_v3", "qwen3_vl", "idefics3"}
"""Walked in every run of the tests: what the other suites do not train, resume and export."""
DOCUMENTED = Path("docs/models.md")


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ARCHITECTURES]
)
def test_an_architecture_trains_resumes_on_one_rank_and_exports(pools: Any, tmp_path: Path, model_type: str) -> None:
    walked = walk(pools, model_type, tmp_path)

    assert walked.difference < LARGEST_DIFFERENCE < walked.moved
    assert table_in(DOCUMENTED)[model_type] == row_of(walked)


def test_every_architecture_is_documented() -> None:
    assert list(table_in(DOCUMENTED)) == list(ARCHITECTURES)
    assert len(ARCHITECTURES) == 27
    assert len(MIXTURES) == 6
    assert len(VISION) == 5
