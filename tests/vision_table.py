"""Ask the processor of every tiny model that sees, and write what was found into docs/models.md.

    python -m tests.vision_table

Takes seconds. `tests/data/test_derivation.py` compares the tables with what it finds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from holdfast.config.sections.model import ModelConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.data.tokens.vision import ImageSide
from holdfast.models.files.processors import whole_processor
from holdfast.models.files.vision import image_side, load_image_processor
from tests.vision import PROCESSORS, config_values, tokenizer_of
from tests.vision_derived import KINDS, derived_directory, derived_side, parts_of

PAGE = Path("docs/models.md")
BEGIN, END = "<!-- models that see: written by tests/vision_table.py -->\n", "<!-- end of models that see -->\n"
HEAD = "| an image in the model's text | `model_type` |\n|---|---|\n"
REFUSED = "\nThese train on text, and rows with images are refused with the reason:\n\n"
HEAD_OF_REFUSED = "| `model_type` | reason |\n|---|---|\n"
NEEDS_TORCHVISION = ("cohere2_vision", "kimi_k25", "llama4")
OF_OTHER_POSITIONS = ("hunyuan_vl",)


def processor_of(kind: str, place: Path) -> tuple[Any, Any, ImageSide]:
    """Return transformers' processor of a family, its tokenizer, and ours; `place` holds a directory of the family."""
    if kind in KINDS:
        processor, tokenizer, _ = parts_of(place)
        return processor, tokenizer, derived_side(place)
    tokenizer, config = tokenizer_of(kind), AutoConfig.for_model(**config_values(kind))
    section = ModelConfig(config=config_values(kind), tokenizer="x", image_processor=PROCESSORS[kind])
    image_processor = load_image_processor(section, config, [])
    side = image_side(image_processor, tokenizer, config)
    assert isinstance(side, ImageSide)
    return whole_processor(image_processor, tokenizer, config, {}), tokenizer, side


def placeholder_of(kind: str, place: Path) -> str:
    """Return what stands for an image in the text of a family, as a cell of the table."""
    _, _, side = processor_of(kind, place)
    written = repr(side.family.placeholder)[1:-1].replace("|", "\\|")
    return f"`{written}`"


def refused_rows() -> dict[str, str]:
    """Return the reason by model_type."""
    reasons = {
        kind: image_side(None, None, AutoConfig.for_model(kind)) for kind in (*NEEDS_TORCHVISION, *OF_OTHER_POSITIONS)
    }
    tokenizer = character_tokenizer(("<image>", "<bos>"))
    tokenizer.bos_token = "<bos>"
    config = AutoConfig.for_model("paligemma", image_token_index=tokenizer.convert_tokens_to_ids("<image>"))
    settings = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": 16, "width": 16},
        "image_seq_length": 16,
    }
    section = ModelConfig(config={"model_type": "paligemma"}, tokenizer="x", image_processor=settings)
    reasons["paligemma"] = image_side(load_image_processor(section, config, []), tokenizer, config)
    assert all(isinstance(reason, str) for reason in reasons.values())
    return {kind: str(reason) for kind, reason in reasons.items()}


def tables(place: Path) -> str:
    """Return both tables; `place` holds a directory for each derived family."""
    kinds: dict[str, list[str]] = {}
    for kind in (*PROCESSORS, *KINDS):
        kinds.setdefault(placeholder_of(kind, place / kind), []).append(f"`{kind}`")
    rows = "".join(f"| {written} | {', '.join(named)} |\n" for written, named in kinds.items())
    refused = "".join(f"| `{kind}` | {reason} |\n" for kind, reason in refused_rows().items())
    return HEAD + rows + REFUSED + HEAD_OF_REFUSED + refused


def in_page() -> str:
    """Return the tables of the page."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def main() -> None:
    """Write the page."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for kind in KINDS:
            derived_directory(place / kind, kind)
        written = tables(place)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.replace(BEGIN + in_page() + END, BEGIN + written + END), encoding="utf-8")


if __name__ == "__main__":
    main()
