"""Boundaries, ring rows and where the rows of a checkpoint come from. Pure arithmetic on NumPy int64.

Positions are absolute token positions of one request. A boundary ``P`` is a multiple of the page size;
the checkpoint at ``P`` holds window rows ``[P - window, P)`` and overlap rows ``[P - overlap, P)``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class RowSources(NamedTuple):
    """Where the rows ``[P - n, P)`` of one checkpoint lie while a chunk is computed.

    Attributes:
        flat: int64 ``[n]``, index into the chunk's flat rows; 0 where the row comes from the ring.
        ring: int64 ``[n]``, index into the ring buffer; 0 where the row comes from the chunk.
        from_ring: bool ``[n]``.
    """

    flat: np.ndarray
    ring: np.ndarray
    from_ring: np.ndarray


def page_floor(length: int, page_size: int) -> int:
    """Deepest boundary not beyond ``length``.

    >>> page_floor(700, 256)
    512
    """
    return length // page_size * page_size


def boundaries(start: int, end: int, step: int) -> list[int]:
    """Multiples of ``step`` in ``(start, end]``: the boundaries completed by computing ``[start, end)``.

    >>> boundaries(0, 700, 256)
    [256, 512]
    >>> boundaries(512, 700, 256), boundaries(511, 512, 256)
    ([], [512])
    >>> boundaries(0, 2560, 1024)
    [1024, 2048]
    """
    return list(range((start // step + 1) * step, end + 1, step))


def ring_rows(slot: int, ring_size: int, first: int, last: int) -> np.ndarray:
    """Ring rows of positions ``[first, last)`` of the request in ``slot``: int64 ``[last - first]``.

    >>> ring_rows(3, 8, 508, 512).tolist()
    [28, 29, 30, 31]
    """
    return slot * ring_size + np.arange(first, last, dtype=np.int64) % ring_size


def verified_reach(committed: int, tokens: int, in_flight: int) -> tuple[int, int]:
    """``(first, end)`` of what a verify step may commit: at least ``[first, ...)``, at most ``[..., end)``.

    A verify step commits 1 to ``tokens`` tokens, and how many is known only when its result is processed.
    It therefore starts where the ``in_flight`` steps before it end, between ``first`` and their utmost.

    Whichever boundary ``P`` in ``(start, start + accepted]`` it crosses, the rows ``[P - window, P)`` are all
    committed and all in a ring of ``window + tokens - 1`` rows right behind it, and not behind the next.

    >>> verified_reach(committed=510, tokens=4, in_flight=0)
    (510, 514)
    >>> verified_reach(committed=510, tokens=4, in_flight=1)
    (511, 518)
    """
    return committed + in_flight, committed + (in_flight + 1) * tokens


def row_sources(
    boundary: int, rows: int, slot: int, ring_size: int, chunk_start: int, flat_offset: int
) -> RowSources:
    """Sources of ``[boundary - rows, boundary)`` while ``[chunk_start, ...)`` is being computed.

    The chunk's row of position ``p`` stands at ``flat_offset + p - chunk_start``; what lies before the
    chunk is still in the ring, which the chunk overwrites only after its attention.

    >>> s = row_sources(boundary=512, rows=4, slot=1, ring_size=8, chunk_start=510, flat_offset=100)
    >>> s.flat.tolist(), s.ring.tolist(), s.from_ring.tolist()
    ([0, 0, 100, 101], [12, 13, 0, 0], [True, True, False, False])
    """
    if not boundary - rows >= 0:
        raise ValueError(f"boundary {boundary} is closer to the start than {rows} rows")
    positions = np.arange(boundary - rows, boundary, dtype=np.int64)
    from_ring = positions < chunk_start
    if from_ring.any() and chunk_start - positions[0] > ring_size:
        raise ValueError(
            f"rows [{positions[0]}, {chunk_start}) do not fit a ring of {ring_size} rows"
        )
    flat = np.where(from_ring, 0, flat_offset + positions - chunk_start)
    ring = np.where(from_ring, slot * ring_size + positions % ring_size, 0)
    return RowSources(flat, ring, from_ring)
