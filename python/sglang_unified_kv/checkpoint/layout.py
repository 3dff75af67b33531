"""The byte layout of a checkpoint record. Pure arithmetic.

A record is one contiguous run of bytes, so that window and states can only travel together and one
copy moves it. Sections stand in this order, without gaps other than the final padding::

    window           one per layer:     [window rows, bytes of a KV row]
    window rope      one per layer, in the fp8 two-pool layout alone: [window rows, bytes of a rope row]
    attention state  one per C4 layer:  [overlap rows, bytes of a compressor state row]
    indexer state    one per C4 layer:  [overlap rows, bytes of an indexer state row]
    draft window     with speculation, one per draft layer: [window rows, bytes of a KV row]
    draft rope       the same in the fp8 two-pool layout:   [window rows, bytes of a rope row]
    zero padding to a multiple of RECORD_ALIGNMENT
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property

FORMAT_VERSION = 1
RECORD_ALIGNMENT = 4096


class Kind(str, Enum):
    """What a section holds."""

    WINDOW = "window"
    WINDOW_ROPE = "window_rope"
    ATTENTION_STATE = "attention_state"
    INDEXER_STATE = "indexer_state"
    DRAFT_WINDOW = "draft_window"
    DRAFT_WINDOW_ROPE = "draft_window_rope"


WINDOW_KINDS = frozenset({Kind.WINDOW, Kind.WINDOW_ROPE})
DRAFT_KINDS = frozenset({Kind.DRAFT_WINDOW, Kind.DRAFT_WINDOW_ROPE})
STATE_KINDS = frozenset({Kind.ATTENTION_STATE, Kind.INDEXER_STATE})


@dataclass(frozen=True)
class RingSpec:
    """One per-request ring of the engine, as far as a checkpoint cares.

    Attributes:
        kind: what it holds.
        layer: layer id.
        row_bytes: bytes of one row.
        dtype: element type of a row, part of the fingerprint.
    """

    kind: Kind
    layer: int
    row_bytes: int
    dtype: str


@dataclass(frozen=True)
class Section:
    """One ring's rows inside a record: ``rows`` rows of ``spec.row_bytes`` bytes at ``offset``."""

    spec: RingSpec
    rows: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.spec.row_bytes


@dataclass(frozen=True)
class CheckpointLayout:
    """Byte map of a record.

    Attributes:
        page_size: tokens per page; boundaries are its multiples.
        window: window rows of a layer in a record, tokens.
        overlap: state rows of a C4 layer in a record, tokens.
        sections: in record order.
    """

    page_size: int
    window: int
    overlap: int
    sections: tuple[Section, ...]

    @classmethod
    def of(
        cls, rings: Sequence[RingSpec], *, page_size: int, window: int, overlap: int
    ) -> CheckpointLayout:
        """Lay ``rings`` out in the order of the module docstring.

        Raises:
            ValueError: a page cannot hold the window, or a ring is given twice.

        DeepSeek-V4-Pro: 61 layers, 30 of them C4, bf16 rows of 512, fp32 states of 4*512 and 4*128:

        >>> rings = [RingSpec(Kind.WINDOW, i, 1024, "bfloat16") for i in range(61)]
        >>> rings += [RingSpec(Kind.ATTENTION_STATE, i, 8192, "float32") for i in range(30)]
        >>> rings += [RingSpec(Kind.INDEXER_STATE, i, 2048, "float32") for i in range(30)]
        >>> CheckpointLayout.of(rings, page_size=256, window=128, overlap=4).record_bytes
        9224192
        """
        if window > page_size or overlap > window:
            raise ValueError(
                f"overlap {overlap} <= window {window} <= page size {page_size} does not hold"
            )
        if len({(r.kind, r.layer) for r in rings}) != len(rings):
            raise ValueError("a layer's ring is given twice")
        order = list(Kind)
        sections, offset = [], 0
        for ring in sorted(rings, key=lambda r: (order.index(r.kind), r.layer)):
            rows = overlap if ring.kind in STATE_KINDS else window
            sections.append(Section(ring, rows, offset))
            offset += rows * ring.row_bytes
        return cls(page_size, window, overlap, tuple(sections))

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of all sections, without padding."""
        last = self.sections[-1]
        return last.offset + last.nbytes

    @property
    def record_bytes(self) -> int:
        """Bytes of one record, a multiple of :data:`RECORD_ALIGNMENT`."""
        return -(-self.payload_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 over format version and byte map: equal only where records are interchangeable."""
        text = json.dumps({"format": FORMAT_VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
