"""Put the rows of checkpoints back into request slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .rows import Places, TorchRows
from .staging import RecordMover
from .store import Record


@dataclass(frozen=True)
class Restore:
    """One pinned record and the request slot that resumes from it."""

    rid: str
    slot: int
    record: Record


def restore(
    restores: list[Restore],
    rows: TorchRows,
    mover: RecordMover,
    landed: Callable[[list[int], list[Restore]], None] | None = None,
) -> None:
    """Write every record's rows into its slot, on the current stream.

    The caller holds the order: after the engine reset the slot, before anything reads it.

    Args:
        landed: told the staging slots and restores of each wave once their copies are queued.
    """
    for first in range(0, len(restores), mover.staging_slots):
        wave = restores[first : first + mover.staging_slots]
        staged = mover.take(len(wave))
        mover.load([r.record.slot for r in wave], staged)
        if landed is not None:
            landed(staged, wave)
        pairs = [(r.slot, r.record.boundary) for r in wave]
        rows.scatter_rings(Places(pairs, staged, mover.device))
        mover.done_reading(staged)
