"""Turn rows into token sequences with loss masks."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.config.sections.data import IMAGE_FIELDS, RowFormat, TextConfig
from holdfast.data.content.formats import (
    Conversation,
    PlainText,
    PromptCompletion,
    Shape,
    normalise,
    prompt_of,
    row_shape,
)
from holdfast.data.content.images import Content, Video
from holdfast.data.content.lengths import DROPPED_ROLES, Stretch, cut_to_length, example_of
from holdfast.data.rows.rows import Row
from holdfast.data.tokens.chat_mask import Masked, mask_conversation
from holdfast.data.tokens.chat_template import ChatTemplate, PromptFormat, TemplateRefuses, template_text
from holdfast.data.tokens.row_images import RowImages
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import DataError
from holdfast.types import Example, Prompt, PromptImages

BLIND = "This model reads text alone"

ToolsOfRow = Callable[[Row, str], Sequence[Mapping[str, Any]]]
"""From a row, and what an error calls it, to schemas of what a policy may call."""

S = TypeVar("S", Example, Prompt)
"""What rows become: sequences to train on, or prompts to continue."""


@dataclass(frozen=True)
class Tokenised(Generic[S]):
    """The sequences of one row, and counts of what happened to it."""

    examples: tuple[S, ...]
    """Several for a row that is split, or that a template writes as one sequence per turn; none if it was dropped."""
    counts: Mapping[str, int]
    """Sequences that were `truncated`, `split`, `overlong_dropped`, left out since they train nothing (`untrained`), or
    whose answer the template does not close (`no_end_of_turn`); rows that were `split_by_turn`, or whose reasoning the
    template does not write (`reasoning_dropped`), or of whose messages it leaves out a role (`system_dropped`,
    `user_dropped`, `developer_dropped`, `tool_dropped`; `role_dropped` for any other). Only what happened is listed."""
    head: int = 0
    """First tokens that all sequences have in common, and none of which is trained."""
    lengths: tuple[int, ...] = ()
    """Tokens of the row's sequences before any was cut, split or left out for its length."""


class Opening(NamedTuple):
    """A prompt as tokens."""

    written: list[int]
    """Each image is its one placeholder."""
    laid: Stretch
    """Each image is its own tokens; none is trained."""
    positions: NDArray[np.int64] | None
    """[A, L] of `laid`; None where all are 0, 1, 2, ..."""
    counts: Mapping[str, int] = MappingProxyType({})
    """`without_chat_template`: it is plain text, and the tokenizer it came with has a chat template, which is then not
    used; and roles that the template leaves out, as in `Tokenised`."""
    images: PromptImages | None = None
    """None where the prompt has none."""


class RowTokeniser:
    """Turns rows into token sequences, as one tokenizer and one `data` section say."""

    def __init__(
        self,
        tokenizer: Any,
        text: TextConfig,
        base: Path,
        images: ImageSide | str = BLIND,
        formats: Mapping[str, RowFormat] = MappingProxyType({}),
        tools: ToolsOfRow | None = None,
    ) -> None:
        """Read the templates.

        Args:
            tokenizer: A transformers tokenizer.
            text: What to train, and how long.
            base: The YAML's directory, where template files are looked up after the current directory.
            images: Turns images into tokens; or a sentence that says why none can be trained on.
            formats: The shape of a source's rows, by its name; `auto`, which recognises it, where none is named.
            tools: What a policy may call, in the place of rows' own; every prompt is a conversation then.

        Raises:
            DataError: A template file is missing or wrong, or a template variable is not the template's to set.
        """
        self._text = text
        self._formats = formats
        self._images = RowImages(images, text, base)
        self._plain = PlainTokeniser(tokenizer, append_eos=text.append_eos)
        self._format = None if text.format is None else PromptFormat(text.format, base)
        self._template = _chat_template(tokenizer, text, base, images)
        self._has_template = bool(tokenizer.name_or_path and self._template.source)  # built-in ones have no name
        # Whoever sets one of these wants a chat: a prompt that is plain text becomes the user's message.
        self._wraps_text = tools is not None or bool(text.system or text.chat_template or text.template_kwargs)
        self._tools = tools

    @property
    def fingerprint(self) -> str:
        """xxh3_128 of all that decides which tokens a row gives, the tokenizer's vocabulary aside."""
        templates = [self._template.source, None if self._format is None else self._format.source]
        fields = set(TextConfig.model_fields) - IMAGE_FIELDS
        text = json.dumps([self._text.model_dump(include=fields), templates], sort_keys=True)
        return str(xxhash.xxh3_128_hexdigest(text.encode()))

    def examples(self, row: Row, sample_id: int, source: str, row_name: str | None = None) -> Tokenised[Example]:
        """Turn a row into sequences; all of them share the sample's id.

        Args:
            row: Under our column names.
            sample_id: Global index of the sample.
            source: Name of the data source.
            row_name: What an error calls the row; default: its sample id and source.

        Raises:
            DataError: The row lacks a column, the template refuses it, or it cannot be masked.
        """
        name = row_name or f"Row {sample_id} of {source}"
        counts: Counter[str] = Counter()
        full_stretches = self.stretches(row, self._formats.get(source, "auto"), name, counts)
        stretches = [piece for stretch in full_stretches for piece in cut_to_length(stretch, self._text, name, counts)]
        examples = tuple(self.example(stretch, sample_id, source) for stretch in stretches)
        return Tokenised(examples, dict(counts), lengths=tuple(len(stretch.tokens) for stretch in full_stretches))

    def example(self, stretch: Stretch, sample_id: int, source: str) -> Example:
        """Return a sequence with its images and positions, numbered."""
        return example_of(stretch, sample_id, source, self._images.positions(stretch))

    def stretches(self, row: Row, row_format: RowFormat, row_name: str, counts: Counter[str]) -> list[Stretch]:
        """Turn a row into sequences of any length.

        Raises:
            DataError: As `examples`.
        """
        content = self._content(row, row_format, row_name)
        images = self._images.prepared(content, row_name)
        return self._images.laid_in(self._stretches(self._images.in_text(content), row_name, counts), images, row_name)

    def opening(self, row: Row, row_name: str, why_no_videos: str = "") -> Opening:
        """Return what a policy continues: the row's prompt, and the opening of an answer if it is a conversation.

        Args:
            row: The row.
            row_name: For errors.
            why_no_videos: Why it may have none; "" if it may.

        Raises:
            DataError: The row has no prompt, its images cannot be read, or the template refuses it.
        """
        content = self._prompt(row, row_name)
        if why_no_videos and any(isinstance(image, Video) for image in content.images):
            raise DataError(f"{row_name} has a video, and {why_no_videos}. Remove the row, or use another engine.")
        images = self._images.prepared(content, row_name, one_sequence=True)
        written, counts = self._opening_tokens(self._images.in_text(content), row_name)
        (laid,) = self._images.laid_in([Stretch(written, [False] * len(written))], images, row_name)
        sources = self._images.unread(written, content, row_name)
        return Opening(written, laid, self._images.positions(laid), counts, sources)

    @property
    def template(self) -> ChatTemplate:
        """What conversations are written with."""
        return self._template

    def conversation(self, row: Row, row_name: str) -> Conversation:
        """Return the messages of a row's prompt, where every prompt is a conversation.

        Raises:
            DataError: As `opening`.
        """
        content = self._prompt(row, row_name)
        assert isinstance(content, Conversation)
        return self._prepared(content, row_name)

    def _prompt(self, row: Row, row_name: str) -> Conversation | PlainText:
        if self._format is not None:
            is_alpaca = "instruction" in row and "prompt" not in row
            row = self._with_prompt(row, "alpaca" if is_alpaca else "prompt_completion", row_name)
        prompt = prompt_of(row, row_name)
        if isinstance(prompt, str) and self._wraps_text:
            prompt = Conversation([{"role": "user", "content": prompt}])
        if isinstance(prompt, Conversation):
            if self._tools is not None:
                prompt = replace(prompt, tools=list(self._tools(row, row_name)))
            return self._images.placed(prompt, row, row_name)
        return self._images.placed(PlainText(prompt), row, row_name)

    def _dropped(self, conversation: Conversation) -> dict[str, int]:
        """Count the roles of a conversation that the template leaves out."""
        roles = self._template.dropped_roles(conversation)
        return {f"{role if role in DROPPED_ROLES else 'role'}_dropped": 1 for role in roles}

    def _opening_tokens(self, content: Conversation | PlainText, row_name: str) -> tuple[list[int], dict[str, int]]:
        if isinstance(content, PlainText):
            return self._plain.opening(content.text), {"without_chat_template": 1} if self._has_template else {}
        conversation = self._prepared(content, row_name)
        try:
            written = list(self._template.ids(conversation, generation_prompt=True))
            return written, self._dropped(conversation)
        except TemplateRefuses as refusal:
            raise DataError(f"{row_name}: {self._template.name} cannot write the prompt: {refusal}.") from None

    def _content(self, row: Row, row_format: RowFormat, row_name: str) -> Content:
        """Bring the row into one of three forms, with the prompt that `data.format` writes and with its images."""
        try:
            shape = row_shape(row, row_format, prompt_is_rendered=self._format is not None)
        except DataError as error:
            raise DataError(f"{row_name}: {error}") from None
        content = normalise(self._with_prompt(row, shape, row_name), shape, row_name)
        if isinstance(content, PromptCompletion) and self._wraps_text:
            question = {"role": "user", "content": content.prompt}
            content = Conversation([question, {"role": "assistant", "content": content.completion}], first_trained=1)
        return self._images.placed(content, row, row_name)

    def _with_prompt(self, row: Row, shape: Shape, row_name: str) -> Row:
        """Put what `data.format` renders in the place of the prompt."""
        if self._format is None:
            return row
        match shape:
            case "prompt_completion":
                return {**row, "prompt": self._format.render(row, row_name)}
            case "alpaca":
                return {**row, "instruction": self._format.render(row, row_name), "input": None}
            case _:
                raise DataError(
                    f"{row_name}: data.format writes the prompt of prompt_completion and alpaca rows, but this is a "
                    f"{shape} row. Remove data.format, or name the columns by data.columns."
                )

    def _stretches(self, content: Content, row_name: str, counts: Counter[str]) -> list[Stretch]:
        match content:
            case PlainText():
                return [self._plain.text(content)]
            case PromptCompletion():
                return [self._plain.prompt_completion(content, train_on_prompt=self._text.train_on_prompt)]
            case Conversation():
                return self._conversation(self._prepared(content, row_name), row_name, counts)

    def _conversation(self, conversation: Conversation, row_name: str, counts: Counter[str]) -> list[Stretch]:
        turns = conversation.assistant_turns
        if not turns:
            counts["untrained"] += 1
            return []
        if self._text.train_on == "last_turn":
            turns = turns[-1:]
        masked = mask_conversation(self._template, conversation, turns, row_name)
        counts.update(self._dropped(conversation))
        if masked.drops_reasoning:
            counts["reasoning_dropped"] += 1
        if len(masked.sequences) > 1:
            counts["split_by_turn"] += 1
        open_ended = sum(
            sequence.tokens[sequence.spans[-1][1] - 1] not in self._template.special_ids
            for sequence in masked.sequences
        )
        if open_ended:
            counts["no_end_of_turn"] += open_ended
        trains_prompt = self._text.train_on_prompt and conversation.first_trained > 0
        return [_stretch(sequence, trains_prompt=trains_prompt) for sequence in masked.sequences]

    def _prepared(self, conversation: Conversation, row_name: str) -> Conversation:
        """Add the system message of `data.system`, and see that there is a template at all."""
        try:
            self._template.check()
        except TemplateRefuses as refusal:
            raise DataError(
                f"{row_name} is a conversation, but the tokenizer has no chat template to write it with ({refusal}). "
                "Set data.chat_template to a jinja file."
            ) from None
        if self._text.system is None or conversation.messages[0]["role"] in ("system", "developer"):
            return conversation
        system = {"role": "system", "content": self._text.system}
        first_trained = conversation.first_trained and conversation.first_trained + 1
        return replace(conversation, messages=[system, *conversation.messages], first_trained=first_trained)


def describe_template(example: Example, tokenizer: Any) -> list[tuple[str, bool]]:
    """Return each token's text and whether it is trained; joined, the texts are the sequence's.

    A character that takes several tokens stands with the last of them.
    """
    tokens = example.tokens.tolist()
    described = []
    # A window of two pieces: decoded alone, a token loses the space before it in some tokenizers.
    start = decoded_end = 0
    for position, trained in enumerate(example.loss_mask.tolist()):
        before = _decoded(tokenizer, tokens[start:decoded_end])
        text = _decoded(tokenizer, tokens[start : position + 1])
        is_whole = not text.endswith("\ufffd") or position + 1 == len(tokens)
        described.append((text[len(before) :] if is_whole else "", trained))
        if is_whole:
            start, decoded_end = decoded_end, position + 1
    return described


def _decoded(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _chat_template(tokenizer: Any, text: TextConfig, base: Path, images: ImageSide | str) -> ChatTemplate:
    ours = set(inspect.signature(tokenizer.apply_chat_template).parameters) & set(text.template_kwargs)
    if ours:
        raise DataError(f"data.template_kwargs: {min(ours)!r} is an argument that Holdfast sets, not a variable.")
    if text.chat_template is None:
        name = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
        template = tokenizer.chat_template
        changed = template if isinstance(images, str) else images.rewritten(template)
        return ChatTemplate(tokenizer, None if changed == template else changed, text.template_kwargs, name)
    source = template_text(text.chat_template, base, "data.chat_template")
    name = "the template written in data.chat_template" if source == text.chat_template else text.chat_template
    source = source if isinstance(images, str) else images.rewritten(source)
    return ChatTemplate(tokenizer, source, text.template_kwargs, name)


def _stretch(masked: Masked, *, trains_prompt: bool) -> Stretch:
    trained = [False] * len(masked.tokens)
    for start, end in masked.spans:
        trained[start:end] = [True] * (end - start)
    if trains_prompt:
        end = masked.spans[-1][1]
        trained[:end] = [True] * end
    return Stretch(masked.tokens, trained)


class PlainTokeniser:
    """A tokenizer with the rule for ends: text opens with the tokenizer's special tokens, and we alone close it."""

    def __init__(self, tokenizer: Any, *, append_eos: bool) -> None:
        """Take a tokenizer.

        Args:
            tokenizer: A transformers tokenizer.
            append_eos: End completions and texts with its end-of-sequence token.
        """
        self._tokenizer = tokenizer
        self._append_eos = append_eos

    def opening(self, text: str) -> list[int]:
        """Return the tokens of text at the start of a sequence; an end the tokenizer adds by itself is taken off."""
        plain = self._bare(text)
        tokens: list[int] = list(self._tokenizer(text, verbose=False)["input_ids"])
        ends = (self._tokenizer.eos_token_id, self._tokenizer.sep_token_id)
        if tokens and tokens[-1] in ends and tokens[-1:] != plain[-1:]:
            tokens.pop()
        return tokens

    def text(self, content: PlainText) -> Stretch:
        """Return plain text, all of it trained."""
        tokens = self._ended(self.opening(content.text))
        return Stretch(tokens, [True] * len(tokens))

    def prompt_completion(self, content: PromptCompletion, *, train_on_prompt: bool) -> Stretch:
        """Return a prompt and its completion; the prompt is trained if asked for.

        They become tokens one by one: the policy, too, receives the prompt's tokens before it chooses any of its own.
        """
        prompt = self.opening(content.prompt)
        completion = self._ended(self._bare(content.completion))
        return Stretch(prompt + completion, [train_on_prompt] * len(prompt) + [True] * len(completion))

    def _bare(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _ended(self, tokens: list[int]) -> list[int]:
        if not self._append_eos:
            return tokens
        end = self._tokenizer.eos_token_id
        if end is None:
            raise DataError(
                "The tokenizer has no end-of-sequence token to append. Set data.append_eos=false, or give the "
                "tokenizer an eos_token."
            )
        return tokens if tokens[-1:] == [end] else [*tokens, end]
