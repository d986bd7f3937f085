"""What a resume must find unchanged: files of the user's, as the run itself finds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.training.fingerprints import _loss, filter_hashes, reward_model_hashes, user_files
from holdfast.training.run import ConfiguredRun
from holdfast.training.saving.differences import changed_fingerprints, is_gone

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def run(**data: Any) -> SFTConfig:
    section = {"synthetic": {"task": "sort"}, **data}
    return from_mapping({"model": {"path": "m"}, "steps": 1, "data": section}, SFTConfig)


def test_smoothed_labels_are_part_of_a_run() -> None:
    tree = {"model": {"path": "m"}, "steps": 1, "data": {"synthetic": {"task": "sort"}}}

    plain, zero, smoothed = (
        _loss(from_mapping({**tree, "objective": section}, SFTConfig))["objective"]
        for section in ({"kind": "nll"}, {"label_smoothing": 0}, {"label_smoothing": 0.1})
    )

    assert plain == zero == '{"kind":"nll","label_smoothing":0.0}'
    assert smoothed == '{"kind":"nll","label_smoothing":0.1}'


OWN = {"kind": "path", "path": "a.py:f"}
JUDGE = {"kind": "judge", "url": "http://h/v1?key=one1", "model": "m", "prompt": "{completion}"}


@pytest.mark.parametrize(
    ("root", "sections"),
    [
        (SFTConfig, {"objective": OWN | {"kwargs": {"at": "one1"}}}),
        (DPOConfig, {"preference": {"loss": ["ipo", OWN | {"kwargs": {"a": ["one1"]}}]}}),
        (GRPOConfig, {"reward": [OWN | {"kwargs": {"hf-token": "one1"}}]}),
        (GRPOConfig, {"reward": "exact", "advantage": OWN | {"kwargs": {"a": "one1"}}}),
        (GRPOConfig, {"reward": "environment", "environment": {"kind": "endpoint", "command": ["a", "one1"]}}),
        (GRPOConfig, {"reward": JUDGE}),
    ],
)
def test_what_may_be_secret_of_a_loss_is_compared_by_hashes(root: Any, sections: dict[str, Any]) -> None:
    tree = {"model": {"path": "m"}, "steps": 1, "data": {"path": "r.jsonl", "max_length": 256}} | sections
    changed = json.loads(json.dumps(tree).replace("one1", "two2"))

    first, again, other = (json.dumps(_loss(from_mapping(values, root))) for values in (tree, tree, changed))

    assert first == again
    assert (first != other) == ("sha256 " in first)
    assert "one1" not in first
    assert "two2" not in other


def test_how_tokens_are_decoded_is_no_part_of_a_run() -> None:
    tree = {"model": {"path": "m"}, "steps": 1, "data": {"path": "r.jsonl", "max_length": 256}, "reward": "exact"}

    recorded, plain = (_loss(from_mapping({**tree, "rollout": {"graphs": how}}, GRPOConfig)) for how in ("auto", "off"))

    assert recorded == plain


def test_how_long_rewards_may_take_is_no_part_of_a_run() -> None:
    """The bound on a step may be moved like the wait for other ranks."""
    tree = {"model": {"path": "m"}, "steps": 1, "data": {"path": "r.jsonl", "max_length": 256}, "reward": "exact"}

    plain, bounded, patient = (
        _loss(from_mapping({**tree, "rewards": rewards}, GRPOConfig))["rewards"]
        for rewards in ({}, {"step_timeout_seconds": 60}, {"timeout_seconds": 60})
    )

    assert plain == bounded != patient


def test_environment_and_tools_are_part_of_a_run_but_not_how_many_live_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text("import helper\n")
    for name in ("helper.py", "lake.py", "tools.py"):
        (tmp_path / name).write_text("")
    tree = {"model": {"path": "m"}, "steps": 1, "data": {"path": "r.jsonl", "max_length": 256}, "reward": "exact"}
    environment = {"path": "world.py:World", "action": "lake.py:parse", "tools": "tools.py:add"}
    configs = {
        name: from_mapping({**tree, **({} if section is None else {"environment": section})}, GRPOConfig)
        for name, section in {
            "none": None,
            "plain": environment,
            "instances": {**environment, "instances": 3},
            "turns": {**environment, "max_turns": 3},
            "kwargs": {**environment, "kwargs": {"size": 3}},
        }.items()
    }

    loss = {name: {"objective": _loss(config)} for name, config in configs.items()}
    files = user_files(ConfiguredRun(config=configs["plain"], base=tmp_path))

    changed = {
        name: changed_fingerprints(loss["plain"], other, configs[name]).get("objective", [])
        for name, other in loss.items()
    }
    assert changed == {
        "none": ["environment"],
        "plain": [],
        "instances": [],
        "turns": ["environment.max_turns 8 -> 3"],
        "kwargs": ["environment.kwargs {} -> sha256 804e334b4bc9e4c038997264678979525..."],
    }
    assert sorted(files) == [
        "environment.action lake.py",
        "environment.path world.py",
        "environment.path world.py imports helper.py",
        "environment.tools tools.py",
    ]


def test_of_two_templates_of_one_name_the_one_in_the_current_directory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, here = tmp_path / "yaml", tmp_path / "here"
    for place in (base, here):
        place.mkdir()
        (place / "chat.jinja").write_text(TEMPLATE)
    monkeypatch.chdir(here)
    config = run(chat_template="chat.jinja")
    before = user_files(ConfiguredRun(config=config, base=base))

    (base / "chat.jinja").write_text("{{ 1 }}")
    beside = user_files(ConfiguredRun(config=config, base=base))
    (here / "chat.jinja").write_text("{{ 2 }}")
    read = user_files(ConfiguredRun(config=config, base=base))

    assert list(before) == ["data.chat_template chat.jinja"]
    assert beside == before
    assert read != before


def test_a_template_that_stands_in_the_configuration_is_one_of_its_files(tmp_path: Path) -> None:
    one = user_files(ConfiguredRun(config=run(chat_template=TEMPLATE), base=tmp_path))
    other = user_files(ConfiguredRun(config=run(chat_template=TEMPLATE + "!"), base=tmp_path))

    assert list(one) == list(other) == ["data.chat_template written in place"]
    assert one != other


def test_a_file_of_code_is_looked_up_beside_the_yaml_first(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def keep(row): return True\n")

    found = user_files(ConfiguredRun(config=run(filter="mine.py:keep"), base=tmp_path))

    assert list(found) == ["data.filter mine.py"]


def test_advantages_of_the_user_s_own_and_a_module_of_rewards_are_its_files(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for name in ("own/__init__.py", "own/words.py", "gain.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    tree = {
        "model": {"path": "m"}, "steps": 1, "data": {"path": "r.jsonl", "max_length": 256},
        "reward": [{"path": "own.words:long"}, {"path": "operator:add"}], "advantage": "gain.py:f",
    }  # fmt: skip

    hashes = user_files(ConfiguredRun(config=from_mapping(tree, GRPOConfig), base=tmp_path))

    assert sorted(hashes) == [
        "advantage.path gain.py",
        "reward own.words imports own/__init__.py",
        "reward own.words imports own/words.py",
    ]


def test_modules_that_a_file_of_code_imports_from_beside_it_are_its_files(tmp_path: Path) -> None:
    files = {
        "mine.py": "import json\nfrom helper import f\ndef keep(row):\n    import pack.deep\n    return True\n",
        "helper.py": "import mine, other\n",
        "other.py": "import not_there\n",
        "unused.py": "",
        "pack/__init__.py": "from . import inner\nfrom .. import unused\n",
        "pack/inner.py": "",
        "pack/deep.py": "this is no Python",
        "pack/unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    config = run(filter="mine.py:keep")

    before = user_files(ConfiguredRun(config=config, base=tmp_path))
    (tmp_path / "pack" / "inner.py").write_text("changed = 1\n")
    after = user_files(ConfiguredRun(config=config, base=tmp_path))

    assert filter_hashes(ConfiguredRun(config=config, base=tmp_path)) == after, (
        "what a table of reference numbers compares is the same"
    )
    imported = ("helper.py", "other.py", "pack/__init__.py", "pack/deep.py", "pack/inner.py", "unused.py")
    assert sorted(before) == ["data.filter mine.py", *(f"data.filter mine.py imports {name}" for name in imported)]
    assert changed_fingerprints({"files": before}, {"files": after}) == {
        "files": ["data.filter mine.py imports pack/inner.py"]
    }


@pytest.mark.parametrize(("changed", "where"), [("model.safetensors", "sharded"), ("tokenizer.json", "whole")])
def test_a_reward_model_that_was_replaced_in_place_is_another_one(tmp_path: Path, changed: str, where: str) -> None:
    place = tmp_path / "scorer"
    place.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (place / name).write_text("one")
    tree = {"model": {"path": "m"}, "steps": 1, "data": {"path": "r.jsonl", "max_length": 256}}
    config = from_mapping({**tree, "reward": {"kind": "model", "path": "scorer", "place": where}}, GRPOConfig)

    before = reward_model_hashes(ConfiguredRun(config=config, base=tmp_path))
    (place / changed).write_text("two")
    after = reward_model_hashes(ConfiguredRun(config=config, base=tmp_path))

    what = "weights" if changed == "model.safetensors" else "configuration and tokenizer"
    assert changed_fingerprints({"files": before}, {"files": after}) == {"files": [f"reward model scorer {what}"]}


def test_other_images_and_images_that_are_gone_are_named() -> None:
    now = {"data": {"rows of source 0": "a", "images of source 0": "b"}}

    assert changed_fingerprints({"data": {"rows of source 0": "a", "images of source 0": "c"}}, now) == {
        "data": ["images of source 0"]
    }
    assert changed_fingerprints(now, {"data": {"rows of source 0": "a"}}) == {"data": ["images of source 0"]}


def test_sections_are_compared_key_by_key() -> None:
    tree = {"model": {"path": "m"}, "steps": 1, "data": {"path": "r.jsonl", "max_length": 256}, "reward": "exact"}
    config = from_mapping({**tree, "rewards": {"timeout_seconds": 60}}, GRPOConfig)
    now = {"objective": _loss(config)}

    def saved(name: str, **values: Any) -> dict[str, dict[str, str]]:
        section = json.loads(now["objective"][name])
        section |= values
        return {
            "objective": now["objective"]
            | {name: json.dumps({key: value for key, value in section.items() if value != "GONE"})}
        }

    defaults = type(config.advantage).model_fields
    assert changed_fingerprints(saved("rewards", timeout_seconds=30), now, config) == {
        "objective": ["rewards.timeout_seconds 30 -> 60.0"]
    }
    # A version before this one did not have the key: equal to its default, and different from any other value.
    assert "discount" in defaults
    assert changed_fingerprints(saved("advantage", discount="GONE"), now, config) == {}
    assert changed_fingerprints(saved("rewards", timeout_seconds="GONE"), now, config) == {
        "objective": ["rewards.timeout_seconds absent -> 60.0"]
    }
    # A later version does not have the key.
    assert changed_fingerprints(saved("advantage", of_old=3), now, config) == {}
    # A name of the whole kind that this one has by default.
    without = {key: value for key, value in now["objective"].items() if key != "data.max_prompt_length"}
    assert changed_fingerprints({"objective": without}, now, config) == {}


def test_a_key_of_a_free_mapping_is_never_gone() -> None:
    tree = {"model": {"path": "m"}, "steps": 1, "data": {"path": "r.jsonl", "max_length": 256}, "reward": "exact"}
    section = {"path": "world.py:World"}
    first, second = (
        from_mapping({**tree, "environment": section | {"kwargs": kwargs}}, GRPOConfig) for kwargs in ({"size": 3}, {})
    )

    changed = changed_fingerprints({"objective": _loss(first)}, {"objective": _loss(second)}, second)

    assert [line.split()[0] for line in changed["objective"]] == ["environment.kwargs"]


GRPO = {"model": {"path": "m"}, "steps": 1, "data": {"path": "r.jsonl", "max_length": 256}, "reward": "exact"}


def test_a_section_that_a_checkpoint_lacks_is_equal_where_all_of_it_has_its_default() -> None:
    config = from_mapping(GRPO, GRPOConfig)
    now = {"objective": _loss(config)}
    for name in ("kl", "entropy", "groups", "updates", "off_policy_mask", "correction"):
        without = {"objective": {key: value for key, value in now["objective"].items() if key != name}}
        assert changed_fingerprints(without, now, config) == {}, name
    other = from_mapping({**GRPO, "kl": {"coefficient": 0.5}}, GRPOConfig)
    then = {"objective": _loss(other)}

    changed = changed_fingerprints(then, now, config)["objective"]

    assert [line.split()[0] for line in changed] == ["kl.coefficient"]


def test_values_that_a_template_prints_otherwise_are_different() -> None:
    one, other = ({"data": {"data.template_kwargs": json.dumps({"level": value})}} for value in (True, 1))

    assert changed_fingerprints(one, other, run()) == {"data": ["data.template_kwargs.level true -> 1"]}


def test_a_key_of_another_kind_is_not_gone_and_an_unknown_one_is() -> None:
    config = run()

    assert not is_gone(config, "optim.schedule.final_ratio")
    assert not is_gone(config, "optim.betas")
    assert not is_gone(config, "rope_scaling.factor")
    assert not is_gone(config, "optim.groups.attention.lr")
    assert is_gone(config, "optim.of_old")
    assert is_gone(config, "optim.schedule.of_old")
    saved, now = ({"data": values} for values in ({"data.of_old": "3", "data.seed": "0"}, {"data.seed": "0"}))
    assert changed_fingerprints(saved, now, config) == {}


def test_a_file_that_a_run_no_longer_names_is_a_difference(tmp_path: Path) -> None:
    before = user_files(ConfiguredRun(config=run(chat_template=TEMPLATE), base=tmp_path))

    assert changed_fingerprints({"files": before}, {"files": {}}, run()) == {
        "files": ["data.chat_template written in place"]
    }


def test_rules_of_mathematics_that_changed_are_a_difference() -> None:
    config = from_mapping({**GRPO, "reward": "math"}, GRPOConfig)
    now = _loss(config)
    before = {name: value for name, value in now.items() if name != "rules of kind math"}

    assert changed_fingerprints({"objective": before}, {"objective": now}, config) == {
        "objective": ["rules of kind math"]
    }
    assert changed_fingerprints({"objective": now}, {"objective": now}, config) == {}
    assert "rules of kind math" not in _loss(from_mapping(GRPO, GRPOConfig))


@pytest.mark.parametrize(
    ("section", "later"),
    [
        ({"path": "world.py:World"}, ("max_failed_calls", "mcp", "mcp_per")),
        ({"command": ["python", "agent.py"], "kind": "endpoint"}, ("max_failed_calls", "endpoint", "sandbox")),
    ],
)
def test_an_environment_of_a_version_without_later_keys_goes_on_unless_one_is_set(
    section: dict[str, Any], later: tuple[str, ...]
) -> None:
    first, second = (
        from_mapping({**GRPO, "reward": "environment", "environment": section | more}, GRPOConfig)
        for more in ({}, {"max_failed_calls": 3})
    )
    now = _loss(first)
    known = json.loads(now["environment"])
    saved = now | {"environment": json.dumps({key: value for key, value in known.items() if key not in later})}

    assert set(later) < known.keys()
    assert changed_fingerprints({"objective": saved}, {"objective": now}, first) == {}
    assert changed_fingerprints({"objective": saved}, {"objective": _loss(second)}, second) == {
        "objective": ["environment.max_failed_calls absent -> 3"]
    }
