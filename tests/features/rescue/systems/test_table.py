"""The tables of other systems' keys: complete against their classes, and every key that they name exists here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.config.tree import all_keys
from holdfast.config.verbs.roots import ROOTS
from holdfast.features.rescue.configuration.rules import RULES
from holdfast.features.rescue.systems.table import HINTED, READABLE, WORDS, KeyEntry, hint, load_key_table, spelled

FIELDS = json.loads(Path(__file__).with_name("fields.json").read_text())
"""Written by tools/foreign_fields.py."""
EVERYWHERE = {key.replace(".*", "") for root in ROOTS.values() for key in all_keys(root)}
"""Keys of all commands here, with one item in the place of a list."""
OF_TRL = {"SFTConfig": "sft", "DPOConfig": "dpo", "GRPOConfig": "grpo"}
UNNAMED = {"model_type"}  # Axolotl takes it out of the file before its schema
"""Keys of files that no class of the system has."""
EARLIER = {
    "trainer.total_episodes",
    "worker.actor.ulysses_sequence_parallel_size",
    "worker.ref.offload.offload_optimizer",
    "worker.ref.offload.offload_params",
    "worker.reward.reward_type",
    "worker.reward.score_function",
}
"""Names of EasyR1's earlier versions."""


def entries() -> Iterator[tuple[str, KeyEntry]]:
    for system in HINTED:
        table = load_key_table(system)
        for key in sorted(table.native_keys):
            for entry in table.entries[key]:
                yield system, entry


def exists(key: str) -> bool:
    plain = key.replace(".*", "")
    return plain in EVERYWHERE or plain.startswith(("data.columns.", "evaluation.sets."))


def named_keys(entry: KeyEntry) -> set[str]:
    of_values = [value for value in (entry.values or {}).values() if isinstance(value, dict)]
    return {*entry.targets, *(key for value in of_values for key in value)}


@pytest.mark.parametrize("name", list(FIELDS["trl"]))
def test_every_field_of_trl_has_one_entry_that_is_read_for_its_command(name: str) -> None:
    table = load_key_table("trl")
    own = [key for key in FIELDS["trl"][name] if key not in FIELDS["transformers"]["TrainingArguments"]]
    verb = OF_TRL.get(name)

    missing = [key for key in own if key not in table.entries]
    several = [
        key
        for key in set(own) - set(missing)
        for other in ("sft", "dpo", "grpo")
        if sum(entry.condition.holds({"verb": other}) for entry in table.entries[key]) > 1
    ]
    of_others = [
        key
        for key in set(own) - set(missing)
        if verb and all(entry.condition.text.startswith("verb=") for entry in table.entries[key])
        if not any(entry.condition.holds({"verb": verb}) for entry in table.entries[key])
    ]

    assert (missing, several, of_others) == ([], [], [])


def test_every_leaf_of_easyr1s_tree_has_an_entry() -> None:
    table, leaves = load_key_table("easyr1"), FIELDS["easyr1"]["PPOConfig"]

    assert sorted(set(leaves) - set(table.entries)) == []
    assert sorted(table.native_keys - set(leaves) - EARLIER) == []


@pytest.mark.parametrize("system", ["axolotl", "llamafactory", "verl"])
def test_keys_of_systems_without_a_complete_table_are_real_ones(system: str) -> None:
    assert load_key_table(system).native_keys - set(FIELDS["names"][system]) - UNNAMED <= {
        key
        for key in load_key_table(system).native_keys
        if any(name.startswith(f"{key}.") for name in FIELDS["names"][system])
    }


def test_names_of_training_arguments_are_those_of_the_class_or_of_its_earlier_versions() -> None:
    earlier = {"warmup_ratio", "group_by_length", "logging_dir", "overwrite_output_dir"}

    assert load_key_table("transformers").native_keys - set(FIELDS["transformers"]["TrainingArguments"]) == earlier


@pytest.mark.parametrize("system", ["transformers", *READABLE])
def test_a_table_names_the_version_that_its_fields_were_read_from(system: str) -> None:
    assert FIELDS["versions"][system] in load_key_table(system).version


def test_every_key_that_a_table_names_exists_here() -> None:
    assert [(system, entry.key, key) for system, entry in entries() for key in named_keys(entry)
            if not exists(key)] == []  # fmt: skip


def test_every_rule_and_every_word_is_of_its_closed_set_and_is_used() -> None:
    assert {entry.rule for _, entry in entries() if entry.rule} == set(RULES)
    assert {entry.word for _, entry in entries() if entry.word} == set(WORDS)


def test_a_table_has_no_sentences() -> None:
    """Nothing that Holdfast does or does not is told in a table, where it would become untrue unseen."""
    texts = [
        text for system, entry in entries() for text in (*entry.targets, *(entry.values or {}), entry.condition.text)
    ]

    assert [text for text in texts if " " in text.replace(" & ", "&")] == []


def test_conditions_name_keys_of_the_same_system() -> None:
    assert [
        (system, entry.key, part)
        for system, entry in entries()
        for part in entry.condition.text.split(" & ")
        if part and part.partition("=")[0].removesuffix("!") not in {*load_key_table(system).entries, "verb"}
    ] == []


@pytest.mark.parametrize("system", READABLE)
def test_defaults_marks_and_commands_are_of_keys_that_the_table_has(system: str) -> None:
    table = load_key_table(system)
    names = {key for values in table.defaults.values() for key in values}
    names |= {key for marks in table.verb_marks.values() for key in marks} | set(table.verb_by)

    assert names - set(table.entries) == set()


@pytest.mark.parametrize(("name", "verb"), OF_TRL.items())
def test_defaults_of_trl_are_those_of_its_classes(name: str, verb: str) -> None:
    read = FIELDS["trl"]
    classes = FIELDS["transformers"]["TrainingArguments"] | read["_BaseConfig"] | read["ScriptArguments"]
    theirs = classes | read["ModelConfig"] | read[name]
    lists = {"loss_type"} if verb == "dpo" else set()

    assert [(key, value) for key, value in load_key_table("trl").defaults_for(verb).items()
            if key not in lists and theirs[key] != value] == []  # fmt: skip


def test_defaults_of_easyr1_are_those_of_its_classes() -> None:
    theirs = FIELDS["easyr1"]["PPOConfig"]

    assert [(key, value) for key, value in load_key_table("easyr1").defaults_for("grpo").items()
            if (theirs[key] or {}) != (value or {})] == []  # fmt: skip


@pytest.mark.parametrize(
    ("key", "title", "targets", "word"),
    [
        ("per_device_train_batch_size", "transformers",
         ("data.batch_size", "data.tokens_per_micro_batch", "updates.mini_batches"), ""),
        ("deepspeed", "transformers", (), "speed"),
        ("sequence_len", "Axolotl", ("data.max_length",), ""),
        ("load_in_4bit", "TRL", ("model.lora.quantize",), ""),
        ("total_epochs", "EasyR1", ("epochs",), ""),
        ("tensor_parallel_size", "Axolotl", (), ""),
        ("gradient_clip_val", "other trainers", ("optim.clip_norm",), ""),
    ],
)  # fmt: skip
def test_a_hint_names_the_system_and_the_keys_here(key: str, title: str, targets: tuple[str, ...], word: str) -> None:
    found = hint(key)

    assert found is not None
    assert (found[0], found[1].targets, found[1].word) == (title, targets, word)


def test_a_word_that_no_system_has_gives_no_hint() -> None:
    assert hint("lerning_rate") is None


def test_values_are_spelled_as_the_files_spell_them() -> None:
    assert [spelled(value) for value in (True, None, 0.5, "Text")] == ["true", "", "0.5", "Text"]
