"""Ways of running the engine that change how batches look, and a store smaller than the tree."""

import pytest
from oracle import Recorder, assert_equal_runs, differing, poison_rings, watch
from sglang.srt.managers import schedule_policy
from sglang_unified_kv.checkpoint.manager import CheckpointError
from sglang_unified_kv.edits.exact import model_runner
from sglang_unified_kv.edits.exact.active import current_manager
from sglang_unified_kv.engage import Refused
from sglang_unified_kv.reference.harness import prompt

PAGE = 256
RADIX_ONLY = {
    "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "0",
    "SGLANG_UNIFIED_KV_BIT_EXACT_RADIX": "1",
}


def test_mixed_chunk_starts_chunks_off_page_and_stays_exact(make_engine, oracle, monkeypatch):
    # The default on MI355X; elsewhere SGLang rounds a chunk down to whole pages.
    monkeypatch.setattr(schedule_policy, "_use_exact_chunk_fill", lambda: True)
    with make_engine(chunked_prefill_size=512, enable_mixed_chunk=True) as engine:
        recorder = Recorder(engine)
        decoding = engine.submit(prompt(5, 250), 40)
        while not engine.scheduler.running_batch.reqs:
            engine.step()
        mixed = []

        def before(row):
            if row.rid == decoding and not row.decode and row.end - row.start == 1:
                mixed.append(row)

        cold_id = engine.submit(oracle.text[:700], 3)
        starts = []
        with watch(engine, before, lambda row, _: starts.append((row.rid, row.start))):
            (cold,) = engine.run_many(cold_id)
        assert mixed, "no decode row was mixed into an extend"
        assert any(rid == cold_id and 0 < start < 700 and start % PAGE for rid, start in starts)
        assert cold.output_ids == oracle.run(700).output_ids
        engine.run_many(decoding)
        engine.drain()
        poison_rings(engine)
        hit = recorder.run(oracle.text[:700])
        assert hit.cached_tokens == 512
        assert differing(hit.resumed, oracle.at(512)) == []
        assert_equal_runs(hit, oracle.run(700))
        # The decode row crossed 256 as a one-token extend or a decode step: its checkpoint serves too.
        assert engine.tree.checkpoints.stats.captured >= 3
        engine.tree.checkpoints.check_idle()


def test_overlap_schedule_is_exact(make_engine, oracle):
    with make_engine(chunked_prefill_size=512, disable_overlap_schedule=False) as engine:
        recorder = Recorder(engine)
        assert_equal_runs(recorder.cold(oracle.text[:700]), oracle.run(700))
        for _ in range(2):
            poison_rings(engine)
            hit = recorder.run(oracle.text[:700])
            assert hit.cached_tokens == 512
            assert differing(hit.resumed, oracle.at(512)) == []
            assert_equal_runs(hit, oracle.run(700))
        engine.tree.checkpoints.check_idle()


def test_store_smaller_than_the_tree_misses_but_never_lies(make_engine, oracle):
    with make_engine(
        chunked_prefill_size=512, env={"SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB": "0.0013"}
    ) as engine:
        manager, recorder = engine.tree.checkpoints, Recorder(engine)
        assert manager.store.capacity == 2
        recorder.cold(oracle.text[:1100])
        assert manager.stats.dropped_no_slot + manager.store.evictions >= 2
        for seed in range(3):
            recorder.run(prompt(20 + seed, 300))
        poison_rings(engine)
        hit = recorder.run(oracle.text[:1100])
        assert hit.cached_tokens in (0, 256, 512, 768)
        assert_equal_runs(hit, oracle.run(1100))
        again = recorder.run(oracle.text[:1100])
        assert again.cached_tokens == 1024, "its own captures serve the next request"
        assert_equal_runs(again, oracle.run(1100))
        manager.check_idle()


def test_a_planned_batch_must_run_the_target_forward(make_engine, monkeypatch):
    """Were a forward to pass the plan by, its captures would hold what was in their slots before."""
    with make_engine() as engine:
        engine.submit(prompt(1, 300), 1)
        monkeypatch.setattr(model_runner, "manager_of", lambda pool: None)
        with pytest.raises(CheckpointError, match="without the target model's forward"):
            engine.step()


def test_a_stock_engine_after_an_exact_one_is_stock(make_engine):
    with make_engine() as engine:
        assert current_manager() is engine.tree.checkpoints
    with make_engine(stock=True) as engine:
        assert current_manager() is None and type(engine.tree).__name__ == "UnifiedRadixCache"
        engine.run(prompt(1, 300), 1)


def test_obstacles_of_the_device_tree_still_refuse(make_engine):
    with pytest.raises(Refused, match="SGLANG_UNIFIED_KV_BIT_EXACT_RADIX=1 cannot be honoured"):
        make_engine(hicache=False, enable_streaming_session=True, env=RADIX_ONLY).__enter__()


def test_each_switch_engages_where_its_condition_holds(make_engine):
    both = {name: "1" for name in RADIX_ONLY}
    for hicache in (True, False):
        with make_engine(hicache=hicache, env=both) as engine:
            assert (engine.tree.cache_controller is not None) == hicache
            assert engine.tree.checkpoints is not None


@pytest.mark.slow
def test_an_id_used_again_after_an_abort_is_another_request(make_engine, monkeypatch):
    """The engine finishes the aborted one while the other runs: their captures must not meet."""
    first, second = prompt(11, 766), prompt(12, 1000)
    with make_engine(stock=True, chunked_prefill_size=256) as built:
        out = built.run(first, 40).output_ids
        whole = (first + out)[:780]
        cold = Recorder(built).cold(whole)
        other = Recorder(built).cold(second)
    with make_engine(chunked_prefill_size=2048, disable_overlap_schedule=False) as built:
        for steps in (1, 3, 5):
            built.flush()
            built.submit(first, 60, rid="x")
            for _ in range(steps):
                built.step()
            built.abort("x")
            built.submit(second, 2, rid="x")
            built.drain()
            built.tree.checkpoints.check_idle()
            for ids, expected in ((whole, cold), (second, other)):
                poison_rings(built)
                hit = Recorder(built).run(ids)
                if hit.cached_tokens:
                    rows = expected.at_boundary[hit.cached_tokens]
                    assert differing(hit.resumed, rows) == [], (steps, hit.cached_tokens)
                assert hit.output_ids == expected.output_ids


def test_two_live_requests_of_one_id_keep_their_captures_apart(make_engine):
    first, second = prompt(11, 780), prompt(12, 1000)
    with make_engine(stock=True, chunked_prefill_size=256) as built:
        cold = [Recorder(built).cold(ids) for ids in (first, second)]
    with make_engine(chunked_prefill_size=2048) as built:
        for ids in (first, second):
            built.submit(ids, 3, rid="x")
        built.drain()
        built.tree.checkpoints.check_idle()
        for ids, expected in zip((first, second), cold, strict=True):
            poison_rings(built)
            hit = Recorder(built).run(ids)
            assert hit.cached_tokens == 768
            assert differing(hit.resumed, expected.at_boundary[768]) == []


def test_a_preempted_request_comes_back_through_the_gate(make_engine, oracle):
    with make_engine(
        chunked_prefill_size=512,
        max_running_requests=1,
        enable_priority_scheduling=True,
        priority_scheduling_preemption_threshold=0,
    ) as engine:
        recorder, manager = Recorder(engine), engine.tree.checkpoints
        urgent = prompt(40, 600)
        low, high = recorder.cold(oracle.text[:700], 12), recorder.cold(urgent, 3)
        engine.flush()
        first = engine.submit(oracle.text[:700], 12, priority=0)
        while not engine.scheduler.running_batch.reqs:
            engine.step()
        for _ in range(5):
            engine.step()
        (request,) = engine.scheduler.running_batch.reqs
        second = engine.submit(urgent, 3, priority=9)
        engine.step()
        assert request.retraction_count == 1, "nothing was preempted"
        assert manager.stats.restored == 0
        runs = recorder.finish({first: 700, second: len(urgent)})
        assert [run.output_ids for run in runs] == [low.output_ids, high.output_ids]
        # What a retracted request computed is not inserted: it resumes where its prompt's prefill left it.
        assert manager.stats.restored == 1 and runs[0].starts == [512]
        manager.check_idle()
