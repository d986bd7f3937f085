"""Generates completions with plain transformers for `holdfast generate`; no model or engine of Holdfast takes part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError, ModelError, UserError

_USUAL_NEW_TOKENS = 128
"""Where nobody says how many, and the model has room for them."""
_SCORES = "ForSequenceClassification"


@dataclass(frozen=True)
class CompletionRequest:
    """The prompts and the sampling options of `holdfast generate`."""

    prompts: Sequence[str]
    rows: str | None
    """A file of prompts, instead."""
    column: str
    chat: bool
    max_new_tokens: int | None
    temperature: float
    """0: the most probable token, always."""
    top_p: float
    seed: int
    trust_remote_code: bool


@dataclass(frozen=True)
class TokenizedPrompt:
    """The token ids of a prompt, and the number of tokens that may follow."""

    prompt: str
    tokens: list[int]
    new_tokens: int
    """At most so many are added."""


@dataclass(frozen=True)
class Completion:
    """A completion that the model generated."""

    prompt: str
    completion: str
    prompt_tokens: int
    tokens: list[int]
    """Token ids of the completion, including the end-of-sequence token."""
    finished: bool
    """Whether the model ended it."""


def load_words(directory: Path, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """Return the configuration and the tokenizer of a model directory.

    Raises:
        ConfigError: The model needs code of its own, and that was not allowed.
        ModelError: There is no configuration or no tokenizer, or the model writes no text.
    """
    from holdfast.config.sections.model import ModelConfig
    from holdfast.files import read_json
    from holdfast.models.files.origin import load_tokenizer, read_config

    logging.getLogger("transformers").setLevel(logging.ERROR)  # a long prompt is refused below, in our words
    section = ModelConfig(path=str(directory), trust_remote_code=trust_remote_code)
    file = directory / "config.json"
    if file.exists() and not trust_remote_code and b'"auto_map"' in file.read_bytes() and "auto_map" in read_json(file):
        raise ConfigError(
            f"{directory} brings Python code of its own, which would run on your machine. Read it, then give "
            "--trust-remote-code."
        )
    config = read_config(directory, trust_remote_code=trust_remote_code)
    names = [str(name) for name in config.architectures or ()]
    if any(name.endswith(_SCORES) for name in names):
        raise ModelError(f"{directory} holds a {names[0]}, which scores texts and writes none.")
    if not (directory / "tokenizer_config.json").exists() and not (directory / "tokenizer.json").exists():
        raise ModelError(
            f"{directory} has no tokenizer: neither tokenizer.json nor tokenizer_config.json is there. Copy "
            "one from the model that it was trained from."
        )
    return config, load_tokenizer(section, directory)


def tokenised_prompts(
    config: Any, tokenizer: Any, prompts: Sequence[str], request: CompletionRequest
) -> list[TokenizedPrompt]:
    """Return every prompt as tokens, with the room that the model has behind it.

    Raises:
        UserError: A prompt has no tokens or too many, or the chat template refuses it.
    """
    from holdfast.data.tokens.chat import PlainTokeniser

    plain, ready = PlainTokeniser(tokenizer, append_eos=False), []
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    for number, prompt in enumerate(prompts, start=1):
        which = f"Prompt {number} of {len(prompts)}"
        tokens = _as_a_turn(tokenizer, prompt, which) if request.chat else plain.opening(prompt)
        if not tokens:
            raise UserError(f"{which} has no tokens: the tokenizer makes nothing of {prompt[:60]!r}.")
        count = _new_tokens(which, len(tokens), positions, request.max_new_tokens)
        ready.append(TokenizedPrompt(prompt, tokens, count))
    return ready


def _new_tokens(which: str, length: int, positions: int | None, requested: int | None) -> int:
    """Return how many tokens may follow a prompt of so many."""
    if not positions:
        return requested or _USUAL_NEW_TOKENS
    room = positions - length
    if room < (requested or 1):
        more = f" and --max-new-tokens {requested}" if requested and room > 0 else ""
        raise UserError(
            f"{which} is too long: its {length} tokens{more} do not fit into the {positions} positions of the model "
            "(max_position_embeddings). Shorten it, or ask for fewer tokens."
        )
    return requested or min(_USUAL_NEW_TOKENS, room)


def _as_a_turn(tokenizer: Any, prompt: str, which: str) -> list[int]:
    from holdfast.data.content.formats import Conversation
    from holdfast.data.tokens.chat_template import ChatTemplate, TemplateRefuses

    template = ChatTemplate(tokenizer, None, {}, "the tokenizer's chat template")
    try:
        template.check()
        return template.ids(Conversation([{"role": "user", "content": prompt}]), generation_prompt=True)
    except TemplateRefuses as error:
        raise UserError(
            f"{which} cannot be written as a conversation: {error}. Leave out --chat to complete it as it is."
        ) from error


def load_model(directory: Path, tokenizer: Any, request: CompletionRequest) -> Callable[[TokenizedPrompt], Completion]:
    """Return what completes a prompt.

    Raises:
        ModelError: transformers cannot load the model, or its class writes no text.
    """
    import torch
    import transformers

    from holdfast.models.files.origin import read_end_tokens

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _loaded(directory, request).eval().to(device)
    ends = read_end_tokens(directory)
    ends = model.config.get_text_config().eos_token_id if ends is None else ends
    ends = tokenizer.eos_token_id if ends is None else ends
    several = ends if isinstance(ends, list) else [ends]
    draws: dict[str, Any] = {"do_sample": False}
    if request.temperature > 0:
        # 0 switches transformers' own choice of 50 off: what is not asked for does not happen.
        draws = {"do_sample": True, "temperature": request.temperature, "top_p": request.top_p, "top_k": 0}
    transformers.set_seed(request.seed)

    def complete(prompt: TokenizedPrompt) -> Completion:
        tokens = torch.tensor([prompt.tokens], device=device)
        how = transformers.GenerationConfig(
            max_new_tokens=prompt.new_tokens, eos_token_id=ends, pad_token_id=several[0], **draws
        )
        with torch.no_grad():
            out = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=how)
        written = out[0, tokens.shape[1] :].tolist()
        text = tokenizer.decode(written, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Completion(prompt.prompt, text, len(prompt.tokens), written, bool(written) and written[-1] in several)

    return complete


def _loaded(directory: Path, request: CompletionRequest) -> Any:
    import transformers
    from safetensors import SafetensorError
    from transformers.utils.logging import disable_progress_bar

    from holdfast.models.files.configuration import refusals

    disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=request.trust_remote_code)
    name = str((config.architectures or ["none"])[0])
    kind = getattr(transformers, name, transformers.AutoModelForCausalLM)
    trust = {} if hasattr(transformers, name) else {"trust_remote_code": request.trust_remote_code}
    try:
        with refusals(f"transformers cannot load {directory}"):
            model, loading = kind.from_pretrained(directory, dtype="auto", output_loading_info=True, **trust)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"transformers cannot load {directory}: {' '.join(str(error).split())[:500]}") from error
    # transformers fills what no file holds with random values, and warns.
    if missing := sorted(loading["missing_keys"]):
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ModelError(
            f"{directory} has no values for {missing[0]}{more}, which a {name} needs. Fetch its weights again."
        )
    if not model.can_generate():
        raise ModelError(f"{directory} holds a {name}, which writes no text. Name a causal language model.")
    return model
