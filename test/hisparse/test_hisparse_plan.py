"""The plan with HiSparse: its bytes are those of real pools and tables, its counts those of the scheduler."""

import doctest
from dataclasses import replace

import pytest
import torch
from hisparse_engine import answer_at_once, coordinator_of, engine_of, hisparse_options
from hypothesis import given
from hypothesis import strategies as st
from plan_runs import device_bytes
from sglang.srt.layers.attention.deepseek_v4_backend_hip_radix import DeepseekV4HipRadixBackend
from sglang.srt.layers.attention.dsv4 import unified_kv_gate
from sglang_unified_kv.config import load_settings
from sglang_unified_kv.edits.hisparse.pool import promises_of
from sglang_unified_kv.hisparse import capacity, rows, tables
from sglang_unified_kv.hisparse.capacity import HiSparseSizes, cold_pages, tokens_on_host
from sglang_unified_kv.hisparse.rows import HotBuffer
from sglang_unified_kv.hisparse.swap import Residency, TritonSwap
from sglang_unified_kv.hisparse.tables import slot_tables, step_rows
from sglang_unified_kv.plan import planner as planning
from sglang_unified_kv.plan.capacity import Machine, first_limits, prompts
from sglang_unified_kv.plan.conversation import Conversation
from sglang_unified_kv.plan.planner import Planner
from sglang_unified_kv.reference.harness import prompt

PAGE = 256
TOKENS = 37120
"""3,072 device rows at ratio 3, in whole pages."""
OPTIONS = {
    "max_total_tokens": TOKENS,
    "max_running_requests": 5,
    "chunked_prefill_size": 1024,
    **hisparse_options(ratio=3, buffer=640),
}
ON_THE_HOST = {"req_device_buffer_size", "req_to_host_pool_allocated_len"}


@pytest.fixture(scope="module", params=["bf16", pytest.param("fp8", marks=pytest.mark.slow)])
def engine(make_engine, request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "fp8":
            patch.setattr(unified_kv_gate, "is_unified_kv_fp8", lambda: True)
            # Plans kernels of gfx950; the model computes nothing here.
            patch.setattr(DeepseekV4HipRadixBackend, "_init_fp8_asm_decode_plan", lambda self: None)
        with engine_of(make_engine, hisparse=True, **OPTIONS) as engine:
            answer_at_once(engine)
            yield engine


@pytest.fixture
def planner(engine):
    return Planner(engine.server_args)


def planned(planner, available=1 << 32, **options):
    return planner.sizes(available, Machine(4, 0, 100), load_settings(), **options)


def tables_of(coordinator) -> dict[str, int]:
    """Bytes of memory behind every device tensor of a coordinator, with the kernels' swap for torch's."""
    kernels = TritonSwap(
        promises_of(coordinator.token_to_kv_pool_allocator).buffer,
        coordinator.swap._parts,
        coordinator.top_k,
        step_rows(len(coordinator.req_to_host_pool)),
    )
    tensors = {k.removeprefix("_"): v for k, v in vars(kernels).items()}
    tensors |= coordinator.residency._asdict() | vars(coordinator)
    # The first two of a residency are the coordinator's own.
    del tensors["tokens"], tensors["locations"]
    return {
        name: value.untyped_storage().nbytes()
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor) and name not in ON_THE_HOST
    }


def map_of(engine) -> torch.Tensor:
    return engine.scheduler.token_to_kv_pool_allocator.full_to_hisparse_device_index_mapping


def test_every_table_is_counted(engine):
    found = {name: size for name, size in tables_of(coordinator_of(engine)).items() if size}
    counted = slot_tables(6, 2, 10240 + 4, 512, HotBuffer(640, 64))
    assert counted.pop("unmapped") == map_of(engine)[-1:].nbytes
    assert found == counted


def test_figures_are_the_bytes_of_real_pools_and_tables(engine, planner):
    coordinator = coordinator_of(engine)
    promises = promises_of(coordinator.token_to_kv_pool_allocator)
    sizes = planned(planner, most=TOKENS)
    assert sizes.tokens == TOKENS == engine.scheduler.max_total_num_tokens < sizes.tokens_fitting
    device = sum(tables_of(coordinator).values()) + map_of(engine).nbytes
    assert device_bytes(engine.pool) + device == sizes.fixed + sizes.pools
    assert sizes.slots == engine.pool.num_req_slots
    hisparse = sizes.hisparse
    assert hisparse.tables + map_of(engine)[:-65].nbytes + 64 * 8 == device
    assert (hisparse.ratio, hisparse.buffer) == (3, promises.buffer)
    assert hisparse.rows == promises.region == coordinator.mem_pool_device.size == 3072
    assert hisparse.longest_sequence == promises.longest_sequence
    host = [buffer for pool in coordinator.host_pools for buffer in pool.kv_buffer]
    assert sizes.host_bytes == {"cold C4 rows": sum(buffer.nbytes for buffer in host)}
    assert sizes.host_pages == sizes.host_shortfall == 0 and not sizes.exact
    assert prompts(sizes, Conversation(5000, 100)) == {
        "logical tokens": TOKENS // PAGE // 20,
        "request slots": 5,
        "device C4 rows": 3,
    }
    assert first_limits(prompts(sizes, Conversation(5000, 100))) == ("device C4 rows", None)


def test_a_budget_is_spent_to_the_last_page(planner, monkeypatch):
    budget = 1 << 30
    sizes = planned(planner, budget)
    left = budget - sizes.fixed - sizes.tokens * sizes.per_token
    assert 0 <= left < PAGE * sizes.per_token
    # What the ring is compared with pays for the tables as well.
    monkeypatch.setattr(planning, "table_bytes", lambda *_: 0)
    assert planned(planner, budget).tokens_scaled > sizes.tokens_scaled
    less = planned(planner, budget - sizes.hisparse.tables)
    assert less.tokens_scaled == sizes.tokens_scaled


@pytest.mark.parametrize("length", [300, 5000, 8000])
def test_as_many_run_as_the_plan_says(engine, planner, length):
    hisparse = planned(planner, most=TOKENS).hisparse
    slots = engine.req_to_token_pool
    rids = [engine.submit(prompt(i, length), 120) for i in range(5)]
    most, computed = 0, 0
    while not all(map(engine.is_done, rids)):
        engine.step()
        used = [slot for slot in range(1, 6) if slot not in slots.free_slots]
        most = max(most, len(used))
        decoding = coordinator_of(engine).req_device_buffer_size[used] > 0
        if len(used) == hisparse.running(length) and decoding.all():
            computed += 1
            held = hisparse.rows - promises_of(engine.scheduler.token_to_kv_pool_allocator).left()
            assert held == len(used) * hisparse.buffer.of_decode(length)
    for rid in rids:
        engine.output(rid)
    engine.step()
    assert most == hisparse.running(length) == {300: 4, 5000: 3, 8000: 2}[length]
    assert computed
    assert hisparse.prefills(length) <= most <= hisparse.hot_buffers(length)


def test_examples():
    for module in (rows, tables, capacity):
        result = doctest.testmod(module)
        assert result.attempted >= 1 and result.failed == 0, module


@given(
    slots=st.integers(1, 5),
    layers=st.integers(1, 3),
    context=st.integers(1, 3000),
    top_k=st.integers(1, 64),
    pages=st.integers(1, 4),
)
def test_our_tables_of_any_shape(slots, layers, context, top_k, pages):
    buffer = HotBuffer(pages * 64, 64)
    counted = slot_tables(slots, layers, context, top_k, buffer)
    order = torch.zeros(layers, slots, buffer.padded, dtype=torch.int32)
    residency = Residency.empty(order, order, buffer.rows, -(-context // 4) + 64)._asdict()
    assert counted["req_device_buffer_tokens"] == order.nbytes
    for name in ("places", "stamps", "clocks"):
        assert counted[name] == residency[name].nbytes, name
    # Each table but those two grows with the slots alone.
    once, twice = (slot_tables(n * 64 * slots, layers, context, top_k, buffer) for n in (1, 2))
    fixed = {"_device_buffer_arange_i32", "num_real_reqs", "unmapped"}
    assert all(twice[name] == once[name] * (2 - (name in fixed)) for name in once)


SIZES = HiSparseSizes(
    ratio=2,
    buffer=HotBuffer(4096, 64),
    rows=41600,
    tables=0,
    cold_page=30 * 64 * 1024,
    cold_pages=1000,
    context=100_000,
)


def test_warnings():
    assert SIZES.warnings(requests=10) == []
    (buffers,) = SIZES.warnings(11)
    assert "11 requests may run, but the device's 41,600 C4 rows are 10 hot buffers" in buffers
    (longest,) = replace(SIZES, context=166_404).warnings(10)
    assert "allows 166,404 tokens, but a sequence may grow to 166,403" in longest


def test_what_is_refused():
    assert SIZES.refusals(SIZES.cold_bytes) == []
    (host,) = SIZES.refusals(SIZES.cold_bytes - 1)
    assert "on the host, 2.0 GB of the rank's 2.0 GB" in host and host.endswith("at most 255744")
    small = replace(SIZES, rows=4096)
    (none,) = small.refusals(SIZES.cold_bytes)
    assert "the device holds 4,096 C4 rows, one hot buffer is 4,160" in none
    assert small.warnings(10) == []


@given(
    free=st.integers(0, 10**12),
    page_bytes=st.integers(1, 10**7),
    more=st.integers(1, 10**6),
)
def test_as_many_tokens_as_the_host_holds(free, page_bytes, more):
    fitting = tokens_on_host(free, page_bytes, 64)
    assert cold_pages(fitting, 64) * page_bytes <= free
    assert cold_pages(fitting + more, 64) * page_bytes > free
