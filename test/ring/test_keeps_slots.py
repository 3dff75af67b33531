"""What SGLang has right, kept against an upgrade: a slot is paid once and is its next owner's clean."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_objects import PAGE, WINDOW, allocator_of, extend
from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
from sglang.srt.mem_cache.allocator.swa import is_swa_req_ring
from sglang.srt.mem_cache.prefill_budget import SWAPrefillBudget
from sglang_unified_kv.config import RING_FIXES
from sglang_unified_kv.edits.report import samples
from sglang_unified_kv.reference.harness import prompt

TREE = SimpleNamespace(
    swa_evictable_size=lambda: 0, full_evictable_size=lambda: 0, sliding_window_size=WINDOW
)


@pytest.fixture(params=[False, True], ids=["stock", "fixed"])
def fixes(request):
    return request.param


@settings(deadline=None, max_examples=12)
@given(slots=st.integers(2, 64), taken=st.data())
def test_availability_is_free_slots_times_cost(slots, taken):
    for fixes in (False, True):
        allocator, rows = allocator_of(fixes, slots, 64 * PAGE)
        count = taken.draw(st.integers(0, slots))
        rows.alloc_rows(count)
        assert allocator.swa_ring_cost_tokens == PAGE
        assert allocator.swa_available_size() == (slots - count) * PAGE
        assert allocator.size_swa == slots * PAGE


@given(slots=st.integers(2, 64), more=st.integers(0, 64), taken=st.data())
def test_the_metric_counts_the_slots_that_a_decode_node_keeps_for_transfers(slots, more, taken):
    allocator, rows = allocator_of(False, slots, 64 * PAGE)
    if more:
        rows = DecodeReqToTokenPool(slots, 1024, "cpu", False, pre_alloc_size=more)
    count = taken.draw(st.integers(0, slots + more))
    rows.alloc([SimpleNamespace(kv=SimpleNamespace(holds_kv=False)) for _ in range(count)])
    scheduler = SimpleNamespace(req_to_token_pool=rows, token_to_kv_pool_allocator=allocator)
    found = {sample.labels: sample.value for sample in samples._ring(scheduler)}
    assert (found["free",], found["used",]) == (slots + more - count, count)


def test_decoding_and_extending_take_full_tokens_alone(fixes):
    allocator, _ = allocator_of(fixes, 4, 64 * PAGE)
    before = allocator.swa_available_size()
    assert extend(allocator, 5000) is not None
    assert allocator.swa_available_size() == before
    assert allocator.available_size() == allocator.full_available_size() == (64 - 20) * PAGE
    assert extend(allocator, 64 * PAGE) is None, "more than there is: None, not an assertion"


def test_a_tail_that_does_not_fit_is_none(fixes):
    allocator, _ = allocator_of(fixes, 4, 4 * PAGE)
    zero, length = torch.tensor([0]), torch.tensor([5 * PAGE])
    tail = allocator.alloc_extend_swa_tail(
        zero, zero, length, length, torch.tensor([-1]), 5 * PAGE, WINDOW
    )
    assert tail is None and allocator.full_available_size() == 4 * PAGE


def test_a_request_pays_one_ring_and_its_next_chunk_none(fixes):
    allocator, _ = allocator_of(fixes, 2, 256 * PAGE)
    budget = SWAPrefillBudget(allocator, TREE)
    chunk = dict(chunk_limit=8192)
    assert budget.swa_tokens(8192, 512, **chunk) == PAGE
    budget.reserve(8192, 512, **chunk)
    assert budget.remaining_swa == PAGE
    budget.reserve(8192, 512, is_chunked_continuation=True, **chunk)
    assert budget.remaining_swa == PAGE
    fits, limit = budget.check_prefill(
        extend_input_len=8192,
        total_tokens=8704,
        max_new_tokens=512,
        input_tokens=8192,
        swa_host_hit_length=0,
        chunk_limit=8192,
    )
    assert fits and limit == 8192, "the last slot is usable and the chunk whole"
    budget.reserve(8192, 512, **chunk)
    assert budget.remaining_swa == 0 and not budget.has_capacity()


def test_only_a_ring_counts_as_one(fixes):
    ring, _ = allocator_of(fixes, 2, 4096)
    paged, _ = allocator_of(fixes, 2, 4096, ring=None)
    assert is_swa_req_ring(ring) and not is_swa_req_ring(paged)
    assert paged.swa_ring_cost_tokens == 0 and not is_swa_req_ring(object())


def test_a_reused_slot_is_clean_and_addressed_by_its_number(make_engine):
    """Rows ``slot * ring + position % ring``; the states of a slot start at nothing."""
    with make_engine(env={RING_FIXES: "1"}, max_running_requests=1) as engine:
        pool, rows = engine.pool, engine.req_to_token_pool
        states = [s for s in pool.compress_state_pools if s is not None and s.ratio == 4]
        for state in states:
            state.kv_score_buffer.kv_score.fill_(7.0)
        seen = {}

        def look(batch, _):
            if batch.forward_mode.is_extend() and not seen:
                slot = int(batch.req_pool_indices[0])
                size = pool.unified_swa_ring_size
                seen["slot"] = slot
                seen["own"] = pool.unified_kv_pool.kv_buffer[0][
                    slot * size : (slot + 1) * size
                ].clone()
                seen["states"] = [
                    s.kv_score_buffer.kv_score[
                        slot * s.ring_size : (slot + 1) * s.ring_size
                    ].clone()
                    for s in states
                ]

        with engine.tap(look):
            engine.run(prompt(3, 6), 1)
        assert rows.available_size() == 1
        assert seen["own"][:6].any(-1).all() and not seen["own"][6:].any()
        for state in seen["states"]:
            assert not (state == 7.0).any(), "a state of the slot's last owner is left"
