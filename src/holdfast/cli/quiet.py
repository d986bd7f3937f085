"""Keep other packages from writing onto a terminal what no user of Holdfast asked for."""

from __future__ import annotations

import logging

_TALK_ON_IMPORT = ("torchao", "torch.utils._pytree")
"""transformers imports torchao wherever it is installed; that tells of kernels for GPUs that are not here."""


def hush() -> None:
    """Let these speak of errors alone; call it before torch is imported."""
    for name in _TALK_ON_IMPORT:
        logging.getLogger(name).setLevel(logging.ERROR)
