"""CheckpointManager: the life of checkpoints on one rank, from a batch's plan to a published record.

Called by the scheduler's thread only, in this order for every batch::

    request_restore(rid, ...)       a fresh row was matched against a checkpoint: its record is pinned
    plan(rows)                      restores are bound to rows, captures get host slots
    begin_forward()                 restores run on the current stream
      capture_interior(...)           each layer hands over the chunk's rows
    end_waves(), capture_ends()     boundaries the forward ended at are gathered from the rings
    finish_forward()                interior records are sent to the host
    close_step()                    pins are released

and, when the tree took a request's pages, ``commit``; when the request gave its row back, ``release``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .capture import Capture, EndCapture, InteriorCapture
from .geometry import page_floor
from .layout import Kind
from .policy import PlacementPolicy, Span
from .restore import ALL_KINDS, Restore, restore
from .rings import Ring, check_layout
from .staging import RecordMover
from .store import CheckpointStore, Published, Record


class CheckpointError(RuntimeError):
    """The engine did what a checkpoint rules out. The process must end: going on would read stale rows."""


class Row(NamedTuple):
    """One request of a batch: tokens ``[start, end)`` are computed in request slot ``slot``.

    Attributes:
        rid: request id.
        slot: request slot.
        generation: counts the allocations of that slot, so that a reused slot is seen to be fresh.
        start: tokens already there.
        end: tokens there after the forward.
        decode: the row is a decode step.
    """

    rid: str
    slot: int
    generation: int
    start: int
    end: int
    decode: bool


class NewRange(NamedTuple):
    """Tokens ``[start, end)`` whose pages an insert put into the tree.

    Attributes:
        leaf: True for a new leaf; False where the tree took the inserting run's pages for tokens that it
            already held (device eviction undone, resident pages re-pointed).
    """

    start: int
    end: int
    leaf: bool


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
    discarded: int = 0


@dataclass
class _Step:
    restores: list[Restore] = field(default_factory=list)
    interior: list[Capture] = field(default_factory=list)
    ends: list[Capture] = field(default_factory=list)
    interior_gather: InteriorCapture | None = None
    wave: EndCapture | None = None
    ran: bool = False


class CheckpointManager:
    """Owns the store, the bytes and the step in flight.

    Args:
        store: decides slots.
        mover: holds bytes.
        rings: the engine's rings, in the order of the layout's sections.
        policy: chooses boundaries.
        strict_provenance: attach a capture only to pages of the same run (``SGLANG_UNIFIED_KV_PROVENANCE``).

    Raises:
        ValueError: the rings do not fit the layout.
    """

    def __init__(
        self,
        store: CheckpointStore,
        mover: RecordMover,
        rings: Sequence[Ring],
        policy: PlacementPolicy,
        *,
        strict_provenance: bool,
    ):
        check_layout(mover.layout, list(rings))
        self.store = store
        self.mover = mover
        self.rings = list(rings)
        self.policy = policy
        self.strict_provenance = strict_provenance
        self.stats = Stats()
        self.restore_kinds = ALL_KINDS
        self._requested: dict[str, Record] = {}
        self._pending: dict[str, dict[int, int]] = {}
        self._generation: dict[int, int] = {}
        self._step: _Step | None = None
        self._armed = False
        self._section_of = {(r.spec.kind, r.buffer.data_ptr()): i for i, r in enumerate(self.rings)}

    # -- before the forward

    def request_restore(self, rid: str, key: str, boundary: int) -> None:
        """Pin the checkpoint that a fresh row of ``rid`` will resume from.

        Raises:
            CheckpointError: admission let a match through that no checkpoint covers.
        """
        record = self.store.pin(key)
        if record is None or record.boundary != boundary:
            raise CheckpointError(
                f"request {rid} was admitted at {boundary} tokens but no checkpoint is there"
            )
        self._drop_request(rid)
        self._requested[rid] = record

    def plan(self, rows: Sequence[Row]) -> None:
        """Bind restores to the rows of a batch and give its captures host slots.

        Raises:
            CheckpointError: a fresh row has a prefix and no restore, or the other way round.
        """
        if self._step is not None:
            raise CheckpointError("a batch was planned while another one was open")
        step = self._step = _Step()
        for row in rows:
            fresh = self._generation.get(row.slot) != row.generation
            self._generation[row.slot] = row.generation
            record = self._requested.pop(row.rid, None)
            if record is not None:
                step.restores.append(Restore(row.rid, row.slot, record))
            expected = row.start if fresh else 0
            found = record.boundary if record is not None else 0
            if expected != found:
                raise CheckpointError(
                    f"request {row.rid} computes [{row.start}, {row.end}) in "
                    f"{'fresh' if fresh else 'its own'} slot {row.slot}, restore from {found}"
                )
        # Everything this batch resumes from is pinned by now: only here may captures evict.
        flat_offset = 0
        for row in rows:
            self._plan_captures(step, row, flat_offset)
            flat_offset += row.end - row.start
        surplus = step.interior[: max(0, len(step.interior) - self.mover.staging_slots)]
        for capture in surplus:
            self._discard(capture.rid, capture.boundary)
            self.stats.dropped_no_staging += 1
        step.interior = step.interior[len(surplus) :]

    def _plan_captures(self, step: _Step, row: Row, flat_offset: int) -> None:
        for boundary in self.policy.boundaries(Span(row.start, row.end, row.decode)):
            host_slot = self.store.reserve()
            if host_slot is None:
                self.stats.dropped_no_slot += 1
                continue
            if boundary in self._pending.setdefault(row.rid, {}):
                self._discard(row.rid, boundary)
            self._pending.setdefault(row.rid, {})[boundary] = host_slot
            capture = Capture(row.rid, row.slot, boundary, row.start, flat_offset, host_slot)
            (step.ends if boundary == row.end else step.interior).append(capture)

    # -- inside the forward

    @property
    def planned(self) -> bool:
        """True while a planned batch has not run its target forward yet."""
        return self._step is not None and not self._step.ran

    @property
    def armed(self) -> bool:
        """True between begin_forward and finish_forward: layers may hand over rows."""
        return self._armed

    def begin_forward(self) -> None:
        """Run the step's restores on the current stream; nothing if no batch is planned."""
        step = self._step
        if step is None:
            return
        self._armed = step.ran = True
        if step.restores:
            restore(step.restores, self.rings, self.mover, self.restore_kinds)
            self.stats.restored += len(step.restores)
        if step.interior:
            step.interior_gather = InteriorCapture(step.interior, self.mover)

    def capture_interior(self, kind: Kind, ring_address: int, flat_rows) -> None:
        """Take one ring's rows of every boundary inside the chunks, before the ring is overwritten.

        Args:
            kind: what the rows are.
            ring_address: ``data_ptr`` of the ring buffer they are about to be stored into.
            flat_rows: ``[tokens, width]`` in batch order.
        """
        if not self._armed or self._step.interior_gather is None:
            return
        section = self._section_of[kind, ring_address]
        self._step.interior_gather.gather(section, self.rings[section], flat_rows)

    def end_waves(self) -> Iterator[None]:
        """Step through the captures at ends of spans, as many at a time as staging holds.

        Between two steps the caller has :meth:`capture_ends` called for every kind; each wave is sent to
        the host when the iterator is advanced.
        """
        if not self._armed:
            return
        step, size = self._step, self.mover.staging_slots
        for first in range(0, len(step.ends), size):
            captures = step.ends[first : first + size]
            step.wave = EndCapture(captures, self.rings, self.mover)
            yield
            step.wave.finish()
            self.stats.captured += len(captures)
        step.wave = None

    def capture_ends(self, kinds: frozenset[Kind]) -> None:
        """Gather the sections of ``kinds`` of the current wave from the rings."""
        if self._armed and self._step.wave is not None:
            self._step.wave.gather(kinds)

    def finish_forward(self) -> None:
        """Send the interior captures to the host and stop listening to the layers."""
        if not self._armed:
            return
        self._armed = False
        if self._step.interior_gather is not None:
            self._step.interior_gather.finish()
            self.stats.captured += len(self._step.interior)

    def close_step(self) -> None:
        """The batch has been launched (or failed): its restores no longer need their pins."""
        step, self._step = self._step, None
        self._armed = False
        if step is not None:
            for item in step.restores:
                self.store.unpin(item.record)

    # -- after the forward

    def commit(
        self, rid: str, chain: Sequence[str], length: int, new_ranges: Sequence[NewRange]
    ) -> None:
        """The tree holds ``[0, length)`` of the request: publish what was captured there.

        Invariant 1 (live equality) is held here and nowhere else.

        Args:
            chain: page hashes of at least ``length`` tokens.
            length: tokens the insert covered, a multiple of the page size.
            new_ranges: what the tree took over from this run; everything else it already held.
        """
        page = self.store.page_size
        fresh: set[int] = set()
        adopted: set[int] = set()
        for span in new_ranges:
            inside = range(page_floor(span.start, page) + page, span.end + 1, page)
            (fresh if span.leaf else adopted).update(inside)
        pending = self._pending.get(rid, {})
        ready = sorted(b for b in pending if b <= length)
        for boundary in sorted(
            (fresh | (adopted if self.strict_provenance else set())) - set(ready)
        ):
            # New pages and no capture: a record of an older run must not pair with them.
            self.stats.removed += self.store.remove(chain[boundary // page - 1])
        for boundary in ready:
            self._publish(
                chain[boundary // page - 1],
                boundary,
                pending.pop(boundary),
                fresh=boundary in fresh,
                adopted=boundary in adopted,
            )
        if not pending:
            self._pending.pop(rid, None)

    def _publish(self, key: str, boundary: int, slot: int, *, fresh: bool, adopted: bool) -> None:
        if not fresh and self.strict_provenance:
            if adopted:
                self.stats.removed += self.store.remove(key)
            self.store.discard(slot)
            self.stats.dropped_provenance += 1
            return
        outcome = self.store.publish(key, boundary, slot, replace=fresh, mixed=not fresh)
        self.stats.published += outcome is not Published.KEPT_EXISTING
        self.stats.replaced += outcome is Published.REPLACED
        self.stats.kept_existing += outcome is Published.KEPT_EXISTING
        self.stats.mixed += outcome is not Published.KEPT_EXISTING and not fresh

    def release(self, rid: str) -> None:
        """The request gave its row back, in whatever way: nothing of it may stay pinned or pending."""
        self._drop_request(rid)
        for boundary in list(self._pending.get(rid, ())):
            self._discard(rid, boundary)
            self.stats.discarded += 1

    def reset(self) -> None:
        """Forget every checkpoint. The engine is idle: no batch is in flight."""
        self._requested.clear()
        self._pending.clear()
        self.store.clear()

    def _drop_request(self, rid: str) -> None:
        record = self._requested.pop(rid, None)
        if record is not None:
            self.store.unpin(record)

    def _discard(self, rid: str, boundary: int) -> None:
        boundaries = self._pending[rid]
        self.store.discard(boundaries.pop(boundary))
        if not boundaries:
            del self._pending[rid]

    def check_integrity(self) -> None:
        """Raise AssertionError unless store and requests agree on every reserved slot and every pin."""
        self.store.check_integrity()
        pending = [slot for slots in self._pending.values() for slot in slots.values()]
        assert len(pending) == len(set(pending)) == self.store.reserved, "a capture's slot is lost"
        if self._step is None:
            assert self.store.pinned == len({id(r) for r in self._requested.values()}), (
                "a record is pinned that no request waits for"
            )

    def check_idle(self) -> None:
        """Raise AssertionError unless nothing is pinned, pending or in flight (invariant 6)."""
        self.check_integrity()
        assert self._step is None and not self._requested and not self._pending, (
            self._step,
            self._requested,
            self._pending,
        )
