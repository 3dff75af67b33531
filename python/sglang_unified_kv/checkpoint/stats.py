"""What happened to checkpoints on one rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Stats:
    """Counters since start, in records unless said otherwise; a flush does not reset them.

    Attributes:
        gate_exact, gate_cut, gate_rejected, gate_none: requests, as :meth:`admitted` tells them apart.
        reused_tokens: tokens that requests resumed at.
        cut_tokens: tokens that the cache held beyond -> requests.
        read: records that storage gave, verified or not.
    """

    gate_exact: int = 0
    gate_cut: int = 0
    gate_rejected: int = 0
    gate_none: int = 0
    reused_tokens: int = 0
    cut_tokens: Counter[int] = field(default_factory=Counter)
    captured: int = 0
    published: int = 0
    replaced: int = 0
    kept_existing: int = 0
    mixed: int = 0
    removed: int = 0
    restored: int = 0
    dropped_no_slot: int = 0
    dropped_no_staging: int = 0
    dropped_provenance: int = 0
    dropped_draft: int = 0
    discarded: int = 0
    superseded: int = 0
    not_reached: int = 0
    saved: int = 0
    save_failed: int = 0
    save_dropped: int = 0
    read: int = 0
    fetched: int = 0
    fetch_unused: int = 0
    fetch_rejected: int = 0
    pages_rejected: int = 0
    storage_errors: int = 0

    def admitted(self, resumed: int, matched: int) -> None:
        """A request resumed at ``resumed`` of ``matched`` tokens that the cache held."""
        self.reused_tokens += resumed
        if matched > resumed:
            self.cut_tokens[matched - resumed] += 1
            self.gate_cut += resumed > 0
            self.gate_rejected += resumed == 0
        else:
            self.gate_exact += resumed > 0
            self.gate_none += resumed == 0
