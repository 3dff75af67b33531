"""Every rule of docs/metrics.md: a real engine in the state that it speaks of, and the metrics that it names.

The rules are the rows of the page's first table. A row without a test fails, and so does a test without a
row, or one that does not read every metric that its row names.
"""

import contextlib
import os
import re
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
from sglang_unified_kv.config import HISPARSE
from sglang_unified_kv.reference.harness import prompt

TEST = Path(__file__).parents[1]
sys.path += [str(TEST / folder) for folder in ("demo", "hisparse")]
# Before SGLang loads its plugins: one of the engines is HiSparse's.
os.environ[HISPARSE] = "1"

from hisparse_engine import engine_of  # noqa: E402
from prometheus_client import REGISTRY  # noqa: E402
from promql_series import Series, evaluate  # noqa: E402
from storage_folder import STORAGE, at, chain_of, file_of, flip  # noqa: E402

PAGE, SLOTS, TOKENS, RECORDS, STAGING = 256, 4, 4096, 9, 2
PREFIX = "sglang:unified_kv_"
TEXT = (TEST.parent / "docs" / "metrics.md").read_text()
TABLE = re.search(r"^\| question \| look at \| alert \|\n\|[-|]+\|\n((?:\|.*\n)+)", TEXT, re.M)[1]
ROWS = dict(re.findall(r"^\| (.*?) \| (.*) \| [^|]*\|$", TABLE, re.M))
"""question -> what to look at."""
TESTS: dict[str, str] = {}
"""question -> name of its test."""


def rule(question):
    """The decorated test is that of the row ``question``."""

    def mark(test):
        assert question not in TESTS, question
        TESTS[question] = test.__name__
        return test

    return mark


def named(cell):
    """(metric, label, value or None if it is a pattern) of every metric that a cell names."""
    for name, label, op, value in re.findall(r'`([\w:]+)(?:{(\w+)(=~?)"([^"]*)"})?`', cell):
        if not name.isupper():
            full = name if name.startswith("sglang:") else PREFIX + name
            yield full, label, value if op == "=" else None


class Metrics:
    """What the process exports, through the client library that SGLang uses.

    Attributes:
        seen: (metric, labels) that were read.
    """

    def __init__(self):
        self.seen = []

    def samples(self, name):
        return [s for f in REGISTRY.collect() for s in f.samples if s.name == name]

    def __call__(self, name, **labels):
        full = name if name.startswith("sglang:") else PREFIX + name
        self.seen.append((re.sub("_(sum|count)$", "", full), labels))
        wanted = labels.items()
        found = [s.value for s in self.samples(full) if wanted <= s.labels.items()]
        assert found, f"{name} {labels} is not exported"
        return sum(found)

    def has_read(self, name, label, value):
        return any(
            name == seen and (not label or (label in labels and value in (None, labels[label])))
            for seen, labels in self.seen
        )


@pytest.fixture
def read(request):
    """``read(name, **labels)``: the present value, summed. A metric of the row that was not read fails."""
    metrics = Metrics()
    yield metrics
    (question,) = (q for q, test in TESTS.items() if test == request.function.__name__)
    missed = [one for one in named(ROWS[question]) if not metrics.has_read(*one)]
    assert not missed, f"{question} names what the test does not read: {missed}"


@contextlib.contextmanager
def exporting():
    """Counters are exported whenever SGLang exports its own."""
    from sglang_unified_kv.edits.report import export as exporting

    with mock.patch.object(exporting, "SECONDS", 0.0):
        yield


def export(engine):
    """A batch, after which SGLang exports: while storage works and nothing runs, it does not."""
    engine.run(prompt(999, 100), 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def shared(make_engine, folder):
    env = at(folder) | {
        "SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB": "0.0056",
        "SGLANG_SWA_HICACHE_STATE_STAGING_PAGES": str(STAGING),
    }
    options = {"enable_metrics": True, "decode_log_interval": 1, "max_total_tokens": TOKENS}
    with exporting(), make_engine(chunked_prefill_size=1024, env=env, **options, **STORAGE) as made:
        manager = made.tree.checkpoints
        assert (manager.store.capacity, manager.mover.staging_slots) == (RECORDS, STAGING)
        yield made


@pytest.fixture
def engine(shared, folder):
    """Idle, with nothing cached or stored."""
    empty(shared, folder)
    yield shared
    shared.drain()
    shared.tree.checkpoints.check_idle()


def empty(engine, folder):
    engine.flush()
    for path in folder.iterdir():
        path.unlink()
    engine.step()


@pytest.fixture
def manager(engine):
    from sglang_unified_kv.checkpoint.placement import Placement
    from sglang_unified_kv.checkpoint.policy import Grid

    found = engine.tree.checkpoints
    yield found
    found.placement = Placement(Grid(PAGE, 1), found.store)


def every(manager, pages):
    """From now on a checkpoint is taken at every ``pages``-th boundary."""
    from sglang_unified_kv.checkpoint.placement import Placement
    from sglang_unified_kv.checkpoint.policy import Grid

    manager.placement = Placement(Grid(PAGE, pages), manager.store)


def results(read):
    return {r: read("gate_results_total", result=r) for r in ("exact", "cut", "rejected", "none")}


class Held:
    """A call that waits until it is let go; the engine goes on meanwhile."""

    def __init__(self, call):
        self._call, self.entered, self.go = call, threading.Event(), threading.Event()

    def __call__(self, *args, **kwargs):
        self.entered.set()
        assert self.go.wait(60)
        return self._call(*args, **kwargs)


@pytest.fixture
def backend(engine):
    return engine.tree.cache_controller.storage_backend._backend


def test_every_rule_has_a_test_and_every_test_a_rule():
    assert ROWS and set(ROWS) == set(TESTS)
    for question, cell in ROWS.items():
        assert [*named(cell)], question
    bullets = re.findall(r"^- `(\w+)`: ", TEXT.partition("## Results of the gate")[2], re.M)
    assert bullets == ["exact", "cut", "rejected", "none"]


@rule("What does HiSparse swap?")
def test_hisparse_counts_reads_and_swaps(make_engine, read):
    # One engine at a time: the first test, before there is a shared one.
    with exporting(), engine_of(make_engine, True, enable_metrics=True) as engine:
        names = ("hisparse_reads_total", "hisparse_swap_ins_total")
        engine.run(prompt(140, 3000), 8)
        engine.step()
        reads, swaps = (read(name) for name in names)
        assert 0 < swaps < reads
        row = engine.scheduler.hisparse_coordinator.row_bytes
        assert read("hisparse_bytes_total", path="host_to_device") == swaps * row


@rule("Is it on, on every rank, with the same edits and budgets?")
def test_a_rank_says_what_is_engaged(engine, read):
    from sglang_unified_kv.edits.report import export as exporting

    assert read("engaged") > 1e9
    (sample,) = read.samples("sglang:unified_kv_engaged")
    said = exporting.attestation_of(engine.scheduler, ["hicache"])
    assert vars(said).items() <= sample.labels.items()
    assert (said.features, said.records, said.storage) == ("hicache", str(RECORDS), "file")


def four_results(engine, manager):
    """A request of each result; returns tokens that were reused, and those that the cache held."""
    every(manager, 2)
    text = prompt(1, 1100)
    outputs = [engine.run(text, 1), engine.run(text, 1)]
    # Three pages are there, and checkpoints at the second and the fourth.
    outputs += [
        engine.run(text[:900] + prompt(2, 50), 1),
        engine.run(text[:300] + prompt(3, 50), 1),
    ]
    reused = [o.cached_tokens for o in outputs]
    assert reused == [0, 1024, 512, 0]
    return sum(reused), 0 + 1024 + 768 + 256


@rule("How much is reused?")
def test_reused_tokens_and_results_are_those_of_the_answers(engine, manager, read):
    before, tokens = results(read), read("gate_reused_tokens_total")
    reused, _ = four_results(engine, manager)
    assert read("gate_reused_tokens_total") - tokens == reused
    assert {k: v - before[k] for k, v in results(read).items()} == dict.fromkeys(before, 1)


@rule("How much is lost for want of a checkpoint?")
def test_the_cut_share_is_what_was_computed_again_of_what_was_held(engine, manager, read):
    (formula,) = re.findall(r"## The cut share\n.*?```text\n(.*?)```", TEXT, re.S)
    names = ("gate_cut_tokens_sum", "gate_reused_tokens_total")
    before = [read(name) for name in names]
    reused, held = four_results(engine, manager)
    series = [
        Series(PREFIX + name, frozenset(), [(0, old), (60, read(name))])
        for name, old in zip(names, before, strict=True)
    ]
    assert evaluate(formula, series, 60) == {frozenset(): (held - reused) / held}


@rule("Is the host budget too small?")
def test_evictions_and_lost_hits_rise_together(engine, manager, read, folder):
    evicted, before = read("evicted_records_total"), results(read)
    text = prompt(4, 600)
    engine.run(text, 1)
    for seed in range(RECORDS):
        engine.run(prompt(10 + seed, 300), 1)
    assert read("evicted_records_total") - evicted == 2
    engine.drain()
    for path in folder.iterdir():
        path.unlink()
    assert engine.run(text, 1).cached_tokens == 0
    found = results(read)
    assert read("gate_results_total", result="rejected") - before["rejected"] == 1
    # The pages were kept, so a part of them is reused where one record was.
    engine.run(text[:300] + prompt(5, 300), 1)
    assert engine.run(text[:560] + prompt(6, 30), 1).cached_tokens == 512
    assert read("gate_results_total", result="cut") == found["cut"]


@rule("Are captures lost?")
def test_captures_are_dropped_for_want_of_a_slot(engine, manager, read):
    before = read("dropped_captures_total")
    engine.run(prompt(7, 700), 1)
    assert read("dropped_captures_total") == before
    staging = read("dropped_captures_total", reason="no_staging_slot")
    # Boundaries at 256, 512 and 768 inside one chunk, and two slots.
    engine.run(prompt(8, 1000), 1)
    assert read("dropped_captures_total", reason="no_staging_slot") - staging == 1
    engine.flush()
    host = read("dropped_captures_total", reason="no_host_slot")
    slots = [manager.store.reserve() for _ in range(RECORDS)]
    engine.run(prompt(9, 700), 1)
    assert read("dropped_captures_total", reason="no_host_slot") - host == 2
    assert read("dropped_captures_total") - before == 3
    for slot in slots:
        manager.store.discard(slot)


class UnderWay:
    """The event of a copy that has not ended."""

    def __init__(self, event):
        self._event = event

    def __getattr__(self, name):
        return getattr(self._event, name)

    def query(self):
        return False


@rule("Does the link to host memory keep up?")
def test_waits_for_staging_grow_with_the_prefill_batches(engine, manager, read, monkeypatch):
    def counted():
        batches = {"mode": "prefill_none"}
        waits = read("staging_waits_total")
        return waits, read("sglang:cuda_graph_passes_total", **batches)

    def run(seeds):
        waits, batches = counted()
        for seed in seeds:
            engine.run(prompt(seed, 300), 1)
        now = counted()
        return now[0] - waits, now[1] - batches

    carried = read("checkpoint_bytes_total", path="device_to_host")
    assert run(range(30, 33)) == (0, 3)
    size = manager.mover.layout.record_bytes
    assert read("checkpoint_bytes_total", path="device_to_host") - carried == 3 * size
    record = manager.mover._record
    monkeypatch.setattr(manager.mover, "_record", lambda stream: UnderWay(record(stream)))
    run(range(33, 33 + STAGING))
    # Every slot's last copy is under way from here on.
    assert run(range(40, 43)) == (3, 3)


@rule("Does storage keep up?")
def test_slow_storage_holds_slots_and_drops_saves(engine, manager, read, backend, monkeypatch):
    dropped = read("storage_saves_total", outcome="dropped")
    engine.run(prompt(50, 700), 1)
    engine.drain()
    engine.step()
    assert read("storage_slots", direction="save") == 0
    assert read("storage_saves_total", outcome="dropped") == dropped
    held = Held(backend.batch_set_v2)
    monkeypatch.setattr(backend, "batch_set_v2", held)
    for seed in range(51, 54):
        engine.run(prompt(seed, 700), 1)
    engine.step_until(held.entered.is_set, 60, "a save under way")
    export(engine)
    # Two records of each, and half of the store may wait.
    assert read("storage_saves_total", outcome="dropped") - dropped == 2
    assert read("storage_slots", direction="save") == RECORDS // 2
    held.go.set()
    engine.drain()
    engine.step()
    assert read("storage_slots", direction="save") == 0


@rule("Does storage work?")
def test_a_backend_that_raises_is_counted(engine, read, backend, monkeypatch, caplog):
    def down(*_, **__):
        raise OSError("no route to host")

    errors, failed = read("storage_errors_total"), read("storage_saves_total", outcome="failed")
    engine.run(prompt(60, 700), 1)
    engine.drain()
    engine.step()
    assert read("storage_errors_total") == errors
    assert read("storage_saves_total", outcome="failed") == failed
    monkeypatch.setattr(backend, "batch_set_v2", down)
    engine.run(prompt(61, 700), 1)
    engine.drain()
    engine.step()
    assert read("storage_errors_total") > errors
    assert read("storage_saves_total", outcome="failed") - failed == 2
    assert any("no route to host" in record.getMessage() for record in caplog.records)


@rule("Is what storage holds sound?")
@pytest.mark.parametrize("pool", ["deepseek_v4_c4_state", "deepseek_v4_c4"])
def test_damaged_objects_are_counted(engine, read, folder, caplog, pool):
    record = pool.endswith("state")

    def rejected():
        fetches = read("storage_fetches_total", outcome="rejected")
        return fetches, read("storage_rejected_pages_total")

    text = prompt(70, 700)
    engine.run(text, 1)
    engine.flush()
    before = rejected()
    assert engine.run(text, 1).cached_tokens == 512 and rejected() == before
    engine.flush()
    flip(file_of(folder, engine, chain_of(engine, text), 512, pool), 5000)
    engine.run(text, 1)
    engine.step()
    assert rejected() == (before[0] + record, before[1] + (not record))
    assert sum("not verify" in one.getMessage() for one in caplog.records) == 1


@rule("Why is nothing reused all of a sudden?")
def test_reuse_is_suspended_between_an_update_and_a_flush(engine, model_path, read):
    text = prompt(80, 700)
    engine.run(text, 1)
    assert engine.run(text, 1).cached_tokens == 512 and read("suspended") == 0
    updater = engine.model_runner.weight_updater
    done, message = updater.update_weights_from_disk(str(model_path), "auto")
    assert done, message
    assert engine.run(text, 1).cached_tokens == 0 and read("suspended") == 1
    engine.flush()
    engine.step()
    assert read("suspended") == 0
    engine.run(text, 1)
    assert engine.run(text, 1).cached_tokens == 512


def usage(read):
    return read("sglang:token_usage"), read("sglang:full_token_usage")


@rule("Are requests short of memory or of slots?")
def test_slots_gone_are_told_from_memory_gone(engine, read):
    def until_they_queue(requests, running):
        rids = [engine.submit(*request) for request in requests]
        engine.step_until(
            lambda: read("sglang:num_running_reqs") >= running, 60, f"{running} running requests"
        )
        assert read("sglang:num_queue_reqs") == len(requests) - running
        found = read("ring_slots", state="free"), *usage(read)
        for rid in rids:
            engine.abort(rid)
        engine.run_many(*rids)
        engine.drain()
        return found

    short = [(prompt(90 + i, 100), 20) for i in range(SLOTS + 2)]
    free, larger, memory = until_they_queue(short, SLOTS)
    assert (free, larger) == (0, 1) and memory < 0.5
    long = [(prompt(100 + i, 1700), 20) for i in range(3)]
    free, larger, memory = until_they_queue(long, 2)
    assert free == SLOTS - 2 and larger == round(memory, 2) > 0.8


@rule("What are the slots of the host pool doing?")
def test_slots_in_flight_pinned_and_given_back(engine, manager, read, backend, monkeypatch):
    def slots():
        return [read("host_slots", state=s) for s in ("free", "published", "in_flight")]

    assert slots() == [RECORDS, 0, 0] and read("record_pins") == 0
    held = Held(backend.batch_set_v2)
    monkeypatch.setattr(backend, "batch_set_v2", held)
    engine.run(prompt(110, 700), 1)
    engine.step_until(held.entered.is_set, 60, "a save under way")
    export(engine)
    assert slots() == [RECORDS - 2, 2, 0] and read("record_pins") == 2
    given_back = read("unpublished_captures_total")
    rid = engine.submit(prompt(111, 1100), 1)
    # Its first chunk is computed, and the tree has not taken it.
    engine.step_until(lambda: slots()[2] > 0, 60, "a chunk that is computed")
    assert slots() == [RECORDS - 2 - 3, 2, 3]
    engine.abort(rid)
    held.go.set()
    engine.drain()
    engine.step()
    assert read("unpublished_captures_total", reason="discarded") > 0
    assert read("unpublished_captures_total") > given_back
    free, published, in_flight = slots()
    assert (free + published, in_flight, read("record_pins")) == (RECORDS, 0, 0)


@rule("Do records stand beside pages of another run?")
def test_a_record_that_is_captured_again_beside_older_pages_is_mixed(engine, manager, read):
    text = prompt(120, 700)
    before = read("mixed_records_total")
    every(manager, 1000)
    engine.run(text, 1)
    assert read("mixed_records_total") == before
    every(manager, 1)
    engine.run(text, 1)
    assert read("mixed_records_total") - before == 2


@rule("What does a request slot cost?")
def test_a_slot_costs_what_sglang_charges(engine, read):
    rid = engine.submit(prompt(130, 100), 8)
    for _ in range(4):
        engine.step()
    free = read("ring_slots", state="free")
    assert free == SLOTS - 1
    assert read("ring_slot_tokens") * free == read("sglang:swa_available_tokens") > 0
    engine.run_many(rid)
