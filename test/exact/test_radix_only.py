"""Without HiCache: exact hits of the device tree, from the same store, behind the same gate."""

import pytest
from oracle import Recorder, assert_equal_runs, differing, poison_rings
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang_unified_kv.checkpoint.placement import Placement
from sglang_unified_kv.checkpoint.policy import Grid

PAGE = 256
RADIX = {
    "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "0",
    "SGLANG_UNIFIED_KV_BIT_EXACT_RADIX": "1",
}


@pytest.fixture(scope="module")
def engine(make_engine, oracle):
    with make_engine(hicache=False, chunked_prefill_size=512, env=RADIX) as built:
        yield built


@pytest.fixture
def manager(engine):
    found = engine.tree.checkpoints
    engine.flush()
    yield found
    found.placement = Placement(Grid(PAGE, 1), found.store)
    engine.drain()
    found.check_idle()


def test_there_is_no_host_pool_of_pages(engine, manager):
    assert engine.tree.cache_controller is None
    assert manager.store.capacity > 0


@pytest.mark.parametrize(
    "stride, length, boundary",
    [(1, 700, 512), pytest.param(1, 2700, 2560, marks=pytest.mark.slow), (4, 2700, 2048)],
)
def test_a_device_hit_is_bit_equal_to_the_cold_run(
    engine, manager, oracle, stride, length, boundary
):
    manager.placement = Placement(Grid(PAGE, stride), manager.store)
    recorder = Recorder(engine)
    assert_equal_runs(recorder.run(oracle.text), oracle.run(2700))
    poison_rings(engine)
    hit = recorder.run(oracle.text[:length])
    assert hit.cached_tokens == boundary
    assert differing(hit.resumed, oracle.at(boundary)) == []
    assert_equal_runs(hit, oracle.run(length))


def test_evicted_pages_are_computed_again(engine, manager, oracle):
    recorder = Recorder(engine)
    recorder.run(oracle.text[:1100])
    engine.tree.evict(EvictParams(num_tokens=10**9))
    again = recorder.run(oracle.text[:1100])
    assert again.cached_tokens == 0
    assert_equal_runs(again, oracle.run(1100))


def test_a_lost_record_cuts_the_hit(engine, manager, oracle):
    recorder = Recorder(engine)
    recorder.run(oracle.text[:1100])
    deepest = max(manager.store._records.values(), key=lambda record: record.boundary)
    manager.store.remove(deepest.key)
    poison_rings(engine)
    hit = recorder.run(oracle.text[:1100])
    assert hit.cached_tokens == 768
    assert_equal_runs(hit, oracle.run(1100))


def test_the_gate_is_not_blamed_for_what_sglang_does_not_match(engine, manager, oracle):
    engine.run(oracle.text[:700], 1)
    stats = manager.stats
    before = stats.gate_rejected, stats.gate_none
    # Logprobs of the whole prompt: SGLang reuses none of it.
    engine.run(oracle.text[:700], 1, return_logprob=True, logprob_start_len=0)
    assert (stats.gate_rejected, stats.gate_none) == (before[0], before[1] + 1)
    manager.suspend()
    engine.run(oracle.text[:700], 1)
    assert (stats.gate_rejected, stats.gate_none) == (before[0], before[1] + 1)


def test_a_flush_forgets_the_records(engine, manager, oracle):
    Recorder(engine).run(oracle.text[:700])
    assert len(manager.store)
    engine.flush()
    assert len(manager.store) == 0
