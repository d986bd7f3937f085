"""A stop text ends a completion where the text of all its tokens first holds it, and costs the last tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.models.names import named_parameters
from holdfast.rollout.engine import Request, generate
from holdfast.rollout.local.generation import TransformersEngine
from holdfast.rollout.sampling import Stops, mixed
from holdfast.types import Finish
from tests.rollout.test_inprocess import origin_of, reference

TEXT = "stop here, it's the end. 停止 ici, naïve 🙂🙃 don't  stop ! Ünï\n\n\tcode 的 is 'quoted' ?"


def byte_level() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"],
                                  show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return fast(tokenizer)


def with_spaces_ahead() -> Any:
    """Return a tokenizer as Llama's: a space before every word, whose first one is dropped, and bytes as a fallback."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += sorted(set("stopherisndc,.'!?") | {"▁stop", "▁here", "st", "op", "en", "▁▁"})
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(tokenizer)


def unigram() -> Any:
    """Return a tokenizer as T5's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=["<end>", "<unk>"], unk_token="<unk>",
                                      show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return fast(tokenizer)


def word_pieces() -> Any:
    """Return a tokenizer as BERT's, which takes spaces away before marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=["<end>", "[UNK]"], show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return fast(tokenizer, clean=True)


def fast(tokenizer: Any, clean: bool = False) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", clean_up_tokenization_spaces=clean)


TOKENIZERS = {
    "characters": character_tokenizer,
    "byte level": byte_level,
    "spaces ahead, bytes": with_spaces_ahead,
    "unigram": unigram,
    "word pieces": word_pieces,
}


class Counted:
    """Decodes, and counts tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.tokens = tokenizer, 0

    def __call__(self, tokens: Sequence[int]) -> str:
        self.tokens += len(tokens)
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


def drawn(tokenizer: Any, generator: np.random.Generator, size: int) -> list[int]:
    """Return tokens at random, some of them what a text is encoded as, cut anywhere."""
    tokens: list[int] = []
    while len(tokens) < size:
        if generator.random() < 0.6:
            start = int(generator.integers(len(TEXT) - 1))
            piece = tokenizer(TEXT[start : start + int(generator.integers(1, 12))], add_special_tokens=False)
            tokens += piece["input_ids"][int(generator.random() < 0.2) :]
        else:
            tokens += generator.integers(0, len(tokenizer), int(generator.integers(1, 6))).tolist()
    return tokens[:size]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_stop_text_is_found_where_the_text_of_all_tokens_first_holds_it(kind: str) -> None:
    tokenizer, generator = TOKENIZERS[kind](), np.random.default_rng(0)
    found_count = 0
    for _ in range(60):
        tokens = drawn(tokenizer, generator, int(generator.integers(2, 70)))
        texts = [tokenizer.decode(tokens[:size], skip_special_tokens=False) for size in range(1, len(tokens) + 1)]
        start, length = int(generator.integers(len(texts[-1]) + 1)), int(generator.integers(1, 9))
        wanted = (texts[-1][start : start + length] or "x", "stop here", TEXT[start : start + 3] or "y")
        stops = Stops(frozenset(), Counted(tokenizer)).with_texts(wanted)

        expected = next((n for n, text in enumerate(texts, 1) if any(stop in text for stop in wanted)), None)
        step = int(generator.integers(1, 20))
        ends = [stops.end(tokens[: before + step], before) for before in range(0, len(tokens), step)]

        assert stops.end(tokens, 0) == expected, (tokens, wanted)
        assert next((end for end in ends if end is not None), None) == expected
        found_count += expected is not None
    assert found_count > 30


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_token_costs_no_more_behind_a_long_completion(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    decode = Counted(tokenizer)
    tokens = drawn(tokenizer, np.random.default_rng(1), 3000)
    stops = Stops(frozenset(), decode).with_texts(["</answer>"])

    assert stops.end(tokens, 0) is None
    assert decode.tokens < 200 * len(tokens)


def test_generate_ends_with_the_last_row_that_a_stop_text_ends() -> None:
    model, tokenizer = reference("llama"), character_tokenizer()
    decode = lambda tokens: str(tokenizer.decode(list(tokens)))  # noqa: E731
    engine = TransformersEngine(origin_of(model), torch.device("cpu"), torch.float64, Stops(frozenset(), decode), 0)
    engine.update_weights(named_parameters(model).items(), 0)
    asked = [Request(number, np.arange(5, 9 + number), (mixed(3, number),)) for number in range(3)]
    free = generate(engine, asked, SamplingConfig(max_new_tokens=40))
    wholes = [sampled.tokens.tolist() for sampled in free]
    firsts = {
        stop: [next((n for n in range(1, 41) if stop in decode(whole[:n])), 40) for whole in wholes]
        for stop in "abcdefghijklmnopqrst"
    }
    stop = min(firsts, key=lambda stop: (max(firsts[stop]), stop))
    calls: list[int] = []
    engine._replica.model.register_forward_hook(lambda *_: calls.append(1))

    found = generate(engine, asked, SamplingConfig(max_new_tokens=40, stop=[stop]))

    assert len(calls) == max(firsts[stop]) < 40
    for sampled, whole, size in zip(found, free, firsts[stop], strict=True):
        assert sampled.tokens.tolist() == whole.tokens[:size].tolist()
        assert sampled.logprobs.tolist() == whole.logprobs[:size].tolist()
        assert sampled.finish is Finish.STOP


GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def split_mix(state: np.uint64) -> np.uint64:
    """Steele, Lea & Flood 2014, figure 16."""
    with np.errstate(over="ignore"):
        state = (state ^ (state >> np.uint64(30))) * np.uint64(FIRST)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(SECOND)
    return state ^ (state >> np.uint64(31))


def test_seeds_are_those_of_split_mix_whatever_integers_are_folded() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        given = [int(value) for value in generator.integers(-(2**63), 2**63 - 1, int(generator.integers(1, 5)))]
        state = np.uint64(0)
        for value in [*given, len(given)]:
            with np.errstate(over="ignore"):
                state = split_mix(state + np.uint64(value % 2**64) * np.uint64(FIRST) + np.uint64(GOLDEN))
        assert mixed(*given) == int(state) % 2**63

    assert [mixed(0), mixed(7, 3, 5, 1), mixed(-5, 2**62)] == [
        609565728871919203, 2391227148278847945, 7944897828131323734,
    ]  # fmt: skip
