"""CheckpointStore: prefix hash -> record. Decides which record lives in which host slot.

The store knows slots; :class:`~sglang_unified_kv.checkpoint.staging.RecordMover` holds the bytes.
Every decision is a pure function of the calls made, in order, so that ranks that make the same calls agree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import takewhile

OCTAVES = 7
"""Grids that are told apart: of 1, 2, 4... 64 pages."""


@dataclass
class Record:
    """A published checkpoint.

    Attributes:
        key: hash of the token prefix, the page hash of the page that ends at ``boundary``.
        boundary: tokens of the prefix.
        slot: host slot of its bytes.
        mixed: captured by another run than the one whose pages the tree kept.
        pins: restores and storage writes that still need the slot.
        live: False once the store no longer offers it (its slot is freed with the last pin).
        stored: storage was given it, or it came from there.
        saves: tokens that a hit saves over the next shallower checkpoint, when it was last used.
        filler: was captured because there was room, and nobody has used it.
        rank: (score, use) of its last use; the lowest goes first.
    """

    key: str
    boundary: int
    slot: int
    mixed: bool
    pins: int = 0
    live: bool = True
    stored: bool = False
    saves: int = 0
    filler: bool = False
    rank: tuple[int, int] = (0, 0)


class Published(Enum):
    """What :meth:`CheckpointStore.publish` did with a capture."""

    NEW = "new"
    REPLACED = "replaced"
    KEPT_EXISTING = "kept existing"


class CheckpointStore:
    """Records by prefix hash, least recently used first out, or least useful.

    A slot is *free*, *reserved* (a capture or a fetch writes it, nobody can find it) or *published*. Only
    ``reserve`` evicts; it is called in the plan of a batch, and between batches for a fetch, never
    between a request's match and its plan (invariant 3). Nothing here may be called but from the
    scheduler's thread.

    A *weighed* store evicts the record of the lowest score (GreedyDual; all records have the same size): what
    it saved when it was last used, above the score of the latest victim at that time. One that saves much
    outlives many uses of others, and without a use goes in the end.

    Args:
        capacity: records, at least 1.
        page_size: tokens per page.
        weighed: evict by score; otherwise by last use alone.

    Attributes:
        filler_worth: how likely a filler is used, in parts of other records, at most 1; may be set any time.
        stride: evict what is at no ``stride``-th page, then the rest, least recently used first, whatever the
            score; a power of two, 0 for by score; may be set any time.

    >>> store = CheckpointStore(2, 256, weighed=True)
    >>> for key, saves in (("deep", 5120), ("shallow", 256), ("next", 512)):
    ...     _ = store.publish(key, 5120, store.reserve(), replace=True, mixed=False, saves=saves)
    >>> "deep" in store, "shallow" in store
    (True, False)
    """

    def __init__(self, capacity: int, page_size: int, *, weighed: bool = False):
        if capacity < 1:
            raise ValueError(f"a checkpoint store needs at least one record, got {capacity}")
        self.capacity = capacity
        self.page_size = page_size
        self.weighed = weighed
        self.evictions = 0
        self.clear()

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def clear(self) -> None:
        """Forget everything. Only when nothing is reserved or pinned by a running forward."""
        self.stride = 0
        self.filler_worth = 0.0
        self._free = list(range(self.capacity - 1, -1, -1))
        self._reserved: set[int] = set()
        self._records: dict[str, Record] = {}
        self._retired: dict[int, Record] = {}
        # Logical clocks: uses so far, and the score of the latest victim.
        self._uses = 0
        self._level = 0
        # By rank; an entry that is not its record's current rank is void.
        self._queue: list[tuple[tuple[int, int], str]] = []
        # By last use, oldest first; apart by the power of two that divides the boundary in pages.
        self._by_use: list[OrderedDict[str, Record]] = [OrderedDict() for _ in range(OCTAVES)]

    def reserve(self) -> int | None:
        """A slot for a new capture, evicting the lowest ranking unpinned record if none is free.

        Returns None when every slot is reserved or pinned.
        """
        if not self._free:
            victim = self._oldest_unpinned() if self.stride else self._lowest_unpinned()
            if victim is None:
                return None
            self.remove(victim.key)
            self.evictions += 1
        slot = self._free.pop()
        self._reserved.add(slot)
        return slot

    def _lowest_unpinned(self) -> Record | None:
        pinned, found = [], None
        while self._queue and found is None:
            rank, key = heappop(self._queue)
            record = self._records.get(key)
            if record is None or record.rank != rank:
                continue
            if record.pins:
                pinned.append(record)
            else:
                found = record
                self._level = rank[0]
        for record in pinned:
            # In use: so that it is passed over once, not each time.
            self._use(record)
        return found

    def _oldest_unpinned(self) -> Record | None:
        finer = self.stride.bit_length() - 1
        for octaves in (self._by_use[:finer], self._by_use[finer:]):
            heads = [next((r for r in o.values() if not r.pins), None) for o in octaves]
            pinned = [r for o in octaves for r in takewhile(lambda r: r.pins, o.values())]
            for record in pinned:
                self._use(record)
            if found := [record for record in heads if record is not None]:
                return min(found, key=lambda record: record.rank[1])
        return None

    def _octave(self, record: Record) -> OrderedDict[str, Record]:
        pages = record.boundary // self.page_size
        return self._by_use[min((pages & -pages).bit_length(), OCTAVES) - 1]

    def _use(self, record: Record) -> None:
        self._uses += 1
        record.rank = (0 if not self.weighed else self._level + record.saves, self._uses)
        if len(self._queue) > 2 * len(self._records) + 64:
            self._queue = [(r.rank, r.key) for r in self._records.values() if r is not record]
            heapify(self._queue)
        heappush(self._queue, (record.rank, record.key))
        octave = self._octave(record)
        octave[record.key] = record
        octave.move_to_end(record.key)

    def discard(self, slot: int) -> None:
        """Give a reserved slot back unpublished."""
        self._reserved.remove(slot)
        self._free.append(slot)

    def publish(
        self,
        key: str,
        boundary: int,
        slot: int,
        *,
        replace: bool,
        mixed: bool,
        saves: int = 0,
        filler: bool = False,
    ) -> Published:
        """Make the capture in a reserved slot the record of ``key``.

        Args:
            replace: the tree adopted new pages for this boundary, so an existing record is void;
                otherwise an existing record stays and the slot is given back.
            mixed: recorded as :attr:`Record.mixed`.
            saves: as :attr:`Record.saves`, in tokens.
            filler: as :attr:`Record.filler`; what it saves counts by :attr:`filler_worth` until it is used.
        """
        existing = self._records.get(key)
        if existing is not None and not replace:
            self.discard(slot)
            return Published.KEPT_EXISTING
        if existing is not None:
            self.remove(key)
        self._reserved.remove(slot)
        record = self._records[key] = Record(
            key, boundary, slot, mixed, saves=self.worth(saves) if filler else saves, filler=filler
        )
        self._use(record)
        return Published.NEW if existing is None else Published.REPLACED

    def remove(self, key: str) -> bool:
        """Stop offering the record of ``key``; its slot is freed now or with its last pin."""
        record = self._records.pop(key, None)
        if record is None:
            return False
        record.live = False
        del self._octave(record)[key]
        if record.pins:
            self._retired[record.slot] = record
        else:
            self._free.append(record.slot)
        return True

    def deepest(self, chain: Sequence[str], limit: int) -> int:
        """Deepest boundary not beyond ``limit`` tokens of which a record is there; 0 if none.

        Args:
            chain: page hashes of the prefix; ``chain[i]`` identifies boundary ``(i + 1) * page_size``.
        """
        for pages in range(min(limit // self.page_size, len(chain)), 0, -1):
            if chain[pages - 1] in self._records:
                return pages * self.page_size
        return 0

    def worth(self, tokens: int) -> int:
        """What ``tokens`` count for that a filler saves."""
        return int(self.filler_worth * tokens)

    def get(self, key: str) -> Record | None:
        """The record of ``key``, without counting a use."""
        return self._records.get(key)

    def touch(self, key: str, saves: int | None = None) -> None:
        """Count a use of the record of ``key``, if it is there, and note what it saves now."""
        record = self._records.get(key)
        if record is not None:
            if saves is not None:
                record.saves, record.filler = saves, False
            self._use(record)

    def pin(self, key: str) -> Record | None:
        """Keep the record's slot until :meth:`unpin`; None if there is no such record."""
        record = self._records.get(key)
        if record is not None:
            record.pins += 1
            self._use(record)
        return record

    def unpin(self, record: Record) -> None:
        """Release one pin. A pin from before :meth:`clear` is void and ignored."""
        current = self._records.get(record.key) if record.live else self._retired.get(record.slot)
        if current is not record:
            return
        record.pins -= 1
        if record.pins == 0 and not record.live:
            del self._retired[record.slot]
            self._free.append(record.slot)

    def order(self) -> list[str]:
        """Keys in the order in which they would be evicted if nothing were used and :attr:`stride` were 0."""
        return sorted(self._records, key=lambda key: self._records[key].rank)

    def forget_stored(self) -> None:
        """Storage was emptied: every record may be given to it again."""
        for record in self._records.values():
            record.stored = False

    @property
    def reserved(self) -> int:
        """Slots held by captures and fetches that are not published yet."""
        return len(self._reserved)

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def stored(self) -> int:
        """Records that storage was given, or that came from it."""
        return sum(record.stored for record in self._records.values())

    @property
    def pinned(self) -> int:
        """Pins held by restores and storage writes."""
        records = [*self._records.values(), *self._retired.values()]
        return sum(record.pins for record in records)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot has exactly one owner and all counts are sane."""
        published = [r.slot for r in self._records.values()]
        owners = self._free + list(self._reserved) + published + list(self._retired)
        assert sorted(owners) == list(range(self.capacity)), "a slot is lost or owned twice"
        for key, record in self._records.items():
            assert record.key == key and record.live and record.pins >= 0, record
            assert record.boundary > 0 and record.boundary % self.page_size == 0, record
        current = {(r.rank, r.key) for r in self._records.values()}
        assert current <= set(self._queue), "a record can never be evicted"
        by_use = {key: record for octave in self._by_use for key, record in octave.items()}
        assert by_use == self._records, "a record is in no octave, or in another's"
        for octave in self._by_use:
            uses = [record.rank[1] for record in octave.values()]
            assert uses == sorted(uses), "an octave is not ordered by use"
        for slot, record in self._retired.items():
            assert record.slot == slot and not record.live and record.pins > 0, record
