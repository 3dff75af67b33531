"""CheckpointManager: the life of checkpoints on one rank, from a batch's plan to a published record.

Called by the scheduler's thread only, in this order for every batch::

    admit(rid, ...)                 what is known of a request that gets a row
    request_restore(rid, ...)       its row was matched against a checkpoint: that record is pinned
    plan(rows)                      restores are bound to rows, captures get host slots
    begin_forward()                 restores run on the current stream
      capture_interior(...)           each layer hands over the chunk's rows, the draft model's last
    end_waves(), capture_ends()     interior records are sent to the host; boundaries the forward ended
                                    at are gathered from the rings and sent
    close_step()                    pins are released

and, when the result of a verify step is known, ``verified``; when the tree took a request's pages,
``commit``; when the request gave its row back, ``release``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .capture import Capture, EndCapture, InteriorCapture
from .geometry import verified_reach
from .layout import DRAFT_KINDS, Kind
from .pending import PendingCaptures
from .placement import Placement
from .policy import Path, PlacementPolicy, Span
from .publish import NewRange, Publisher
from .restore import Restore, restore
from .rings import Ring, check_layout
from .rows import rows_on
from .savings import Savings
from .staging import RecordMover
from .stats import Stats
from .storage import StorageTraffic
from .store import CheckpointStore, Record
from .verify import Verifier

logger = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """The engine did what a checkpoint rules out. The process must end: going on would read stale rows."""


class Row(NamedTuple):
    """One request of a batch: tokens ``[start, end)`` are computed in request slot ``slot``.

    Attributes:
        rid: names the request, uniquely among all that ever ran.
        slot: request slot; None if the request was released since the batch was prepared. Its tokens
            are still computed, for nobody.
        generation: counts the allocations of that slot, so that a reused slot is seen to be fresh.
        start: tokens already there.
        end: tokens there after the forward.
        decode: the row is a decode step.
        verify: tokens that a verify step of speculative decoding commits at most, 0 for any other forward.
            ``start`` is then what is known to be committed, ``end`` is not used.
        next_known: the draft model computes its row at ``end - 1`` from the token that follows. False where
            it does from one that was sampled and thrown away, in the middle of a prefill.
    """

    rid: str
    slot: int | None
    generation: int
    start: int
    end: int
    decode: bool
    verify: int = 0
    next_known: bool = True

    @property
    def own_slot(self) -> int:
        """The slot of a row that has one."""
        assert self.slot is not None, self
        return self.slot


@dataclass
class _Step:
    restores: list[Restore] = field(default_factory=list)
    interior: list[Capture] = field(default_factory=list)
    ends: list[Capture] = field(default_factory=list)
    interior_gather: InteriorCapture | None = None
    wave: EndCapture | None = None
    ran: bool = False
    captured: bool = False


class CheckpointManager:
    """Owns the store, the bytes and the step in flight.

    Args:
        store: decides slots.
        mover: holds bytes.
        rings: the engine's rings, in the order of the layout's sections.
        policy: chooses boundaries.
        strict_provenance: attach a capture only to pages of the same run (``SGLANG_UNIFIED_KV_PROVENANCE``).
        verify: compare every restore with its capture (``SGLANG_SWA_DBG_CHECKSUM``).

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
        verify: bool = False,
    ):
        check_layout(mover.layout, list(rings))
        self.store = store
        self.mover = mover
        self.rings = list(rings)
        self.rows = rows_on(mover.device, mover.layout, self.rings, mover.staging)
        self.placement = Placement(policy, store)
        self.stats = Stats()
        self._requested: dict[str, Record] = {}
        self.storage = StorageTraffic(store, self.stats)
        self.strict_provenance = strict_provenance
        self.suspended = False
        # Why weights may change at any moment, without a call.
        self._unsettled: set[str] = set()
        self._pending = PendingCaptures(store)
        self._publisher = Publisher(store, self._pending, self.stats, strict=strict_provenance)
        self.verifier = Verifier(mover, self.rings) if verify else None
        if self.verifier is not None:
            mover.on_save = self.verifier.captured
            self.storage.on_fetched = self.verifier.fetched
        self._warned: set[str] = set()
        self._generation: dict[int, int] = {}
        self._paths: dict[str, Path] = {}
        # Position behind a draft row that no cold run has, by request.
        self._draft_foreign: dict[str, int] = {}
        self._step: _Step | None = None
        self._armed: _Step | None = None
        self.drafts = any(r.spec.kind in DRAFT_KINDS for r in self.rings)
        self._section_of = {(r.spec.kind, r.buffer.data_ptr()): i for i, r in enumerate(self.rings)}

    @property
    def policy(self) -> PlacementPolicy:
        """Chooses boundaries."""
        return self.placement.policy

    def deepest(self, chain: Sequence[str], limit: int) -> int:
        """Deepest boundary not beyond ``limit`` tokens that may be resumed at; 0 if none."""
        return 0 if self.suspended else self.store.deepest(chain, limit)

    def touch(self, chain: Sequence[str], boundary: int) -> None:
        """Count a use of the record at ``boundary`` of a prefix; nothing at 0 or if there is none."""
        if boundary:
            self.store.touch(chain[boundary // self.store.page_size - 1])

    def suspend(self) -> None:
        """The weights change: nothing is captured, reused or published until :meth:`resume`."""
        if not self.suspended:
            self.suspended = True
            logger.warning(
                "The weights were updated: no prefix is reused or stored until the cache is flushed."
            )

    def unsettled(self, why: str, on: bool) -> None:
        """The weights may change at any moment, without a call, for as long as this is on."""
        if on:
            self._unsettled.add(why)
        else:
            self._unsettled.discard(why)

    @property
    def suspended_by(self) -> str | None:
        """Why :meth:`resume` has to wait; None if nothing is in the way.

        A request that holds a row has KV of the weights before, in part or as a whole.
        """
        if self._unsettled:
            return " and ".join(sorted(self._unsettled))
        if self._step is not None or self._requested or self._pending or self._paths:
            return "a request still has KV of the weights before"
        return None

    def resume(self) -> None:
        """Nothing of the weights before is left: forget every checkpoint, and reuse and publish again."""
        assert self.suspended and self.suspended_by is None, self.suspended_by
        self.reset()
        self.suspended = False

    # -- before the forward

    def admit(
        self, rid: str, chain: Sequence[str], resumed: int, matched: int, prompt: int
    ) -> None:
        """A request gets a row: what the placement of its checkpoints goes by until it gives it back.

        Args:
            chain: page hashes of the prompt.
            resumed, matched, prompt: tokens, as :class:`~.policy.Path`.
        """
        if not self.suspended:
            self.stats.admitted(resumed, matched)
        self._paths[rid] = self.placement.admit(chain, resumed, matched, prompt)

    def request_restore(self, rid: str, chain: Sequence[str], boundary: int) -> None:
        """Pin the checkpoint that a fresh row of ``rid`` will resume from.

        Raises:
            CheckpointError: admission let a match through that no checkpoint covers.
        """
        key = chain[boundary // self.store.page_size - 1]
        if self.store.weighed:
            # Here and not whenever a queued request is matched again: the walk down the chain takes time.
            self.store.touch(key, Savings(self.store, chain).at(boundary))
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
            if row.slot is not None:
                self._bind(step, row)
        # Everything this batch resumes from is pinned by now: only here may captures evict.
        self._plan_captures(step, rows)

    def _bind(self, step: _Step, row: Row) -> None:
        fresh = self._generation.get(row.own_slot) != row.generation
        self._generation[row.own_slot] = row.generation
        record = self._requested.pop(row.rid, None)
        if record is not None:
            step.restores.append(Restore(row.rid, row.own_slot, record))
        expected = row.start if fresh else 0
        found = record.boundary if record is not None else 0
        if expected != found:
            raise CheckpointError(
                f"request {row.rid} computes [{row.start}, {row.end}) in "
                f"{'fresh' if fresh else 'its own'} slot {row.slot}, restore from {found}"
            )
        if fresh:
            if row.rid not in self._paths:
                raise CheckpointError(f"request {row.rid} was given a row without being admitted")
            self._publisher.begin(row.rid, row.start)

    def _plan_captures(self, step: _Step, rows: Sequence[Row]) -> None:
        interior: list[tuple[int, Row, int, int]] = []
        flat_offset = 0
        for row in rows:
            if row.verify:
                if row.slot is not None:
                    step.ends += self._plan_verify(row)
                continue
            if row.slot is not None:
                if self.drafts and not row.next_known:
                    self._draft_foreign[row.rid] = row.end
                span = self._wanted(row.rid, row.start, row.end)
                inside = [b for b in span if b != row.end]
                interior += [(len(inside) - i, row, flat_offset, b) for i, b in enumerate(inside)]
                if row.end in span and (capture := self._capture(row, flat_offset, row.end)):
                    step.ends.append(capture)
            flat_offset += row.end - row.start
        # Deepest first, so that what staging or the store cannot hold are shallow boundaries.
        interior.sort(key=lambda item: item[0])
        surplus = len(interior) - self.mover.staging_slots
        if surplus > 0:
            self.stats.dropped_no_staging += surplus
            self._warn_once("staging is full", "SGLANG_SWA_HICACHE_STATE_STAGING_PAGES")
        for _, row, offset, boundary in interior[: self.mover.staging_slots]:
            if capture := self._capture(row, offset, boundary):
                step.interior.append(capture)

    def _wanted(self, rid: str, start: int, end: int) -> list[int]:
        """Boundaries in ``(start, end]`` that the policy wants and whose draft window is a cold run's."""
        if self.suspended:
            return []
        wanted = self.policy.boundaries(Span(start, end), self._paths[rid])
        foreign = self._draft_foreign.get(rid)
        if foreign is None:
            return wanted
        window = self.mover.layout.window
        clean = [b for b in wanted if not foreign <= b < foreign + window]
        self.stats.dropped_draft += len(wanted) - len(clean)
        return clean

    def _plan_verify(self, row: Row) -> list[Capture]:
        """Captures at every boundary that the step may reach; :meth:`verified` tells which one it did."""
        first, end = verified_reach(row.start, row.verify, self._pending.in_flight(row.rid))
        slots: dict[int, int] = {}
        for boundary in self._wanted(row.rid, first, end):
            if (host_slot := self._reserve()) is not None:
                slots[boundary] = host_slot
        self._pending.expect(row.rid, first, end, slots)
        return [Capture(row.rid, row.own_slot, b, first, 0, slot) for b, slot in slots.items()]

    def _capture(self, row: Row, flat_offset: int, boundary: int) -> Capture | None:
        host_slot = self._reserve()
        if host_slot is None:
            return None
        self.stats.superseded += self._pending.add(row.rid, boundary, host_slot, decode=row.decode)
        return Capture(row.rid, row.own_slot, boundary, row.start, flat_offset, host_slot)

    def _reserve(self) -> int | None:
        host_slot = self.store.reserve()
        if host_slot is None:
            self.stats.dropped_no_slot += 1
            self._warn_once("every host slot is in use", "SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB")
        return host_slot

    def _warn_once(self, what: str, remedy: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(
                "A checkpoint was not captured: %s. Later prompts hit an earlier boundary. Raise %s if "
                "this is frequent (said once).",
                what,
                remedy,
            )

    # -- inside the forward

    @property
    def planned(self) -> bool:
        """True while a planned batch has not run its target forward yet."""
        return self._step is not None and not self._step.ran

    @property
    def unfinished(self) -> bool:
        """True while the open step has captures whose bytes nobody took."""
        step = self._step
        return step is not None and bool(step.interior or step.ends) and not step.captured

    @property
    def armed(self) -> bool:
        """True from the start of the target forward to :meth:`end_waves`: layers may hand over rows.

        With a draft model that spans its forward behind the target's, which fills the draft rings.
        """
        return self._armed is not None

    def begin_forward(self) -> None:
        """Run the step's restores on the current stream; nothing if no batch is planned."""
        step = self._step
        if step is None:
            return
        self._armed, step.ran = step, True
        if step.restores:
            verifier = self.verifier
            landed = verifier.landed if verifier is not None else None
            restore(step.restores, self.rows, self.mover, landed)
            if verifier is not None:
                verifier.restored(step.restores)
            self.stats.restored += len(step.restores)
        if step.interior:
            step.interior_gather = InteriorCapture(step.interior, self.rows, self.mover)

    def capture_interior(self, kind: Kind, ring_address: int, flat_rows) -> None:
        """Take one ring's rows of every boundary inside the chunks, before the ring is overwritten.

        Args:
            kind: what the rows are.
            ring_address: ``data_ptr`` of the ring buffer they are about to be stored into.
            flat_rows: ``[tokens, width]`` in batch order.
        """
        if self._armed is None or self._armed.interior_gather is None:
            return
        section = self._section_of[kind, ring_address]
        self._armed.interior_gather.gather(section, flat_rows)

    def end_waves(self) -> Iterator[None]:
        """Behind the last layer (the draft model's): save the interior captures, then step through the ends.

        As many at a time as staging holds. Between two steps the caller has :meth:`capture_ends` called
        for every kind; each wave is sent to the host when the iterator is advanced.
        """
        step, size = self._armed, self.mover.staging_slots
        if step is None:
            return
        if step.interior_gather is not None:
            # First: until then their staging slots are held.
            step.interior_gather.finish()
            self.stats.captured += len(step.interior)
        for first in range(0, len(step.ends), size):
            captures = step.ends[first : first + size]
            step.wave = EndCapture(captures, self.rows, self.mover)
            yield
            step.wave.finish()
            self.stats.captured += len(captures)
        step.wave = None
        step.captured = True
        self._armed = None

    def capture_ends(self, kinds: frozenset[Kind]) -> None:
        """Gather the sections of ``kinds`` of the current wave from the rings."""
        if self._armed is not None and self._armed.wave is not None:
            self._armed.wave.gather(kinds)

    def close_step(self) -> None:
        """The batch has been launched (or failed): its restores no longer need their pins."""
        step, self._step = self._step, None
        self._armed = None
        if step is not None:
            for item in step.restores:
                self.store.unpin(item.record)

    # -- after the forward

    def verified(self, rid: str, start: int, end: int) -> None:
        """The result of the request's oldest verify step in flight: it committed ``[start, end)``.

        Raises:
            CheckpointError: no such step was planned.
        """
        try:
            missed, superseded = self._pending.resolve(rid, start, end)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        self.stats.not_reached += missed
        self.stats.superseded += superseded

    def commit(
        self, rid: str, chain: Sequence[str], length: int, new_ranges: Sequence[NewRange]
    ) -> list[str]:
        """The tree holds ``[0, length)`` of the request: publish what was captured there.

        Returns the keys of new records whose pages the tree held before, so that storage may know the
        pages already.

        Args:
            chain: page hashes of at least ``length`` tokens.
            length: tokens the insert covered, a multiple of the page size.
            new_ranges: what the tree took over from this run; everything else it already held.
        """
        path = self._paths[rid]
        keep = self.policy.output_tails(path)
        self.stats.superseded += self._pending.drop_outputs(rid, length, keep)
        fillers = self.placement.commit(chain, path, length, self._pending.ready(rid, length))
        return self._publisher.commit(rid, chain, length, new_ranges, fillers)

    def release(self, rid: str, inserted: int = 0) -> None:
        """The request gave its row back, in whatever way: nothing of it may stay pinned or pending.

        Args:
            inserted: tokens that it gave to the tree at its end, 0 if it gave none.
        """
        self._drop_request(rid)
        self._draft_foreign.pop(rid, None)
        self._paths.pop(rid, None)
        self._publisher.forget(rid)
        # An insert takes every capture that it covers; the rest lies behind the end, or never had pages.
        unbound = len(self._pending.ready(rid, inserted))
        self.stats.discarded += self._pending.release(rid)
        if unbound and self.verifier is not None:
            logger.info("BIND-MISS rid=%s captures=%d", rid, unbound)

    def reset(self) -> None:
        """Forget every checkpoint. The engine is idle: no batch is in flight."""
        self._requested.clear()
        self._draft_foreign.clear()
        self._paths.clear()
        self.placement.clear()
        self._publisher.clear()
        self.store.clear()
        self.storage.clear()
        self._pending.clear()

    def _drop_request(self, rid: str) -> None:
        record = self._requested.pop(rid, None)
        if record is not None:
            self.store.unpin(record)

    def check_integrity(self) -> None:
        """Raise AssertionError unless store and requests agree on every reserved slot and every pin."""
        self.store.check_integrity()
        self._pending.check_integrity(self.storage.fetching)
        if self._step is None:
            assert self.store.pinned == len(self._requested) + self.storage.saving, (
                "a record is pinned that nobody waits for"
            )

    def check_idle(self) -> None:
        """Raise AssertionError unless nothing is pinned, pending or in flight (invariant 6)."""
        self.check_integrity()
        assert self._step is None and not self._requested and not self._pending
        assert not self._draft_foreign and not self._paths, (self._draft_foreign, self._paths)
        self._publisher.check_idle()
        self.storage.check_idle()
