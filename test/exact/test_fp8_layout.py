"""The fp8 two-pool layout: packed rows in one pool, rope rows in another, captured and restored together.

The real pools, rings and host memory of an engine in that layout; its attention kernels need a gfx950, so
rows come from the test and not from a model.
"""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.deepseek_v4_backend_hip_radix import DeepseekV4HipRadixBackend
from sglang.srt.layers.attention.dsv4 import unified_kv_gate
from sglang_unified_kv.checkpoint.capture import Capture, EndCapture, InteriorCapture
from sglang_unified_kv.checkpoint.layout import WINDOW_KINDS, Kind
from sglang_unified_kv.checkpoint.restore import Restore, restore
from sglang_unified_kv.checkpoint.store import Record
from sglang_unified_kv.edits.exact.attention import forward_unified_kv

WINDOW, START, END = 128, 300, 700
SLOT, OTHER = 1, 2


@pytest.fixture(scope="module")
def engine(make_engine):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unified_kv_gate, "is_unified_kv_fp8", lambda: True)
        # Plans kernels of gfx950.
        patch.setattr(DeepseekV4HipRadixBackend, "_init_fp8_asm_decode_plan", lambda self: None)
        with make_engine() as built:
            yield built


@pytest.fixture
def manager(engine):
    return engine.tree.checkpoints


def random_rows(ring, count: int, seed: int) -> torch.Tensor:
    """Rows of any bytes, NaN patterns of both formats included."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, ring.spec.row_bytes)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(
        ring.buffer.dtype
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def ring_index(ring, slot: int, first: int, last: int) -> torch.Tensor:
    return slot * ring.size + torch.arange(first, last) % ring.size


def put(ring, slot: int, first: int, rows: torch.Tensor) -> None:
    """What the engine's store does: the last window of a chunk goes to the ring."""
    kept = rows[-WINDOW:]
    last = first + len(rows)
    as_bytes(ring.buffer)[ring_index(ring, slot, last - len(kept), last)] = as_bytes(kept)


def test_both_pools_are_rings_of_the_record(engine, manager):
    unified = engine.pool.unified_kv_pool
    assert unified.fp8
    rings = {kind: [r for r in manager.rings if r.spec.kind is kind] for kind in Kind}
    for kind, buffers, row_bytes, dtype in (
        (Kind.WINDOW, unified.kv_buffer, 512, "float8_e4m3fn"),
        (Kind.WINDOW_ROPE, unified.kv_buffer_rope, 128, "bfloat16"),
    ):
        assert [r.buffer.data_ptr() for r in rings[kind]] == [b.data_ptr() for b in buffers]
        assert {(r.spec.row_bytes, r.spec.dtype) for r in rings[kind]} == {(row_bytes, dtype)}
    assert {s.rows for s in manager.mover.layout.sections if s.spec.kind in WINDOW_KINDS} == {
        WINDOW
    }


@pytest.mark.parametrize("boundary", [384, END], ids=["inside the chunk", "at its end"])
def test_rows_come_back_byte_for_byte_in_another_slot(manager, boundary):
    """``[0, START)`` was computed before, ``[START, END)`` is the chunk; the window reaches into both."""
    rings, mover = manager.rings, manager.mover
    before = [random_rows(r, START, seed) for seed, r in enumerate(rings)]
    chunk = [random_rows(r, END - START, 100 + seed) for seed, r in enumerate(rings)]
    for ring, rows in zip(rings, before, strict=True):
        put(ring, SLOT, 0, rows)
    host_slot = 3
    captures = [Capture("r", SLOT, boundary, START, 0, host_slot)]
    if boundary == END:
        for ring, rows in zip(rings, chunk, strict=True):
            put(ring, SLOT, START, rows)
        capture = EndCapture(captures, manager.rows, mover)
        capture.gather(frozenset(Kind))
    else:
        capture = InteriorCapture(captures, manager.rows, mover)
        for section, rows in enumerate(chunk):
            capture.gather(section, rows)
    capture.finish()
    for ring in rings:
        as_bytes(ring.buffer)[OTHER * ring.size : (OTHER + 1) * ring.size] = 0xA5
    restore([Restore("r", OTHER, Record("key", boundary, host_slot, False))], manager.rows, mover)
    for section, ring, old, new in zip(mover.layout.sections, rings, before, chunk, strict=True):
        whole = torch.cat([as_bytes(old), as_bytes(new)])
        expected = whole[boundary - section.rows : boundary]
        found = as_bytes(ring.buffer)[ring_index(ring, OTHER, boundary - section.rows, boundary)]
        assert torch.equal(found, expected), ring.spec


def test_a_layer_hands_over_both_halves_and_passes_them_on(engine, manager, monkeypatch):
    taken, passed = [], {}
    monkeypatch.setattr(type(manager), "armed", True)
    monkeypatch.setattr(manager, "capture_interior", lambda *arguments: taken.append(arguments))
    unified, backend = engine.pool.unified_kv_pool, engine.model_runner.attn_backend
    nope, rope, layer = object(), object(), SimpleNamespace(layer_id=2)
    forward_unified_kv(
        lambda self, **kwargs: passed.update(kwargs),
        backend,
        kv=nope,
        layer=layer,
        forward_batch=None,
        k_rope=rope,
    )
    assert passed == dict(kv=nope, layer=layer, forward_batch=None, k_rope=rope)
    assert taken == [
        (Kind.WINDOW, unified.kv_buffer[2].data_ptr(), nope),
        (Kind.WINDOW_ROPE, unified.kv_buffer_rope[2].data_ptr(), rope),
    ]
