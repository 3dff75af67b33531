"""Records on their way to and from storage: which, in which host slots, held for how long.

Everything here is called by the scheduler's thread, in lockstep on every rank. The bytes are moved by
SGLang's storage threads between those calls; a slot belongs to them from :meth:`StorageTraffic.save` or
:meth:`~StorageTraffic.fetch` until :meth:`~StorageTraffic.saved` or :meth:`~StorageTraffic.fetched`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .stats import Stats
from .store import CheckpointStore, Record


@dataclass(eq=False)
class Save:
    """Records on their way to storage, pinned.

    Attributes:
        records: in the order of the storage keys.
    """

    records: list[Record]


@dataclass(eq=False)
class Fetch:
    """Room for records that one prefetch may bring, and what it brought.

    Boundaries count pages from the start of the prefetch, as its keys do. SGLang reads a prefix in batches
    and tells the ranks' common progress after each, so one record per batch is what a prefetch that is cut
    short keeps.

    Attributes:
        start: tokens before the prefetched span, a page boundary.
        span: pages per batch.
        resident: boundary -> key, of records that are in memory already.
        slots: host slots by batch; a batch without one brings no record.
        arrived: boundary -> host slot of a verified record, None for a resident one. Written by the
            storage thread before it tells the batch's progress.
        pages_read: pages of the batches read so far. Storage thread only.
    """

    start: int
    span: int
    resident: dict[int, str] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    arrived: dict[int, int | None] = field(default_factory=dict)
    pages_read: int = 0

    def usable(self, pages: int) -> int:
        """Deepest boundary within ``pages`` that pages and record arrived for; 0 if none."""
        return max((b for b in list(self.arrived) if b <= pages), default=0)


class StorageTraffic:
    """Owns the pins of records being saved and the slots of records being fetched.

    Args:
        store: where the records live.
        stats: counts outcomes.

    Attributes:
        saving: records pinned for storage.
        most_saving: their bound.
    """

    def __init__(self, store: CheckpointStore, stats: Stats):
        self._store = store
        self._stats = stats
        # So that slow storage can never starve captures of slots.
        self.most_saving = max(store.capacity // 2, 1)
        # Told the host slot of a record that was fetched and published; for debugging.
        self.on_fetched: Callable[[int], None] | None = None
        self.saving = 0
        self._saves: dict[Save, None] = {}
        self._fetches: dict[Fetch, None] = {}

    @property
    def fetching(self) -> int:
        """Slots reserved for records from storage."""
        return sum(len(fetch.slots) for fetch in self._fetches)

    def save(self, keys: Iterable[str]) -> Save | None:
        """Pin the records of ``keys`` that storage has not been given yet; None if there are none.

        Args:
            keys: by ascending boundary.

        At most half of the store may wait for storage at a time; beyond that a write is dropped and counted.
        """
        records = []
        # Deepest first: those that serve most.
        for key in reversed(list(keys)):
            record = self._store.get(key)
            if record is None or record.stored:
                continue
            if self.saving >= self.most_saving:
                self._stats.save_dropped += 1
                continue
            record.stored = True
            self._store.pin(key)
            self.saving += 1
            records.append(record)
        if not records:
            return None
        save = Save(records)
        self._saves[save] = None
        return save

    def saved(self, save: Save) -> None:
        """Storage is done with the records, well or badly. Void after :meth:`clear`."""
        if save in self._saves:
            del self._saves[save]
            self.saving -= len(save.records)
            for record in save.records:
                self._store.unpin(record)

    def fetch(self, fetch: Fetch, pages: int) -> bool:
        """Reserve the host slots of a prefetch of ``pages`` pages, deepest batch first.

        Returns False if not one record could arrive, which makes the pages useless.
        """
        for batch in reversed(range(-(-pages // fetch.span))):
            if min((batch + 1) * fetch.span, pages) in fetch.resident:
                continue  # nothing deeper can come
            slot = self._store.reserve()
            if slot is None:
                break
            fetch.slots[batch] = slot
        # What had to make room is read from storage after all.
        fetch.resident = {b: key for b, key in fetch.resident.items() if key in self._store}
        if not fetch.slots and not fetch.resident:
            return False
        self._fetches[fetch] = None
        return True

    def publish(self, fetch: Fetch, keys: Sequence[str], pages: int, *, own_pages: bool) -> None:
        """The first ``pages`` prefetched pages were given to the tree: offer the records that came along.

        Args:
            keys: page hashes of the prefetched span.
            own_pages: every one of these pages came with this prefetch; otherwise some belong to
                another run, which counts as mixed provenance.
        """
        page, below = self._store.page_size, fetch.start
        # A copy: a prefetch that was cut short is still being read.
        for boundary, slot in sorted(list(fetch.arrived.items())):
            if boundary > pages or fetch not in self._fetches:
                continue
            key, tokens = keys[boundary - 1], fetch.start + boundary * page
            saves, below = tokens - below, tokens
            if slot is None:
                self._stats.mixed += key in self._store
                continue
            del fetch.slots[(boundary - 1) // fetch.span]
            if self.on_fetched is not None:
                self.on_fetched(slot)
            self._store.publish(key, tokens, slot, replace=False, mixed=not own_pages, saves=saves)
            self._stats.fetched += 1
            self._stats.mixed += not own_pages
            if (record := self._store.get(key)) is not None:
                record.stored = True

    def fetched(self, fetch: Fetch) -> None:
        """The storage thread is done with the prefetch: free what was not published."""
        if fetch in self._fetches:
            del self._fetches[fetch]
            self._stats.fetch_unused += sum(
                1 for slot in fetch.arrived.values() if slot in fetch.slots.values()
            )
            for slot in fetch.slots.values():
                self._store.discard(slot)

    def finish_all(self) -> None:
        """The storage threads have stopped and nothing will be told any more."""
        for save in list(self._saves):
            for record in save.records:
                record.stored = False
            self.saved(save)
        for fetch in list(self._fetches):
            self.fetched(fetch)

    def clear(self) -> None:
        """Forget everything, after the store was cleared."""
        self._saves.clear()
        self.saving = 0
        self._fetches.clear()

    @property
    def idle(self) -> bool:
        """Whether no storage thread holds a slot."""
        return not self._saves and not self._fetches

    def check_idle(self) -> None:
        """Raise AssertionError unless no storage thread holds a slot."""
        assert self.idle, (self._saves, self._fetches)
