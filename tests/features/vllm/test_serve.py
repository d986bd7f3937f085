"""`holdfast serve` on runs that have no servers: one paragraph each, with what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.in_process import cli_in_process

POLICY = """
steps: 1
model: {tokenizer: builtin:characters, config: {model_type: llama, vocab_size: 64}}
data: {synthetic: {task: sort, rows: 8}, batch_size: 4, max_length: 48}
rollout: {group_size: 4, max_new_tokens: 8}
reward: {kind: length, target: 6}
"""
SFT = """
steps: 1
model: {tokenizer: builtin:characters, config: {model_type: llama, vocab_size: 64}}
data: {synthetic: {task: sort, rows: 8}, batch_size: 4, max_length: 48}
"""


@pytest.mark.parametrize(
    ("text", "overrides", "why"),
    [
        (POLICY, [], "rollout.engine of this run is auto"),
        (POLICY, ["rollout.engine=transformers"], "rollout.engine of this run is transformers"),
        (SFT, [], "a run of `holdfast sft` samples nothing"),
    ],
)
def test_a_run_without_servers_is_told_what_to_write(tmp_path: Path, text: str, overrides: list[str], why: str) -> None:
    (tmp_path / "run.yaml").write_text(text)

    done = cli_in_process("serve", "run.yaml", *overrides, cwd=tmp_path)

    assert done.code == 2
    assert len(done.err.splitlines()) == 1, done.err
    assert done.err.startswith("run.yaml: `holdfast serve` starts the servers of vLLM that a run samples from, and ")
    assert f"{why}, so there is none to start." in done.err
    assert "write rollout.engine: {kind: vllm, url: http://127.0.0.1:8700" in done.err
