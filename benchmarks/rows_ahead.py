"""What rows that a thread prepares cost the update that runs beside it.

    python benchmarks/rows_ahead.py [--updates 12] [--kinds text launches images]

One process trains. Its updates take turns between three arms: *thread*, where the thread of `data/batches/ahead.py`
prepares the next rows meanwhile, as in every run; *process*, where another process prepares the same rows meanwhile;
*alone*, where they were prepared before the update was timed. CPU seconds of the rows over those of an update bound
what the interpreter's lock can cost: the thread holds it for a part of them at most. Thread over process, in wall
seconds, is what it does cost; a busy machine does not resolve it.

*text* has 2 conversations of about 1,000 tokens in an update, a BPE tokenizer, a template, and a thin model of 24
layers. *launches* has 16 of them beside an update of 16 tokens, which does little but start operations, as the CPU
beside a GPU does; on a GPU that computes for longer than this update takes, a delay of the starts is hidden. *images*
has 8 rows with a picture of 448 x 448 pixels and a Qwen2.5-VL of 4 + 4 layers.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kinds
import numpy as np
from measure import ENVIRONMENT, Round, heading
from verdicts import Verdicts, show

ARMS = ("thread", "process", "alone")
ROWS = {"text": 2, "launches": 16, "images": 8}
WARM_UP, WORTH_A_PROCESS = 1, 1.03
THIN: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 8_000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def words() -> list[str]:
    """Return made-up words, as many as a language has common ones."""
    drawn = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    return ["".join(drawn.choice(letters, size)) for size in drawn.integers(2, 9, 6_000)]


def texts(count: int) -> list[dict[str, Any]]:
    """Return conversations of four turns and about 1,000 tokens."""
    drawn, vocabulary = np.random.default_rng(1), np.array(words())
    roles = ("user", "assistant") * 2
    return [
        {"messages": [{"role": role, "content": " ".join(drawn.choice(vocabulary, 100))} for role in roles]}
        for _ in range(count)
    ]


def pictures(count: int) -> list[dict[str, Any]]:
    """Return rows with a picture of noise and an answer of 200 characters."""
    from PIL import Image

    drawn, letters = np.random.default_rng(0), np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return [
        {
            "prompt": "<image>say=",
            "completion": "".join(drawn.choice(letters, 200)),
            "images": [Image.fromarray(drawn.integers(0, 256, (448, 448, 3), dtype=np.uint8))],
        }
        for _ in range(count)
    ]


def tokenizer() -> Any:
    """Return a BPE tokenizer of 8,000 tokens with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        words(), trainers.BpeTrainer(vocab_size=8_000, special_tokens=special, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", chat_template=TEMPLATE)


@contextmanager
def run_of(kind: str, updates: int) -> Iterator[Any]:
    """Build a run of so many updates."""
    from holdfast.config.load import from_mapping
    from holdfast.config.verbs.training import SFTConfig
    from holdfast.parallel.mesh import joined_world
    from holdfast.training.setup.begin import Live, build_run

    size = ROWS[kind]
    rows = pictures(size * updates) if kind == "images" else texts(size * updates)
    model: dict[str, Any] = {"path": "live"}
    if kind == "images":
        model = {"config": kinds.MODELS["vision"], "tokenizer": "builtin:pictures", "image_processor": kinds.PROCESSOR}
    data = {"path": "rows", "batch_size": size, "max_length": 2048, "tokens_per_micro_batch": 2048 * size}
    tree = {"steps": updates, "model": model, "data": data, "run": {"dir": tempfile.mkdtemp()}}
    settings = from_mapping(tree | {"optim": {"lr": 1e-5, "schedule": "constant"}}, SFTConfig)
    live = Live(rows=rows)
    if kind != "images":
        live = Live(rows=rows, model=_thin_model(), tokenizer=tokenizer())
    with joined_world(settings.launch) as world:
        yield build_run(settings, Path.cwd(), world, live)


def _thin_model() -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**THIN), attn_implementation="sdpa").float()


def _few_tokens() -> Any:
    """Return a mini-batch of 16 tokens."""
    from holdfast.data.batches.packing import Share, pack
    from holdfast.types import Example, MiniBatch

    example = Example(0, 0, np.arange(16), np.arange(16) > 0, "rows")
    return MiniBatch((pack([example], [Share(1.0, 15.0)]),), 15.0, 1, 16, 15, {})


def read(kind: str, updates: int) -> None:
    """Prepare a batch whenever a line arrives; say a word when it is ready."""
    with run_of(kind, updates) as run:
        print("ready", flush=True)
        for step, _ in enumerate(sys.stdin):
            run.stream._stream.next(step)  # noqa: SLF001 - what the thread calls
            print("ready", flush=True)


class Neighbour:
    """Another process that prepares the same rows when it is told to."""

    def __init__(self, kind: str, updates: int) -> None:
        command = [sys.executable, __file__, "--read", kind, "--updates", str(updates)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.wait()

    def begin(self) -> None:
        """Let it prepare a batch."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def wait(self) -> None:
        """Wait until it has."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == "ready":
                return
        sys.exit("the process that reads has ended")

    def end(self) -> None:
        """End it."""
        self._process.communicate()


def measure(kind: str, updates: int) -> tuple[Round, float, float]:
    """Return the wall seconds of updates by arm, and the CPU seconds of an update alone and of preparing a batch."""
    from holdfast.training.step import train_step

    total = len(ARMS) * (updates + WARM_UP)
    neighbour = Neighbour(kind, total)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    reading: list[float] = []
    alone: list[float] = []
    few = _few_tokens()
    with run_of(kind, total) as run:
        for step in range(total):
            turn, place = divmod(step, len(ARMS))
            arm = ARMS[(place + turn) % len(ARMS)]
            batch = run.stream.next(step)
            if arm != "thread":
                used = time.process_time()
                run.stream.settle()
                reading.append(time.process_time() - used)
            if arm == "process":
                neighbour.begin()
            if kind == "launches":
                batch = few
            begun, used = time.perf_counter(), time.process_time()
            train_step(run.model, batch, run.evaluation.objective, source_names=run.source_names).read()
            if turn >= WARM_UP:
                seconds[arm].append(time.perf_counter() - begun)
                if arm == "alone":
                    alone.append(time.process_time() - used)
            if arm == "process":
                neighbour.wait()
            run.stream.settle()
        run.stream.close()
    neighbour.end()
    by_arm: Round = {arm: {"seconds": values} for arm, values in seconds.items()}
    return by_arm, statistics.median(alone), statistics.median(reading)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--kinds", nargs="+", default=list(ROWS))
    parser.add_argument("--read")
    options = parser.parse_args()
    if options.read:
        read(options.read, options.updates)
        return
    print(heading("transformers", "tokenizers"))
    missed = False
    for kind in options.kinds:
        turn, update, rows = measure(kind, options.updates)
        what = f"{kind}: CPU seconds of rows ({rows:.4f}) over those of an update ({update:.3f})"
        show(what, f"{rows / update:.4f}")
        verdicts = Verdicts([turn], judged=kind != "launches")
        verdicts.at_most_over_all(WORTH_A_PROCESS, f"{kind}: thread over process", "thread", "process", "seconds")
        missed = missed or verdicts.missed
    sys.exit(missed)


if __name__ == "__main__":
    import os

    os.environ |= ENVIRONMENT
    import torch

    torch.set_num_threads(1)
    main()
