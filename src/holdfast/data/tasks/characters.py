"""A tokenizer of single characters for generated tasks: no file, no download."""

from __future__ import annotations

from typing import Any

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 +-*/=?:,.()<>|_\n"

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ROLES = ("<system>", "<user>", "<assistant>", "<tool>")

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "<assistant>{% generation %}{{ message.content }}<eos>{% endgeneration %}"
    "{% elif message.role in ['system', 'user', 'tool'] %}"
    "<{{ message.role }}>{{ message.content }}"
    "{% else %}{{ raise_exception('a role is system, user, assistant or tool, not ' + message.role) }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")

_WRITTEN = (
    "{% macro written(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'image' %}" + "".join(VISION) + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
)


def picture_tokenizer() -> Any:
    """Return the tokenizer of single characters with the tokens that Qwen-VL models mark images by, after all others.

    Its template writes contents that are text and contents that are lists of parts.
    """
    tokenizer = character_tokenizer(VISION)
    tokenizer.chat_template = _WRITTEN + TEMPLATE.replace("message.content", "written(message.content)")
    return tokenizer


def character_tokenizer(further: tuple[str, ...] = ()) -> Any:
    """Return a `PreTrainedTokenizerFast` with one token per character.

    `<pad>` is 0 and `<eos>` is 1. It knows lower-case letters, digits, space, newline and `+-*/=?:,.()<>|_`; any other
    character becomes `<unk>`. There is no beginning-of-sequence token, so a prompt is its characters and nothing else.

    Args:
        further: Special tokens after all others.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = [PAD, EOS, UNKNOWN, *ROLES, *CHARACTERS, *further]
    model = models.WordLevel({token: number for number, token in enumerate(vocabulary)}, unk_token=UNKNOWN)
    tokenizer = Tokenizer(model)
    # Not Regex("."), which leaves newlines glued to their neighbours.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[*ROLES, *further],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast
