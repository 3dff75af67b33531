"""What a scheduler rank tells its operator: what is engaged, once; counters, where SGLang reports its own."""

from __future__ import annotations

import logging
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from ... import engage
from ...attestation import Attestation, Rank, digest
from ...hooking.series import EditError, audit
from ...metrics import ANY, ENGAGED, EXACT, HISPARSE, METRICS, Exporter, Sample
from .. import series
from ..hisparse.pool import promises_of
from ..ring.allocator import counted
from ..series import REPORT
from .samples import manager_of, samples_of

if TYPE_CHECKING:
    from ...checkpoint.manager import CheckpointManager

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
    exported = {ANY: ANY, "hicache": EXACT, "radix": EXACT, "hisparse": HISPARSE}
    engaged = {ANY} | {exported[name] for name in features if name in exported}
    reports = self.metrics_reporter.current_scheduler_metrics_enabled
    metrics = [metric for metric in METRICS if reports or metric.every_rank]
    exporter = Exporter(engaged, collector.labels, _types(collector), metrics)
    labels = tuple(getattr(said, name) for name in ENGAGED.labels)
    exporter.publish([Sample(ENGAGED.name, int(time.time()), labels)])
    if reports:
        setattr(self.metrics_reporter, _MARK, _Reports(self, exporter))


def _types(collector) -> dict[str, type]:
    """Classes of metrics: Prometheus' own, unless the collector was given others."""
    # Not earlier: it reads where the processes of a server meet when it is imported.
    from prometheus_client import Counter, Gauge, Histogram

    return {
        "counter": collector._counter_cls or Counter,
        "gauge": collector._gauge_cls or Gauge,
        "histogram": collector._histogram_cls or Histogram,
    }


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


def attestation_of(scheduler, features: list[str]) -> Attestation:
    """What this rank says.

    Raises:
        EditError: an edit is no longer what was verified.
    """
    applied = [one for one in series.ALL if one.applied]
    if reasons := audit(applied):
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

    from ...checkpoint.record_format import HEADER_BYTES
    from ..exact.build import policy_name, stride_of

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
