"""Pools of real engines: a view and no second allocation; C4 alone shrinks; what does not fit is refused."""

import json
from types import SimpleNamespace

import pytest
import torch
from hisparse_engine import PAGE, coordinator_of, engine_of, hisparse_options
from sglang.srt.layers.attention.deepseek_v4_backend_hip_radix import DeepseekV4HipRadixBackend
from sglang.srt.layers.attention.dsv4 import unified_kv_gate
from sglang.srt.managers.hisparse_coordinator import HiSparseCoordinator
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools
from sglang.srt.mem_cache.allocator.hisparse import (
    DeepSeekV4HiSparseTokenToKVPoolAllocator,
    HiSparseTokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator, is_swa_req_ring
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang_unified_kv.config import HISPARSE
from sglang_unified_kv.edits.hisparse import coordinator
from sglang_unified_kv.edits.hisparse.device_pool import UnifiedC4DevicePool
from sglang_unified_kv.edits.hisparse.pool import promises_of

TOKENS = 12288
C4, C128 = (1, 3), (2,)
"""Layers of the tiny model by what they compress to."""


@pytest.fixture(params=[False, True], ids=["bf16", "fp8"])
def fp8(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(unified_kv_gate, "is_unified_kv_fp8", lambda: True)
        # Plans kernels of gfx950.
        monkeypatch.setattr(
            DeepseekV4HipRadixBackend, "_init_fp8_asm_decode_plan", lambda self: None
        )
    return request.param


@pytest.mark.parametrize("ratio", [3, 4])
def test_c4_alone_shrinks_and_the_device_pool_is_a_view(make_engine, fp8, ratio):
    options = hisparse_options(ratio=ratio)
    with engine_of(make_engine, hisparse=True, max_total_tokens=TOKENS, **options) as engine:
        unified, rings = engine.pool.unified_kv_pool, engine.pool.unified_swa_pages
        buffers = [unified.kv_buffer] + ([unified.kv_buffer_rope] if fp8 else [])
        row_bytes = [512, 128] if fp8 else [1024]
        rows = TOKENS // (4 * ratio)
        for part in buffers:
            # The extra page is SGLang's null page.
            assert {len(part[layer]) - rings for layer in C4} == {rows + PAGE}
            assert {len(part[layer]) - rings for layer in C128} == {TOKENS // 128 + 2}
            assert len(part[0]) == rings
        device, coordinator = engine.pool.c4_kv_pool, coordinator_of(engine)
        assert isinstance(device, UnifiedC4DevicePool) and device.size == rows
        assert len(device.parts) == len(buffers)
        for i, part in enumerate(buffers):
            for layer, view in zip(C4, device.rows(i), strict=True):
                assert view.shape == (rows + PAGE, row_bytes[i])
                assert view.data_ptr() == part[layer][rings:].data_ptr()
        # All rows have a place on the host, of all parts alike.
        assert [pool.size for pool in coordinator.host_pools] == [TOKENS // 4] * len(buffers)
        allocator = engine.scheduler.token_to_kv_pool_allocator
        assert engine.scheduler.max_total_num_tokens == TOKENS
        # Logical, though the device holds a fraction.
        assert allocator.available_size() == allocator.full_available_size() == TOKENS
        save_and_load(coordinator)


def save_and_load(coordinator) -> None:
    """Rows of all parts reach the host and come back, in another place, byte for byte."""
    device = coordinator.mem_pool_device
    generator = torch.Generator().manual_seed(0)
    for part in range(len(device.parts)):
        for layer in device.rows(part):
            layer.copy_(torch.randint(0, 256, layer.shape, generator=generator, dtype=torch.uint8))
    before = [[layer.clone() for layer in device.rows(part)] for part in range(len(device.parts))]
    rows, host = torch.tensor([70, 71, 200]), torch.tensor([5, 900, 17])
    coordinator.swap.save(host, rows)
    target = torch.tensor([300, 64, 65])
    coordinator.swap.load(1, host, target)
    for part, layers in enumerate(before):
        assert torch.equal(device.rows(part)[1][target], layers[1][rows])
        assert torch.equal(device.rows(part)[0], layers[0])


def refused(make_engine, match, config=None, **server_args):
    if config is not None:
        server_args["hisparse_config"] = json.dumps(config)
    with pytest.raises(ValueError, match=match):
        with engine_of(make_engine, hisparse=True, max_total_tokens=TOKENS, **server_args):
            pass


@pytest.mark.parametrize(
    "config, match",
    [
        (
            {"top_k": 512, "device_buffer_size": 520},
            "device_buffer_size=520: it must be a multiple",
        ),
        (
            {"top_k": 512, "device_buffer_size": 512, "host_to_device_ratio": 1.5},
            "host_to_device_ratio=1.5: it must be an integer",
        ),
        ({"top_k": 256, "device_buffer_size": 256}, "device_buffer_size=256: .* index_topk=512"),
        (
            {"top_k": 512, "device_buffer_size": 512, "host_to_device_ratio": 8},
            "host_to_device_ratio=8: the device holds 384 C4 rows, one request needs 576",
        ),
    ],
)
def test_a_configuration_of_no_use_is_refused(make_engine, config, match):
    refused(make_engine, match, config)


def test_host_memory_is_asked_for_as_a_whole_before_any_is_taken(make_engine, fp8, monkeypatch):
    # Two layers of 3,072 rows: enough for one part of the fp8 layout, not for both.
    row_bytes = 640 if fp8 else 1024
    requested = 2 * (TOKENS // 4) * row_bytes
    free = 2 * (TOKENS // 4) * 512
    monkeypatch.setattr(coordinator, "host_memory_budget_bytes", lambda: free)
    monkeypatch.setattr(
        HiSparseCoordinator, "__init__", lambda *args, **kwargs: pytest.fail("memory was taken")
    )
    fitting = free // (2 * PAGE * row_bytes) * 256
    refused(
        make_engine,
        f"{requested / 1e9:.2f} GB per rank are requested, {free / 1e9:.2f} GB are free.*"
        f"--max-total-tokens to at most {fitting}",
    )


# Whatever is not DeepSeek-V4 on the unified pool.


@pytest.fixture
def switched_on(monkeypatch):
    """As in a server with the switch and --enable-hisparse on, on another layout."""
    monkeypatch.setenv(HISPARSE, "1")
    monkeypatch.setattr(unified_kv_gate, "is_unified_kv_triton", lambda: False)
    memory = SimpleNamespace(enable_hisparse=True, hisparse_config=None)
    monkeypatch.setattr("sglang.srt.runtime_context.get_memory", lambda: memory)


def test_the_packed_layout_of_deepseek_v4_is_not_touched(switched_on, monkeypatch):
    execution = SimpleNamespace(
        kernel=SimpleNamespace(dsv4_attn_backend=None, enable_deepseek_v4_fp4_indexer=False),
        features=SimpleNamespace(enable_encoder_swa_bounded_replay=False),
        graph=SimpleNamespace(cuda_graph_config=None),
    )
    monkeypatch.setattr(pools, "get_exec", lambda: execution)
    monkeypatch.setattr(pools, "get_spec", lambda: SimpleNamespace(speculative_algorithm=None))
    monkeypatch.setattr(pools, "get_platform", lambda: SimpleNamespace(is_sm120=False))
    pool = pools.DeepSeekV4TokenToKVPool(
        max_num_reqs=4, swa_size=2048, c4_size=1024, c128_size=128, c4_state_pool_size=256,
        c128_state_pool_size=256, page_size=256, swa_page_size=256, dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32, c128_state_dtype=torch.float32, qk_nope_head_dim=448,
        qk_rope_head_dim=64, indexer_head_dim=128, layer_num=3, device="cpu",
        enable_memory_saver=False, compression_ratios=[0, 4, 128], start_layer=0, end_layer=3,
        enable_hisparse=True, full_size=16384,
    )  # fmt: skip
    assert type(pool.c4_kv_pool) is pools.HiSparseC4DevicePool
    slots = ReqToTokenPool(size=4, max_context_len=512, device="cpu", enable_memory_saver=False)
    logical = SWATokenToKVPoolAllocator(
        16384, 2048, 256, torch.uint8, "cpu", pool, False, req_to_token_pool=slots
    )
    allocator = DeepSeekV4HiSparseTokenToKVPoolAllocator(logical)
    assert promises_of(allocator) is None and not is_swa_req_ring(allocator)
    # The device bounds what is free, as released.
    assert allocator.full_available_size() == 4096 and allocator.available_size() == 2048
    budget = allocator.create_prefill_budget(None)
    assert type(budget).__name__ == "SWAPrefillBudget"
    limits = {"token_capacity": 16384, "sliding_window_size": 128, "chunk_size": 512}
    assert allocator.max_new_tokens_for_memory(8192, 10**6, **limits) == 16384 - 8192 - 257


def test_hisparse_of_other_models_is_not_touched(switched_on):
    class Dsa:
        def register_mapping(self, mapping):
            self.mapping = mapping

        def _translate_loc_to_hisparse_device(self, loc):
            return self.mapping[loc]

    allocator = HiSparseTokenToKVPoolAllocator(
        512, 64, torch.bfloat16, "cpu", Dsa(), need_sort=False, host_to_device_ratio=2
    )
    assert allocator.available_size() == 512 and allocator.size == 1024
    lengths = torch.tensor([0]), torch.tensor([100])
    found = allocator.alloc_extend(
        lengths[0], lengths[0], lengths[1], lengths[1], torch.tensor([-1]), 100
    )
    assert len(found) == 100 and allocator.available_size() == 512 - 128
    buffer = allocator.alloc_device_buffer(found, 256)
    assert len(set(buffer.tolist())) == 256 and allocator.available_size() == 512 - 256
    allocator.free_hisparse_indices(buffer)
    allocator.free(found)
    assert allocator.available_size() == 512
