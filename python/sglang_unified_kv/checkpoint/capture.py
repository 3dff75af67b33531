"""Gather the rows of checkpoints while, or right after, a forward computes them.

Two sources. A boundary *inside* a chunk never reaches the rings (prefill keeps the last window only), so
its rows are taken layer by layer from the chunk's flat rows, and from the ring for positions before the
chunk. A boundary at the *end* of what a forward computed, a decode step's included, lies in the rings
after the forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .geometry import row_sources
from .layout import Kind
from .rings import Ring, RowIndex, as_words, upload
from .staging import RecordMover


@dataclass(frozen=True)
class Capture:
    """One checkpoint to take in one forward.

    Attributes:
        rid: request.
        slot: its request slot.
        boundary: position the checkpoint ends at.
        chunk_start: first position the forward computes for the request.
        flat_offset: index of that position's row among the forward's flat rows.
        host_slot: where the record goes.
    """

    rid: str
    slot: int
    boundary: int
    chunk_start: int
    flat_offset: int
    host_slot: int


class _FlatIndex:
    """Index tensors of one (rows, ring size) geometry for all interior captures of a forward."""

    def __init__(self, captures: list[Capture], rows: int, ring_size: int, device: torch.device):
        parts = [
            row_sources(c.boundary, rows, c.slot, ring_size, c.chunk_start, c.flat_offset)
            for c in captures
        ]
        flat, ring, from_ring = (np.concatenate(column) for column in zip(*parts, strict=True))
        where = np.flatnonzero(from_ring)
        self.flat = upload(flat, device)
        self.where = upload(where, device) if where.size else None
        self.ring = upload(ring[where], device) if where.size else None


class InteriorCapture:
    """Captures at boundaries inside the chunks of one prefill forward.

    Must see each layer before that layer stores its rows into the ring.
    """

    def __init__(self, captures: list[Capture], mover: RecordMover):
        self.captures = captures
        self._mover = mover
        self._staged = mover.take(len(captures))
        self._slots = upload(self._staged, mover.device)
        self._index: dict[tuple[int, int], _FlatIndex] = {}
        self._missing = set(range(len(mover.sections)))

    def gather(self, section: int, ring: Ring, flat_rows: torch.Tensor) -> None:
        """Take one section of every capture.

        Args:
            section: index into the layout's sections.
            ring: that section's ring, as it was before the chunk.
            flat_rows: ``[tokens, width]``, the chunk's rows in batch order: in the ring's dtype or one
                that the engine converts to it, or packed bytes.
        """
        target = self._mover.sections[section]
        rows = target.shape[1]
        key = (rows, ring.size)
        if key not in self._index:
            self._index[key] = _FlatIndex(self.captures, rows, ring.size, self._mover.device)
        index, before = self._index[key], ring.buffer
        if before.element_size() == 1:
            # Packed rows are bytes, not numbers: scales stand among the values.
            flat_rows, before = flat_rows.view(torch.uint8), before.view(torch.uint8)
        taken = flat_rows.index_select(0, index.flat).to(before.dtype)
        if index.where is not None:
            taken.index_copy_(0, index.where, before.index_select(0, index.ring))
        target[self._slots] = as_words(taken).unflatten(0, (-1, rows))
        self._missing.discard(section)

    def finish(self) -> None:
        """Send the records to the host.

        Raises:
            RuntimeError: a section was never gathered; the records would hold another capture's bytes.
        """
        if self._missing:
            raise RuntimeError(
                f"sections {sorted(self._missing)} were not captured in this forward"
            )
        self._mover.save(self._staged, [c.host_slot for c in self.captures])


class EndCapture:
    """Captures at boundaries that a forward ended at, taken from the rings behind it."""

    def __init__(self, captures: list[Capture], rings: list[Ring], mover: RecordMover):
        self.captures = captures
        self._rings = rings
        self._mover = mover
        self._staged = mover.take(len(captures))
        self._slots = upload(self._staged, mover.device)
        self._index = RowIndex([(c.slot, c.boundary) for c in captures], mover.device)
        self._missing = {ring.spec.kind for ring in rings}

    def gather(self, kinds: frozenset[Kind]) -> None:
        """Take the sections of ``kinds`` of every capture."""
        for target, ring in zip(self._mover.sections, self._rings, strict=True):
            if ring.spec.kind in kinds:
                rows = target.shape[1]
                taken = ring.words.index_select(0, self._index.of(ring, rows))
                target[self._slots] = taken.unflatten(0, (-1, rows))
        self._missing -= kinds

    def finish(self) -> None:
        """Send the records to the host.

        Raises:
            RuntimeError: a kind was never gathered; the records would hold another capture's bytes.
        """
        if self._missing:
            raise RuntimeError(f"{sorted(self._missing)} were not captured behind this forward")
        self._mover.save(self._staged, [c.host_slot for c in self.captures])
