"""The holes found when the design was attacked, on the real engine: H1 to H11 and H18 to H22 as far as
device, host, prefill and decode can meet them. Storage has files of its own; speculation is refused at start
(test/plugin).
"""

from array import array

import pytest
from oracle import Recorder, assert_equal_runs, differing, poison_rings, retract_often
from sglang.srt.managers import schedule_policy
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import touch_waiting_prefix
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang_unified_kv.checkpoint.placement import Placement
from sglang_unified_kv.checkpoint.policy import Grid
from sglang_unified_kv.reference.harness import prompt

PAGE = 256


@pytest.fixture(scope="module")
def engine(make_engine, oracle):
    with make_engine(chunked_prefill_size=512) as built:
        yield built


@pytest.fixture
def recorder(engine):
    engine.flush()
    yield Recorder(engine)
    engine.drain()
    engine.tree.checkpoints.check_idle()
    engine.tree.checkpoints.placement = Placement(Grid(PAGE, 1), engine.tree.checkpoints.store)
    engine.tree.sanity_check()


def key_at(engine, ids, boundary):
    """Page hash that identifies ``ids[:boundary]``."""
    return engine.tree._chain(None, RadixKey(array("q", ids[:boundary])))[-1]


def forget(engine, ids, *boundaries):
    """Drop records as the store's own eviction would, pages stay."""
    for boundary in boundaries:
        assert engine.tree.checkpoints.store.remove(key_at(engine, ids, boundary))


def evict_device(engine, tokens=10**9):
    engine.drain()
    engine.tree.evict(EvictParams(num_tokens=tokens))


def device_and_host(engine, recorder, oracle):
    """[0, 512) on the device, [512, 1024) on the host only; records at 256 and 1024."""
    recorder.cold(oracle.text[:1100])
    evict_device(engine)
    assert recorder.run(oracle.text[:600]).details == {"device": 0, "host": 512}
    forget(engine, oracle.text, 512, 768)


def test_h1_failed_load_back_resumes_at_a_checkpoint(engine, recorder, oracle, monkeypatch):
    device_and_host(engine, recorder, oracle)
    monkeypatch.setattr(engine.tree, "load_back", lambda *args, **kwargs: False)
    poison_rings(engine)
    hit = recorder.run(oracle.text[:1100])
    assert hit.cached_tokens == 256
    assert differing(hit.resumed, oracle.at(256)) == []
    assert_equal_runs(hit, oracle.run(1100))


def test_h1_successful_load_back_reaches_the_deeper_checkpoint(engine, recorder, oracle):
    device_and_host(engine, recorder, oracle)
    poison_rings(engine)
    hit = recorder.run(oracle.text[:1100])
    assert hit.cached_tokens == 1024 and hit.details["host"] > 0
    assert differing(hit.resumed, oracle.at(1024)) == []
    assert_equal_runs(hit, oracle.run(1100))


def test_h2_h3_recompute_over_device_evicted_pages_stays_exact(engine, recorder, oracle):
    """The tree takes the new run's pages back onto nodes whose host copy is the old run's."""
    stats = engine.tree.checkpoints.stats
    before = stats.mixed
    recorder.cold(oracle.text[:1100])
    assert stats.mixed == before, "a cold run's captures belong to its own pages"
    evict_device(engine)
    forget(engine, oracle.text, 256, 512, 768, 1024)
    again = recorder.run(oracle.text[:1100])
    assert again.cached_tokens == 0
    assert_equal_runs(again, oracle.run(1100))
    assert stats.mixed == before + 4
    for tier in ("device", "host"):
        if tier == "host":
            evict_device(engine)
        poison_rings(engine)
        hit = recorder.run(oracle.text[:1100])
        assert (hit.cached_tokens, hit.details[tier]) == (1024, 1024)
        assert_equal_runs(hit, oracle.run(1100))


def test_h2_recompute_over_loaded_back_pages_re_points_them_and_stays_exact(
    engine, recorder, oracle
):
    recorder.cold(oracle.text[:700])
    evict_device(engine)
    assert recorder.run(oracle.text[:700]).details["host"] == 512
    forget(engine, oracle.text, 256, 512)
    assert recorder.run(oracle.text[:700]).cached_tokens == 0
    poison_rings(engine)
    hit = recorder.run(oracle.text[:700])
    assert hit.cached_tokens == 512
    assert_equal_runs(hit, oracle.run(700))


def test_a_record_whose_pages_left_every_tier_is_a_miss_and_is_replaced(engine, recorder, oracle):
    recorder.cold(oracle.text[:700])
    evict_device(engine)
    engine.tree.evict_host(10**9)
    manager = engine.tree.checkpoints
    assert key_at(engine, oracle.text, 512) in manager.store
    before = manager.stats.replaced
    again = recorder.run(oracle.text[:700])
    assert again.cached_tokens == 0 and manager.stats.replaced == before + 2
    poison_rings(engine)
    assert_equal_runs(recorder.run(oracle.text[:700]), oracle.run(700))


def test_h5_a_prefix_whose_record_was_lost_becomes_a_hit_again(engine, recorder, oracle):
    recorder.cold(oracle.text[:700])
    forget(engine, oracle.text, 256, 512)
    assert recorder.run(oracle.text[:700]).cached_tokens == 0
    assert recorder.run(oracle.text[:700]).cached_tokens == 512


def test_h5_strict_provenance_keeps_such_a_prefix_a_miss(engine, recorder, oracle, monkeypatch):
    recorder.cold(oracle.text[:700])
    forget(engine, oracle.text, 256, 512)
    monkeypatch.setattr(engine.tree.checkpoints._publisher, "_strict", True)
    assert [recorder.run(oracle.text[:700]).cached_tokens for _ in range(2)] == [0, 0]


def test_gate_cuts_to_the_deepest_record(engine, recorder, oracle):
    recorder.cold(oracle.text[:1100])
    forget(engine, oracle.text, 1024, 768)
    poison_rings(engine)
    hit = recorder.run(oracle.text[:1100])
    assert hit.cached_tokens == 512
    assert_equal_runs(hit, oracle.run(1100))


def test_h11_queued_requests_keep_their_record_young(engine, recorder, oracle):
    recorder.cold(oracle.text[:700])
    store = engine.tree.checkpoints.store
    recorder.run(prompt(9, 700))
    assert store.order()[-1] != key_at(engine, oracle.text, 512)
    rid = engine.submit(oracle.text[:700], 1)
    (queued,) = engine.scheduler.waiting_queue
    touch_waiting_prefix(queued, engine.tree)
    assert store.order()[-1] == key_at(engine, oracle.text, 512)
    engine.run_many(rid)


def test_extra_key_and_salt_are_part_of_the_identity(engine, recorder, oracle):
    recorder.cold(oracle.text[:700])
    for namespace in ({"extra_key": "tenant"}, {"cache_salt": "salt"}):
        assert recorder.run(oracle.text[:700], **namespace).cached_tokens == 0
        poison_rings(engine)
        hit = recorder.run(oracle.text[:700], **namespace)
        assert hit.cached_tokens == 512
        assert_equal_runs(hit, oracle.run(700))


def test_unaligned_chunk_starts_of_requests_sharing_a_chunk(engine, recorder, oracle, monkeypatch):
    """SGLANG_EXACT_CHUNK_FILL, the default on MI355X: the second request gets what is left of the chunk."""
    monkeypatch.setattr(schedule_policy, "_use_exact_chunk_fill", lambda: True)
    first, second = recorder.run_many([prompt(5, 300), oracle.text[:700]])
    assert first.cached_tokens == second.cached_tokens == 0
    assert any(start % PAGE for start in second.starts), second.starts
    assert_equal_runs(second, oracle.run(700))
    poison_rings(engine)
    hit = recorder.run(oracle.text[:700])
    assert hit.cached_tokens == 512
    assert differing(hit.resumed, oracle.at(512)) == []
    assert_equal_runs(hit, oracle.run(700))


def test_two_hits_restored_in_one_batch(engine, recorder, oracle):
    recorder.cold(oracle.text[:1100])
    poison_rings(engine)
    runs = recorder.run_many([oracle.text[:700], oracle.text[:444], oracle.text[:950]])
    assert [r.cached_tokens for r in runs] == [512, 256, 768]
    for run, length in zip(runs, (700, 444, 950), strict=True):
        assert differing(run.resumed, oracle.at(run.cached_tokens)) == []
        assert_equal_runs(run, oracle.run(length))


def test_h20_a_retracted_request_comes_back_through_the_gate(engine, recorder, oracle, monkeypatch):
    alone = recorder.cold(oracle.text[:700], new_tokens=12)
    released = retract_often(engine, monkeypatch)
    engine.flush()
    runs = recorder.run_many([oracle.text[:700], prompt(6, 260)], new_tokens=12)
    assert False in released, "nothing was retracted"
    assert runs[0].output_ids == alone.output_ids


def test_h8_a_draft_forward_never_sees_the_plan(engine, recorder, oracle):
    """A draft model's pool has no manager, and its runner does not open the planned step."""
    from types import SimpleNamespace

    from sglang_unified_kv.checkpoint.manager import Row
    from sglang_unified_kv.edits.exact.active import manager_of
    from sglang_unified_kv.edits.exact.model_runner import forward

    manager = engine.tree.checkpoints
    assert manager_of(engine.pool) is manager and manager_of(object()) is None
    draft = SimpleNamespace(is_draft_worker=True, token_to_kv_pool=engine.pool)
    manager.admit("draft", [], 0, 0, 256)
    manager.plan([Row("draft", 1, -1, 0, 256, False)])
    try:
        assert forward(lambda self, batch: manager.armed, draft, None) is False
        assert manager.planned
    finally:
        manager.close_step()
        manager.release("draft")


def test_h22_every_c4_state_buffer_maps_to_its_own_section(engine, recorder):
    manager = engine.tree.checkpoints
    addresses = [(r.spec.kind, r.buffer.data_ptr()) for r in manager.rings]
    assert len(set(addresses)) == len(addresses) == len(manager.mover.layout.sections)
    recorder.run(prompt(30, 700))
