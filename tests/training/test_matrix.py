"""Architectures of transformers, each from its files to an export that plain transformers reads and agrees with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.export.stored import export_stored, export_stored_adapter
from holdfast.checkpoint.keep import find
from tests.training.matrix import ARCHITECTURES, LARGEST_DIFFERENCE, MIXTURES, VISION, walk
from tests.training.matrix_table import table_in

QUICK = {"gemma2", "falcon_h1", "gpt_oss", "deepseek_v3", "qwen3_vl", "idefics3"}
"""Walked in every run of the tests: what the other suites do not train, resume and export."""
DOCUMENTED = Path("docs/models.md")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ARCHITECTURES]
)
def test_an_architecture_trains_resumes_on_one_rank_and_exports(pools: Any, tmp_path: Path, model_type: str) -> None:
    walked = walk(pools, model_type, tmp_path)

    assert walked.difference < LARGEST_DIFFERENCE < walked.moved
    assert table_in(DOCUMENTED)[model_type] == walked.attention


ADAPTED = ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in (*VISION[1:], *MIXTURES))]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ADAPTED)
def test_adapters_of_an_architecture_export_merged_and_alone(pools: Any, tmp_path: Path, model_type: str) -> None:
    walked = walk(pools, model_type, tmp_path, {"rank": 4})

    assert walked.difference < LARGEST_DIFFERENCE < walked.moved
    assert walked.adapter_difference < LARGEST_DIFFERENCE


OTHER_KINDS = {
    "gpt2 with LoRA": {"rank": 4, "ranks": {"c_attn": 6}},
    "gpt2 with DoRA": {"rank": 4, "dora": True},
    "llama with DoRA": {"rank": 4, "dora": True, "ranks": {"q_proj": 6}},
    "qwen3_moe with experts": {"rank": 4, "experts": "all", "ranks": {"experts.down": 2}},
    "mixtral with experts alone": {"rank": 4, "targets": [], "experts": ["experts.gate_up_proj"]},
    "gpt_oss with experts": {"rank": 4, "experts": "all"},
    "olmoe with experts": {"rank": 4, "experts": "all"},
    "deepseek_v3 with experts": {"rank": 4, "experts": "all"},
    "qwen2_5_vl with DoRA": {"rank": 4, "dora": True},
}
QUICK_KINDS = {"gpt2 with LoRA", "gpt2 with DoRA", "llama with DoRA", "qwen3_moe with experts"}


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning")  # peft looks among layers alone
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK_KINDS else pytest.mark.slow) for kind in OTHER_KINDS]
)
def test_other_adapters_export_merged_and_alone_from_the_run_and_from_its_checkpoint(
    pools: Any, tmp_path: Path, kind: str
) -> None:
    walked = walk(pools, kind.split(maxsplit=1)[0], tmp_path, OTHER_KINDS[kind])

    assert walked.difference < LARGEST_DIFFERENCE < walked.moved
    assert walked.adapter_difference < LARGEST_DIFFERENCE
    last = find.one(str(tmp_path / "r"))
    export_stored([last], tmp_path / "again")
    export_stored_adapter(last, tmp_path / "again-adapter")
    for name in ("", "-adapter"):
        first, again = (
            folder.with_name(folder.name + name) for folder in (tmp_path / "r/exports/final", tmp_path / "again")
        )
        (weights,) = first.glob("*.safetensors")
        assert (again / weights.name).read_bytes() == weights.read_bytes()


def test_every_architecture_is_documented() -> None:
    assert set(table_in(DOCUMENTED)) == set(ARCHITECTURES)
    assert len(ARCHITECTURES) == 53
    assert len(MIXTURES) == 7
    assert len(VISION) == 7
