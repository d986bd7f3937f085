"""Reads how many tokens of drafts servers accept, where they decode by speculation (`start.arguments`).

A server adds up what it drafted and accepted since its start; the acceptance of a step is the ratio of the increases.
The counters are those of vLLM's `/metrics` in the text format of Prometheus.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from holdfast.features.vllm.servers import VLLMServer
from holdfast.http import EndpointRefuses, EndpointUnwell

_METRICS = "/metrics"
_SECONDS = 5.0
"""Longest wait for the counters: a step does not wait for numbers that nobody trains on."""
_COUNTER = re.compile(
    r"^vllm:spec_decode_num_(draft|accepted)_tokens_total(?:\{[^}]*\})? ([0-9.eE+-]+|NaN|\+Inf)$", re.MULTILINE
)


@dataclass(frozen=True)
class DraftCounts:
    """Tokens of drafts, added up since the start of a server."""

    drafted: float
    accepted: float

    @classmethod
    def read(cls, text: str) -> DraftCounts | None:
        """Return the sums over all lines of a server's metrics; None where it counts no drafts."""
        sums = {"draft": 0.0, "accepted": 0.0}
        lines = _COUNTER.findall(text)
        for kind, number in lines:
            sums[kind] += float(number)
        known = {kind for kind, _ in lines} == {*sums} and all(map(math.isfinite, sums.values()))
        return cls(sums["draft"], sums["accepted"]) if known else None


@dataclass
class Acceptance:
    """The share of drafted tokens that servers accept, from one call to the next."""

    before: dict[str, DraftCounts] = field(default_factory=dict)
    """By address."""
    silent: set[str] = field(default_factory=set)
    """Addresses of servers that count no drafts, which are not asked again."""

    def since_last(self, servers: Sequence[VLLMServer]) -> dict[str, float]:
        """Return sampling/speculation/acceptance: accepted tokens per drafted one, over all servers.

        It is left out where no server counts drafts, or none has drafted since the last call.
        """
        drafted = accepted = 0.0
        for server in servers:
            counts = self._ask(server)
            if counts is None:
                continue
            before = self.before.get(server.url, DraftCounts(0.0, 0.0))
            if counts.drafted < before.drafted:  # it was started again
                before = DraftCounts(0.0, 0.0)
            drafted += counts.drafted - before.drafted
            accepted += counts.accepted - before.accepted
            self.before[server.url] = counts
        return {"sampling/speculation/acceptance": accepted / drafted} if drafted > 0 else {}

    def _ask(self, server: VLLMServer) -> DraftCounts | None:
        if server.url in self.silent:
            return None
        looks = replace(server.control, is_text=True, attempts=1, timeout_seconds=_SECONDS)
        try:
            text = looks.ask("GET", _METRICS)
        except EndpointUnwell:
            return None
        except EndpointRefuses:
            text = ""
        counts = DraftCounts.read(text)
        if counts is None:
            self.silent.add(server.url)
        return counts
