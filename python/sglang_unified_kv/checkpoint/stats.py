"""What happened to checkpoints on one rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stats:
    """Counters since start, in records unless said otherwise."""

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
    fetched: int = 0
    fetch_unused: int = 0
    fetch_rejected: int = 0
    pages_rejected: int = 0
    storage_errors: int = 0
