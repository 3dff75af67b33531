"""The table of metrics, their export through Prometheus' client, and which counter each one shows."""

from collections import Counter
from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import prometheus_client
import pytest
from made_up_engine import Engine
from sglang_unified_kv.checkpoint.stats import Stats
from sglang_unified_kv.edits.report import export, samples
from sglang_unified_kv.metrics import ANY, BY_NAME, EXACT, METRICS, Exporter, Metric, Sample

LABELS = {"model_name": "tiny", "tp_rank": 1}
COUNTER = Metric("sglang:made_up_total", "counter", "Made up.", ANY, {"kind": ("a", "b")})
GAUGE = Metric("sglang:made_up_level", "gauge", "Made up.", ANY)
HISTOGRAM = Metric("sglang:made_up_tokens", "histogram", "Made up.", EXACT, buckets=(256, 512))


def test_the_table_is_complete_and_named_as_sglang_names():
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("sglang:unified_kv_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith(".") and metric.help[0].isupper() or metric.help[0] == "1"
        assert bool(metric.buckets) == (metric.kind == "histogram")
        for values in metric.labels.values():
            # Whoever reads the help learns what each value means.
            for value in values:
                assert value in metric.help, (metric.name, value)


@pytest.fixture
def exported(monkeypatch):
    """``exporter, read``: an exporter of three made-up metrics; ``read(name, **labels)`` is what it shows."""
    registry = prometheus_client.CollectorRegistry()
    kinds = {
        "counter": prometheus_client.Counter,
        "gauge": prometheus_client.Gauge,
        "histogram": prometheus_client.Histogram,
    }
    types = {kind: partial(made, registry=registry) for kind, made in kinds.items()}
    metrics = (COUNTER, GAUGE, HISTOGRAM)
    monkeypatch.setattr("sglang_unified_kv.metrics.BY_NAME", {m.name: m for m in metrics})

    def read(name, **labels):
        return registry.get_sample_value(name, {"model_name": "tiny", "tp_rank": "1"} | labels)

    return partial(Exporter, labels=LABELS, types=types, metrics=metrics), read


def test_totals_are_exported_as_they_are(exported):
    make, read = exported
    exporter = make({ANY, EXACT})
    assert read(COUNTER.name, kind="a") is None
    cuts = Counter({256: 2, 1024: 1})
    for total, level in ((5, 3.0), (5, 1.0), (9, 2.0)):
        samples = [Sample(COUNTER.name, total, ("a",)), Sample(COUNTER.name, 1, ("b",))]
        samples += [Sample(GAUGE.name, level), Sample(HISTOGRAM.name, cuts)]
        exporter.publish(samples)
        assert (read(COUNTER.name, kind="a"), read(COUNTER.name, kind="b")) == (total, 1)
        assert read(GAUGE.name) == level
        # The same counter, which goes on growing.
        assert read(f"{HISTOGRAM.name}_count") == sum(cuts.values())
        assert read(f"{HISTOGRAM.name}_sum") == sum(k * n for k, n in cuts.items())
        assert read(f"{HISTOGRAM.name}_bucket", le="256.0") == cuts[256]
        cuts[256] += 1


def test_what_is_not_engaged_is_not_created(exported):
    make, read = exported
    make({ANY}).publish([Sample(GAUGE.name, 1)])
    assert read(GAUGE.name) == 1 and read(f"{HISTOGRAM.name}_count") is None


@pytest.mark.parametrize("label", sorted({label for m in METRICS for label in m.labels}))
def test_a_label_that_a_metric_has_of_its_own_is_named(exported, label):
    make, _ = exported
    with pytest.raises(ValueError, match=f"--extra-metric-labels sets {label}, which metrics"):
        make({ANY}, labels=LABELS | {label: "mine"})


def test_a_counter_that_fell_is_a_fault(exported):
    make, _ = exported
    exporter = make({ANY})
    exporter.publish([Sample(COUNTER.name, 5, ("a",))])
    with pytest.raises(ValueError):
        exporter.publish([Sample(COUNTER.name, 4, ("a",))])


# -- which counter each metric shows

TOLD = {
    "gate_results_total": {
        "exact": "gate_exact",
        "cut": "gate_cut",
        "rejected": "gate_rejected",
        "none": "gate_none",
    },
    "gate_reused_tokens_total": "reused_tokens",
    "gate_cut_tokens": "cut_tokens",
    "captures_total": "captured",
    "restores_total": "restored",
    "published_records_total": {"replaced": "replaced", "kept_existing": "kept_existing"},
    "mixed_records_total": "mixed",
    "dropped_captures_total": {
        "no_host_slot": "dropped_no_slot",
        "no_staging_slot": "dropped_no_staging",
        "provenance": "dropped_provenance",
        "draft_window": "dropped_draft",
    },
    "unpublished_captures_total": {
        "discarded": "discarded",
        "superseded": "superseded",
        "not_reached": "not_reached",
    },
    "removed_records_total": "removed",
    "storage_saves_total": {
        "saved": "saved",
        "failed": "save_failed",
        "dropped": "save_dropped",
    },
    "storage_fetches_total": {
        "published": "fetched",
        "unused": "fetch_unused",
        "rejected": "fetch_rejected",
    },
    "storage_rejected_pages_total": "pages_rejected",
    "storage_errors_total": "storage_errors",
}


def samples_of(manager):
    parts = (samples._gate, samples._records, samples._storage)
    values = [sample for part in parts for sample in part(manager)]
    found = {(s.name.removeprefix("sglang:unified_kv_"), *s.labels): s.value for s in values}
    assert len(found) == len(values)
    return found


def test_every_counter_of_ours_is_shown_under_its_name():
    manager = Engine(records=8, staging=3).manager
    for number, item in enumerate(fields(Stats), 1000):
        made = Counter({256: 7}) if item.name == "cut_tokens" else number
        setattr(manager.stats, item.name, made)
    manager.mover.waits, manager.store.evictions = 11, 12
    manager.suspended = True
    stats, found = manager.stats, samples_of(manager)
    shown = set()
    for name, told in TOLD.items():
        for label, attribute in told.items() if isinstance(told, dict) else (((), told),):
            key = (name, label) if label else (name,)
            assert found.pop(key) == getattr(stats, attribute), key
            shown.add(attribute)
    assert found.pop(("published_records_total", "new")) == stats.published - stats.replaced
    size = manager.mover.layout.record_bytes
    for path, attribute in (
        ("device_to_host", "captured"),
        ("host_to_device", "restored"),
        ("host_to_storage", "saved"),
        ("storage_to_host", "read"),
    ):
        assert found.pop(("checkpoint_bytes_total", path)) == size * getattr(stats, attribute)
    assert found == {
        ("evicted_records_total",): 12,
        ("records", "host"): 0,
        ("records", "storage"): 0,
        ("host_slots", "free"): 8,
        ("host_slots", "published"): 0,
        ("host_slots", "in_flight"): 0,
        ("record_pins",): 0,
        ("staging_slots",): 3,
        ("staging_waits_total",): 11,
        ("suspended",): 1,
        ("storage_slots", "save"): 0,
        ("storage_slots", "fetch"): 0,
    }
    assert shown | {"published", "read"} == {item.name for item in fields(Stats)}


def test_levels_follow_the_store():
    engine = Engine(records=4, staging=3)
    manager = engine.manager
    engine.fresh(0)
    engine.forward([("r1", 0, 0, 600)])
    found = samples_of(manager)
    assert [found["host_slots", state] for state in ("free", "published", "in_flight")] == [2, 0, 2]
    engine.commit("r1", 600)
    record = manager.store.get("r1:2")
    save = manager.storage.save([record.key])
    found = samples_of(manager)
    assert [found["host_slots", state] for state in ("free", "published", "in_flight")] == [2, 2, 0]
    assert (found["records", "host"], found["records", "storage"]) == (2, 1)
    assert found[("record_pins",)] == found["storage_slots", "save"] == 1
    manager.storage.saved(save)
    assert samples_of(manager)["storage_slots", "save"] == 0
    manager.release("r1")


def test_the_gates_results_are_told_apart():
    stats = Stats()
    for resumed, matched in ((0, 0), (512, 512), (256, 768), (0, 256), (512, 1024)):
        stats.admitted(resumed, matched)
    counts = (stats.gate_none, stats.gate_exact, stats.gate_cut, stats.gate_rejected)
    assert counts == (1, 1, 2, 1)
    assert stats.reused_tokens == 512 + 256 + 512
    assert stats.cut_tokens == {512: 2, 256: 1}


def test_a_rank_exports_at_most_once_a_second(monkeypatch):
    now, published = [100.0], []
    monkeypatch.setattr(export.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(export, "samples_of", lambda scheduler: [scheduler])
    reports = export._Reports("scheduler", SimpleNamespace(publish=published.append))
    for moment in (100.0, 100.1, 100.99, 101.0, 101.5, 107.0):
        now[0] = moment
        reports.tick()
    assert published == [["scheduler"]] * 3


class Copy:
    """A copy of records, under way or done, and the stream that is told to wait for it."""

    done = False
    waited = 0

    def current_stream(self):
        return self

    def query(self):
        return self.done

    def wait_event(self, event):
        self.waited += 1


def test_a_wait_for_staging_is_counted_only_if_the_copy_is_under_way():
    mover = Engine(records=4, staging=2).manager.mover
    copy = mover._module = Copy()
    mover._staging_busy = dict.fromkeys(range(2), copy)
    mover.take(1)
    assert (mover.waits, copy.waited) == (1, 1)
    copy.done = True
    mover.take(1)
    # Ordered all the same.
    assert (mover.waits, copy.waited) == (1, 2)
