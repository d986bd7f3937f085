"""The table of completions shows what the user asked last, whatever a template or a format writes behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.training.policy.samples import SampleRow, question_of, sample_line, sample_table
from holdfast.types import Prompt

LONG = "What is left of 12 apples " + "and of other fruit " * 20 + "when 5 are eaten?"
SCHEMA = '{"type": "function", "function": {"name": "add"}}' * 9
RENDERED = f"<bos>user:{LONG} Think first, and put the answer into a box.{SCHEMA}<eos><bos>assistant:"
IMAGE = [{"type": "image"}, {"type": "text", "text": LONG}]
SAID = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": LONG}]


def shown(row: dict[str, Any], *, is_formatted: bool = False, **episode: Any) -> str:
    """Return what stands before the arrow."""
    prompt = Prompt(1, np.zeros(1, np.int64), RENDERED, row)
    item = SampleRow(1, 0, RENDERED, "7", 1.0, {}, 0.5, "stop", trained=True, **episode)
    item = item._replace(question=question_of(prompt, item, is_formatted))
    assert "question" not in sample_line(item, None)
    assert sample_line(item, None)["prompt"] == RENDERED
    return sample_table([("best", item)], 1, 120).splitlines()[-1].partition(" -> ")[0]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": LONG},
        {"prompt": SAID},
        {"prompt": [{"role": "user", "content": IMAGE}]},
        {"messages": [*SAID, {"role": "assistant", "content": "7"}]},
        {"instruction": LONG, "output": "7"},
    ],
)
@pytest.mark.parametrize("is_formatted", [False, True])
def test_a_prompt_is_shown_by_the_end_of_its_question(row: dict[str, Any], is_formatted: bool) -> None:
    assert shown(row, is_formatted=is_formatted).endswith("when 5 are eaten?")


def test_an_episode_is_shown_by_what_its_environment_asked_last() -> None:
    begun = [{"role": "user", "content": "play"}, {"role": "user", "content": LONG}]
    messages = [*begun, {"role": "assistant", "content": "no"}, {"role": "user", "content": "again"}]

    assert shown({"prompt": "play"}, messages=messages, prompt_messages=2).endswith("when 5 are eaten?")
    formatted = [{"role": "user", "content": f"{LONG} Think first."}, {"role": "assistant", "content": "no"}]
    assert shown({"prompt": LONG}, messages=formatted, prompt_messages=1, is_formatted=True).endswith("are eaten?")


def test_a_prompt_of_columns_that_only_a_format_knows_is_shown_as_it_was_written() -> None:
    assert shown({"problem": LONG}, is_formatted=True).endswith("<eos><bos>assistant:")


@pytest.mark.parametrize("message", [{"content": LONG}, {"role": "user"}, {"role": "user", "content": ""}])
def test_a_message_without_a_role_or_a_text_asks_nothing(message: dict[str, Any]) -> None:
    prompt = Prompt(1, np.zeros(1, np.int64), RENDERED, {"prompt": "play"})
    item = SampleRow(1, 0, RENDERED, "7", 1.0, {}, 0.5, "stop", trained=True, messages=[message], prompt_messages=1)

    assert question_of(prompt, item, is_formatted=False) == ""
