"""What a scheduler rank tells its operator: what is engaged, once; counters, where SGLang reports its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING

from .. import engage
from ..attestation import Attestation, Rank, digest
from ..edit import EditError
from ..metrics import ANY, ENGAGED, EXACT, HISPARSE, METRICS, Exporter, Sample
from . import series
from .hisparse_allocator import promises_of
from .ring_allocator import counted, logical
from .series import REPORT

if TYPE_CHECKING:
    from ..checkpoint.manager import CheckpointManager

logger = logging.getLogger(__name__)

_FEATURE = "attestation and metrics"
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter"
_MARK = "_unified_kv_metrics"
SECONDS = 1.0
"""Least time between two exports of a rank."""


@REPORT.wrap(
    f"{_SCHEDULER}.init_metrics_reporter",
    feature=_FEATURE,
    why="on every rank, once: pools, cache and coordinator are built, and SGLang's collector",
    params="self",
    fingerprint="d31c7f2fb4c9852b",
)
def attest(original, self) -> None:
    original(self)
    features = features_of(self)
    if not features:
        return
    said = attestation_of(self, features)
    logger.info("Unified KV engaged on %s: %s", _coordinates(), said)
    collector = self.metrics_collector
    if collector is None:
        return
    types = {
        "counter": collector._counter_cls,
        "gauge": collector._gauge_cls,
        "histogram": collector._histogram_cls,
    }
    if None in types.values():
        # Not earlier: it reads where the processes of a server meet when it is imported.
        from prometheus_client import Counter, Gauge, Histogram

        default = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        types = {kind: types[kind] or default[kind] for kind in types}
    exported = {ANY: ANY, "hicache": EXACT, "radix": EXACT, "hisparse": HISPARSE}
    engaged = {ANY} | {exported[name] for name in features if name in exported}
    reports = self.metrics_reporter.current_scheduler_metrics_enabled
    metrics = [metric for metric in METRICS if reports or metric.every_rank]
    exporter = Exporter(engaged, collector.labels, types, metrics)
    labels = tuple(getattr(said, name) for name in ENGAGED.labels)
    exporter.publish([Sample(ENGAGED.name, 1, labels)])
    if reports:
        setattr(self.metrics_reporter, _MARK, _Reports(self, exporter))


def features_of(scheduler) -> list[str]:
    """Names of what is engaged on this rank, as the attestation lists them."""
    allocator = scheduler.token_to_kv_pool_allocator
    exact = "hicache" if scheduler.enable_hierarchical_cache else "radix"
    engaged = {
        exact: manager_of(scheduler) is not None,
        "ring": counted(allocator),
        "hisparse": promises_of(allocator) is not None,
    }
    return [name for name, there in engaged.items() if there]


def manager_of(scheduler) -> CheckpointManager | None:
    """The manager of the scheduler's checkpoints; None unless exact reuse is engaged."""
    if engage.current() is None:
        return None
    from .strict_cache import StrictUnifiedRadixCache

    cache = scheduler.tree_cache
    return cache.checkpoints if isinstance(cache, StrictUnifiedRadixCache) else None


def attestation_of(scheduler, features: list[str]) -> Attestation:
    """What this rank says.

    Raises:
        EditError: an edit is no longer what was verified.
    """
    applied = [one for one in series.ALL if one.applied]
    if reasons := [reason for one in applied for reason in one.audit()]:
        raise EditError(reasons)
    edits, fingerprints = digest(applied)
    general = {
        "features": "+".join(features),
        "plugin_version": version("sglang-unified-kv"),
        "sglang_version": version("sglang"),
        "edits": str(edits),
        "edits_digest": fingerprints,
    }
    manager = manager_of(scheduler)
    return Attestation(**general, **({} if manager is None else _checkpoints(manager)))


def _checkpoints(manager: CheckpointManager) -> dict[str, str]:
    from sglang.srt.runtime_context import get_memory

    from ..checkpoint.record_format import HEADER_BYTES
    from .build import policy_name, stride_of

    settings, layout = engage.engaged_settings(), manager.mover.layout
    policy = policy_name(settings)
    records, slots = manager.store.capacity, manager.mover.staging_slots
    return {
        "policy": policy,
        "stride": str(stride_of(settings)) if policy == "grid" else "",
        "records": str(records),
        "record_bytes": str(layout.record_bytes),
        "host_gb": f"{records * (HEADER_BYTES + layout.record_bytes) / 1e9:.3f}",
        "staging_slots": str(slots),
        "staging_gb": f"{slots * layout.record_bytes / 1e9:.3f}",
        "provenance": settings.provenance,
        "storage": get_memory().hicache_storage_backend or "none",
        "checksum": str(int(settings.dbg_checksum)),
        "layout": layout.fingerprint[:16],
    }


def _coordinates() -> str:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    rank = Rank(parallel.dp_rank or 0, parallel.tp_rank)
    return f"{rank} (dp_size {parallel.num_dp_ranks}, tp_size {parallel.tp_size})"


# -- counters


class _Reports:
    """Exports a scheduler's counters, at most once in :data:`SECONDS`."""

    def __init__(self, scheduler, exporter: Exporter):
        self._scheduler = scheduler
        self._exporter = exporter
        self._next = 0.0

    def tick(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + SECONDS
            self._exporter.publish(samples_of(self._scheduler))


def _tick(reporter) -> None:
    reports = getattr(reporter, _MARK, None)
    if reports is not None:
        reports.tick()


@REPORT.wrap(
    f"{_REPORTER}._log_hicache_stats",
    feature=_FEATURE,
    why="where SGLang's reporter gathers what it exports next, of prefills, decode steps and idle rounds",
    params="self",
    fingerprint="9dc4156c477884db",
)
def export_with_sglang(original, self) -> None:
    original(self)
    _tick(self)


@REPORT.wrap(
    f"{_REPORTER}._maybe_log_idle_metrics",
    feature=_FEATURE,
    why="SGLang exports every 30 s when idle; what storage did and a flush is told sooner",
    params="self",
    fingerprint="40fc462def6540e0",
)
def export_when_idle(original, self) -> None:
    original(self)
    _tick(self)


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
    yield from _each("ring_slots", free=free, used=rows.size - free)
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
