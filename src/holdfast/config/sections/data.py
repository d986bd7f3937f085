"""The `data` section: where rows come from, how they become token sequences, how sequences become batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from holdfast.config.base import (
    Count,
    Declared,
    Fraction,
    FunctionPath,
    Mistake,
    Positive,
    PositiveInt,
    ProperFraction,
    PublicStr,
    Section,
    Seed,
)

Average = Literal["token_mean", "sequence_mean", "constant_length", "prompt_mean"]
PairAverage = Literal["pair_mean"]
RowFormat = Literal["auto", "messages", "prompt_completion", "text", "alpaca", "sharegpt"]


class SyntheticConfig(Section):
    """A generated task with exact answers; row i is a pure function of (seed, i)."""

    task: Literal["sort", "reverse", "add", "countdown", "shapes"]
    rows: PositiveInt = 20_000
    noise: Fraction = 0.0
    """Share of rows whose answer is wrong, for training runs that a verifier must clean up."""
    seed: Seed = 0
    min_length: PositiveInt = 4
    """Fewest symbols (sort, reverse), digits (add) or numbers (countdown) in a question, or shapes in a picture."""
    max_length: PositiveInt = 6

    def mistakes(self) -> Iterator[Mistake]:
        """Yield an empty range of lengths."""
        if self.min_length > self.max_length:
            yield "min_length", f"{self.min_length} is above max_length={self.max_length}; lower one or raise the other"


class SourceConfig(Section):
    """One set of rows."""

    path: PublicStr | None = None
    """A .jsonl, .json, .csv, .tsv, .parquet or .arrow file, a directory or glob of them, a directory written by
    `datasets.save_to_disk`, or a hub name; `name@split` picks a split."""
    synthetic: SyntheticConfig | None = None
    """A generated task instead of a path."""
    name: PublicStr | None = None
    """Name in metrics; default: the file's stem or the task."""
    weight: Positive | None = None
    """Relative share of draws from this source. Set it on all sources or on none; none means every row once."""
    rows: RowFormat = "auto"
    """Shape of a row; `auto` recognises it by its columns and refuses what fits two shapes."""
    columns: dict[PublicStr, PublicStr] = Field(default_factory=dict)
    """Our column name to the file's, as in {prompt: problem, completion: solution}."""
    config_name: PublicStr | None = None
    """Configuration of a hub data set, such as `main` for openai/gsm8k."""
    revision: PublicStr | None = None
    """Branch, tag or commit on the hub."""
    streaming: bool = False
    """Read front to back without an index, for sets that do not fit the disk."""
    max_samples: PositiveInt | None = None
    """Use only the first rows, counted before shuffling."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield an origin that is missing or given twice."""
        yield from _one_of({"path": self.path, "synthetic": self.synthetic})


def _one_of(origins: dict[str, Any]) -> Iterator[Mistake]:
    present = [name for name, value in origins.items() if value]
    if not present:
        yield next(iter(origins)), f"no rows are named; set one of {', '.join(origins)}"
    if len(present) > 1:
        yield present[1], f"rows come from {' and '.join(present)} at once; keep one of them"


class TextConfig(Section):
    """How a row becomes tokens, and which of them are trained."""

    max_length: PositiveInt = 1024
    """Longest sequence in tokens."""
    overlong: Literal["truncate", "split", "drop", "refuse"] = "truncate"
    """What happens to a row that is longer than `max_length`; each such row is counted in the metrics. With `packing:
    wrapped` no row is too long.
    """
    train_on: Literal["all_turns", "last_turn"] = "all_turns"
    """Which assistant turns of a conversation are trained."""
    train_on_prompt: bool = False
    """Train the prompt of prompt/completion rows too."""
    append_eos: bool = True
    """End `completion` and `text` rows with the tokenizer's end-of-sequence token."""
    format: PublicStr | None = None
    """A jinja file (or the template itself) that turns the row's columns into the user prompt; `{{ content }}` is the
    prompt that the row has already."""
    system: PublicStr | None = None
    """A system message for conversations that have none."""
    chat_template: PublicStr | None = None
    """A jinja file (or the template itself) that replaces the tokenizer's chat template."""
    template_kwargs: dict[PublicStr, Annotated[Any, Declared.NUMBER]] = Field(default_factory=dict)
    """Extra variables for the chat template, such as {enable_thinking: false}."""
    image_dir: PublicStr | None = None
    """Where relative paths of images and films start; it is looked up in the current directory, then beside the YAML.
    Default: those two themselves."""
    min_pixels: PositiveInt | None = None
    """Smaller images are enlarged to so many pixels (Qwen-VL); default: as the model's image processor says."""
    max_pixels: PositiveInt | None = None
    """Larger images are scaled down to so many pixels (Qwen-VL), which bounds their tokens; default: as the model's
    image processor says."""
    max_images: PositiveInt | None = None
    """Most images of a row; a row with more is refused."""
    video_fps: Positive = 2.0
    """Frames that belong to one second of a video, where the row does not say: times and positions follow from it. Of
    a film (a file of a video) so many are taken."""
    video_min_pixels: PositiveInt | None = None
    """As `min_pixels`, for the frames of videos: for each of them in Qwen2-VL and Qwen2.5-VL, for all together in
    Qwen3-VL."""
    video_max_pixels: PositiveInt | None = None
    """As `max_pixels`, for frames of videos, counted in the same way."""
    max_frames: PositiveInt | None = None
    """Most frames of a video; a row with a longer list is refused, and of a longer film so many are taken, spread
    evenly. Default: any list, and 768 frames of a film."""


IMAGE_FIELDS = frozenset(
    {"image_dir", "min_pixels", "max_pixels", "max_images"}
    | {"video_fps", "video_min_pixels", "video_max_pixels", "max_frames"}
)
"""Fields of a text section that say nothing of text."""

_ORIGINS = ("path", "synthetic")


class DataConfig(SourceConfig, TextConfig):
    """Training data. One source is written in place; several go under `sources`."""

    path: PublicStr | None = None
    sources: list[SourceConfig] = Field(default_factory=list)
    """Several sources instead of one."""
    filter: FunctionPath | None = None
    """A function row -> bool; rows it refuses are skipped and counted. It is asked about the rows of `data`, those that
    `validation_split` holds out included, and not about those of `evaluation.sets`."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """What happens to a training row that cannot be read: a missing image, a column that is null, broken JSON. `skip`
    counts it in `data/bad_rows`, and the next row takes its place."""
    validation_split: ProperFraction = 0.0
    """Share of rows held out (by a hash of the row index) as the evaluation set `validation`."""

    shuffle: bool = True
    """Read the rows in another random order in every pass; `false` reads them in the order of the files."""
    shuffle_buffer: PositiveInt = 10_000
    """Rows shuffled together when streaming: the stream is shuffled block by block."""
    seed: Seed | None = None
    """Seed of the random order of rows; default: the run's seed."""

    batch_size: PositiveInt = 32
    """Rows per optimizer update, over all ranks; all sequences of a row that gives several belong to its update. With
    `packing: wrapped`, windows per update."""
    batch_size_schedule: dict[Count, PositiveInt] = Field(default_factory=dict)
    """Step to batch size from that step on, as in {100: 64}; before the first entry `batch_size` holds."""
    tokens_per_micro_batch: PositiveInt = 4096
    """Most tokens in one forward pass of one rank: memory and speed. The result stays the same up to rounding."""
    packing: Literal["best_fit", "wrapped", "none"] = "best_fit"
    """`best_fit` lays whole sequences side by side; `wrapped` cuts the stream of documents into windows of
    max_length; `none` pads, one sequence per row."""
    average: Average = "token_mean"
    """What the loss averages over; see docs/developers/averages.md."""
    allow_partial: bool = False
    """Train on a data set smaller than one batch."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield origins that exclude each other, weights that do not compare, and lengths that do not fit."""
        yield from _one_of({"path": self.path, "synthetic": self.synthetic, "sources": self.sources})
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            key = f"sources.{weighted.index(False)}.weight"
            yield key, "missing, but other sources have one; set weight on all sources or on none"
        if self.sources:
            for name, field in SourceConfig.model_fields.items():
                if name not in _ORIGINS and getattr(self, name) != field.get_default(call_default_factory=True):
                    yield name, f"it speaks of one source, but there are several; write {name} inside data.sources"
        if self.packing == "wrapped":
            yield from self._wrapped()

    def _wrapped(self) -> Iterator[Mistake]:
        """Yield what has no meaning where documents are cut at window edges."""
        if self.average != "token_mean":
            yield (
                "average",
                f"{self.average} has no meaning with packing: wrapped, which cuts documents at window edges; use "
                "average: token_mean or packing: best_fit",
            )
        if self.overlong != "truncate":
            yield (
                "overlong",
                f"{self.overlong} has no effect with packing: wrapped, where no row is too long; leave it out",
            )

    def all_sources(self) -> list[SourceConfig]:
        """Return the sources, the in-place one included."""
        return list(self.sources_by_key().values())

    def sources_by_key(self) -> dict[str, SourceConfig]:
        """Return the sources by the dotted name of their section."""
        if self.sources:
            return {f"data.sources.{number}": source for number, source in enumerate(self.sources)}
        return {"data": SourceConfig(**{name: getattr(self, name) for name in SourceConfig.model_fields})}


class PromptDataConfig(DataConfig):
    """Prompts for rollouts. `batch_size` counts prompts of one step; each is completed `rollout.group_size` times."""

    overlong: Literal["drop", "refuse"] = "drop"
    """What happens to a prompt that is longer than max_prompt_length, or leaves no room for max_new_tokens within
    max_length; dropped ones are counted."""
    max_prompt_length: PositiveInt | None = None
    """Longest prompt in tokens; what happens to a longer one says `overlong`. Default: what `max_length` leaves beside
    `rollout.max_new_tokens`, which bounds it in any case."""
    packing: Literal["best_fit", "none"] = "best_fit"
    """`best_fit` lays whole sequences side by side; `none` pads, one sequence per row."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what supervised rows have and prompts have not."""
        yield from super().mistakes()
        for name in ("train_on", "train_on_prompt", "append_eos"):
            if getattr(self, name) != type(self).model_fields[name].default:
                yield name, "a rollout is trained on what the policy said, and on nothing of the row; leave it out"
        for index, source in enumerate(self.all_sources()):
            if source.rows != "auto":
                key = f"sources.{index}.rows" if self.sources else "rows"
                yield key, f"{source.rows} is a shape of supervised rows; leave it out, the columns tell"
