"""Selects the environment variables that a tracker's process inherits: no more than its library needs."""

from __future__ import annotations

import os
import re
from pathlib import Path

_PASSED = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy",
    "https_proxy", "no_proxy", "HOLDFAST_LAUNCH_DIR",
)  # fmt: skip
_OWN = {
    "wandb": (
        "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_MODE", "WANDB_RUN_GROUP",
        "WANDB_TAGS", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR",
    ),
    "mlflow": (
        "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN",
        "MLFLOW_TRACKING_INSECURE_TLS", "MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_EXPERIMENT_NAME",
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "MLFLOW_S3_ENDPOINT_URL",
    ),
    "trackio": ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WRITE_TOKEN", "TRACKIO_PROJECT", "HF_TOKEN"),
    "swanlab": ("SWANLAB_API_KEY", "SWANLAB_API_HOST", "SWANLAB_WEB_HOST", "SWANLAB_MODE", "SWANLAB_PROJ_NAME"),
}  # fmt: skip
"""Credentials and destinations of a library."""
_DEFAULTS = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline"}
"""Of these kinds nothing leaves the machine until the user says so."""
_FIXED = {
    # Reports of a library about itself.
    "DO_NOT_TRACK": "1",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    # What a library would collect by itself.
    "WANDB_DISABLE_GIT": "true",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_SILENT": "true",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
    "SWANLAB_INTERACTIVE": "false",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
}
_CREDENTIAL = re.compile(r"(?:^|_)(?:KEY|TOKEN)(?:_|\d|$)|APIKEY|SECRET|PASSW|CREDENTIAL")
"""Names of variables; TOKENIZERS_PARALLELISM is none."""


def tracker_environment(kind: str, folder: Path) -> dict[str, str]:
    """Return the environment of a tracker's process.

    A user's own class gets all of it: it is code of the user's as the run is, and only it knows its credentials.

    Args:
        kind: As in metrics.sinks.
        folder: Of the tracker, below the run's directory.
    """
    if kind == "path":
        return dict(os.environ) | _FIXED
    passed = {name: os.environ[name] for name in (*_PASSED, *_OWN.get(kind, ())) if name in os.environ}
    values = _DEFAULTS | passed | _FIXED
    if kind == "trackio":
        values["TRACKIO_DIR"] = str(folder)
        if not values.keys() & {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"}:
            values["HF_HUB_OFFLINE"] = "1"  # else it asks who the user is
            values.pop("HF_TOKEN", None)
    return values


def become_tracker(kind: str, folder: Path) -> None:
    """Give this process the environment of a tracker's process."""
    values = tracker_environment(kind, folder)
    os.environ.clear()
    os.environ.update(values)


def setting(name: str, default: str) -> str:
    """Return a variable of this process, which `tracker_environment` made."""
    return os.environ.get(name) or default


def without_credentials(text: str) -> str:
    """Return what a library says of an error without this process's credentials, and passwords of addresses."""
    for name, value in os.environ.items():
        if _CREDENTIAL.search(name.upper()) and len(value) > 3:
            text = text.replace(value, f"({name})")
    return re.sub(r"(?<=://)[^/\s@]+@", "", text)
