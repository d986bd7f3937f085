"""A first configuration while it is composed, with the reason for every value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.config.yaml12 import to_yaml


@dataclass
class FirstFile:
    """A configuration that is being composed."""

    verb: str
    tree: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)
    """By dotted key: why it has its value."""

    def put(self, key: str, value: Any, reason: str) -> None:
        """Set a key, and say why."""
        section, _, name = key.rpartition(".")
        (self.tree.setdefault(section, {}) if section else self.tree)[name] = value
        self.reasons[key] = reason

    def lines(self) -> Iterator[str]:
        """Yield what was decided and why."""
        for key, reason in self.reasons.items():
            section, _, name = key.rpartition(".")
            yield f"{key} = {(self.tree[section] if section else self.tree)[name]}: {reason}"

    def text(self) -> str:
        """Return the YAML: every key that was decided stands below its reason."""
        lines = [f"# holdfast {self.verb} THIS_FILE"]
        path: list[str] = []
        for line in to_yaml(self.tree).splitlines():
            indent = line[: len(line) - len(line.lstrip())]
            path = [*path[: len(indent) // 2], line.strip().partition(":")[0]]
            reason = self.reasons.get(".".join(path))
            lines += [f"{indent}# {reason}", line] if reason else [line]
        return "\n".join(lines) + "\n"
