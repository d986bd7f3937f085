"""GSM8K on two ranks, as a user would train on it: tokenizer of the model's directory, conversations, packs, loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.batches.packing import unpack
from holdfast.metrics.sink import read_metrics
from holdfast.parallel.mesh import World
from holdfast.recipes.grpo import grpo
from holdfast.rewards.base import Sample
from holdfast.training.policy.rewards import open_rewards
from holdfast.training.setup.begin import build_run
from tests.training.cases import run

ROWS = 400
VOCABULARY = 1000
SPECIAL_TOKENS = ["<pad>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}{{ '\\n' }}"
    "{%- if message.role == 'assistant' -%}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{%- else -%}{{ message.content }}<|im_end|>{%- endif -%}{{ '\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}{%- endif -%}"
)


@pytest.fixture(scope="module")
def rows(gsm8k: Path) -> list[dict[str, str]]:
    with gsm8k.open(encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(ROWS), strict=False)]


def train_tokenizer(texts: list[str]) -> Any:
    """Train a byte-level BPE and give it the chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def model(rows: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny llama of random weights with a tokenizer trained on the rows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("gsm8k") / "model"
    tokenizer = train_tokenizer([text for row in rows for text in row.values()])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=0,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def shapes(rows: list[dict[str, str]], gsm8k: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the `data` of both ways to write a conversation."""
    file = tmp_path_factory.mktemp("rows") / "messages.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for row in rows:
            turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
            out.write(json.dumps({"messages": turns}) + "\n")
    return {
        "messages": {"path": str(file)},
        "columns": {"path": str(gsm8k), "max_samples": ROWS, "columns": {"prompt": "question", "completion": "answer"}},
    }


def settings(model: Path, directory: Path, data: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "steps": 30,
        "run": {"dir": str(directory), "name": "r"},
        "model": {"path": str(model)},
        "data": {"batch_size": 32, "max_length": 768, "tokens_per_micro_batch": 1536, "overlong": "refuse"} | data,
        "optim": {"lr": 1e-2, "schedule": {"kind": "linear", "warmup_steps": 3}},
        "metrics": {"progress": "off"},
        "checkpoint": {"at_end": False, "export_at_end": False, "rehearsal": False},
    } | sections


def served(world: World, values: dict[str, Any]) -> dict[str, Any]:
    """Return the text of every sequence of one epoch that this rank trains, and how the packs were laid."""
    built = build_run(from_mapping(values, SFTConfig), Path(), world)
    decode = built.model.blueprint.tokenizer.decode
    texts, packs = [], []
    for step in range(-(-ROWS // 32)):
        mini_batch = built.stream.next(step)
        assert mini_batch is not None
        for micro_batch in mini_batch.micro_batches:
            examples = unpack(micro_batch)
            packs.append((len(examples), int(micro_batch.tokens.numel())))
            for example in examples:
                trained, read = example.tokens[example.loss_mask], example.tokens[~example.loss_mask]
                ends = np.flatnonzero(np.diff(example.loss_mask.astype(int)))
                texts.append((decode(trained), decode(read), len(ends)))
    return {"texts": texts, "packs": packs}


@pytest.mark.parametrize("shape", ["messages", "columns"])
def test_the_trained_tokens_of_packed_rows_are_exactly_the_answers(
    pools: Any, tmp_path: Path, model: Path, shapes: dict[str, Any], rows: list[dict[str, str]], shape: str
) -> None:
    """The newline that the template writes after a conversation's last turn is read, not trained."""
    found = pools(2).run(served, settings(model, tmp_path, shapes[shape]))

    texts = [text for of_rank in found for text in of_rank["texts"]]
    if shape == "messages":
        asked = [f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n" + "\n" for row in rows]
    else:
        asked = [row["question"] for row in rows]
    answers = [row["answer"] + "<|im_end|>" for row in rows]
    assert sorted((trained, read) for trained, read, _ in texts) == sorted(zip(answers, asked, strict=True))
    assert {spans for *_, spans in texts} == {2 if shape == "messages" else 1}
    packs = [pack for of_rank in found for pack in of_rank["packs"]]
    assert max(tokens for _, tokens in packs) <= 1536
    assert max(sequences for sequences, _ in packs) >= 4


@pytest.mark.parametrize(
    "shape", [pytest.param("messages", marks=pytest.mark.slow), pytest.param("columns", marks=pytest.mark.slow)]
)
def test_the_loss_on_real_rows_falls_by_a_quarter_in_30_steps(
    pools: Any, tmp_path: Path, model: Path, shapes: dict[str, Any], shape: str
) -> None:
    """From that of a uniform guess, log 1000 = 6.9, to what the frequencies of tokens and their neighbours give."""
    pools(2).run(run, settings(model, tmp_path, shapes[shape]))

    losses = [line["loss"] for line in read_metrics(tmp_path / "r" / "metrics.jsonl")]
    assert losses[0] == pytest.approx(np.log(VOCABULARY), abs=0.2)
    assert np.mean(losses[-5:]) < 0.75 * losses[0]


def rewarded(world: World, values: dict[str, Any], gold: list[dict[str, str]]) -> list[tuple[float | None, float]]:
    """Train a policy, then score this rank's share of the rows' own answers; return their rewards and parts."""
    config = from_mapping(values, GRPOConfig)
    grpo(config, Path(), world)
    mine = gold[world.rank :: world.size]
    samples = [Sample(number, "", row["output"], [], [], "stop", row) for number, row in enumerate(mine)]
    with open_rewards(config, Path(), world) as rewards:
        return [(scored.reward, scored.parts["math"] or 0.0) for scored in rewards.score(samples)]


def test_a_policy_is_asked_in_chat_format_and_rewarded_by_the_math_reward(
    pools: Any, tmp_path: Path, model: Path, gsm8k: Path, rows: list[dict[str, str]]
) -> None:
    """Random weights are right by luck only; the rows' own answers always are, under the same sections and columns."""
    columns = {"instruction": "question", "output": "answer"}
    values = settings(
        model,
        tmp_path,
        {"path": str(gsm8k), "max_samples": ROWS, "columns": columns, "batch_size": 4},
        steps=2,
        rollout={"group_size": 4, "max_new_tokens": 24, "show_every": 1},
        reward=[{"kind": "math", "column": "output"}, {"kind": "format", "regex": ".*#### -?[0-9,]+", "weight": 0.5}],
        rewards={"workers": 1},
        optim={"lr": 1e-3, "schedule": "constant"},
    )
    gold = [{"instruction": row["question"], "output": row["answer"]} for row in rows]

    found = pools(2).run(rewarded, values, gold)

    assert [each for of_rank in found for each in of_rank] == [(1.5, 1.0)] * ROWS
    lines = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["reward"] == line["rewards/math/mean"] + 0.5 * line["rewards/format/mean"]
        assert line["rewards/math/mean"] <= 2 / 16
        assert line["rollout/completions"] == 16.0
        assert line["reward/error"] == line["reward/timeout"] == line["reward/none"] == 0.0
    samples = [json.loads(line) for line in (tmp_path / "r" / "samples.jsonl").read_text().splitlines()]
    asked = {f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n" for row in rows}
    assert len(samples) == 2 * 16
    assert {sample["prompt"] for sample in samples} <= asked
