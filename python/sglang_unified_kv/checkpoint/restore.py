"""Put the rows of checkpoints back into request slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layout import Kind
from .rings import Ring, RowIndex
from .staging import RecordMover
from .store import Record

ALL_KINDS = frozenset(Kind)


@dataclass(frozen=True)
class Restore:
    """One pinned record and the request slot that resumes from it."""

    rid: str
    slot: int
    record: Record


def restore(
    restores: list[Restore],
    rings: list[Ring],
    mover: RecordMover,
    kinds: frozenset[Kind] = ALL_KINDS,
) -> None:
    """Write every record's rows into its slot, on the current stream.

    The caller holds the order: after the engine reset the slot, before anything reads it.

    Args:
        kinds: sections to write; fewer than all only to show in a test what each part is for.
    """
    for first in range(0, len(restores), mover.staging_slots):
        wave = restores[first : first + mover.staging_slots]
        staged = mover.take(len(wave))
        mover.load([r.record.slot for r in wave], staged)
        index = RowIndex([(r.slot, r.record.boundary) for r in wave], mover.device)
        slots = torch.tensor(staged, device=mover.device)
        for source, ring in zip(mover.sections, rings, strict=True):
            if ring.spec.kind in kinds:
                rows = source.index_select(0, slots).flatten(0, 1)
                ring.words.index_copy_(0, index.of(ring, source.shape[1]), rows)
        mover.done_reading(staged)
