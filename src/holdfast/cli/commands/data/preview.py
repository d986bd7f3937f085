"""`holdfast data preview`: one row of the first source as tokens, with what is trained and the images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.config.verbs.distill import DistillConfig, DistillRolloutConfig
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.roots import load_run
from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from holdfast.data.batches.candidates import Tokenise
    from holdfast.data.rows.rows import Row
    from holdfast.data.tokens.vision import ImageSide
    from holdfast.types import Example


COLUMNS, ROWS = 40, 20
"""Characters that an image takes at most."""
_OPEN, _CLOSE = "⟦", "⟧"
"""Around what is trained, where there are no colours."""


def preview(path: Path, overrides: Sequence[str], row: int) -> None:
    """Print one row of the first source as tokens with the trained ones coloured, or marked where there is no colour.

    What was counted on the way follows.

    Raises:
        DataError: There is no such row.
    """
    from rich.console import Console
    from rich.text import Text

    from holdfast.data.rows.rows import open_source
    from holdfast.models.files.origin import load_tokenizer
    from holdfast.training.setup.rows import task_rows

    loaded = load_run(path, overrides)
    config = loaded.config
    section = config.data.all_sources()[0]
    source = open_source(section, loaded.base, task_rows(config))
    content = next(iter(source.scan(row)), None)
    if content is None:
        row_range = "" if source.size is None else f" It has rows 0 to {source.size - 1}."
        raise DataError(f"{source.name} has no row {row}.{row_range}")
    tokenizer = load_tokenizer(config.model, loaded.base)
    console = Console(highlight=False, soft_wrap=True)
    images = images_of(config, tokenizer, loaded.base)
    if not isinstance(images, str):
        images.on_image, images.on_video = partial(_show_image, console), partial(_show_video, console)
    if isinstance(config, GRPOConfig | DistillConfig) and longest_prompt(config) is not None:
        for line in _prompt(config, tokenizer, loaded.base, content, f"{source.name} row {row}", images):
            console.print(Text(line))
        return
    tokenise = tokeniser_of(config, tokenizer, loaded.base, images, {source.name: section.rows})
    sequences = tokenise(content, row, source.name, f"{source.name} row {row}")
    for example in sequences.examples:
        _show(console, example, tokenizer)
    for name, number in sequences.counts.items():
        console.print(f"{name}: {number}", style="yellow")
    if not sequences.examples:
        console.print("this row is not trained on", style="yellow")


def _show_image(console: Console, image: Any, tokens: int, name: str) -> None:
    """Print an image's name, size and tokens, and where there are colours the image."""
    console.print(f"{name}: {image.width}x{image.height} pixels, {tokens} tokens", style="italic", markup=False)
    _draw(console, image)


def _show_video(console: Console, frames: Sequence[Any], tokens: int, name: str) -> None:
    """Print a video's name, frames and tokens, and where there are colours its first frame."""
    size = f"{len(frames)} frames of {frames[0].width}x{frames[0].height} pixels"
    console.print(f"{name}: {size}, {tokens} tokens", style="italic", markup=False)
    _draw(console, frames[0])


def _draw(console: Console, image: Any) -> None:
    if console.color_system is not None and not console.no_color:
        console.print(half_blocks(image), end="")


def half_blocks(image: Any) -> Text:
    """Return a PIL image in RGB as upper halves of blocks: a colour and a background are two pixels."""
    from rich.text import Text

    scale = min(COLUMNS / image.width, 2 * ROWS / image.height, 1.0)
    width, height = (max(1, round(side * scale)) for side in (image.width, image.height))
    small = image.resize((width, height))
    text = Text()
    for row in range(0, height, 2):
        for column in range(width):
            above = "#{:02x}{:02x}{:02x}".format(*small.getpixel((column, row)))
            below = row + 1 < height and "#{:02x}{:02x}{:02x}".format(*small.getpixel((column, row + 1)))
            text.append("▀", style=f"{above} on {below}" if below else above)
        text.append("\n")
    return text


def _show(console: Console, example: Example, tokenizer: Any) -> None:
    """Print a sequence, with what is trained in green, or marked where there is no colour."""
    from rich.text import Text

    from holdfast.data.tokens.chat import describe_template

    plain = console.color_system is None or console.no_color
    text = Text()
    for stretch, trained in _stretches(describe_template(example, tokenizer)):
        marked = f"{_OPEN}{stretch}{_CLOSE}" if trained and plain else stretch
        text.append(marked, style="bold green" if trained else "dim")
    console.print(text)
    how = f"between {_OPEN} and {_CLOSE}" if plain else "green"
    console.print(f"{example.tokens.size} tokens, {example.trained_tokens} trained ({how})", style="italic")


def _stretches(tokens: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Join neighbouring tokens that are all trained, or all not."""
    for trained, run in groupby(tokens, key=lambda token: token[1]):
        yield "".join(text for text, _ in run), trained


_COUNTED = {
    "overlong_dropped": "the prompt has {tokens} tokens and is left out: {limit} {longest}",
    "without_chat_template": "the prompt is plain text, so the tokenizer's chat template is not used; prompts that are "
    "messages use it, and so do texts with data.system or data.chat_template",
}
"""What is counted on prompts, in words."""


def _prompt(  # noqa: PLR0913 - a run's parts and a row's
    config: GRPOConfig | DistillConfig, tokenizer: Any, base: Path, row: Row, name: str, images: ImageSide | str
) -> Iterator[str]:
    """Yield a row's prompt as the policy sees it, and what rewards see of the row."""
    assert config.rollout is not None
    tokenised = tokeniser_of(config, tokenizer, base, images, {})(row, 0, name, name)
    for prompt in tokenised.examples:
        yield prompt.text
        yield f"{prompt.tokens.size} tokens; the policy writes up to {config.rollout.max_new_tokens} after them"
        if isinstance(config, GRPOConfig):
            yield f"rewards see the columns {', '.join(sorted(prompt.row))}"
    limit = "rollout.max_new_tokens in data.max_length leave room for"
    if isinstance(config, GRPOConfig) and config.data.max_prompt_length is not None:
        limit = "data.max_prompt_length is"
    for counted in tokenised.counts:
        yield _COUNTED[counted].format(tokens=max(tokenised.lengths), longest=longest_prompt(config), limit=limit)


def tokeniser_of(  # noqa: PLR0913 - a run's parts and its rows
    config: TrainingConfig,
    tokenizer: Any,
    base: Path,
    images: ImageSide | str,
    formats: dict[str, Any],
    *,
    training: bool = True,
) -> Tokenise[Any]:
    """Return what turns rows into what a run of this verb reads: prompts, pairs or sequences."""
    from holdfast.data.batches.candidates import prompt_tokeniser
    from holdfast.data.tokens.chat import RowTokeniser
    from holdfast.training.run import ConfiguredRun
    from holdfast.training.setup.rows import preference_tokeniser, row_tokeniser

    run_file = ConfiguredRun(config=config, base=base)
    longest = longest_prompt(config, training=training)
    if longest is not None:
        rows = RowTokeniser(tokenizer, config.data, base, images)
        return prompt_tokeniser(rows, tokenizer.decode, config.data, longest)
    if isinstance(config, DPOConfig):
        return preference_tokeniser(config, run_file, tokenizer, images)
    return row_tokeniser(run_file, tokenizer, formats, images)


def longest_prompt(config: TrainingConfig, *, training: bool = True) -> int | None:
    """Return how many tokens a row's prompt may have, where rows are prompts alone; None where they have answers.

    A student is measured on answers, also where it is trained on prompts alone.
    """
    match config:
        case GRPOConfig():
            return config.longest_prompt
        case DistillConfig(rollout=DistillRolloutConfig(share=1, max_new_tokens=written)) if training:
            return config.data.max_length - written
    return None


def images_of(config: TrainingConfig, tokenizer: Any, base: Path) -> ImageSide | str:
    """Return what turns images into tokens, without building a model."""
    from holdfast.models.files.origin import locate
    from holdfast.models.files.processors import processor_settings
    from holdfast.models.files.vision import image_side, video_options
    from holdfast.models.setup.model import configured

    model, data = config.model, config.data
    raw_config, processor = configured(model, base)
    directory = None if model.path is None else locate(model.path, model, base, weights=False)
    bounds = {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels}
    settings = processor_settings([] if directory is None else [directory])
    videos = video_options(data, directory)
    return image_side(processor, tokenizer, raw_config, settings=settings, **bounds, videos=videos)
