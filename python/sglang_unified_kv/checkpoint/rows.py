"""Rows of rings and chunks to staged records and back: in torch, or by the kernels where there is a GPU.

:class:`TorchRows` says what is moved, on any device; :class:`TritonRows` moves the same bytes with one launch
for all layers (rings) or one for a layer (chunks), whatever the number of records.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from .geometry import ring_rows, row_sources
from .layout import DRAFT_KINDS, STATE_KINDS, WINDOW_KINDS, CheckpointLayout, Kind
from .rings import Ring, as_words, upload


class Places:
    """Several (request slot, boundary) pairs and the staged record of each; indices are uploaded once.

    Args:
        pairs: request slot and boundary ``P``; the rows are ``[P - rows, P)``.
        staged: staging slot of each pair's record.
    """

    def __init__(
        self, pairs: Sequence[tuple[int, int]], staged: Sequence[int], device: torch.device
    ):
        self.pairs, self._staged, self._device = list(pairs), list(staged), device
        self._ring_rows: dict[tuple[int, int], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.pairs)

    def ring_rows(self, ring: Ring, rows: int) -> torch.Tensor:
        """int64 ``[pairs * rows]``: the ring's rows. Rings of one geometry share the tensor."""
        key = (rows, ring.size)
        if key not in self._ring_rows:
            index = [ring_rows(slot, ring.size, end - rows, end) for slot, end in self.pairs]
            self._ring_rows[key] = upload(np.concatenate(index), self._device)
        return self._ring_rows[key]

    @cached_property
    def records(self) -> torch.Tensor:
        """int64 ``[pairs]``: staging slots."""
        return upload(self._staged, self._device)

    @cached_property
    def columns(self) -> torch.Tensor:
        """int64 ``[3, pairs or one more]``: request slots, boundaries, staging slots."""
        # Of even width: each row is then aligned alike, and the kernel compiled once.
        columns = np.zeros((3, -(-len(self.pairs) // 2) * 2), dtype=np.int64)
        columns[:, : len(self.pairs)] = [*zip(*self.pairs, strict=True), self._staged]
        return upload(columns, self._device)


class ChunkPlaces:
    """Where the rows of boundaries inside a chunk are, while the chunk is computed.

    Args:
        captures: with ``boundary``, ``slot``, ``chunk_start`` and ``flat_offset``, as ``capture.Capture``.
        staged: staging slot of each.
    """

    def __init__(self, captures, staged: Sequence[int], device: torch.device):
        self._captures, self._device = captures, device
        self.records = upload(list(staged), device)
        self._sources: dict[tuple[int, int], tuple[torch.Tensor, bool]] = {}

    def sources(self, rows: int, ring_size: int) -> tuple[torch.Tensor, bool]:
        """int64 ``[2, captures * rows]`` and whether any row is in the ring.

        Row of the chunk, and row of the ring or -1 where the row is in the chunk.
        """
        key = (rows, ring_size)
        if key not in self._sources:
            parts = [
                row_sources(c.boundary, rows, c.slot, ring_size, c.chunk_start, c.flat_offset)
                for c in self._captures
            ]
            flat, ring, from_ring = (np.concatenate(column) for column in zip(*parts, strict=True))
            index = np.stack([flat, np.where(from_ring, ring, -1)])
            self._sources[key] = upload(index, self._device), bool(from_ring.any())
        return self._sources[key]


def as_numbers(chunk: torch.Tensor, ring: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as they are, or packed rows as bytes: scales stand among their values."""
    if ring.element_size() == 1:
        return chunk.view(torch.uint8), ring.view(torch.uint8)
    return chunk, ring


class TorchRows:
    """The moves in torch.

    Args:
        layout: byte map of a record.
        rings: in the order of its sections.
        staging: uint8 ``[staging slots, record_bytes]``.
    """

    def __init__(self, layout: CheckpointLayout, rings: Sequence[Ring], staging: torch.Tensor):
        self.layout, self.rings, self.staging = layout, list(rings), staging
        # int64 [staging slots, rows, row words] per section.
        self._sections = [
            as_words(staging[:, s.offset : s.offset + s.nbytes]).unflatten(
                1, (s.rows, s.spec.row_bytes // 8)
            )
            for s in layout.sections
        ]

    def gather_rings(self, kinds: frozenset[Kind], places: Places) -> None:
        """Copy the rows of ``kinds`` of every place from the rings to its record."""
        for target, ring in zip(self._sections, self.rings, strict=True):
            if ring.spec.kind in kinds:
                rows = target.shape[1]
                taken = ring.words.index_select(0, places.ring_rows(ring, rows))
                target[places.records] = taken.unflatten(0, (-1, rows))

    def scatter_rings(self, places: Places) -> None:
        """Copy every place's record to the rings."""
        for source, ring in zip(self._sections, self.rings, strict=True):
            rows = source.index_select(0, places.records).flatten(0, 1)
            ring.words.index_copy_(0, places.ring_rows(ring, source.shape[1]), rows)

    def gather_chunk(self, section: int, chunk: torch.Tensor, places: ChunkPlaces) -> None:
        """Copy one section's rows of every place to its record.

        Args:
            section: index into the layout's sections; its ring must be as it was before the chunk.
            chunk: ``[tokens, width]``, the chunk's rows in batch order: in the ring's dtype or one that
                the engine converts to it, or packed bytes.
        """
        target, ring = self._sections[section], self.rings[section]
        rows = target.shape[1]
        (flat, old), any_old = places.sources(rows, ring.size)
        chunk, before = as_numbers(chunk, ring.buffer)
        taken = chunk.index_select(0, flat).to(before.dtype)
        if any_old:
            earlier = before.index_select(0, old.clamp_min(0))
            taken = torch.where((old >= 0)[:, None], earlier, taken)
        target[places.records] = as_words(taken).unflatten(0, (-1, rows))


class TritonRows(TorchRows):
    """The moves by ``kernels.rows``."""

    RING_BLOCK = 1024
    CHUNK_BLOCK = 1024

    def __init__(self, layout: CheckpointLayout, rings: Sequence[Ring], staging: torch.Tensor):
        super().__init__(layout, rings, staging)
        self._kinds = [r.spec.kind for r in self.rings]
        self._tables: dict[frozenset[Kind], tuple[torch.Tensor, int]] = {}
        # Now, since an upload behind a forward would make the host wait for it.
        for kinds in (WINDOW_KINDS, STATE_KINDS, DRAFT_KINDS, frozenset(self._kinds)):
            if kinds & frozenset(self._kinds):
                self._table(kinds & frozenset(self._kinds))

    def _table(self, kinds: frozenset[Kind]) -> tuple[torch.Tensor, int]:
        """The kernel's table of the sections of ``kinds``, and the words of the longest."""
        if kinds not in self._tables:
            rows = [
                (r.buffer.data_ptr(), s.spec.row_bytes // 8, r.size, s.rows, s.offset // 8)
                for r, s in zip(self.rings, self.layout.sections, strict=True)
                if r.spec.kind in kinds
            ]
            table = torch.tensor(rows, dtype=torch.int64).to(self.staging.device)
            self._tables[kinds] = table, max(words * n for _, words, _, n, _ in rows)
        return self._tables[kinds]

    def _move(self, kinds: frozenset[Kind], places: Places, *, to_staging: bool) -> None:
        from ..kernels.rows import move_ring_rows

        table, longest = self._table(kinds & frozenset(self._kinds))
        slots, ends, staged = places.columns
        grid = (-(-longest // self.RING_BLOCK), len(table), len(places))
        words = as_words(self.staging)
        move_ring_rows[grid](
            table,
            slots,
            ends,
            staged,
            words,
            words.shape[1],
            TO_STAGING=to_staging,
            BLOCK=self.RING_BLOCK,
        )

    def gather_rings(self, kinds: frozenset[Kind], places: Places) -> None:
        if kinds & frozenset(self._kinds):
            self._move(kinds, places, to_staging=True)

    def scatter_rings(self, places: Places) -> None:
        self._move(frozenset(self._kinds), places, to_staging=False)

    def gather_chunk(self, section: int, chunk: torch.Tensor, places: ChunkPlaces) -> None:
        from ..kernels.rows import gather_chunk_rows

        ring, part = self.rings[section], self.layout.sections[section]
        index, _ = places.sources(part.rows, ring.size)
        if chunk.stride(-1) != 1:
            raise ValueError(
                f"rows of a chunk have stride {chunk.stride()}: they must be contiguous"
            )
        chunk, before = as_numbers(chunk, ring.buffer)
        target = self.staging[:, part.offset : part.offset + part.nbytes].view(before.dtype)
        width = before.shape[1]
        grid = (index.shape[1], -(-width // self.CHUNK_BLOCK))
        gather_chunk_rows[grid](
            chunk,
            before,
            target,
            index[0],
            index[1],
            places.records,
            chunk.stride(0),
            before.stride(0),
            target.stride(0),
            part.rows,
            width,
            BLOCK=self.CHUNK_BLOCK,
        )


def rows_on(
    device: torch.device,
    layout: CheckpointLayout,
    rings: Sequence[Ring],
    staging: torch.Tensor,
) -> TorchRows:
    """The moves for a device."""
    kind = TorchRows if device.type == "cpu" else TritonRows
    return kind(layout, rings, staging)
