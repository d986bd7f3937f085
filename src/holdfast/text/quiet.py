"""Keep other packages from writing onto a terminal what no user of Holdfast asked for."""

from __future__ import annotations

import logging

_TALK_ON_IMPORT = ("torchao", "torch.utils._pytree", "bitsandbytes")
"""transformers imports torchao and peft bitsandbytes wherever they are installed; they tell of kernels that are not."""


def hush() -> None:
    """Let these speak of errors alone; call it before transformers is imported."""
    for name in _TALK_ON_IMPORT:
        logging.getLogger(name).setLevel(logging.ERROR)
