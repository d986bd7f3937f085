"""A policy that is asked about pictures: its steps are the paper's, whatever the split and whoever has pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.data import PromptDataConfig
from holdfast.data.content.lengths import joined_inputs
from holdfast.data.tokens.chat import RowTokeniser
from tests.distributed.grpo_cases import by_hand, settings, train
from tests.distributed.test_vision import directory, side_of  # noqa: F401 - directory is a fixture
from tests.vision import picture_rows, tokenizer_of, vision_model

SHARED_PROMPT = 1e-6
"""Where a prompt is forwarded once, norms that are float32 in a float64 model round the sum of its completions'
gradients; where it is repeated, each gradient alone, as the oracle does."""


def prompts_of(images: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return prompts with so many pictures, in turn."""
    return [{"prompt": row["messages"][:1]} for row in picture_rows(12, images=images)]


ROWS = {
    "mixed": prompts_of((1, 0, 2)),
    "a picture in one prompt of four": prompts_of((1, 0, 0, 0)),
    "a picture for each": prompts_of((1,)),
}


def tree_of(place: Path, **sections: Any) -> dict[str, Any]:
    tree = settings(str(place), data={"max_length": 120})
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return tree


def shown_by(place: Path, kind: str, rows: list[dict[str, Any]]) -> Callable[[int, Sequence[int]], dict[str, Any]]:
    """Return what plain transformers gets of a prompt with its completion."""
    side = side_of(place, kind)
    tokeniser = RowTokeniser(tokenizer_of(kind), PromptDataConfig(path="rows", max_length=120), Path.cwd(), side)
    images = [joined_inputs(tokeniser.opening(row, "row").laid) for row in rows]

    def shown(prompt_id: int, tokens: Sequence[int]) -> dict[str, Any]:
        # The policy may end by an image token of its own: nothing reads it, and a model that counts would miss one.
        read = np.array([*tokens[:-1], 0 if tokens[-1] == side.image_id else tokens[-1]])
        given = side.upstream_inputs(read, images[prompt_id]) if images[prompt_id] else {}
        return {"input_ids": torch.tensor(read)[None]} | {name: torch.as_tensor(v) for name, v in given.items()}

    return shown


def assert_made_by_hand(found: dict[str, Any], place: Path, kind: str, rows: str, tolerance: float) -> None:
    model = vision_model(kind).double()
    expected = by_hand(model, found["sampled"], lr=0.5, shown=shown_by(place, kind, ROWS[rows]))
    losses, norms = ([line[name] for line in found["lines"]] for name in ("loss", "grad_norm"))
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=1e-10)  # near 0: advantages sum to 0
    np.testing.assert_allclose(norms, expected["norms"], rtol=tolerance)
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][name], parameter, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava"])
@pytest.mark.parametrize(
    ("ranks", "rows", "sections"),
    [
        pytest.param(1, "mixed", {}, id="1 rank, prompts shared"),
        pytest.param(1, "mixed", {"data": {"packing": "none"}}, id="1 rank, padded, transformers' generate"),
        pytest.param(2, "mixed", {"rollout": {"shared_prefix": "off"}}, id="2 ranks, prompts repeated"),
        pytest.param(2, "mixed", {"data": {"tokens_per_micro_batch": 192}}, id="2 ranks, small packs"),
        pytest.param(2, "a picture in one prompt of four", {}, id="2 ranks, images on one"),
        pytest.param(2, "mixed", {"parallel": {"context": 2}}, id="2 ranks share rows, prompts shared"),
    ],
)
def test_steps_are_those_of_the_paper(
    pools: Any,
    directory: Callable[[str], Path],  # noqa: F811
    kind: str,
    ranks: int,
    rows: str,
    sections: dict[str, Any],
) -> None:
    found = pools(ranks).run(train, tree_of(directory(kind), **sections), ROWS[rows])[0]

    repeated = "rollout" in sections or sections.get("data", {}).get("packing") == "none"
    assert_made_by_hand(found, directory(kind), kind, rows, 1e-10 if repeated else SHARED_PROMPT)
    for line in found["lines"]:
        assert line["ratio/deviation_mean"] == 0.0
        assert line["clip_ratio/region_mean"] == 0.0
        assert line["sampling/sampling_logp_difference/mean"] < 1e-5


@pytest.mark.slow
def test_images_of_gemma_are_sampled_and_trained_one_sequence_a_row(
    pools: Any,
    directory: Callable[[str], Path],  # noqa: F811
) -> None:
    tree = tree_of(directory("gemma3"), data={"packing": "none", "tokens_per_micro_batch": 512})

    found = pools(2).run(train, tree, ROWS["mixed"])[0]

    assert_made_by_hand(found, directory("gemma3"), "gemma3", "mixed", 1e-6)


@pytest.mark.slow
def test_what_is_sampled_depends_neither_on_ranks_nor_on_what_shows_the_pictures(
    pools: Any,
    directory: Callable[[str], Path],  # noqa: F811
) -> None:
    tree = tree_of(directory("qwen2_5_vl"))
    outcomes = [
        pools(1).run(train, tree, ROWS["mixed"])[0],
        pools(2).run(train, tree, ROWS["mixed"])[0],
        pools(2).run(train, tree_of(directory("qwen2_5_vl"), rollout={"engine": "transformers"}), ROWS["mixed"])[0],
    ]

    one, two, three = ([[item[:4] for item in step] for step in outcome["sampled"]] for outcome in outcomes)
    assert one == two == three
    assert len({item[2] for step in one for item in step}) > 40, "completions must differ"


@pytest.mark.slow
def test_an_image_token_ends_a_completion_and_a_masked_one_trains_nothing(
    pools: Any,
    directory: Callable[[str], Path],  # noqa: F811
) -> None:
    """Of so many completions of an untrained model some end so; the first of each group is not scored."""
    place = directory("qwen2_5_vl")
    marks = side_of(place, "qwen2_5_vl").marks  # of images and of videos
    tree = tree_of(place, rollout={"group_size": 16, "max_new_tokens": 24})

    found = pools(2).run(train, tree, ROWS["a picture for each"], 2, "even_share_but_first")[0]

    ended = [item for step in found["sampled"] for item in step if set(marks) & set(item[2])]
    assert {item[2][-1] for item in ended} == set(marks)
    assert any(item[4] is None for item in ended)
    assert any(item[4] is not None for item in ended)
    for item in ended:
        assert not set(marks) & set(item[2][:-1])
        assert item[3] == "stop"
    first = found["sampled"][0]
    scored = [item for item in first if item[4] is not None]
    expected = by_hand(
        vision_model("qwen2_5_vl").double(),
        [scored],
        0.5,
        shown=shown_by(place, "qwen2_5_vl", ROWS["a picture for each"]),
    )
    np.testing.assert_allclose(found["lines"][0]["grad_norm"], expected["norms"][0], rtol=SHARED_PROMPT)


@pytest.mark.slow
def test_images_are_refused_in_packs_of_gemma_in_episodes_and_where_steps_are_recorded(
    pools: Any,
    directory: Callable[[str], Path],  # noqa: F811
) -> None:
    """Settings of a run that leave images out are no fault of a row, so none is skipped for them."""
    skips, acts = {"on_bad_row": "skip"}, {"tools": "tools.py:add"}
    for tree, error, key in (
        (tree_of(directory("gemma3")), "DataError", "gemma3 attends within an image in both directions"),
        (tree_of(directory("llava"), data=skips, rollout={"record": True}), "ConfigError", "rollout.record: "),
        (
            tree_of(directory("llava"), data=skips, environment=acts),
            "ConfigError",
            "environment: ",
        ),
    ):
        raised = pools(2).errors(train, tree, ROWS["mixed"])
        assert len(set(raised)) == 1
        for kind, message in raised:
            assert kind == error
            assert key in message
