"""Gather the rows of checkpoints while, or right after, a forward computes them.

Two sources. A boundary *inside* a chunk never reaches the rings (prefill keeps the last window only), so
its rows are taken layer by layer from the chunk's flat rows, and from the ring for positions before the
chunk. A boundary at the *end* of what a forward computed, a decode step's included, lies in the rings
after the forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layout import Kind
from .rows import ChunkPlaces, Places, TorchRows
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


class InteriorCapture:
    """Captures at boundaries inside the chunks of one prefill forward.

    Must see each layer before that layer stores its rows into the ring.
    """

    def __init__(self, captures: list[Capture], rows: TorchRows, mover: RecordMover):
        self.captures = captures
        self._rows, self._mover = rows, mover
        self._staged = mover.take(len(captures))
        self._places = ChunkPlaces(captures, self._staged, mover.device)
        self._missing = set(range(len(mover.layout.sections)))

    def gather(self, section: int, flat_rows: torch.Tensor) -> None:
        """Take one section of every capture; arguments as :meth:`.rows.TorchRows.gather_chunk`."""
        self._rows.gather_chunk(section, flat_rows, self._places)
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

    def __init__(self, captures: list[Capture], rows: TorchRows, mover: RecordMover):
        self.captures = captures
        self._rows, self._mover = rows, mover
        self._staged = mover.take(len(captures))
        pairs = [(c.slot, c.boundary) for c in captures]
        self._places = Places(pairs, self._staged, mover.device)
        self._missing = {ring.spec.kind for ring in rows.rings}

    def gather(self, kinds: frozenset[Kind]) -> None:
        """Take the sections of ``kinds`` of every capture."""
        self._rows.gather_rings(kinds, self._places)
        self._missing -= kinds

    def finish(self) -> None:
        """Send the records to the host.

        Raises:
            RuntimeError: a kind was never gathered; the records would hold another capture's bytes.
        """
        if self._missing:
            raise RuntimeError(f"{sorted(self._missing)} were not captured behind this forward")
        self._mover.save(self._staged, [c.host_slot for c in self.captures])
