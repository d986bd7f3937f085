"""The share of drafted tokens that servers accept, from the counters of vLLM's metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.features.vllm.speculation import DraftCounts
from holdfast.metrics.sink import METRICS, read_metrics
from tests.features.vllm.served import ServedModel, served_tree, serving
from tests.features.vllm.test_served_runs import run

TEXT = """# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="policy"} %d.0
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="policy"} 1.764e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="policy"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="policy",position="0"} 7.0
"""


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (TEXT % (10, 7), DraftCounts(10.0, 7.0)),
        (TEXT % (10, 7) + TEXT % (5, 1), DraftCounts(15.0, 8.0)),  # two engines behind one address
        ("", None),
        (TEXT.replace("%d.0", "NaN"), None),
        (TEXT.replace("draft_tokens_total{", "drafts_total{") % (10, 7), None),
        ("<html>not found</html>", None),
    ],
)
def test_counters_of_drafts_are_read_from_a_server_s_metrics(text: str, counts: DraftCounts | None) -> None:
    assert DraftCounts.read(text) == counts


def test_acceptance_of_a_step_is_that_of_its_own_drafts(tmp_path: Path) -> None:
    asked = []

    def counters() -> str:
        asked.append(True)
        drafted = (0, 40, 100, 8)[len(asked)]  # 40, then 60; then the server was started again
        return TEXT % (drafted, (0, 30, 45, 8)[len(asked)])

    with serving(ServedModel(counters=counters)) as url, serving(ServedModel()) as silent:
        run(tmp_path, served_tree([url, silent], str(tmp_path), steps=3))

    lines = [line for line in read_metrics(tmp_path / "r" / METRICS) if "loss" in line]
    assert [line["sampling/speculation/acceptance"] for line in lines] == [30 / 40, 15 / 60, 1.0]


def test_where_no_server_drafts_nothing_is_said_of_it(tmp_path: Path) -> None:
    asked = []

    def counters() -> str:
        asked.append(True)
        return "vllm:num_requests_running 0.0\n"

    with serving(ServedModel(counters=counters)) as url:
        run(tmp_path, served_tree([url], str(tmp_path), steps=2))

    lines = [line for line in read_metrics(tmp_path / "r" / METRICS) if "loss" in line]
    assert not any("sampling/speculation/acceptance" in line for line in lines)
    assert len(asked) == 1
