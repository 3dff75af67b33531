"""Hits against cold runs, byte for byte: device and host, strides, chunk sizes, parts of a record."""

import pytest
from oracle import (
    POISON,
    Recorder,
    assert_equal_runs,
    differing,
    largest_difference,
    poison_rings,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang_unified_kv.checkpoint import manager as manager_module
from sglang_unified_kv.checkpoint.layout import Kind
from sglang_unified_kv.checkpoint.placement import Placement
from sglang_unified_kv.checkpoint.policy import Grid
from sglang_unified_kv.checkpoint.restore import restore

PAGE = 256
# Length of the prompt whose deepest boundary on the stride's grid is the one under test.
CASES = {
    1: {256: 444, 512: 700, 768: 950, 2560: 2700},
    2: {512: 700, 2560: 2700},
    4: {1024: 1100, 2048: 2700},
}

DEFAULT = {(512, 1), (2048, 4)}
"""Chunk sizes and strides that run by default."""


def chunked(*defaults):
    """Run with each chunk size; by default with these alone."""
    params = [
        pytest.param(n, id=f"chunk{n}", marks=() if n in defaults else pytest.mark.slow)
        for n in (256, 512, 2048)
    ]
    return pytest.mark.parametrize("engine", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def engine(request, make_engine, oracle):
    with make_engine(chunked_prefill_size=request.param) as built:
        yield built


@pytest.fixture
def manager(engine):
    found = engine.tree.checkpoints
    yield found
    found.placement = Placement(Grid(PAGE, 1), found.store)
    found.check_idle()


def evict_device(engine):
    """Drop every unlocked page from the device; what was written through stays on the host."""
    engine.drain()
    engine.tree.evict(EvictParams(num_tokens=10**9))


@pytest.mark.parametrize(
    "engine, stride",
    [
        pytest.param(chunk, stride, marks=() if (chunk, stride) in DEFAULT else pytest.mark.slow)
        for chunk in (256, 512, 2048)
        for stride in CASES
    ],
    indirect=["engine"],
    scope="module",
)
def test_hit_is_bit_equal_to_the_cold_run(engine, manager, oracle, stride):
    recorder = Recorder(engine)
    manager.placement = Placement(Grid(PAGE, stride), manager.store)
    assert_equal_runs(recorder.cold(oracle.text), oracle.run(2700))
    for tier in ("device", "host"):
        for boundary, length in CASES[stride].items():
            if tier == "host":
                evict_device(engine)
            poison_rings(engine)
            hit = recorder.run(oracle.text[:length])
            assert hit.cached_tokens == boundary
            assert hit.details == {"device": 0, "host": 0} | {tier: boundary}
            assert differing(hit.resumed, oracle.at(boundary)) == []
            assert_equal_runs(hit, oracle.run(length))
            if length - boundary < PAGE:
                # The cold run's last chunk begins at the boundary too: even rows that nobody reads agree.
                assert differing(hit.slot, oracle.run(length).slot) == []
            manager.check_idle()


@chunked(512)
@pytest.mark.parametrize(
    "missing", [Kind.WINDOW, Kind.ATTENTION_STATE, Kind.INDEXER_STATE], ids=lambda k: k.value
)
def test_each_part_of_a_record_is_needed(engine, manager, oracle, missing, monkeypatch):
    recorder = Recorder(engine)
    recorder.run(oracle.text)
    lost = [ring for ring in manager.rings if ring.spec.kind is missing]

    def restore_without(restores, rows, mover, landed):
        restore(restores, rows, mover, landed)
        for item in restores:
            for ring in lost:
                ring.buffer[item.slot * ring.size : (item.slot + 1) * ring.size] = POISON

    monkeypatch.setattr(manager_module, "restore", restore_without)
    poison_rings(engine)
    hit = recorder.run(oracle.text)
    assert hit.cached_tokens == 2560
    wrong = differing(hit.resumed, oracle.at(2560))
    assert wrong and {name.rsplit(" ", 1)[0].replace(" ", "_") for name in wrong} == {missing.value}
    assert largest_difference(hit, oracle.run(2700)) > 0


@chunked(512)
def test_prompt_of_exactly_k_pages_resumes_one_page_earlier(engine, manager, oracle):
    recorder = Recorder(engine)
    recorder.cold(oracle.text[:768])
    poison_rings(engine)
    hit = recorder.run(oracle.text[:768])
    assert hit.cached_tokens == 512
    assert differing(hit.resumed, oracle.at(512)) == []
    assert differing(hit.ended, oracle.at(768)) == []


@chunked(256)
def test_decode_capture_serves_the_next_turn(engine, manager, oracle):
    recorder = Recorder(engine)
    engine.flush()
    first = recorder.run(oracle.text[:500], new_tokens=20)
    turn = oracle.text[:500] + first.output_ids + oracle.text[500:600]
    poison_rings(engine)
    second = recorder.run(turn)
    assert second.cached_tokens == 512
    assert_equal_runs(second, recorder.cold(turn))
