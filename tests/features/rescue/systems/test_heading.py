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


@pytest.mark.parametrize(("system", "text", "key", "other"), [
    ("trl", "max_length: 512\nmax_seq_length: 256", "max_length", "max_seq_length sets data.max_length to 256"),
    ("axolotl", "base_model: m\nsdp_attention: true\nflash_attention: true", "sdp_attention",
     "flash_attention sets model.attention to auto"),
    ("axolotl", "base_model: m\nsequence_parallel_degree: 2\ncontext_parallel_size: 4", "sequence_parallel_degree",
     "context_parallel_size sets parallel.context to 4"),
    ("verl", "algorithm: {use_kl_in_reward: true}\nactor_rollout_ref: {actor: {use_kl_loss: true}}",
     "algorithm.use_kl_in_reward", "actor_rollout_ref.actor.use_kl_loss sets kl.where to loss"),
])  # fmt: skip
def test_two_lines_that_disagree_are_left_to_a_person(system: str, text: str, key: str, other: str) -> None:
    conversion = convert(parse_text(text, "theirs.yaml"), system, None, 8)

    assert {line.key: line.remark for line in conversion.lines if line.undecided and line.number} == {key: other}


@pytest.mark.parametrize(("system", "text", "ours", "value"), [
    ("trl", "dataset_name: r\npacking: true\npacking_strategy: wrapped", "data.packing", "wrapped"),
    ("trl", "dataset_name: r\noutput_dir: out/a\nrun_name: b", "run.name", "b"),
    ("trl", "dataset_name: r\nlr_scheduler_type: polynomial\nlr_scheduler_kwargs: {power: 2.0}",
     "optim.schedule.power", 2.0),
    ("easyr1", "worker: {actor: {loss_avg_mode: token, loss_type: gspo}}", "data.average", "sequence_mean"),
    ("verl", "actor_rollout_ref: {actor: {loss_agg_mode: token-mean, policy_loss: {loss_mode: gspo}}}",
     "data.average", "sequence_mean"),
    ("verl", "data: {truncation: error, filter_overlong_prompts: true}", "data.overlong", "drop"),
    ("axolotl", "base_model: m\nflash_attention: false\nsdp_attention: true", "model.attention", "sdpa"),
])  # fmt: skip
def test_a_line_that_says_more_than_another_replaces_it(system: str, text: str, ours: str, value: object) -> None:
    conversion = convert(parse_text(text, "theirs.yaml"), system, None, 8)

    assert [line.key for line in conversion.lines if line.undecided and line.number] == []
    assert conversion.settings[ours] == value
