"""A policy that is asked about videos: its steps are those of plain transformers, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from holdfast.config.sections.data import PromptDataConfig
from holdfast.data.content.lengths import joined_inputs
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.types import Example
from tests.distributed.grpo_cases import by_hand, settings, train
from tests.distributed.test_grpo_images import SHARED_PROMPT
from tests.distributed.test_videos import side_of
from tests.films import film, noise
from tests.videos import FPS, upstream_inputs, video_directory, video_model, video_rows, video_tokenizer

DATA = {"max_length": 128, "video_fps": FPS}
ROWS = {
    "mixed": [{"prompt": row["messages"][:1]} for row in video_rows(12)],
    "a video in one prompt of four": [
        {"prompt": row["messages"][:1]} for row in video_rows(12, seen=("v", "", "", ""))
    ],
}


def shown_by(place: Path, kind: str, rows: Sequence[Any]) -> Callable[[int, Sequence[int]], dict[str, Any]]:
    """Return what plain transformers gets of a prompt with its completion."""
    side = side_of(place)
    tokeniser = RowTokeniser(video_tokenizer(), PromptDataConfig(path="rows", **DATA), Path.cwd(), side)
    inputs = [joined_inputs(tokeniser.opening(row, "row").laid) for row in rows]

    def shown(prompt_id: int, tokens: Sequence[int]) -> dict[str, Any]:
        # The policy may end by a mark of its own: nothing reads it, and a model that counts would miss one.
        read = np.array([*tokens[:-1], 0 if tokens[-1] in side.marks else tokens[-1]])
        example = Example(0, 0, read, np.zeros(read.size, bool), model_inputs=inputs[prompt_id])
        return {"input_ids": torch.tensor(read)[None], **upstream_inputs(kind, example)}

    return shown


@pytest.mark.parametrize(
    ("kind", "ranks", "rows", "sections"),
    [
        pytest.param("qwen2_vl", 1, "mixed", {}, id="qwen2_vl, 1 rank, prompts shared"),
        pytest.param("qwen3_vl", 1, "mixed", {}, id="qwen3_vl, 1 rank, prompts shared"),
        pytest.param("qwen2_5_vl", 2, "mixed", {"rollout": {"shared_prefix": "off"}}, id="2 ranks, prompts repeated"),
        pytest.param("qwen2_5_vl", 2, "a video in one prompt of four", {}, id="2 ranks, a video on one"),
    ],
)
def test_steps_are_those_of_the_paper(
    pools: Any, tmp_path: Path, kind: str, ranks: int, rows: str, sections: dict[str, Any]
) -> None:
    place = video_directory(tmp_path, kind)
    tree = settings(str(place), data=DATA, **sections)

    found = pools(ranks).run(train, tree, ROWS[rows])[0]

    expected = by_hand(video_model(kind).double(), found["sampled"], lr=0.5, shown=shown_by(place, kind, ROWS[rows]))
    tolerance = 1e-10 if sections else SHARED_PROMPT
    losses, norms = ([line[name] for line in found["lines"]] for name in ("loss", "grad_norm"))
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=1e-10)  # near 0: advantages sum to 0
    np.testing.assert_allclose(norms, expected["norms"], rtol=tolerance)
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][name], parameter, rtol=0, atol=tolerance, err_msg=name)
    for line in found["lines"]:
        assert line["ratio/deviation_mean"] == 0.0
        assert line["sampling/sampling_logp_difference/mean"] < 1e-5


def test_transformers_generate_is_shown_none(pools: Any, tmp_path: Path) -> None:
    tree = settings(str(video_directory(tmp_path, "qwen2_vl")), data=DATA, rollout={"engine": "transformers"})

    for kind, message in pools(2).errors(train, tree, ROWS["mixed"]):
        assert kind == "DataError"
        assert "transformers' generate, which samples here, would place its frames as if they were images" in message


def test_prompts_with_films_are_those_with_lists_of_their_frames(pools: Any, tmp_path: Path) -> None:
    tree = settings(str(video_directory(tmp_path, "qwen2_5_vl")), data=DATA)
    written = [noise(12, 12 + number, 16, seed=number) for number in range(12)]
    # Of one second at 12 a second, three frames a second would be too few: four are taken.
    frames = [[Image.fromarray(frames[index]) for index in (0, 3, 6, 9)] for frames in written]
    films = [{"prompt": "<video>see=", "videos": [film(frames)]} for frames in written]
    lists = [{"prompt": "<video>see=", "videos": [{"frames": it, "fps": 4.0}]} for it in frames]

    found, expected = (pools(1).run(train, tree, rows)[0] for rows in (films, lists))

    assert [line["loss"] for line in found["lines"]] == [line["loss"] for line in expected["lines"]]
    for name, parameter in expected["parameters"].items():
        np.testing.assert_array_equal(found["parameters"][name], parameter, err_msg=name)
