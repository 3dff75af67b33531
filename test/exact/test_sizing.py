"""Memory: what is reserved is what is allocated, budgets hold, and a bad budget ends the start."""

import pytest
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
from sglang_unified_kv import engage
from sglang_unified_kv.config import load_settings
from sglang_unified_kv.edits.exact.build import default_records, host_records
from sglang_unified_kv.edits.exact.pool_sizing import staging_bytes

PAGE = 256
SLOT_BYTES = 135_168


@pytest.mark.parametrize(
    ("env", "chunk", "slots"),
    [
        ({}, 2048, 9),
        ({"SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE": 2}, 2048, 5),
        ({"SGLANG_SWA_HICACHE_STATE_STAGING_PAGES": 3}, 2048, 3),
        ({}, -1, 8192 // PAGE + 1),
    ],
    ids=["default", "stride 2", "override", "no chunking"],
)
def test_staging_is_reserved_before_the_kv_pool_is_sized(make_engine, env, chunk, slots):
    with make_engine(env=env, chunked_prefill_size=chunk) as engine:
        mover = engine.tree.checkpoints.mover
        assert mover.staging_slots == slots
        configurator = create_memory_pool_configurator(engine.model_runner.kv_cache_configurator)
        reserved = configurator._fixed_swa_bytes(4)
        assert staging_bytes(configurator) == mover.staging.nbytes
        budget = reserved + 10_000_000
        strict = configurator.calculate_pool_sizes(budget, PAGE).full_max_total_num_tokens
        engage.reset()
        assert reserved - configurator._fixed_swa_bytes(4) == mover.staging.nbytes
        stock = configurator.calculate_pool_sizes(budget, PAGE).full_max_total_num_tokens
        assert strict < stock


def test_records_follow_the_host_pool_the_stride_and_the_budget(make_engine):
    with make_engine(env={"SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB": None}) as engine:
        pages = engine.tree.cache_controller.mem_pool_host.size // PAGE
        manager = engine.tree.checkpoints
        assert manager.store.capacity == pages == manager.mover.host.shape[0]
    assert default_records(load_settings({}), pages) == 64 and pages > 64
    assert default_records(load_settings({}), 4096) == 256
    assert default_records(load_settings({}), 20) == 20
    env = {
        "SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB": None,
        "SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE": 4,
        "SGLANG_UNIFIED_KV_PROVENANCE": "strict",
    }
    with make_engine(env=env) as engine:
        manager = engine.tree.checkpoints
        assert manager.store.capacity == pages // 4
        assert manager.policy.stride == 4 and manager._publisher._strict


@pytest.mark.parametrize("budget", ["0.0001", "900000"], ids=["no record", "more than there is"])
def test_a_budget_that_cannot_be_honoured_is_refused(budget):
    settings = load_settings({"SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB": budget})
    with pytest.raises(
        ValueError, match=rf"CHECKPOINT_HOST_GB={float(budget)}.*at least one record"
    ):
        host_records(settings, SLOT_BYTES, 10)


def test_the_default_is_capped_at_a_quarter_of_free_host_memory(caplog):
    with host_memory_budget_scope(100 * SLOT_BYTES):
        assert host_records(load_settings({}), SLOT_BYTES, 20) == 20 and not caplog.records
        assert host_records(load_settings({}), SLOT_BYTES, 26) == 25
    assert "capped at a quarter of free host memory: 25 records instead of 26" in caplog.text


def test_b3_another_write_policy_is_refused_before_any_pool(make_engine):
    with (
        pytest.raises(
            ValueError, match="--hicache-write-policy write_back: set it to write_through"
        ),
        make_engine(hicache_write_policy="write_back"),
    ):
        pass
