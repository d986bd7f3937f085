"""What stands above a converted file."""

from __future__ import annotations

import pytest

from holdfast.config.yaml12 import parse_text
from holdfast.features.rescue.config_import import run_yaml
from holdfast.features.rescue.configuration.convert import convert

TRL, VERL = "model_name_or_path: m\nlearning_rate: 1.0e-5\n", "trainer: {n_gpus_per_node: 2, nnodes: 1}\n"


@pytest.mark.parametrize(
    ("system", "verb", "text", "ranks", "said"),
    [
        ("trl", "sft", TRL, 1, "converted for `holdfast sft` and 1 rank by the table"),
        ("trl", "sft", TRL, 2, "converted for `holdfast sft` and 2 ranks by the table"),
        ("verl", "grpo", VERL, 1, "converted for `holdfast grpo` by the table"),
    ],
)
def test_ranks_are_named_where_the_file_itself_does_not_say_them(
    system: str, verb: str, text: str, ranks: int, said: str
) -> None:
    written = run_yaml(convert(parse_text(text, "theirs.yaml"), system, verb, ranks), "theirs.yaml")

    heading = [line.removeprefix("#").strip() for line in written.splitlines() if line.startswith("#")]
    assert said in " ".join(heading)
