"""Present values of everything that a scheduler exports: which plain counter each metric shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ... import engage
from ...metrics import Sample
from ..hisparse.pool import promises_of
from ..ring.allocator import logical

if TYPE_CHECKING:
    from ...checkpoint.manager import CheckpointManager


def manager_of(scheduler) -> CheckpointManager | None:
    """The manager of the scheduler's checkpoints; None unless exact reuse is engaged."""
    if engage.current() is None:
        return None
    from ..exact.cache import StrictUnifiedRadixCache

    cache = scheduler.tree_cache
    return cache.checkpoints if isinstance(cache, StrictUnifiedRadixCache) else None


def samples_of(scheduler) -> Iterator[Sample]:
    """Present values of everything that is engaged."""
    manager = manager_of(scheduler)
    if manager is not None:
        yield from _gate(manager)
        yield from _records(manager)
        yield from _storage(manager)
    yield from _ring(scheduler)
    if promises_of(scheduler.token_to_kv_pool_allocator) is not None:
        yield from _hisparse(scheduler)


def _each(name: str, **values: float) -> Iterator[Sample]:
    """One sample for every value of the metric's only label."""
    for label, value in values.items():
        yield Sample(f"sglang:unified_kv_{name}", value, (label,))


def _one(name: str, value) -> Sample:
    return Sample(f"sglang:unified_kv_{name}", value)


def _gate(manager) -> Iterator[Sample]:
    stats = manager.stats
    yield from _each(
        "gate_results_total",
        exact=stats.gate_exact,
        cut=stats.gate_cut,
        rejected=stats.gate_rejected,
        none=stats.gate_none,
    )
    yield _one("gate_reused_tokens_total", stats.reused_tokens)
    yield _one("gate_cut_tokens", stats.cut_tokens)


def _records(manager) -> Iterator[Sample]:
    stats, store, mover = manager.stats, manager.store, manager.mover
    payload = mover.layout.record_bytes
    yield _one("captures_total", stats.captured)
    yield _one("restores_total", stats.restored)
    yield from _each(
        "checkpoint_bytes_total",
        device_to_host=stats.captured * payload,
        host_to_device=stats.restored * payload,
        host_to_storage=stats.saved * payload,
        storage_to_host=stats.read * payload,
    )
    yield from _each(
        "published_records_total",
        new=stats.published - stats.replaced,
        replaced=stats.replaced,
        kept_existing=stats.kept_existing,
    )
    yield _one("mixed_records_total", stats.mixed)
    yield from _each(
        "dropped_captures_total",
        no_host_slot=stats.dropped_no_slot,
        no_staging_slot=stats.dropped_no_staging,
        provenance=stats.dropped_provenance,
        draft_window=stats.dropped_draft,
    )
    yield from _each(
        "unpublished_captures_total",
        discarded=stats.discarded,
        superseded=stats.superseded,
        not_reached=stats.not_reached,
    )
    yield _one("removed_records_total", stats.removed)
    yield _one("evicted_records_total", store.evictions)
    yield from _each("records", host=len(store), storage=store.stored)
    free, published = store.free, len(store)
    yield from _each(
        "host_slots",
        free=free,
        published=published,
        in_flight=store.capacity - free - published,
    )
    yield _one("record_pins", store.pinned)
    yield _one("staging_slots", mover.staging_slots)
    yield _one("staging_waits_total", mover.waits)
    yield _one("suspended", int(manager.suspended))


def _storage(manager) -> Iterator[Sample]:
    stats, traffic = manager.stats, manager.storage
    yield from _each(
        "storage_saves_total",
        saved=stats.saved,
        failed=stats.save_failed,
        dropped=stats.save_dropped,
    )
    yield from _each(
        "storage_fetches_total",
        published=stats.fetched,
        unused=stats.fetch_unused,
        rejected=stats.fetch_rejected,
    )
    yield _one("storage_rejected_pages_total", stats.pages_rejected)
    yield _one("storage_errors_total", stats.storage_errors)
    yield from _each("storage_slots", save=traffic.saving, fetch=traffic.fetching)


def _ring(scheduler) -> Iterator[Sample]:
    rows = scheduler.req_to_token_pool
    free = rows.available_size()
    # A decode node keeps more for requests in transfer, and its size leaves them out.
    yield from _each("ring_slots", free=free, used=rows.size + rows.pre_alloc_size - free)
    allocator = logical(scheduler.token_to_kv_pool_allocator)
    yield _one("ring_slot_tokens", allocator.swa_ring_cost_tokens)


def _hisparse(scheduler) -> Iterator[Sample]:
    coordinator = scheduler.hisparse_coordinator
    promises = promises_of(scheduler.token_to_kv_pool_allocator)
    assert promises is not None, "its pool is unified"
    reads, swapped_in = coordinator.tally.latest()
    yield _one("hisparse_reads_total", reads)
    yield _one("hisparse_swap_ins_total", swapped_in)
    yield from _each(
        "hisparse_bytes_total",
        host_to_device=swapped_in * coordinator.row_bytes,
        device_to_host=coordinator.saved_rows * coordinator.layers * coordinator.row_bytes,
    )
    host = coordinator.mem_pool_host
    yield from _each(
        "hisparse_host_rows",
        free=host.available_size(),
        used=host.logical_size - host.available_size(),
    )
    free, promised = promises.free(), promises.outstanding()
    yield from _each(
        "hisparse_device_rows",
        free=free - promised,
        promised=promised,
        used=promises.region - free,
    )
