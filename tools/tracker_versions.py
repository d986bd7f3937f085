"""Says which requirements of a package the packages of another environment do not meet.

    python tools/tracker_versions.py mlflow .venv

Run by the Python of an environment that has the package.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path

from packaging.requirements import Requirement


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(environment: Path) -> dict[str, str]:
    """Return the versions of an environment's packages by name, those on paths that it adds too."""
    places = [str(place) for place in environment.glob("lib/python3*/site-packages")]
    for place in list(places):
        for file in Path(place).glob("*.pth"):
            places += [line for line in file.read_text(encoding="utf-8").splitlines() if Path(line).is_dir()]
    return {plain(each.metadata["Name"]): each.version for each in distributions(path=places)}


def unmet(package: str, versions: dict[str, str], seen: set[str]) -> list[str]:
    """Return what the package and its dependencies require, where another version is installed."""
    if package in seen:
        return []
    seen.add(package)
    try:
        requirements = [Requirement(text) for text in requires(package) or []]
    except PackageNotFoundError:
        return []
    lines = []
    for requirement in requirements:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = plain(requirement.name)
        if name in versions and not requirement.specifier.contains(versions[name], prereleases=True):
            lines.append(f"{package} wants {name}{requirement.specifier}, not {versions[name]}")
        lines += unmet(name, versions, seen)
    return lines


if __name__ == "__main__":
    print("; ".join(unmet(sys.argv[1], installed(Path(sys.argv[2])), set())))
