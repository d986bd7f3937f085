"""A vLLM beside a pretrained model: a run samples from it, and it loads what the run exported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.real.conftest import answer_logprobs, answer_tokens, done, sums, write_run

PYTHON = os.environ.get("HOLDFAST_VLLM_PYTHON", "")
"""That of an environment with vLLM, as `tools/install_vllm.sh` makes it."""
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs a vLLM; tools/install_vllm.sh .venv-vllm installs one")

SCORE = """
import json
import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    directory, sequences = sys.argv[1], json.loads(sys.argv[2])
    engine = LLM(directory, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8)
    prompts = [{"prompt_token_ids": tokens} for tokens in sequences]
    answers = engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    scores = [
        [row[token].logprob for row, token in zip(answer.prompt_logprobs[1:], tokens[1:])]
        for answer, tokens in zip(answers, sequences)
    ]
    print("scores", json.dumps(scores), flush=True)
"""


class ServedRun(NamedTuple):
    """A run of GRPO whose completions a vLLM sampled."""

    directory: Path
    out: str


@pytest.fixture(scope="module")
def run() -> Iterator[ServedRun]:
    """Train two steps on two ranks; the run starts and ends its server."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    engine = {"kind": "vllm", "url": f"http://127.0.0.1:{port}", "start": True, "python": PYTHON}
    with tempfile.TemporaryDirectory(prefix="holdfast-test-") as folder:
        file = write_run(
            Path(folder),
            "grpo",
            rollout={"engine": engine, "record": True},
            checkpoint={"every_steps": 1},
        )
        yield ServedRun(Path(folder) / "runs/run", done("grpo", file, cwd=Path(folder)))


def test_a_push_is_proved_and_nothing_is_to_be_explained(run: ServedRun) -> None:
    explained = done("explain-mismatch", run.directory, "--step", 2, cwd=run.directory)

    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    worst = [line["sampling/sampling_logp_difference/max"] for line in lines if "reward" in line]
    print(explained, worst)
    assert "weights pushed to 1 of 1 servers in" in run.out
    assert len(worst) == 2
    assert max(worst) <= 1e-4
    assert explained.splitlines()[-1].startswith("nothing to explain")


def test_vllm_scores_an_export_as_transformers_does(run: ServedRun, model: Path, tmp_path: Path) -> None:
    final, rows = run.directory / "exports/final", sums(8, start=40)
    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = [answer_tokens(tokenizer, row) for row in rows]
    (tmp_path / "score.py").write_text(SCORE)
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    scored = subprocess.run(
        [PYTHON, str(tmp_path / "score.py"), str(final), json.dumps([[*prompt, *answer] for prompt, answer in pairs])],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert "scores [[" in scored.stdout, scored.stderr
    (line,) = (line for line in scored.stdout.splitlines() if line.startswith("scores "))
    scores = json.loads(line.removeprefix("scores "))
    by_vllm = [score for row, (_, answer) in zip(scores, pairs, strict=True) for score in row[-len(answer) :]]
    plain = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    assert by_vllm == pytest.approx(answer_logprobs(plain, tokenizer, rows), abs=1e-4)
