"""The versions that decide a run's numbers; found without importing what they are of."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version

from holdfast.errors import UserError

LIBRARIES = ("holdfast", "torch", "transformers", "datasets", "safetensors", "tokenizers", "numpy", "peft")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that decide numbers."""
    installed = {"python": platform.python_version(), "platform": platform.platform()}
    for name in LIBRARIES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def installed(name: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def unmet_requirements() -> dict[str, str] | None:
    """Return what Holdfast's own metadata asks for and is not installed: requirement to `NAME VERSION (needed: BOUND)`.

    None where Holdfast has no metadata, as in a checkout on the import path.
    """
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion, Version

    def fits(requirement: Requirement) -> bool:
        number = installed(requirement.name)
        try:
            # A nightly build, or 2.11.0a0 of a vendor's image, counts as the release that it becomes.
            return number is not None and requirement.specifier.contains(Version(number).base_version)
        except InvalidVersion:
            return False  # transformers compares versions too, and fails at its import

    try:
        needed = [Requirement(text) for text in requires("holdfast") or ()]
    except PackageNotFoundError:
        return None
    return {
        str(requirement): f"{requirement.name} {installed(requirement.name) or 'is not installed'} "
        f"(needed: {requirement.specifier})"
        for requirement in needed
        if requirement.marker is None and not fits(requirement)
    }


def pip_command(requirements: Iterable[str]) -> str:
    """Return the command that installs requirements."""
    return f"pip install -U {shlex.join(requirements)}"


def check_versions() -> None:
    """Check that every package is installed in a version that Holdfast works with.

    Raises:
        UserError: One is older or newer, or is not there.
    """
    if unmet := unmet_requirements():
        raise UserError(f"{'; '.join(unmet.values())}. Install what Holdfast needs: {pip_command(unmet)}")
