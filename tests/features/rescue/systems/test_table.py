"""The table of other systems' keys: complete against their classes, and every key that it names exists here."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from holdfast.cli.main import COMMANDS
from holdfast.config.tree import KeyType, all_keys
from holdfast.config.verbs.roots import ROOTS
from holdfast.features.rescue.configuration.rules import RULES
from holdfast.features.rescue.systems.table import HINTED, READABLE, KeyEntry, hint, load_key_table, spelled

ROOT = Path(__file__).parents[4]
FIELDS = json.loads(Path(__file__).with_name("fields.json").read_text())
"""Written by tools/foreign_fields.py."""
OURS = {verb: set(all_keys(root)) for verb, root in ROOTS.items()}
OF_TRL = {
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "GRPOConfig": "grpo",
}
UNNAMED = {
    *("model_type",),  # Axolotl takes it out of the file before its schema
    *("seed_everything", "num_workers", "pin_memory", "val_batch_size", "lr_scheduler"),  # of Lightning's users
}
"""Keys of files that no class of the system has."""
MAPPINGS = ("data.columns",)
"""Keys here that hold names of the user's."""
PLACES = {
    "split over ranks|context parallel": "parallel.context",
    "sharded over all": "parallel.shard",
    "uploaded|upload one": "holdfast push",
    "Ray is": "holdfast launch ray",
    "one turn|tools are": "environment",
    "decoded in the training|are not engines|decodes its own": "rollout.engine",
    "model merger": "holdfast checkpoint import",
    "take turns": "rollout.max_staleness",
    "whole sets": "evaluation.limit_samples",
    "holdfast runs": "holdfast runs ls",
    "share their weights": "rollout.max_staleness",
    "observer.*state": "docs/python.md",
    "one shared folder": "checkpoint.storage",
    "options of an engine": "rollout.temperature",
    "bound in GiB": "rollout.engine.start.gpu_memory_utilization",
    "vespo is": "examples/losses/vespo.py",
}
"""Words about what Holdfast does, and the key, command or file that does it, which the entry must then name."""


def entries() -> Iterator[tuple[str, KeyEntry]]:
    for system in HINTED:
        table = load_key_table(system)
        for key in sorted(table.native_keys):
            for entry in table.entries[key]:
                yield system, entry


def exists(key: str, keys: set[str]) -> bool:
    above, _, _ = key.rpartition(".")
    if key in keys or above in MAPPINGS:
        return True
    return any(re.fullmatch(each.replace(".", r"\.").replace("*", "[^.]+"), key) for each in keys if "*" in each)


def defaults(section: type[BaseModel], dotted: str) -> Iterator[Any]:
    """Yield the default of a key, of every kind of section that has it."""
    name, _, below = dotted.removeprefix("*.").partition(".")
    if name not in section.model_fields:
        return
    if not below:
        yield section.model_fields[name].get_default(call_default_factory=True)
    for child in KeyType((section,)).below(name).sections if below else ():
        yield from defaults(child, below)


def named_keys(entry: KeyEntry) -> set[str]:
    of_values = [value for value in (entry.values or {}).values() if isinstance(value, dict)]
    return {*entry.targets, *(key for value in of_values for key in value if "." in key)}


@pytest.mark.parametrize("name", list(FIELDS["transformers"] | FIELDS["trl"]))
def test_every_field_of_trl_and_transformers_has_one_entry_for_its_command(name: str) -> None:
    table = load_key_table("trl")
    fields = (FIELDS["transformers"] | FIELDS["trl"])[name]
    verb = OF_TRL.get(name)

    missing = [key for key in fields if key not in table.entries]
    several = [key for key in fields for other in ("sft", "dpo", "grpo") if sum(
        other in entry.verbs for entry in table.entries.get(key, ())) > 1]  # fmt: skip
    unused = [key for key in fields if verb is not None and key in table.entries and table.entry(key, verb) is None]

    assert (missing, several, unused) == ([], [], [])


def test_every_leaf_of_easyr1s_tree_has_one_entry() -> None:
    table = load_key_table("easyr1")
    leaves = FIELDS["easyr1"]["PPOConfig"]

    assert sorted(set(leaves) - set(table.entries)) == []
    assert sorted(key for key in table.native_keys - set(leaves) if not table.entries[key][0].earlier) == []
    assert all(len(table.entries[key]) == 1 for key in leaves)


def test_the_list_of_training_arguments_is_that_of_the_installed_transformers() -> None:
    from transformers import TrainingArguments

    live = {field.name for field in dataclasses.fields(TrainingArguments)}

    assert live - set(load_key_table("transformers").entries) == set()


@pytest.mark.parametrize("system", ["axolotl", "llamafactory", "verl", "lightning"])
def test_systems_without_a_complete_list_have_at_least_sixty_keys(system: str) -> None:
    assert len(load_key_table(system).native_keys) >= 60


@pytest.mark.parametrize("system", ["axolotl", "llamafactory", "verl", "lightning"])
def test_keys_of_systems_without_a_complete_list_are_real_ones(system: str) -> None:
    table, real = load_key_table(system), FIELDS["names"][system]

    assert [
        key
        for key in sorted(table.native_keys - UNNAMED)
        if key not in real and not any(name.startswith(f"{key}.") for name in real)
    ] == []


@pytest.mark.parametrize("system", ["transformers", "trl", "easyr1", "axolotl", "llamafactory", "verl", "lightning"])
def test_a_table_names_the_version_that_its_fields_were_read_from(system: str) -> None:
    assert FIELDS["versions"][system] in load_key_table(system).version


def test_every_key_that_the_table_names_exists_here() -> None:
    everywhere = set().union(*OURS.values())

    assert [(system, entry.key, key) for system, entry in entries() for key in named_keys(entry)
            if not exists(key, everywhere)] == []  # fmt: skip


def test_an_entry_of_one_command_names_keys_of_that_command() -> None:
    assert [
        (system, entry.key, verb)
        for system, entry in entries()
        if len(entry.verbs) == 1
        for verb in entry.verbs
        if entry.targets and not any(exists(key, OURS[verb]) for key in entry.targets)
    ] == []


def test_every_entry_that_differs_says_how_and_every_other_one_why() -> None:
    assert [(system, entry.key) for system, entry in entries() if entry.status != "same" and not entry.note] == []


def test_notes_are_short_sentences_without_a_period() -> None:
    long = [(system, entry.key) for system, entry in entries() if len(entry.note) > 220 or entry.note.endswith(".")]

    assert long == []


def test_what_the_table_is_to_name_is_there() -> None:
    keys = set().union(*OURS.values())
    commands = {f"holdfast {name}" for name in COMMANDS}

    assert [place for place in PLACES.values() if place not in keys | commands and not (ROOT / place).is_file()] == []


@pytest.mark.parametrize("words", list(PLACES))
def test_an_entry_that_speaks_of_what_is_here_names_it(words: str) -> None:
    assert [
        (system, entry.key, entry.note)
        for system, entry in entries()
        if re.search(words, entry.note) and PLACES[words] not in " ".join((entry.note, *entry.targets))
    ] == []


def test_what_an_entry_calls_the_default_is_the_default() -> None:
    said = [
        (system, entry.key, match[1], entry.targets[0])
        for system, entry in entries()
        if (match := re.search(r"([\w-]+) is the default", entry.note)) and entry.targets
    ]

    assert len(said) >= 4
    assert [
        (system, key, name)
        for system, key, name, target in said
        if name not in {str(value) for root in ROOTS.values() for value in defaults(root, target)}
    ] == []


def test_every_rule_is_one_of_the_closed_set_and_every_rule_is_used() -> None:
    rules = {entry.rule for _, entry in entries() if entry.rule}

    assert rules == set(RULES)


def test_conditions_name_keys_of_the_same_system() -> None:
    assert [
        (system, entry.key, other)
        for system, entry in entries()
        for other in (*entry.when, *entry.unless)
        if other not in load_key_table(system).entries
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
    ("key", "system", "status"),
    [
        ("per_device_train_batch_size", "transformers'", "differs"),
        ("bf16", "transformers'", "differs"),
        ("deepspeed", "transformers'", "none"),
        ("micro_batch_size", "Axolotl's", "differs"),
        ("learning_rate", "transformers'", "same"),
        ("sequence_len", "Axolotl's", "same"),
        ("load_in_4bit", "TRL's", "differs"),
        ("report_to", "transformers'", "differs"),
        ("val_set_size", "Axolotl's", "differs"),
        ("neftune_noise_alpha", "transformers'", "same"),
        ("total_epochs", "EasyR1's", "same"),
        ("train_batch_size", "DeepSpeed's", "same"),
    ],
)
def test_a_hint_names_the_system_and_never_calls_the_same_what_differs(key: str, system: str, status: str) -> None:
    found = hint(key)

    assert found is not None
    assert (found.system, found.entry.status) == (system, status)


def test_a_word_that_no_system_has_gives_no_hint() -> None:
    assert hint("lerning_rate") is None


def test_values_are_spelled_as_the_files_spell_them() -> None:
    assert [spelled(value) for value in (True, None, 0.5, "Text")] == ["true", "", "0.5", "Text"]
