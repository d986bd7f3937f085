"""Triton's compiler takes our kernels at real sizes, for cards that are not here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.models.chunks.kernel_form import why_no_triton
from tests.kernels.outside import lines_of

if why_no_triton():
    pytest.skip("needs Triton: make test-kernels", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a program may take, by compute capability x 10."""
SPILLED = 32
"""Bytes of registers that a program may spill."""
SPILLED_IN_SINGLE_PRECISION = 640
"""On an H100 attention in float32 has no registers left; it is slow there, and right."""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of("compiled", tmp_path_factory.mktemp("compiled"))]


def test_every_program_fits_the_shared_memory_and_the_registers_of_its_card(lines: list[dict[str, Any]]) -> None:
    programs = {capability: [line for line in lines if line["capability"] == capability] for capability in SHARED}

    # Attention in eight cases, over one split and over several, which are joined; the head's two kernels in two dtypes,
    # with two vocabularies, with and without options.
    assert {capability: len(found) for capability, found in programs.items()} == dict.fromkeys(SHARED, 8 * 3 + 2 * 2**3)
    assert not [line for line in lines if line["shared"] > SHARED[line["capability"]]]
    assert all(line["registers"] > 0 for line in lines)
    assert not [line for line in lines if line["spilled"] > limit(line)]


def limit(line: dict[str, Any]) -> int:
    slow = (line["case"], line["capability"]) == ("single precision", 90)
    return SPILLED_IN_SINGLE_PRECISION if slow else SPILLED


def test_attention_over_blocks_copies_ahead_and_multiplies_in_tensor_cores(lines: list[dict[str, Any]]) -> None:
    found = [line for line in lines if line["kernel"] == "_attend"]

    assert len(found) == 48
    assert all(line["copies_ahead"] and line["shared"] > 0 for line in found)
    assert all(line["tensor_cores"] is (line["case"] != "single precision") for line in found)


def test_the_head_reads_rows_in_wide_loads_whatever_the_vocabulary(lines: list[dict[str, Any]]) -> None:
    aligned, odd = (
        [line["wide_loads"] for line in lines if line["case"].startswith("head") and (vocabulary in line["case"])]
        for vocabulary in ("151936", "32001")
    )

    assert (len(aligned), len(odd)) == (24, 24)
    assert min(aligned) >= 2, "of 16 bytes each"
    assert odd == aligned
