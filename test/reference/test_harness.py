"""The in-process engine: what tests and the demo rely on."""

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache import kv_cache_builder
from sglang_unified_kv.reference.harness import InProcessEngine, prompt
from sglang_unified_kv.reference.plugin import ENV
from sglang_unified_kv.reference.snapshot import differing, request_bytes


def test_prompt():
    assert prompt(3, 900)[:700] == prompt(3, 700)
    assert prompt(3, 50) != prompt(4, 50)
    assert min(prompt(0, 5000)) == 6 and max(prompt(0, 5000)) == 1023


def test_hits_evictions_and_flush(make_engine):
    """A small device pool beside a larger host pool: hits come from both, and a flush empties both."""
    with make_engine(stock=True, chunked_prefill_size=512, max_total_tokens=1536) as engine:
        cold = engine.run(prompt(0, 700), 4, return_logprob=True, logprob_start_len=0)
        assert cold.cached_tokens == 0 and cold.details is None
        assert cold.finish_reason["type"] == "length"
        assert len(cold.output_ids) == len(cold.output_logprobs) == 4
        assert len(cold.input_logprobs) == 700
        engine.drain()
        assert engine.run(prompt(0, 700), 1).details == {"device": 512, "host": 0}
        for seed in (1, 2):
            engine.run(prompt(seed, 700), 1)
            engine.drain()
        hit = engine.run(prompt(0, 700), 1)
        assert hit.cached_tokens == 512 and hit.details["host"] > 0
        engine.flush()
        again = engine.run(prompt(0, 700), 4, return_logprob=True)
        assert again.cached_tokens == 0
        assert (again.output_ids, again.output_logprobs) == (cold.output_ids, cold.output_logprobs)


def test_overlap_schedule_computes_the_same(make_engine):
    outputs = []
    for overlap in (False, True):
        with make_engine(
            stock=True,
            hicache=False,
            chunked_prefill_size=512,
            disable_overlap_schedule=not overlap,
        ) as engine:
            assert engine.scheduler.enable_overlap is overlap
            rids = [engine.submit(prompt(seed, 150 + seed), 4) for seed in range(3)]
            outputs.append([o.output_ids for o in engine.run_many(*rids)])
            engine.drain()
            assert engine.scheduler.is_fully_idle()
    assert outputs[0] == outputs[1]


def test_abort_running_and_waiting(make_engine):
    with make_engine(
        stock=True, hicache=False, max_running_requests=2, chunked_prefill_size=256
    ) as engine:
        kept = engine.submit(prompt(0, 300), 6)
        running = engine.submit(prompt(1, 300), 500)
        waiting = engine.submit(prompt(2, 300), 6)
        while not engine.scheduler.running_batch.reqs:
            engine.step()
        engine.abort(waiting)
        engine.abort(running)
        engine.drain()
        assert engine.output(running).finish_reason["type"] == "abort"
        assert engine.output(waiting).finish_reason["type"] == "abort"
        assert len(engine.output(kept).output_ids) == 6
        engine.flush()


def test_tap_sees_every_forward(make_engine):
    seen = []
    with make_engine(stock=True, hicache=False, chunked_prefill_size=256) as engine:
        with engine.tap(lambda batch, logits: seen.append((batch.forward_mode.name, logits.shape))):
            ids = engine.run(prompt(0, 300), 3).output_ids
        engine.run(prompt(1, 300), 3)
    assert seen == [("EXTEND", (1, 1024))] * 2 + [("DECODE", (1, 1024))] * 2
    assert len(ids) == 3


def test_snapshot_does_not_depend_on_the_slot_and_notices_a_byte(make_engine):
    held = []
    with make_engine(stock=True, hicache=False, chunked_prefill_size=512) as engine:

        def keep(batch, logits):
            if "kept" in batch.rids:
                i = batch.rids.index("kept")
                slot, length = int(batch.req_pool_indices[i]), int(batch.seq_lens[i])
                held.append((slot, request_bytes(engine, slot, length)))

        with engine.tap(keep):
            engine.run(prompt(0, 300), 1, rid="kept")
            engine.flush()
            other = engine.submit(prompt(1, 200), 20)
            while not engine.scheduler.running_batch.reqs:
                engine.step()
            engine.run_many(engine.submit(prompt(0, 300), 1, rid="kept"), other)
    (slot, first), (other_slot, second) = held
    assert slot != other_slot
    assert differing(first, second) == []
    assert {name.rpartition(" ")[0] for name in first} == {
        "window",
        "compressed",
        "attention state",
        "indexer state",
        "indexer keys",
        "indexer scales",
    }
    second["compressed 3"][7, 5] += 1
    assert differing(first, second) == ["compressed 3: 1 of 75 rows"]


def test_a_closed_engine_gives_its_memory_back(make_engine):
    """Host pools are shared memory: a suite of engines that stay would fill the machine."""
    with make_engine(stock=True) as engine:
        engine.run(prompt(0, 300), 1)
        kept = [weakref.ref(o) for o in (engine.scheduler, engine.tree, engine.pool)]
    del engine
    gc.collect()
    assert [type(ref()).__name__ for ref in kept] == ["NoneType"] * 3


def test_one_engine_at_a_time_and_close_leaves_nothing(make_engine, model_path):
    with make_engine(stock=True, hicache=False) as engine:
        with pytest.raises(RuntimeError, match="another InProcessEngine"):
            InProcessEngine(model_path)
        sockets = [
            Path(value.removeprefix("ipc://"))
            for value in vars(engine._ports).values()
            if isinstance(value, str) and value.startswith("ipc://")
        ]
        assert sockets
    assert not torch.distributed.is_initialized()
    assert not [path for path in sockets if path.exists()]
    engine.close()


def test_a_failed_start_does_not_spoil_the_next(make_engine, monkeypatch):
    """It failed late: sockets, process groups and pools were there."""

    def fail(*_, **__):
        raise RuntimeError("injected")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="injected"):
        patch.setattr(kv_cache_builder, "build_kv_cache", fail)
        with make_engine(stock=True, hicache=False):
            pytest.fail("it must not start")
    assert not torch.distributed.is_initialized()
    with make_engine(stock=True, hicache=False) as engine:
        assert len(engine.run(prompt(0, 20), 1).output_ids) == 1


def test_a_switched_off_engine_is_refused(monkeypatch, model_path):
    monkeypatch.setitem(os.environ, ENV, "0")
    with pytest.raises(RuntimeError, match=ENV):
        InProcessEngine(model_path)
