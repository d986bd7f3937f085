"""Shorter waits for the processes that tests fork: about a tenth where a wait, not its length, is what matters.

Whoever imports this module has them. Waits stay as they are where a busy machine could not meet shorter ones
(heartbeats, what a launcher leaves ranks), and where machines must agree (a lease is stale after 120 s).
"""

from __future__ import annotations

from dataclasses import replace

from holdfast import patience

patience.current = replace(
    patience.Patience(),
    file_retries_seconds=(0.05, 0.1, 0.2),
    http_first_pause_seconds=0.025,
    http_longest_pause_seconds=0.4,
    failure_look_seconds=0.1,
    failure_store_seconds=0.1,
    server_leave_seconds=1.0,
    lease_look_seconds=0.2,
    raising_seconds=2.5,
)
