"""What paths, first rows and the tokenizer show is told before torch is imported, or before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.fixtures import HOLDFAST, TINY, write_rows, write_run
from tests.cli.warm import WarmPython, run_and_list_imports
from tests.messages import Said, lacks


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("verb", "change", "named"),
    [
        ("sft", {"data": {"path": "gone.jsonl"}}, "data.path=gone.jsonl"),
        ("sft", {"data": {"path": "notes.md"}}, "notes.md .jsonl"),
        ("sft", {"model": {"path": "./gone"}}, "./gone"),
        ("eval", {"evaluation": {"sets": {"held": {"path": "gone.csv"}}}}, "evaluation.sets.held.path=gone.csv"),
        ("sft", {"data": {"filter": "gone.py:keep"}}, "data.filter: gone.py"),
        ("sft", {"optim": {"kind": "path", "path": "gone.py:Mine"}}, "optim.path: gone.py"),
        ("sft", {"metrics": {"sinks": ["gone.py:Mine"]}}, "metrics.sinks: gone.py"),
        ("grpo", {"reward": {"path": "gone.py:score"}}, "reward score: gone.py"),
        ("grpo", {"reward": [{"kind": "model", "path": "./gone"}]}, "./gone"),
        ("grpo", {"reward": "exact", "advantage": {"kind": "path", "path": "gone.py:mine"}}, "advantage.path: gone.py"),
        ("grpo", {"reward": "exact", "objective": {"kind": "path", "path": "gone.py:mine"}}, "objective.path: gone.py"),
    ],
)
def test_a_path_that_leads_nowhere_is_told_before_torch_is_imported(
    verb: str, change: dict[str, Any], named: str, tmp_path: Path, tree: dict[str, Any], said: Said
) -> None:
    (tmp_path / "notes.md").write_text("no rows")
    if verb == "grpo":
        tree["rollout"] = {"max_new_tokens": 8}
    for section, values in change.items():
        tree[section] = tree.get(section, {}) | values if section == "data" else values
    write_run(tmp_path / "run.yaml", tree)

    done, imports = run_and_list_imports([HOLDFAST, verb, "run.yaml"], cwd=tmp_path)

    assert done.code == 2
    assert lacks(done.err, named) == []
    said(done.err.strip())
    assert len(done.err.strip().splitlines()) == 1
    assert "holdfast.cli.main" in imports
    assert not {"torch", "transformers", "datasets", "numpy", "pyarrow"} & imports
    assert sorted(file.name for file in tmp_path.iterdir()) == ["notes.md", "rows.jsonl", "run.yaml"]


@pytest.fixture(scope="module")
def broken_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose weights are no numbers, which shows as soon as they are used."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from holdfast.data.tasks.synthetic import character_tokenizer

    directory = tmp_path_factory.mktemp("broken") / "model"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY)).save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    file = directory / "model.safetensors"
    weights = {name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return directory


POLICY = {"reward": "exact", "rollout": {"max_new_tokens": 4, "group_size": 2}}
CHAT = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 12


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("verb", "section", "rows", "named"),
    [
        ("sft", {}, [{"prompt": "a=", "answer": "b"}] * 12, "rows row 0: prompt answer"),
        ("sft", {"chat_template": "{{ messages[7].content.gone }}"}, CHAT, "rows row 0"),
        ("dpo", {"preference": {"loss": "dpo"}}, [{"prompt": "a=", "chosen": "b"}] * 12, "rows row 0"),
        ("grpo", POLICY, [{"question": "a=", "answer": "b"}] * 12, "rows row 0"),
        ("grpo", POLICY, [{"prompt": "a=", "gold": "b"}] * 12, "reward exact: answer prompt gold"),
        ("sft", {}, [{"prompt": "a=", "completion": "b"}] * 12, ""),
    ],
)
def test_rows_are_refused_before_a_weight_is_read(  # noqa: PLR0913 - a case's parts
    verb: str,
    section: dict[str, Any],
    rows: list[dict[str, Any]],
    named: str,
    warm: WarmPython,
    broken_weights: Path,
    tmp_path: Path,
    tree: dict[str, Any],
    said: Said,
) -> None:
    write_rows(tmp_path / "rows.jsonl", rows)
    if "chat_template" in section:
        tree["data"] |= section
        section = {}
    write_run(tmp_path / "run.yaml", tree | section | {"model": {"path": str(broken_weights)}})

    done = warm.run("-m", "holdfast.cli.main", verb, "run.yaml", cwd=tmp_path)

    assert done.code == 2
    assert lacks(done.err, named) == []
    assert ("nan" in done.err.lower()) is (not named)
    if named:
        said(done.err.strip())


def test_a_column_that_only_a_late_row_has_is_no_mistake_of_all_rows(said: Said) -> None:
    from holdfast.data.rows.rows import from_rows
    from holdfast.errors import DataError
    from holdfast.training.policy.reward_columns import refuse_absent_columns
    from holdfast.training.setup.rows import OpenedData

    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c", "answer": "1"}]
    data = OpenedData((from_rows(rows, "rows"),), None, {}, {}, {})

    refuse_absent_columns(data, {"exact": ["answer"]})
    with pytest.raises(DataError, match="column gold") as raised:
        refuse_absent_columns(data, {"exact": ["answer", "gold"]})
    said(str(raised.value))


def test_rows_that_are_left_out_are_left_out_of_the_search_for_columns(tmp_path: Path) -> None:
    from holdfast.config.sections.data import SourceConfig
    from holdfast.data.rows.rows import open_source
    from holdfast.errors import DataError
    from holdfast.training.policy.reward_columns import refuse_absent_columns
    from holdfast.training.setup.rows import OpenedData

    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a\n{"prompt": "b", "answer": "1"}\n')
    source = open_source(SourceConfig(path=str(file)), tmp_path, keep_bad=True)
    data = OpenedData((source,), None, {}, {}, {})

    refuse_absent_columns(data, {"exact": ["answer"]}, skips=True)
    refuse_absent_columns(data, {})
    with pytest.raises(DataError, match="rows.jsonl"):
        refuse_absent_columns(data, {"exact": ["answer"]})
    with pytest.raises(DataError, match="column gold"):
        refuse_absent_columns(data, {"exact": ["gold"]}, skips=True)
