"""A reference behind a server is the one beside the policy, number for number; what is wrong with it is an error."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.data.tasks.synthetic import character_tokenizer
from tests.distributed import grpo_cases, preference_cases
from tests.logprob_server import LONGEST, Served, served
from tests.tiny import tiny_directory, tiny_model

PROMPTS, PAIRS, LABELLED = grpo_cases.prompts_of(12), preference_cases.pairs_of(12), preference_cases.labelled_of(12)


def other_weights(folder: Path) -> None:
    tiny_directory(folder, "llama", seed=1)


def fewer_tokens(folder: Path) -> None:
    tiny_model("llama", vocab_size=64).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)


def other_words(folder: Path) -> None:
    tiny_directory(folder, "llama")
    file = folder / "tokenizer.json"
    words = json.loads(file.read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(words))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("models") / "policy", "llama")


@pytest.fixture(scope="module")
def process(directory: Path) -> Iterator[Served]:
    others = [other_weights, fewer_tokens, other_words]
    for make in others:
        make(directory.with_name(make.__name__))
    names = [directory.with_name(make.__name__) for make in others]
    with served(sys.executable, directory.with_name("fault"), directory, *names) as server:
        yield server


@pytest.fixture
def server(process: Served) -> Iterator[Served]:
    """Return the server, mended, and with nothing asked."""
    Path(f"{process.faults}.log").unlink(missing_ok=True)
    yield process
    process.spoil("")


def at(server: Served, name: str = "policy", **options: Any) -> dict[str, Any]:
    return {"kind": "server", "url": server.url(name), **options}


CASES = [
    pytest.param(preference_cases, PAIRS, {}, id="dpo"),
    pytest.param(preference_cases, LABELLED, {"preference": {"loss": "kto"}}, id="kto"),
    pytest.param(
        grpo_cases,
        PROMPTS,
        {"kl": {"coefficient": 0.3}, "updates": {"mini_batches": 2, "passes": 2}, "groups": {"truncated": "mask"}},
        id="grpo, two updates, two passes, cut completions masked",
    ),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("cases", "rows", "sections"), CASES)
def test_it_makes_the_updates_that_the_reference_beside_the_policy_makes(
    pools: Any, directory: Path, server: Served, cases: Any, rows: Any, sections: dict[str, Any]
) -> None:
    data = {"tokens_per_micro_batch": 96}
    beside = cases.settings(str(directory), data=data, reference={"kind": "sharded"}, **sections)
    asked = cases.settings(str(directory), data=data, reference=at(server, requests=3), **sections)

    expected = pools(2).run(cases.train, beside, rows)[0]
    found = pools(2).run(cases.train, asked, rows)[0]

    assert [line["loss"] for line in found["lines"]] == pytest.approx(
        [line["loss"] for line in expected["lines"]], rel=1e-12
    )
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][name], parameter, rtol=0, atol=1e-12, err_msg=name)


def test_each_rank_asks_for_its_own_samples_alone_and_the_older_form_says_the_same(
    pools: Any, directory: Path, server: Served
) -> None:
    tree = preference_cases.settings(str(directory), reference=at(server))
    one = pools(1).run(preference_cases.train, tree, PAIRS)[0]
    of_one = _trained(server)

    two = pools(2).run(
        preference_cases.train, tree | {"reference": at(server, answers="echo", api_key_variable="HOME")}, PAIRS
    )[0]

    assert sorted(_trained(server)[len(of_one) :]) == sorted(of_one)
    assert len(of_one) == 3 * 4 * 2, "each answer of each step was asked for once"
    assert [line["loss"] for line in two["lines"]] == pytest.approx([line["loss"] for line in one["lines"]], rel=1e-12)
    assert {line["key"] for line in server.asked()[-3:]} == {f"Bearer {Path.home()}"}


def _trained(server: Served) -> list[list[int]]:
    """Return the sequences of rows that were asked for: those that begin as the rows' prompts do."""
    tokenizer = character_tokenizer()
    texts = [line["prompt"] for line in server.asked() if isinstance(line["prompt"], list)]
    return [tokens for tokens in texts if tokenizer.decode(tokens).startswith("copy ")]


def test_what_it_said_once_is_kept_and_a_later_start_asks_nothing(
    pools: Any, directory: Path, server: Served, tmp_path: Path
) -> None:
    once = at(server, precompute=True, cache=str(tmp_path / "said"))
    tree = preference_cases.settings(str(directory), reference=once)
    first = pools(2).run(preference_cases.train, tree, PAIRS)[0]
    asked = len(server.asked())

    server.spoil("500")
    second = pools(2).run(preference_cases.train, tree, PAIRS)[0]

    assert len(server.asked()) == asked
    assert [line["loss"] for line in second["lines"]] == [line["loss"] for line in first["lines"]]


def test_a_server_that_is_busy_now_and_then_is_asked_again(pools: Any, directory: Path, server: Served) -> None:
    tree = preference_cases.settings(str(directory), reference=at(server))
    server.spoil("503-once")

    found = pools(2).run(preference_cases.train, tree, PAIRS, 1)[0]

    assert found["lines"][0]["loss"] == pytest.approx(math.log(2), rel=1e-12)
    assert found["lines"][0]["rewards/margins"] == pytest.approx(0, abs=1e-12)


OTHERS = [
    ("other_weights", "is not the model at start: of one text their log-probabilities differ by "),
    ("fewer_tokens", "does not know all 96 tokens that the trained model may use"),
    ("other_words", "has another tokenizer than the trained model: of "),
]


@pytest.mark.parametrize(("name", "words"), OTHERS)
def test_another_model_is_refused_before_step_1_on_all_ranks(
    pools: Any, directory: Path, server: Served, name: str, words: str
) -> None:
    tree = grpo_cases.settings(str(directory), kl={"coefficient": 0.3}, reference=at(server, name))

    (kind, message), second = pools(2).errors(grpo_cases.train, tree, PROMPTS)

    assert kind == "ModelError"
    assert words in message
    assert second == (kind, message)


def test_another_reference_by_intent_is_taken(pools: Any, directory: Path, server: Served) -> None:
    tree = preference_cases.settings(str(directory), reference=at(server, "other_weights", bound=None))

    line = pools(1).run(preference_cases.train, tree, PAIRS, 1)[0]["lines"][0]

    policy, reference = tiny_model("llama").double(), tiny_model("llama", seed=1).double()
    for side, name in enumerate(("chosen", "rejected")):
        ratios = [_log_ratio(pair[side], policy, reference) for pair in preference_cases.sequences_of(PAIRS[:4])]
        assert line[f"rewards/{name}"] == pytest.approx(0.3 * np.mean(ratios), rel=1e-9)
        assert abs(line[f"rewards/{name}"]) > 1e-2


def _log_ratio(example: Any, policy: Any, reference: Any) -> float:
    """Return log policy - log reference of an answer, from plain transformers."""
    said = [preference_cases.answer_logprob(model, example.tokens, example.loss_mask) for model in (policy, reference)]
    return (said[0] - said[1]).item()


REFUSED = [
    ({"model": "large"}, {}, "no large is served there; http://127.0.0.1:", "serves tiny. Name one of them."),
    ({"api_key_variable": "NOT_SET_ANYWHERE"}, {}, "the environment variable NOT_SET_ANYWHERE is not set", ""),
    ({}, {"data": {"max_length": LONGEST}}, f"takes {LONGEST - 1} tokens, and data.max_length is {LONGEST}", ""),
]


@pytest.mark.parametrize(("options", "sections", "words", "more"), REFUSED)
def test_what_the_server_does_not_offer_is_refused(
    pools: Any, directory: Path, server: Served, options: dict[str, Any], sections: Any, words: str, more: str
) -> None:
    tree = preference_cases.settings(str(directory), reference=at(server, **options), **sections)

    (kind, message), second = pools(2).errors(preference_cases.train, tree, PAIRS)

    assert kind == "ConfigError"
    assert words in message
    assert more in message
    assert second == (kind, message)


FAULTS = [
    ("500", "answers 500"),
    ("hangs", "gave no whole answer within 1 s"),
    ("trickles", "gave no whole answer within 1 s"),
    ("html", "with what is no JSON: <html>a proxy's page</html>"),
    ("other-model", "is another model than it was before step 1: what it says of one text differs by 0.5 nats"),
]
OF_ANSWERS = [
    ("nan", " NaN, where the logarithm of a probability"),
    ("infinite", " -9999.0, where the logarithm of a probability"),
    ("short", "tokens where "),
    ("other-tokens", "answers of token "),
]


@pytest.mark.parametrize(
    ("fault", "words", "answers"),
    [
        *(pytest.param(*fault, "prompt_logprobs", id=fault[0]) for fault in FAULTS + OF_ANSWERS),
        *(pytest.param(*fault, "echo", id=f"{fault[0]}, echo", marks=pytest.mark.slow) for fault in OF_ANSWERS),
    ],
)
def test_a_failure_in_the_middle_of_a_run_is_one_error_on_all_ranks_and_no_hang(  # noqa: PLR0913 - a case's parts
    pools: Any, directory: Path, server: Served, fault: str, words: str, answers: str
) -> None:
    section = at(server, answers=answers, timeout_seconds=1.0, attempts=2)
    tree = preference_cases.settings(str(directory), reference=section)
    pools(2).run(ready)
    began = time.monotonic()

    (kind, message), second = pools(2).errors(spoiled_after_a_step, tree, PAIRS, str(server.faults), fault)

    assert kind == "RunStopped"
    assert words in message
    assert second == (kind, message)
    assert time.monotonic() - began < 45, "an answer that hangs takes 60 s"


def ready(world: Any) -> int:
    """Return the rank, once its process has started: that is no part of what is timed."""
    return int(world.rank)


def spoiled_after_a_step(world: Any, tree: dict[str, Any], rows: Any, faults: str, fault: str) -> None:
    """Make a step, spoil the server, and make another."""
    from holdfast.recipes.dpo import dpo_step
    from holdfast.training.preference.build import build_preference_run
    from holdfast.training.setup.begin import Live
    from tests.trees import run_from_mapping

    training = build_preference_run(run_from_mapping(tree), Path.cwd(), world, Live(rows=rows))
    dpo_step(training)
    training.run.ranks.gather(None)
    Path(faults).write_text(fault)
    dpo_step(training)
