"""What a scheduler rank exports on SGLang's ``/metrics``, beside SGLang's own: the table, and its export.

:data:`METRICS` is the whole list; reference and dashboard are made from it or checked against it. Values are
plain counters, kept where things happen; :class:`Exporter` copies them when SGLang reports its own. Imports
neither sglang nor prometheus: the classes of metrics are SGLang's, or what it was told to use instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

SCHEDULER_LABELS = ("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank")
"""Labels of SGLang's scheduler metrics, which ours carry too.

With data parallelism ``dp_rank`` as well, and whatever ``--extra-metric-labels`` adds.
"""

ANY, EXACT, HISPARSE = "any", "exact reuse", "HiSparse"
"""What has to be engaged for a metric to exist; any: whichever feature."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: as exported; a counter's ends in ``_total``.
        kind: Prometheus type.
        help: what it counts, in which unit, and when it should worry.
        feature: :data:`EXACT`, :data:`HISPARSE` or :data:`ANY`.
        labels: beyond those of SGLang's scheduler metrics -> the values they take; () for free text.
        buckets: upper ends of a histogram.
        every_rank: exported by every scheduler rank. Others are exported by the ranks that export SGLang's
            own: one of each attention group, or all with ``--enable-metrics-for-all-schedulers``.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    feature: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    every_rank: bool = False


ENGAGED = Metric(
    "sglang:unified_kv_engaged",
    "gauge",
    "Start of every scheduler rank on which a feature of sglang-unified-kv is engaged, in seconds since the "
    "epoch; the labels say which, with which edits of SGLang, policy and budgets. A rank that is missing "
    "runs SGLang as released; `sglang-unified-kv check` compares the ranks.",
    ANY,
    dict.fromkeys(
        (
            "features",
            "plugin_version",
            "sglang_version",
            "edits",
            "edits_digest",
            "policy",
            "stride",
            "records",
            "record_bytes",
            "host_gb",
            "staging_slots",
            "staging_gb",
            "provenance",
            "storage",
            "checksum",
            "layout",
        ),
        (),
    ),
    every_rank=True,
)

METRICS = (
    ENGAGED,
    # -- the gate
    Metric(
        "sglang:unified_kv_gate_results_total",
        "counter",
        "Requests that were given a row, by what the gate made of the prefix that the cache held. exact: "
        "all of it was reused. cut: less, from an earlier checkpoint. rejected: nothing, for want of a "
        "checkpoint. none: the cache held nothing that a match may return. Many cut or rejected ask for "
        "more host memory or a denser policy.",
        EXACT,
        {"result": ("exact", "cut", "rejected", "none")},
    ),
    Metric(
        "sglang:unified_kv_gate_reused_tokens_total",
        "counter",
        "Prompt tokens that were reused instead of computed, on the device, from the host or from "
        "storage. A retracted request counts again, its own output included.",
        EXACT,
    ),
    Metric(
        "sglang:unified_kv_gate_cut_tokens",
        "histogram",
        "Tokens that the cache held and a request computed again all the same, per request that was cut "
        "or rejected. Their sum over that sum and sglang:unified_kv_gate_reused_tokens_total is the cut "
        "share: what missing checkpoints cost of what the cache held.",
        EXACT,
        buckets=(256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    ),
    # -- checkpoints
    Metric(
        "sglang:unified_kv_captures_total",
        "counter",
        "Checkpoints copied from the device to host memory.",
        EXACT,
    ),
    Metric(
        "sglang:unified_kv_restores_total",
        "counter",
        "Checkpoints copied from host memory into a request's ring: one for every request that reused a "
        "prefix.",
        EXACT,
    ),
    Metric(
        "sglang:unified_kv_checkpoint_bytes_total",
        "counter",
        "Bytes of checkpoints that were copied. device_to_host: captures. host_to_device: restores. "
        "host_to_storage: what the backend acknowledged. storage_to_host: what arrived, whether or not "
        "it verified.",
        EXACT,
        {"path": ("device_to_host", "host_to_device", "host_to_storage", "storage_to_host")},
    ),
    Metric(
        "sglang:unified_kv_published_records_total",
        "counter",
        "Captures offered when the tree took their pages. new: became a record. replaced: took the place "
        "of an older record. kept_existing: an older record stayed.",
        EXACT,
        {"outcome": ("new", "replaced", "kept_existing")},
    ),
    Metric(
        "sglang:unified_kv_mixed_records_total",
        "counter",
        "Records beside pages that another run of the same tokens computed. Both are exact on their own; "
        "SGLANG_UNIFIED_KV_PROVENANCE=strict has none of them.",
        EXACT,
    ),
    Metric(
        "sglang:unified_kv_dropped_captures_total",
        "counter",
        "Captures that were wanted and not made or not kept. no_host_slot: every slot of the host pool "
        "was in use; raise SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB. no_staging_slot: a chunk had more "
        "boundaries than staging has slots; raise SGLANG_SWA_HICACHE_STATE_STAGING_PAGES. provenance: "
        "strict provenance forbade it. draft_window: the draft model's window there was not a cold "
        "run's.",
        EXACT,
        {"reason": ("no_host_slot", "no_staging_slot", "provenance", "draft_window")},
    ),
    Metric(
        "sglang:unified_kv_unpublished_captures_total",
        "counter",
        "Captures whose slot was given back. discarded: the request ended before the tree took the "
        "pages. superseded: a later capture of the same output took its place. not_reached: taken in "
        "advance of a verify step that stopped before it. All of these are normal.",
        EXACT,
        {"reason": ("discarded", "superseded", "not_reached")},
    ),
    Metric(
        "sglang:unified_kv_removed_records_total",
        "counter",
        "Records that were dropped because the tree took new pages for their prefix.",
        EXACT,
    ),
    Metric(
        "sglang:unified_kv_evicted_records_total",
        "counter",
        "Records that made room for others. Hits are cut if this goes on while pages stay: compare with "
        "sglang:unified_kv_gate_cut_tokens and raise SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB.",
        EXACT,
    ),
    Metric(
        "sglang:unified_kv_records",
        "gauge",
        "Records in memory. host: that a hit may use. storage: those of them that storage holds too, as "
        "far as this rank knows.",
        EXACT,
        {"tier": ("host", "storage")},
    ),
    Metric(
        "sglang:unified_kv_host_slots",
        "gauge",
        "Slots of the checkpoint host pool, one record each. published: a record that may be found. "
        "in_flight: a capture or a fetch, or a record that was removed while a copy read it. free: "
        "nothing. Captures are dropped when nearly all are in flight or pinned.",
        EXACT,
        {"state": ("free", "published", "in_flight")},
    ),
    Metric(
        "sglang:unified_kv_record_pins",
        "gauge",
        "Uses of records that keep them from eviction: restores of the batch being launched and writes "
        "to storage. It falls to 0 when the server is idle and storage has kept up.",
        EXACT,
    ),
    Metric(
        "sglang:unified_kv_staging_slots",
        "gauge",
        "Slots of the device staging ring, one record each, that copies to and from host memory pass "
        "through.",
        EXACT,
    ),
    Metric(
        "sglang:unified_kv_staging_waits_total",
        "counter",
        "Times that a forward had to wait, on the device, until the copy of an earlier one had left its "
        "staging slots. If it grows with every batch the link to host memory is saturated.",
        EXACT,
    ),
    Metric(
        "sglang:unified_kv_suspended",
        "gauge",
        "1 after a weight update until the cache is flushed: nothing is reused or stored meanwhile.",
        EXACT,
    ),
    # -- storage
    Metric(
        "sglang:unified_kv_storage_saves_total",
        "counter",
        "Records given to storage. saved: acknowledged. failed: the backend refused or raised. dropped: "
        "not tried, because half of the host pool was waiting for storage already; storage is too slow.",
        EXACT,
        {"outcome": ("saved", "failed", "dropped")},
    ),
    Metric(
        "sglang:unified_kv_storage_fetches_total",
        "counter",
        "Records that came from storage. published: a hit may use it. unused: its pages did not come "
        "with it. rejected: it did not verify, so it is damaged or another server's; any of these is "
        "worth a look at the log.",
        EXACT,
        {"outcome": ("published", "unused", "rejected")},
    ),
    Metric(
        "sglang:unified_kv_storage_rejected_pages_total",
        "counter",
        "Pages from storage that did not verify and counted as misses. Any of these is worth a look at "
        "the log.",
        EXACT,
    ),
    Metric(
        "sglang:unified_kv_storage_errors_total",
        "counter",
        "Calls of the storage backend that raised and counted as misses.",
        EXACT,
    ),
    Metric(
        "sglang:unified_kv_storage_slots",
        "gauge",
        "Host slots that wait for storage. save: records that are being written; it falls to 0 when "
        "storage has kept up. fetch: room for what prefetches may bring.",
        EXACT,
        {"direction": ("save", "fetch")},
    ),
    # -- ring
    Metric(
        "sglang:unified_kv_ring_slots",
        "gauge",
        "Request slots, each with a sliding-window ring and compressor states of its own: used by a "
        "request, or free. Requests queue when none is free; sglang:token_usage is 1 then, and "
        "sglang:full_token_usage says how much memory is in use.",
        ANY,
        {"state": ("free", "used")},
    ),
    Metric(
        "sglang:unified_kv_ring_slot_tokens",
        "gauge",
        "Tokens that SGLang charges for the ring of one request slot.",
        ANY,
    ),
    # -- HiSparse
    Metric(
        "sglang:unified_kv_hisparse_reads_total",
        "counter",
        "C4 rows that decode steps read of sequences longer than their hot buffer, over all layers. Read "
        "from the device without waiting, so it lags a report behind.",
        HISPARSE,
    ),
    Metric(
        "sglang:unified_kv_hisparse_swap_ins_total",
        "counter",
        "Of the rows of sglang:unified_kv_hisparse_reads_total those that were not hot and were copied "
        "from the host. A large share asks for a larger device_buffer_size.",
        HISPARSE,
    ),
    Metric(
        "sglang:unified_kv_hisparse_bytes_total",
        "counter",
        "Bytes of C4 rows that were copied. host_to_device: swap-ins. device_to_host: every row is saved "
        "once.",
        HISPARSE,
        {"path": ("host_to_device", "device_to_host")},
    ),
    Metric(
        "sglang:unified_kv_hisparse_host_rows",
        "gauge",
        "C4 rows of the host pool of each layer, four tokens each: used by requests, or free. There are "
        "as many as the pool has tokens for, so they run out with sglang:kv_available_tokens.",
        HISPARSE,
        {"state": ("free", "used")},
    ),
    Metric(
        "sglang:unified_kv_hisparse_device_rows",
        "gauge",
        "C4 rows of the device region of each layer. used: by a prompt or a hot buffer. promised: free, "
        "but an admitted request will take them. free: may be promised to the next request, which queues "
        "until they suffice for it.",
        HISPARSE,
        {"state": ("free", "promised", "used")},
    ),
)
"""Every metric, in the order of the reference."""

BY_NAME = {metric.name: metric for metric in METRICS}


def taken_labels(names: Iterable[str]) -> str:
    """Those of ``names`` that a metric of ours has for a label of its own, comma-separated."""
    own = {label for metric in METRICS for label in metric.labels}
    return ", ".join(sorted(own.intersection(names)))


TAKEN_LABELS = (
    "--extra-metric-labels sets {taken_labels}, which metrics of this plugin have for labels of their own: "
    "rename there, or serve without --enable-metrics"
)
"""What is said of :func:`taken_labels`."""


class Sample(NamedTuple):
    """A value of a metric.

    Attributes:
        name: of a :class:`Metric`.
        value: total of a counter, level of a gauge; of a histogram, how often each value was observed.
        labels: in the order of :attr:`Metric.labels`.
    """

    name: str
    value: float | Counter[int]
    labels: tuple[str, ...] = ()


class Exporter:
    """The metrics of one scheduler rank, created in the process's Prometheus registry.

    Args:
        engaged: features whose metrics are created.
        labels: SGLang's, with this rank's values.
        types: class of each kind, as ``prometheus_client`` has them.
        metrics: which, of :data:`METRICS`.

    Raises:
        ValueError: ``labels`` holds one that a metric has of its own.
    """

    def __init__(
        self,
        engaged: Collection[str],
        labels: Mapping[str, Any],
        types: Mapping[str, type],
        metrics: Iterable[Metric] = METRICS,
    ):
        if taken := taken_labels(labels):
            raise ValueError(TAKEN_LABELS.format(taken_labels=taken))
        self._labels = dict(labels)
        self._exported: dict[str, Any] = {}
        self._told: dict[tuple[str, ...], Any] = {}
        for metric in metrics:
            if metric.feature in engaged:
                options: dict[str, Any] = {}
                if metric.kind == "gauge":
                    options["multiprocess_mode"] = "mostrecent"
                if metric.buckets:
                    options["buckets"] = metric.buckets
                self._exported[metric.name] = types[metric.kind](
                    name=metric.name,
                    documentation=metric.help,
                    labelnames=[*self._labels, *metric.labels],
                    **options,
                )

    def publish(self, samples: Iterable[Sample]) -> None:
        """Export the present values; those of counters and histograms never fall."""
        for name, value, labels in samples:
            metric = BY_NAME[name]
            own = dict(zip(metric.labels, labels, strict=True))
            child = self._exported[name].labels(**self._labels, **own)
            if metric.kind == "gauge":
                child.set(value)
                continue
            told = self._told.get((name, *labels))
            if isinstance(value, Counter):
                for observed, times in (value - (told or Counter())).items():
                    for _ in range(times):
                        child.observe(observed)
                value = value.copy()
            else:
                child.inc(value - (told or 0))
            self._told[name, *labels] = value
