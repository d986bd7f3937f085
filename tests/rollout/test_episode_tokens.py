"""Episodes are assembled token by token: what was sampled stays, and what stands between turns is the template's."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.data.tokens.chat_template import ChatTemplate, TemplateRefuses
from holdfast.errors import ConfigError
from holdfast.rollout.engine import Sampled
from holdfast.rollout.episodes.history import TurnTemplate, classify, observations_of, observations_of_agents
from holdfast.rollout.episodes.proof import proved_syntax
from holdfast.rollout.episodes.tokens import EpisodeTokens
from holdfast.types import Finish

CHATML = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif -%}"
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>"
    "{%- endfor -%}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)
FORGETFUL = CHATML.replace(
    "{{ message.content }}",
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1].lstrip() }}"
    "{% else %}{{ message.content }}{% endif %}",
)
ADD = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "A number."}}},
    },
}


USER, TOOL = (("user",),), (("tool",),)


def bpe() -> Any:
    """Return a byte-level BPE without borders between words, whose merges run across the ends of lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["assistant\n\nhello hello", "user\n\nwhat is 12 and 34?\n", "tool\nit is 46.\n\nassistant\nhello"]
    tokenizer.train_from_iterator(texts * 8, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )


def turn_template(tokenizer: Any, source: str = CHATML, tools: tuple[dict[str, Any], ...] = ()) -> TurnTemplate:
    return TurnTemplate(ChatTemplate(tokenizer, source, {}, "it"), tools, [tokenizer.eos_token_id])


def completion(tokens: list[int], version: int = 3) -> Sampled:
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    return Sampled(0, 0, np.array(tokens, np.int64), logprobs, Finish.STOP, version)


def test_columns_of_other_lengths_or_with_numbers_of_nobody_cannot_be_built() -> None:
    episode = EpisodeTokens.of_prompt(np.array([5, 6])).with_turn(completion([7, 8]))
    columns = {name: getattr(episode, name) for name in EpisodeTokens.__dataclass_fields__}

    for name in ("sampled", "logprobs", "weights_versions", "turns"):
        with pytest.raises(ValueError, match=rf"{name} is .* for 4 tokens"):
            EpisodeTokens(**{**columns, name: columns[name][:-1]})
    with pytest.raises(ValueError, match="log-probability or a weights version"):
        EpisodeTokens(**{**columns, "logprobs": np.full(4, -1, np.float32)})
    with pytest.raises(ValueError, match="begins with a prompt"):
        EpisodeTokens.of_prompt(np.zeros(0, np.int64))


def test_each_token_has_the_numbers_of_its_turn() -> None:
    second = completion([9], version=4)._replace(segments=((0, 4),))

    episode = (
        EpisodeTokens.of_prompt(np.array([5, 6]))
        .with_turn(completion([7, 8]))
        .with_observation(np.array([1, 2, 3]))
        .with_turn(second)
    )

    assert episode.tokens.tolist() == [5, 6, 7, 8, 1, 2, 3, 9]
    assert episode.sampled.tolist() == [False, False, True, True, False, False, False, True]
    assert episode.logprobs.tolist() == [0, 0, -1, -2, 0, 0, 0, -1]
    assert episode.weights_versions.tolist() == [-1, -1, 3, 3, -1, -1, -1, 4]
    assert episode.turns.tolist() == [-1, -1, 0, 0, 0, 0, 0, 1]
    assert episode.turn_count == 2


def test_drawn_conversations_keep_every_sampled_token_and_train_no_other() -> None:
    tokenizer = bpe()
    writer, generator = turn_template(tokenizer), np.random.default_rng(0)
    texts = ["what is 12 and 34?", "\n\nhello", "it is 46.", "assistant\n"]
    end, changed = tokenizer.eos_token_id, 0
    for _ in range(2000):
        question = {"role": "user", "content": texts[generator.integers(4)]}
        episode = EpisodeTokens.of_prompt(np.array(writer.opening([question]), np.int64))
        expected, rendered = list(episode.tokens), tokenizer.decode(episode.tokens.tolist())
        trained: list[int] = []
        for turn in range(generator.integers(1, 4)):
            drawn = generator.integers(3, len(tokenizer), generator.integers(1, 7)).tolist()
            is_cut = generator.random() < 0.2
            drawn += [] if is_cut else [end]
            observed = texts[generator.integers(4)]
            episode = episode.with_turn(completion(drawn, turn))
            between = writer.observation([{"role": "user", "content": observed}], last_token=drawn[-1])
            episode = episode.with_observation(np.array(between, np.int64))
            text = f"{'<|im_end|>' if is_cut else ''}\n<|im_start|>user\n{observed}<|im_end|>\n<|im_start|>assistant\n"
            trained += drawn
            expected += drawn + tokenizer(text, add_special_tokens=False)["input_ids"]
            rendered += tokenizer.decode(drawn) + text
        changed += tokenizer(tokenizer.decode(expected), add_special_tokens=False)["input_ids"] != expected

        assert episode.tokens.tolist() == expected
        assert episode.tokens[episode.sampled].tolist() == trained
        assert tokenizer.decode(episode.tokens.tolist()) == rendered or "\ufffd" in rendered
    assert changed > 1000, "encoding texts again would have changed next to nothing, and this test would show nothing"


@pytest.mark.parametrize("tools", [(), (ADD,)])
def test_a_joined_conversation_is_that_of_the_template(tools: tuple[dict[str, Any], ...]) -> None:
    writer = turn_template(bpe(), tools=tools)

    assert writer.prove(observations_of_agents(tools)) == ""


def test_a_difference_between_joined_and_whole_is_named() -> None:
    # It writes how many messages there are, which is another number once there are more.
    end = "{% if m.role == 'assistant' %}<eos>{% endif %}"
    source = f"{{% for m in messages %}}{{{{ m.content }}}}{end}{{{{ loop.length }}}}|{{% endfor %}}"

    assert "turn 1 is written as" in turn_template(character_tokenizer(), source).prove([("user",)])


def test_a_template_that_closes_no_answer_is_refused() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    writer = turn_template(bpe(), source)

    with pytest.raises(TemplateRefuses, match="ends an answer by no token that ends a completion"):
        writer.observation([{"role": "user", "content": "more"}], last_token=1)


def test_templates_are_told_apart_by_rendering() -> None:
    tokenizer = bpe()
    whole, forgetful = ChatTemplate(tokenizer, CHATML, {}, ""), ChatTemplate(tokenizer, FORGETFUL, {}, "")
    without_tools = ChatTemplate(tokenizer, CHATML.replace("if tools", "if false"), {}, "")
    two_roles = ChatTemplate(tokenizer, "{{ raise_exception('no turns') }}", {}, "")
    told = {
        "whole": classify(whole, (), USER),
        "tools": classify(whole, [ADD], TOOL),
        "all": classify(whole, [ADD], observations_of_agents([ADD])),
        "forgetful": classify(forgetful, (), USER),
        "without tools": classify(without_tools, [ADD], TOOL),
        "two roles": classify(two_roles, (), USER),
    }

    assert {name: history.kind for name, history in told.items()} == {
        "whole": "prefix", "tools": "prefix", "all": "prefix", "forgetful": "split", "without tools": "refused",
        "two roles": "refused",
    }  # fmt: skip
    assert told["without tools"].reason == "leaves tools out of the prompt"
    assert "no turns" in told["two roles"].reason
    assert not told["whole"].trims


def test_a_template_that_trims_answers_is_told_from_one_that_rewrites_them() -> None:
    tokenizer = bpe()
    ends = [tokenizer.eos_token_id]
    for method in ("strip", "rstrip", "lstrip"):
        source = CHATML.replace("{{ message.content }}", f"{{{{ message.content.{method}() }}}}")
        template = ChatTemplate(tokenizer, source, {}, "")

        history = classify(template, (), USER)

        assert (history.kind, history.trims) == ("prefix", True)
        assert proved_syntax(template, (), ends, USER, splits=False).note
    assert not proved_syntax(ChatTemplate(tokenizer, CHATML, {}, ""), (), ends, USER, splits=False).note


THOUGHTLESS = (
    "{%- set ns = namespace(last=0) -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
) + CHATML.replace(
    "{{ message.content }}",
    "{% if loop.index0 < ns.last %}{{ message.content.split('</think>')[-1].lstrip() }}"
    "{% else %}{{ message.content }}{% endif %}",
)
"""Drops thoughts at the user's next message, as Qwen3's own template does: results of tools keep them."""


def test_a_template_that_drops_thoughts_at_the_user_s_next_message_is_seen_where_there_are_tools_too() -> None:
    template = ChatTemplate(bpe(), THOUGHTLESS, {}, "it")
    both, of_agent = observations_of([ADD], answers=True), observations_of_agents([ADD])

    assert both == (("tool",), ("user",))
    assert classify(template, [ADD], TOOL).kind == "prefix"
    for observations in (USER, both, of_agent):
        history = classify(template, [ADD], observations)
        assert (history.kind, history.splits_at) == ("split", {"user"})
    ends = [template.tokenizer.eos_token_id]
    with pytest.raises(ConfigError, match="writes earlier turns otherwise"):
        proved_syntax(template, [ADD], ends, both, splits=False)
    writer = proved_syntax(template, [ADD], ends, both, splits=True).writer
    assert [writer.splits_behind([{"role": role, "content": ""}]) for role in ("tool", "user")] == [False, True]
    assert not proved_syntax(template, [ADD], ends, TOOL, splits=False).writer.splits_behind([{"role": "tool"}])


SPLIT, REFUSED, PREFIX = "split", "refused", "prefix"
OF_TRL = {
    "cohere": (PREFIX, REFUSED, REFUSED),
    "cohere2": (PREFIX, REFUSED, REFUSED),
    "deepseek_r1_distill": (SPLIT, REFUSED, REFUSED),
    "deepseek_r1_distill_training": (PREFIX, REFUSED, REFUSED),
    "deepseekv3": (SPLIT, REFUSED, REFUSED),
    "diffusion_gemma": (PREFIX, SPLIT, SPLIT),
    "gemma": (PREFIX, REFUSED, REFUSED),
    "gemma3": (PREFIX, REFUSED, REFUSED),
    "gemma4": (PREFIX, PREFIX, PREFIX),
    "gemma4_v5": (PREFIX, SPLIT, SPLIT),
    "glm4moe": (SPLIT, PREFIX, SPLIT),
    "gptoss": (PREFIX, PREFIX, SPLIT),
    "idefics3": (PREFIX, REFUSED, REFUSED),
    "lfm2": (PREFIX, REFUSED, REFUSED),
    "lfm2_2_5": (SPLIT, PREFIX, SPLIT),
    "lfm2_v2": (PREFIX, PREFIX, PREFIX),
    "llama3": (PREFIX, REFUSED, REFUSED),
    "llama3_1": (PREFIX, SPLIT, SPLIT),
    "llama3_2": (PREFIX, SPLIT, SPLIT),
    "llava_next": (PREFIX, REFUSED, REFUSED),
    "muse_glimmer": (PREFIX, SPLIT, SPLIT),
    "nemotron_3_5_lightning": (SPLIT, PREFIX, SPLIT),
    "nemotron_3_nano": (SPLIT, PREFIX, SPLIT),
    "nemotron_3_super": (SPLIT, PREFIX, SPLIT),
    "nemotron_3_ultra": (SPLIT, PREFIX, SPLIT),
    "phi3": (PREFIX, REFUSED, REFUSED),
    "phi3_5": (PREFIX, REFUSED, REFUSED),
    "qwen2_5": (PREFIX, PREFIX, PREFIX),
    "qwen2_5_training": (PREFIX, PREFIX, PREFIX),
    "qwen2_5_vl": (PREFIX, REFUSED, REFUSED),
    "qwen3": (SPLIT, PREFIX, SPLIT),
    "qwen3_5_nothink": (SPLIT, SPLIT, SPLIT),
    "qwen3_5_think": (SPLIT, PREFIX, SPLIT),
    "qwen3_5_think_training": (PREFIX, PREFIX, PREFIX),
    "qwen3_6": (SPLIT, PREFIX, SPLIT),
    "qwen3_6_training": (PREFIX, PREFIX, PREFIX),
    "qwen3_8": (PREFIX, PREFIX, PREFIX),
    "qwen3_instruct_2507": (PREFIX, PREFIX, PREFIX),
    "qwen3_training": (PREFIX, PREFIX, PREFIX),
    "qwen3_vl": (PREFIX, PREFIX, PREFIX),
    "smolvlm": (PREFIX, REFUSED, REFUSED),
}
"""Template -> with observations of the user, with calls of tools, with both in every order; those that TRL calls
`training` keep thoughts."""
TRIMMING = {
    "cohere", "diffusion_gemma", "gemma", "gemma3", "gemma4", "gemma4_v5", "glm4moe", "lfm2_2_5", "llama3", "llama3_1",
    "llama3_2", "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "qwen3_5_nothink",
    "qwen3_5_think", "qwen3_5_think_training", "qwen3_6", "qwen3_6_training", "qwen3_8", "qwen3_training",
}  # fmt: skip


@pytest.mark.parametrize("name", OF_TRL)
def test_templates_of_many_families_are_classified(name: str) -> None:
    installed = importlib.util.find_spec("trl")
    if installed is None or installed.origin is None:
        pytest.skip("trl is not installed, and its chat templates with it")
    file = Path(installed.origin).parent / "chat_templates" / f"{name}.jinja"
    if not file.is_file():
        pytest.skip(f"this release of trl has no template {name}")
    tokenizer = character_tokenizer()
    tokenizer.bos_token = "<s>"
    template = ChatTemplate(tokenizer, file.read_text(), {}, name)

    told = [
        classify(template, (), observations_of((), answers=True)),
        classify(template, [ADD], observations_of([ADD], answers=False)),
        classify(template, [ADD], observations_of([ADD], answers=True)),
    ]
    assert tuple(history.kind for history in told) == OF_TRL[name]
    assert told[0].trims is (name in TRIMMING)
    of_agent = classify(template, [ADD], observations_of_agents([ADD]))
    assert of_agent == told[2]
