"""Silence warnings that other packages print when transformers imports them."""

from __future__ import annotations

import logging

_TALK_ON_IMPORT = ("torchao", "torch.utils._pytree", "bitsandbytes")
"""transformers imports torchao and peft bitsandbytes wherever they are installed; they tell of kernels that are not."""


def hush() -> None:
    """Set their loggers to errors only; call it before transformers is imported."""
    for name in _TALK_ON_IMPORT:
        logging.getLogger(name).setLevel(logging.ERROR)
