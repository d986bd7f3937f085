"""Families of models that see: what their processors tell about images, and the few rules that no processor tells.

`holdfast.data.tokens.derivation` asks a model's own processor how it writes, counts and returns images, and makes a
`VisionFamily` of the answers. `VISION_FAMILIES` holds what no question to a processor finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

Inputs = Mapping[str, NDArray[Any]]
"""What the model gets of one image, by the name of its argument; images of a batch are joined along dimension 0."""

Features = Callable[[Any, Inputs], int]
"""(configuration, inputs of one image) -> how many features the model makes of it"""


@dataclass(frozen=True)
class VideoFamily:
    """How one family writes videos. Its tower takes them as it takes images, with more than one frame in the grid."""

    placeholder: str = "<|vision_start|><|video_pad|><|vision_end|>"
    token: str = "<|video_pad|>"
    bounds_whole: bool = False
    """Whether bounds of pixels are for all frames together, and not for each."""
    in_seconds: bool = False
    """Whether positions on the axis of time go by the clock (`tokens_per_second`) and not by patches."""
    written_times: str = ""
    """What stands before each patch of frames, with the seconds in it; "" where nothing does."""


@dataclass(frozen=True)
class VisionFamily:
    """How one model writes and counts images."""

    placeholder: str
    """Stands for one image in plain text; it holds `image_token` once."""
    image_token: str
    """The token at which the model puts features. In text without features it marks an image."""
    processor_token: str
    """What the processor reads as the mark of an image, and what the family's chat template writes."""
    before: tuple[int, ...] = ()
    """Tokens of the processor's text for an image that `placeholder` has before `image_token`."""
    after: tuple[int, ...] = ()
    """Tokens of the processor's text for an image that `placeholder` has after `image_token`."""
    inputs: tuple[str, ...] = ("pixel_values",)
    """Arguments of the model that the processor makes of images."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """The dimension along which the processor joins images, by input."""
    ragged: tuple[str, ...] = ()
    """Inputs whose images differ in further dimensions; the processor fills the smaller ones up with zeros."""
    token_types: str | None = None
    """The model's argument that tells image tokens from text."""
    type_tokens: tuple[int, ...] = ()
    """Tokens that `token_types` marks by 1."""
    turns_by_grid: bool = False
    """Whether positions of image tokens have three axes: time, row and column (M-RoPE, arXiv:2409.12191)."""
    takes_pixel_budget: bool = False
    """Whether the size an image is brought to depends on its own, between two bounds."""
    features: Features | None = None
    """None where no rule is known; then only the check before step 1 counts them."""
    video: VideoFamily | None = None
    """None where videos are not known."""

    def for_processor(self, text: str) -> str:
        """Return a text with the marks of images that the processor reads."""
        if self.processor_token == self.image_token:
            return text
        return text.replace(self.placeholder, self.processor_token)

    @property
    def record(self) -> dict[str, Any]:
        """What was derived, as JSON has it."""
        values = asdict(replace(self, features=None, video=None))
        return {name: values[name] for name in values if name not in {"features", "video"}}


@dataclass(frozen=True)
class FamilyRules:
    """What no question to a processor finds out about one family."""

    features: Features | None = None
    """The towers of these families do not follow a grid that the processor returns; the number of features is part of
    the model, so that a row can be refused by its name before the model sees it."""
    video: VideoFamily | None = None
    """transformers' video processors need torchvision, so that they cannot be asked."""
    attends_both_ways: bool = False
    """Image tokens see later ones of their image; the model decides that, and its processor does not know."""
    settings: Callable[[Any], Mapping[str, Any]] | None = None
    """(configuration) -> arguments of the processor's class that older directories have in no file."""
    processor: str | None = None
    """The processor's class, where transformers' own cannot be built here."""
    refused: str = ""
    """Why images of the family cannot be trained on, as a clause."""


def patch_features(config: Any, inputs: Inputs) -> int:
    """Return how many features a tower makes of patches that are rows of `pixel_values`."""
    return int(len(inputs["pixel_values"]) // config.vision_config.spatial_merge_size**2)


def _square_features(config: Any, inputs: Inputs) -> int:
    """Count the patches, with or without the one that stands for the whole image."""
    vision = config.vision_config
    height, width = inputs["pixel_values"].shape[-2:]
    has_class = _class_tokens(config)
    extra = has_class if config.vision_feature_select_strategy == "full" else has_class - 1
    return int((height // vision.patch_size) * (width // vision.patch_size) + extra)


def _class_tokens(config: Any) -> int:
    """Return how many tokens beside the patches the tower has."""
    return int("clip" in config.vision_config.model_type)


def _tile_features(config: Any, inputs: Inputs) -> int:
    count, _, _, height, width = inputs["pixel_values"].shape
    patch = config.vision_config.patch_size
    return int(count * ((height // patch) * (width // patch) // config.scale_factor**2))


def _tokens_of_a_tile(config: Any) -> int:
    side = config.vision_config.image_size // config.vision_config.patch_size
    return int(side**2 // config.scale_factor**2)


def _llava_settings(config: Any) -> Mapping[str, Any]:
    return {"num_additional_image_tokens": _class_tokens(config)}


_QWEN_WRITTEN = FamilyRules(video=VideoFamily(bounds_whole=True, written_times="<{:.1f} seconds>"))
_IDEFICS3 = FamilyRules(
    features=_tile_features,
    settings=lambda config: {"image_seq_len": _tokens_of_a_tile(config)},
    processor="Idefics3Processor",  # SmolVLM's own writes the same for images; it wants num2words, for videos
)

VISION_FAMILIES: Mapping[str, FamilyRules] = {
    "qwen2_vl": FamilyRules(video=VideoFamily()),
    "qwen2_5_vl": FamilyRules(video=VideoFamily(in_seconds=True)),
    "qwen3_vl": _QWEN_WRITTEN,
    "qwen3_vl_moe": _QWEN_WRITTEN,
    "llava": FamilyRules(features=_square_features, settings=_llava_settings),
    "llava_next": FamilyRules(settings=_llava_settings),
    "gemma3": FamilyRules(
        features=lambda config, inputs: int(config.mm_tokens_per_image * len(inputs["pixel_values"])),
        attends_both_ways=True,
        settings=lambda config: {"image_seq_length": config.mm_tokens_per_image},
    ),
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "hunyuan_vl": FamilyRules(
        refused="positions of image tokens are column, row and number of the image, a rule that is not followed here"
    ),
}
"""By transformers' model_type. A family that is not here is known by its processor alone."""

_NO_RULES = FamilyRules()


def rules_of(config: Any) -> FamilyRules:
    """Return what is known of a model besides what its processor tells."""
    return VISION_FAMILIES.get(str(config.model_type), _NO_RULES)


def may_see(config: Any) -> bool:
    """Whether a configuration has a vision tower and a token for its features."""
    return getattr(config, "vision_config", None) is not None and getattr(config, "image_token_id", None) is not None


def image_marks(config: Any) -> list[int]:
    """Return the tokens whose embeddings a model replaces where there are images: of features, and Ovis2's of edges."""
    marks = (config.image_token_id, video_token(config), *(getattr(config, "visual_indicator_token_ids", None) or ()))
    return [int(token) for token in marks if token is not None]


def attends_both_ways(config: Any) -> bool:
    """Whether image tokens see later ones of their image, which packed attention does not have."""
    declared = getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision"  # Gemma 4
    return declared or rules_of(config).attends_both_ways


def video_token(config: Any) -> int | None:
    """Return the id that a model's configuration marks videos by; None where the family's videos are not known."""
    return None if rules_of(config).video is None else getattr(config, "video_token_id", None)
