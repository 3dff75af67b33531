"""Admission under pressure: the real scheduler, with a model that answers at once.

Whatever arrives, is aborted and retracted in whatever order: nothing asserts, nothing waits for ever, every
page and row comes back.
"""

import random

import pytest
from hisparse_engine import (
    answer_at_once,
    assert_nothing_is_held,
    coordinator_of,
    engine_of,
    hisparse_options,
)
from hypothesis import given
from hypothesis import strategies as st
from sglang_unified_kv.edits.hisparse.pool import promises_of
from sglang_unified_kv.edits.hisparse.runner import prefills_of
from sglang_unified_kv.hisparse.rows import HotBuffer, Prefill, Promises, region_rows
from sglang_unified_kv.reference.harness import prompt

PAGE = 64

# Each of four requests wants 704 rows or more, there are 2,176; and 26,112 logical tokens.
TIGHT = {
    "max_total_tokens": 26112,
    "max_running_requests": 4,
    "chunked_prefill_size": 512,
    "decode_log_interval": 1,
    **hisparse_options(ratio=3, buffer=640),
}


@pytest.fixture(scope="module", params=[True, False], ids=["sequential", "overlap"])
def engine(make_engine, request):
    options = {"disable_overlap_schedule": request.param, "context_length": 10240}
    with engine_of(make_engine, hisparse=True, **(TIGHT | options)) as engine:
        answer_at_once(engine)
        yield engine


def check(engine) -> None:
    coordinator = coordinator_of(engine)
    allocator = coordinator.token_to_kv_pool_allocator
    promises = promises_of(allocator)
    # Whoever was admitted can have what is still to come.
    assert promises.left() >= 0
    # Nobody has a host page without its logical page, and the host has as many: it cannot run out first.
    logical, host = allocator.logical_attn_allocator, coordinator.mem_pool_host
    used = logical.size_full - logical.full_available_size()
    assert (host.size - host.available_size()) * 4 <= used
    for req in engine.scheduler.running_batch.reqs:
        if (slot := req.kv.req_pool_idx) is not None:
            assert coordinator.req_device_buffer_size[slot] == promises.buffer.padded


@pytest.fixture
def slow_saves(engine, monkeypatch):
    """As on a GPU: rows are on their way to the host for some steps."""
    coordinator = coordinator_of(engine)
    chance = random.Random(0)
    collect = coordinator.collect_ready_reqs
    monkeypatch.setattr(
        coordinator, "collect_ready_reqs", lambda: collect() if chance.random() < 0.3 else []
    )


def storm(engine, seed: int, arrivals: int) -> dict[str, int]:
    """Requests of all lengths, some aborted at a random moment; how the finished ones ended."""
    chance = random.Random(seed)
    limit = promises_of(engine.scheduler.token_to_kv_pool_allocator).longest_sequence
    waiting, ends = {}, {}
    steps = last_end = 0
    while arrivals or waiting:
        if arrivals and chance.random() < 0.2:
            arrivals -= 1
            length = chance.choice([1, 3, 4, 255, 256, 2560, 2564, chance.randrange(1, limit)])
            # SGLang admits the two kinds by different ways.
            sampling = {"ignore_eos": chance.random() < 0.5}
            tokens = chance.choice([1, 2, 5, 90, 400])
            rid = engine.submit(prompt(arrivals, length), tokens, sampling=sampling)
            waiting[rid] = steps + chance.randrange(1, 400) if chance.random() < 0.3 else None
        engine.step()
        steps += 1
        check(engine)
        for rid, when in list(waiting.items()):
            if engine.is_done(rid):
                how = engine.output(rid).finish_reason["type"]
                ends[how] = ends.get(how, 0) + 1
                del waiting[rid]
                last_end = steps
            elif when is not None and steps >= when:
                engine.abort(rid)
                waiting[rid] = None
        assert steps < last_end + 2000 or not waiting, f"{len(waiting)} requests never finish"
    for _ in range(3):
        engine.step()
    assert_nothing_is_held(engine)
    return ends


def saving(engine, monkeypatch, tokens):
    """A request whose rows were on their way to the host while another one was computed."""
    coordinator = coordinator_of(engine)
    with monkeypatch.context() as held:
        held.setattr(coordinator, "collect_ready_reqs", list)
        rid = engine.submit(prompt(1, 700), tokens)
        while not coordinator.has_ongoing_staging():
            engine.step()
        other = engine.submit(prompt(2, 300), 1)
        engine.run_many(other)
        for _ in range(2):
            engine.step()
    assert [act.req.rid for act in coordinator.ack_staging_queue] == [rid]
    return rid


def test_an_abort_reaches_a_request_on_its_way_to_the_host(engine, monkeypatch):
    rid = saving(engine, monkeypatch, 300)
    engine.abort(rid)
    (output,) = engine.run_many(rid)
    assert output.finish_reason["type"] == "abort" and len(output.output_ids) <= 2
    for _ in range(3):
        engine.step()
    assert_nothing_is_held(engine)


def test_a_pause_retracts_a_request_on_its_way_to_the_host(engine, monkeypatch):
    from sglang.srt.managers.io_struct import (
        ContinueGenerationReqInput,
        PauseGenerationReqInput,
    )

    rid = saving(engine, monkeypatch, 20)
    engine.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    assert [req.rid for req in engine.scheduler.waiting_queue] == [rid]
    assert_nothing_is_held(engine)
    engine.scheduler.continue_generation(ContinueGenerationReqInput())
    (output,) = engine.run_many(rid)
    assert len(output.output_ids) == 20
    for _ in range(3):
        engine.step()
    assert_nothing_is_held(engine)


@pytest.fixture
def retracted(monkeypatch):
    """Decode steps that find too few tokens, by chance; the requests that were retracted."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    chance, found = random.Random(0), []
    check_memory, retract = ScheduleBatch.check_decode_mem, ScheduleBatch.retract_decode

    def sometimes_short(batch, selected_indices=None):
        short = selected_indices is None and len(batch.reqs) > 1 and chance.random() < 0.02
        return not short and check_memory(batch, selected_indices)

    def noted(batch):
        result = retract(batch)
        found.extend(result[0])
        return result

    monkeypatch.setattr(ScheduleBatch, "check_decode_mem", sometimes_short)
    monkeypatch.setattr(ScheduleBatch, "retract_decode", noted)
    return found


@pytest.mark.parametrize("seed, arrivals", [(1, 60), pytest.param(2, 600, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("slow_saves")
def test_no_order_of_requests_crashes_wedges_or_leaks(
    engine, retracted, monkeypatch, seed, arrivals
):
    coordinator = coordinator_of(engine)
    lengths = []
    allocate = coordinator.alloc_device_buffer

    def noted(req):
        lengths.append(req.extend_end)
        allocate(req)

    monkeypatch.setattr(coordinator, "alloc_device_buffer", noted)
    ends = storm(engine, seed, arrivals)
    assert sum(ends.values()) == arrivals
    assert ends["abort"] > 3 and ends["length"] > arrivals / 2
    assert retracted
    # Both kinds: buffers that grow by what was promised, and prompts that shrink to their buffer.
    assert min(lengths) < 640 * 4 < max(lengths)


def test_promises_are_the_schedulers_own_state(engine):
    scheduler = engine.scheduler
    promises = promises_of(scheduler.token_to_kv_pool_allocator)
    rid = engine.submit(prompt(1, 4000), 4)
    seen = set()
    while not engine.is_done(rid):
        engine.step()
        seen |= {(p.tokens, p.allocated) for p in prefills_of(scheduler)}
    engine.output(rid)
    engine.step()
    assert {(4000, end) for end in (512, 1024, 3584, 4000)} <= seen
    assert promises.outstanding() == 0
    assert promises.left() == promises.region == region_rows(26112, 3, PAGE)


def test_a_planned_chunk_has_no_rows_yet(engine, monkeypatch):
    from sglang.srt.managers.schedule_policy import PrefillAdder

    promises = promises_of(engine.scheduler.token_to_kv_pool_allocator)
    left, add = [], PrefillAdder.add_chunked_req

    def noted(self, req):
        left.append(promises.left())
        result = add(self, req)
        left.append(promises.left())
        return result

    monkeypatch.setattr(PrefillAdder, "add_chunked_req", noted)
    engine.run_many(engine.submit(prompt(1, 1500), 1))
    engine.step()
    assert left and set(left) == {promises.region - promises.buffer.of_life(1500)}


sizes = st.integers(0, 40000)


@given(tokens=sizes, pages=st.integers(1, 100))
def test_rows_of_a_life(tokens, pages):
    buffer = HotBuffer(pages * PAGE, PAGE)
    rows = buffer.of_life(tokens)
    assert rows % PAGE == 0 and rows >= buffer.padded
    assert tokens // 4 <= max(rows, buffer.padded)
    assert buffer.of_life(tokens + 1) >= rows


@given(region=sizes, pages=st.integers(1, 100))
def test_the_longest_prompt_is_the_longest(region, pages):
    buffer = HotBuffer(pages * PAGE, PAGE)
    longest = buffer.longest_prompt(region)
    if longest == 0:
        assert region < buffer.padded
    else:
        assert buffer.of_life(longest) <= region < buffer.of_life(longest + 1)


@given(
    prefills=st.lists(st.tuples(sizes, sizes), max_size=6),
    free=sizes,
    pages=st.integers(1, 100),
)
def test_what_is_left_covers_what_was_promised(prefills, free, pages):
    buffer = HotBuffer(pages * PAGE, PAGE)
    promises = Promises(buffer, 10**6, lambda: free)
    states = [Prefill(max(pair), min(pair)) for pair in prefills]
    promises.prefills = lambda: states
    owed = [buffer.of_life(p.tokens) - buffer.of_tokens(p.allocated) for p in states]
    assert promises.left() == free - sum(owed)
    assert all(rows >= 0 for rows in owed)


@given(tokens=st.integers(1, 10**8), ratio=st.integers(1, 40))
def test_the_region_is_a_share_in_whole_pages(tokens, ratio):
    rows = region_rows(tokens, ratio, PAGE)
    assert rows % PAGE == 0 and 0 <= tokens / (4 * ratio) - rows < PAGE


@pytest.mark.parametrize(
    "rows, found",
    [(100, "must be a multiple of 64"), (0, "must be a multiple of 64"), (32768, "at most 32704")],
)
def test_a_buffer_of_no_use_is_refused(rows, found):
    with pytest.raises(ValueError, match=f"--hisparse-config device_buffer_size={rows}: .*{found}"):
        HotBuffer(rows, PAGE)
