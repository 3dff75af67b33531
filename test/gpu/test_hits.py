"""Hits with upstream's own kernels on a GPU, byte for byte: every tier, long prompts.

These kernels round by the shape of a chunk and of a batch. A hit is compared with a cold run whose last chunk
begins where the hit resumes, so that both compute the same shapes. The top-k kernel alone stays torch: two
cold runs of upstream's own already differ. Host pools are copied by torch, and by SGLang's own calls where
sgl_kernel is installed.
"""

import contextlib

import pytest
from gpu_hits import TIERS, hit_from
from oracle import (
    POISON,
    Recorder,
    assert_equal_runs,
    differing,
    largest_difference,
)
from sglang_unified_kv.checkpoint import manager as manager_module
from sglang_unified_kv.checkpoint.restore import restore
from sglang_unified_kv.reference import upstream_kernels
from sglang_unified_kv.reference.harness import prompt
from storage_folder import STORAGE, at

PAGE = 256
CASES = {256: 444, 512: 700, 2560: 2700}
LONG, LONG_CHUNK = 40_960, 8192


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "storage"


@pytest.fixture(
    params=[
        (False, "direct", "page_first_direct"),
        (True, "direct", "page_first_direct"),
        (True, "kernel", "page_first"),
    ],
    ids=["torch", "sgl_kernel", "sgl_kernel, kernel"],
)
def host_copies(request):
    """HiCache's options, while its host pools are copied by torch or by sgl_kernel."""
    sgl_kernel, io_backend, layout = request.param
    with contextlib.ExitStack() as stack:
        if sgl_kernel:
            pytest.importorskip("sgl_kernel.kvcacheio", exc_type=ImportError)
            stack.enter_context(upstream_kernels.also(upstream_kernels.SGL_KERNEL))
        yield dict(hicache_io_backend=io_backend, hicache_mem_layout=layout)


def test_hits_from_every_tier_are_bit_equal_to_stock_cold_runs(make_engine, folder, host_copies):
    text = prompt(0, 2700)
    with make_engine(stock=True, chunked_prefill_size=PAGE) as engine:
        recorder = Recorder(engine)
        cold = {length: recorder.cold(text[:length]) for length in CASES.values()}
    options = dict(chunked_prefill_size=PAGE, **STORAGE, **host_copies)
    with make_engine(env=at(folder), **options) as engine:
        recorder = Recorder(engine)
        assert_equal_runs(recorder.cold(text), cold[2700])
        for tier in TIERS:
            for boundary, length in CASES.items():
                hit = hit_from(tier, engine, recorder, text[:length])
                assert hit.cached_tokens == boundary, (tier, length)
                assert differing(hit.resumed, cold[2700].at_boundary[boundary]) == []
                assert_equal_runs(hit, cold[length])
        engine.tree.checkpoints.check_idle()


def test_without_the_restore_the_hit_differs(make_engine, monkeypatch):
    text = prompt(0, 2700)
    with make_engine(chunked_prefill_size=PAGE) as engine:
        recorder = Recorder(engine)
        cold = recorder.cold(text)

        def nothing_restored(restores, rows, mover, landed):
            restore(restores, rows, mover, landed)
            for item in restores:
                for ring in engine.tree.checkpoints.rings:
                    ring.buffer[item.slot * ring.size : (item.slot + 1) * ring.size] = POISON

        monkeypatch.setattr(manager_module, "restore", nothing_restored)
        hit = hit_from("device", engine, recorder, text)
        assert len(differing(hit.resumed, cold.at_boundary[2560])) == len(hit.resumed)
        assert largest_difference(hit, cold) > 0


def test_long_prompts_are_exact_from_every_tier(make_engine, folder):
    text = prompt(7, LONG + 200)
    options = dict(
        chunked_prefill_size=LONG_CHUNK,
        context_length=LONG + 1024,
        max_total_tokens=LONG + 4096,
        json_model_override_args=f'{{"max_position_embeddings": {LONG + 1024}}}',
        hicache_ratio=2,
        **STORAGE,
    )
    env = at(folder) | {"SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB": "0.5"}
    with make_engine(env=env, **options) as engine:
        recorder = Recorder(engine)
        cold = recorder.cold(text)
        assert cold.starts[-1] == LONG
        for tier in TIERS:
            hit = hit_from(tier, engine, recorder, text)
            assert hit.cached_tokens == LONG
            assert differing(hit.resumed, cold.at_boundary[LONG]) == []
            assert_equal_runs(hit, cold)
        engine.tree.checkpoints.check_idle()
