"""Environments written for `environment_factory` of TRL have the episodes that they have there, token for token."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.data.tokens.chat_template import ChatTemplate, TemplateRefuses
from holdfast.rollout.episodes.episode import Episode
from holdfast.rollout.episodes.history import TurnTemplate
from holdfast.rollout.episodes.proof import proved_parser
from tests.rollout.conftest import ScriptedEngine
from tests.rollout.test_episode_tokens import ADD, bpe
from tests.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL: its environments are experimental

WORLDS = '''
import asyncio

class Guess:
    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward, self.target = 0.0, kwargs["target"]
        return " between 0 and 9."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.

        Returns:
            How it compares.
        """
        self.reward = 1.0 if number == self.target else self.reward - 0.25
        return "right" if number == self.target else "higher" if number < self.target else "lower"

    def get_reward(self) -> float:
        return self.reward


class Store:
    """Keeps what was written, and says nothing at the start."""

    def reset(self, **kwargs) -> None:
        self.items: dict[str, float] = {}

    def write(self, key: str, value: float) -> dict:
        """Write a value under a key.

        Args:
            key: Its name.
            value: The value.
        """
        self.items[key] = value
        return self.items

    def read(self, key: str) -> float:
        """Read a value.

        Args:
            key: Its name.
        """
        return self.items[key]

    def get_reward(self) -> float:
        return float(len(self.items))


class Clock:
    """Waits, as tools that are coroutines do."""

    def reset(self, **kwargs) -> str:
        self.now = 0
        return ""

    async def wait(self, seconds: int) -> int:
        """Wait.

        Args:
            seconds: How long (choices: [1, 2])
        """
        await asyncio.sleep(0)
        self.now += seconds
        return self.now

    async def get_reward(self) -> float:
        return self.now / 10


WORLDS = {"guess": Guess, "store": Store, "clock": Clock}
'''
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "guess a number"}], "environment": "guess", "target": 4},
    {"prompt": [{"role": "user", "content": "store a number"}], "environment": "store", "target": 0},
    {"prompt": [{"role": "user", "content": "watch the clock"}], "environment": "clock", "target": 0},
]


def call(name: str, **arguments: Any) -> str:
    import json

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SCRIPTS = {
    "guess a number": [call("guess", number=2), call("guess", number=7), call("guess", number=4), "it is 4."],
    "store a number": [
        call("write", key="a", value=2.5) + "\n" + call("read", key="a"),
        call("read", key="b"),
        call("erase", key="a"),
        "it is 2.5.",
    ],
    "watch the clock": [call("wait", seconds=1), "the clock says " + call("wait", seconds=2), "it is 3."],
}


def said(text: str) -> str:
    """Return what the policy says next."""
    (script,) = (script for question, script in SCRIPTS.items() if question in text)
    return script[text.count("<|im_start|>assistant") - 1]


def in_trl(trl: Any, tokenizer: Any, directory: Path, worlds: Any) -> dict[str, dict[str, Any]]:
    """Return, by environment, the tokens, the mask, the messages and the reward of an episode in TRL."""
    from datasets import Dataset

    found: dict[str, dict[str, Any]] = {}

    class Scripted(trl.GRPOTrainer):  # type: ignore[misc]  # a class that mypy does not see
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            texts = [said(tokenizer.decode(tokens)) for tokens in prompt_ids]
            return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts], None

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            assert self.environments is not None
            for index, row in enumerate(inputs):
                prompt = output["prompt_ids"][index][output["prompt_mask"][index].bool()].tolist()
                is_there = output["completion_mask"][index].bool()
                completion = output["completion_ids"][index][is_there].tolist()
                mask = output["tool_mask"][index][is_there].bool().tolist()
                reward = self.environments[index].reward_of_test
                found[row["environment"]] |= {
                    "tokens": prompt + completion, "mask": [False] * len(prompt) + mask, "reward": reward
                }  # fmt: skip
            return output

    def seen(prompts: Any, completions: Any, environments: Any, **_: Any) -> list[float]:
        for prompt, completion, world in zip(prompts, completions, environments, strict=True):
            name = next(name for name, make in worlds.items() if type(world) is make)
            found[name] = {"messages": [*prompt, *completion]}
        return [0.0] * len(prompts)

    for make in worlds.values():
        make.reward_of_test = property(_reward_of_test)
    config = trl.GRPOConfig(
        output_dir=str(directory), per_device_train_batch_size=6, num_generations=2, max_steps=1, report_to="none",
        max_completion_length=900, use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Scripted(
        model=tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=2048),
        reward_funcs=[seen],
        args=config,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
        environment_factory=worlds,
    ).train()
    return found


def _reward_of_test(world: Any) -> float:
    import asyncio
    import inspect

    reward = world.get_reward()
    return float(asyncio.run(reward) if inspect.iscoroutine(reward) else reward)


def test_three_environments_of_trl_have_the_episodes_that_they_have_in_trl(
    play: Callable[..., list[Episode]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl: Any = pytest.importorskip("trl")
    tokenizer = copy.deepcopy(bpe())
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    (tmp_path / "worlds.py").write_text(WORLDS)
    monkeypatch.syspath_prepend(str(tmp_path))

    expected = in_trl(trl, tokenizer, tmp_path / "run", importlib.import_module("worlds").WORLDS)
    options = {"max_turns": 9, "max_length": 2048, "max_new_tokens": 200, "path": "world.py:WORLDS"}
    episodes = play(ScriptedEngine(tokenizer, said), ROWS, source=WORLDS, **options)

    assert tokenizer.response_template
    for row, episode in zip(ROWS, episodes, strict=True):
        of_trl, tokens = expected[row["environment"]], episode.tokens
        assert tokens is not None
        assert tokenizer.decode(tokens.tokens.tolist()) == tokenizer.decode(of_trl["tokens"])
        assert tokens.tokens.tolist() == of_trl["tokens"]
        assert tokens.sampled.tolist() == of_trl["mask"]
        assert (episode.ended, episode.reward) == ("done", of_trl["reward"])
        told = [message["content"] for message in episode.messages if message["role"] != "assistant"]
        assert told == [message["content"] for message in of_trl["messages"] if message["role"] != "assistant"]


ENDS = ["<|im_end|>", "<|eot_id|>", "<|call|>", "<turn|>", "<|user|>", "<|observation|>"]
READ = [
    "gemma4", "gemma4_v5", "glm4moe", "gptoss", "llama3_1", "llama3_2", "nemotron_3_5_lightning", "nemotron_3_nano",
    "nemotron_3_super", "nemotron_3_ultra", "qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6",
    "qwen3_8", "qwen3_instruct_2507", "qwen3_vl",
]  # fmt: skip
"""Templates of families for which TRL has a response template."""


def with_response_template(trl: Any, name: str) -> tuple[ChatTemplate, TurnTemplate]:
    """Return one of TRL's templates with its response template, and what writes turns by it."""
    tokenizer = copy.deepcopy(bpe())
    tokenizer.bos_token = "<s>"
    tokenizer.add_special_tokens({"additional_special_tokens": ENDS})
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    importlib.import_module("trl.chat_template_utils").add_response_schema(tokenizer)
    template = ChatTemplate(tokenizer, tokenizer.chat_template, {}, name)
    return template, TurnTemplate(template, [ADD], tokenizer.convert_tokens_to_ids(ENDS), ["user"])


@pytest.mark.parametrize("name", READ)
def test_a_call_is_read_back_by_the_response_template_of_its_family(name: str) -> None:
    template, writer = with_response_template(pytest.importorskip("trl"), name)

    parse = proved_parser(template, writer, [ADD])

    assert parse is not None
    assert parse.__qualname__.startswith("parser_of_tokenizer")


def test_a_response_template_that_reads_no_apostrophe_is_refused() -> None:
    template, writer = with_response_template(pytest.importorskip("trl"), "lfm2_2_5")

    with pytest.raises(TemplateRefuses, match="reads back as add_numbers"):
        proved_parser(template, writer, [ADD])
