"""Writes the configuration and the tokenizer of a run's model for a server, without weights.

    python -m holdfast.features.vllm.server_files VERB CONFIG.json BASE DIRECTORY

It runs in its own process, since it imports torch and the process that starts servers does not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from holdfast.config.load import from_mapping
from holdfast.config.quiet import hush, leave_out_broken
from holdfast.config.verbs.roots import ROOTS
from holdfast.errors import HoldfastError


def main() -> None:
    """Write the directory; a user's mistake is one paragraph."""
    hush()
    leave_out_broken()
    import torch

    from holdfast.checkpoint.export.assets import write_assets
    from holdfast.data.tokens.vision import ImageSide
    from holdfast.models.files.processors import write_processor
    from holdfast.models.setup.model import blueprint
    from holdfast.training.setup.model import image_side_of

    file, base, directory = (Path(argument) for argument in sys.argv[2:5])
    config = from_mapping(json.loads(file.read_text(encoding="utf-8")), ROOTS[sys.argv[1]])
    try:
        origin = blueprint(config.model, base, seed=config.seed)
        directory.mkdir(parents=True, exist_ok=True)
        write_assets(directory, origin, torch.float32)
        side = image_side_of(config, origin)
        if isinstance(side, ImageSide):
            write_processor(directory, side.processor.upstream, side.processor.options)
    except HoldfastError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
