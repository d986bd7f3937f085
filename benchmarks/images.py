"""What images cost before a step: CPU seconds to ask a model's processor, to prepare a row, and to decode a film.

    python benchmarks/images.py [--rows 40]

*Asking* is done once per start: the processor is built, asked, and its whole output for images of noise is compared
with the answers. *Preparing* a row with a picture of 640 x 480 pixels is compared with the processor's own call for the
same text and picture, row by row in turn; the first rows of a run, which are compared with that call, are not counted.
Image processors have the sizes of released models (SmolVLM, LLaVA-NeXT 336, InternVL 448, Qwen), all else is tiny.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measure import Meter, Round, heading
from PIL import Image
from verdicts import Verdicts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tiny models and films are the tests'

from tests.films import film, smooth  # noqa: E402
from tests.vision_released import FAMILIES, parts  # noqa: E402

from holdfast.config.sections.data import DataConfig  # noqa: E402
from holdfast.data.tokens.chat import RowTokeniser  # noqa: E402
from holdfast.data.tokens.vision import ImageSide  # noqa: E402
from holdfast.features.video.films import FilmFile  # noqa: E402
from holdfast.models.files.processors import whole_processor  # noqa: E402

COMPARED = 16
"""Rows at the beginning of a run that are compared with the processor's own call."""
SECONDS_OF_ASKING, ROW_OVER_PROCESSOR = 5.0, 1.1
TEXT = "what is to be seen here, and where does it lie? " * 4


def seconds_of(act: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of a call, and what it returned."""
    meter = Meter()
    begun = meter.seconds()
    value = act()
    return meter.seconds() - begun, value


def ask(kind: str) -> tuple[float, Any, Any, ImageSide]:
    """Return the CPU seconds of asking, the second time: imports are not counted; processor, tokenizer and answers."""
    with tempfile.TemporaryDirectory() as folder:
        image_processor, tokenizer, config = parts(kind, Path(folder))

        def asked() -> tuple[Any, ImageSide]:
            processor = whole_processor(image_processor, tokenizer, config, FAMILIES[kind].settings)
            return processor, ImageSide(processor, tokenizer, config)

        asked()
        seconds, (processor, side) = seconds_of(asked)
    return seconds, processor, tokenizer, side


def prepare(kind: str, processor: Any, tokenizer: Any, side: ImageSide, count: int) -> Round:
    """Return the CPU seconds of rows, prepared by us and by the processor in turn."""
    generator = np.random.default_rng(0)
    rows = RowTokeniser(tokenizer, DataConfig(path="rows", max_length=100_000, append_eos=False), Path(), side)
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(COMPARED + count):
        image = Image.fromarray(generator.integers(0, 256, (480, 640, 3), dtype=np.uint8))
        row = {"prompt": f"<image>{TEXT}", "completion": "a cat", "images": [image]}
        text = side.family.for_processor(f"{side.family.placeholder}{TEXT}a cat")

        def prepared(row: Any = row, number: int = number) -> Any:
            return rows.examples(row, number, "rows").examples[0]

        def called(image: Any = image, text: str = text) -> Any:
            return processor(images=[image], text=[text], return_tensors="np", add_special_tokens=False)

        acts: dict[str, Callable[[], Any]] = {"prepared": prepared, "called": called}
        timed = {name: seconds_of(acts[name]) for name in sorted(acts, reverse=bool(number % 2))}
        if timed["prepared"][1].tokens.tolist() != timed["called"][1]["input_ids"][0].tolist():
            sys.exit(f"{kind}: the two did not make the same tokens")
        if number >= COMPARED:
            ours.append(timed["prepared"][0])
            theirs.append(timed["called"][0])
    return {f"row_{kind}": {"seconds": ours}, f"processor_{kind}": {"seconds": theirs}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=40)
    options = parser.parse_args()
    print(heading("transformers", "pillow", "av"))
    missed, turn = False, Round()
    for kind in FAMILIES:
        seconds, processor, tokenizer, side = ask(kind)
        missed = missed or seconds > SECONDS_OF_ASKING
        verdict = "ok  " if seconds <= SECONDS_OF_ASKING else "MISS"
        print(f"{verdict}  {kind}: asked in {seconds:.2f} CPU seconds (target <= {SECONDS_OF_ASKING})", flush=True)
        turn |= prepare(kind, processor, tokenizer, side, options.rows)
    verdicts = Verdicts([turn])
    for kind in FAMILIES:
        title = f"{kind}: a row over its processor's own call of {milliseconds(turn[f'processor_{kind}'])} ms"
        verdicts.at_most_over_all(ROW_OVER_PROCESSOR, title, f"row_{kind}", f"processor_{kind}", "seconds")
    file = film(smooth(50, 1080, 1920), "mov", rate=25)
    rates = {fps: seconds_of(partial(FilmFile(file, "a film").frames, fps, None))[0] for fps in (2.0, 25.0)}
    told = ", ".join(f"{50 / seconds:.0f} frames a CPU second at fps={fps:g}" for fps, seconds in rates.items())
    print(f"H.264 of 1,920 x 1,080 pixels and 25 frames a second, two seconds: {told}")
    sys.exit(missed or verdicts.missed)


def milliseconds(arm: Mapping[str, Any]) -> str:
    return f"{1000 * statistics.median(arm['seconds']):.1f}"


if __name__ == "__main__":
    main()
