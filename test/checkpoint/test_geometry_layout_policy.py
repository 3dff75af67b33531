"""Pure arithmetic of checkpoints: boundaries, row sources, byte map, grid."""

import doctest
import importlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_unified_kv.checkpoint.geometry import boundaries, page_floor, ring_rows, row_sources
from sglang_unified_kv.checkpoint.layout import CheckpointLayout, Kind, RingSpec
from sglang_unified_kv.checkpoint.policy import Grid, Path, Span

PAGE = 256


@pytest.mark.parametrize("name", ["geometry", "layout", "policy", "reuse", "staging", "store"])
def test_worked_examples_in_docstrings(name):
    module = importlib.import_module(f"sglang_unified_kv.checkpoint.{name}")
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 8))
def test_boundaries_are_the_multiples_a_span_completes(start, length, stride):
    step = stride * PAGE
    found = boundaries(start, start + length, step)
    assert found == [p for p in range(start + 1, start + length + 1) if p % step == 0]


@given(
    st.integers(0, 5000), st.lists(st.integers(1, 900), min_size=1, max_size=6), st.integers(1, 4)
)
def test_chunking_does_not_change_the_grid(start, chunks, stride):
    policy, found, position = Grid(PAGE, stride), [], start
    path = Path(start, start, start + sum(chunks))
    for chunk in chunks:
        found += policy.boundaries(Span(position, position + chunk), path)
        position += chunk
    assert found == policy.boundaries(Span(start, position), path)


@given(
    slot=st.integers(0, 5),
    pages=st.integers(1, 6),
    start=st.integers(0, 1500),
    offset=st.integers(0, 300),
    rows=st.sampled_from([4, 128]),
    extra=st.sampled_from([0, 3]),
)
def test_row_sources_find_every_position(slot, pages, start, offset, rows, extra):
    boundary, ring_size = pages * PAGE, (8 if rows == 4 else 128) + extra
    start = min(start, boundary - 1)
    # An engine that holds position p in both places, as it does while a chunk is computed.
    chunk = np.full(offset + boundary, -1)
    chunk[offset : offset + boundary - start] = np.arange(start, boundary)
    ring = np.full((slot + 1) * ring_size, -1)
    before = np.arange(max(0, start - ring_size), start)
    ring[slot * ring_size + before % ring_size] = before
    found = row_sources(boundary, rows, slot, ring_size, start, offset)
    positions = np.where(found.from_ring, ring[found.ring], chunk[found.flat])
    assert positions.tolist() == list(range(boundary - rows, boundary))


def test_row_sources_refuse_rows_the_ring_has_lost():
    with pytest.raises(ValueError, match="do not fit a ring of 8"):
        row_sources(512, 128, 1, 8, 500, 0)
    with pytest.raises(ValueError, match="closer to the start"):
        row_sources(64, 128, 1, 128, 0, 0)


@given(st.integers(0, 9), st.integers(1, 300), st.integers(0, 4000), st.integers(0, 128))
def test_ring_rows_stay_in_their_slot(slot, ring_size, first, count):
    rows = ring_rows(slot, ring_size, first, first + count)
    assert all(slot * ring_size <= r < (slot + 1) * ring_size for r in rows)
    assert len(set(rows.tolist())) == min(count, ring_size)


@given(st.integers(0, 10_000))
def test_page_floor(length):
    assert page_floor(length, PAGE) <= length < page_floor(length, PAGE) + PAGE


def rings(layers=5, c4=(1, 3), width=1024, dtype="bfloat16"):
    found = [RingSpec(Kind.WINDOW, i, width, dtype) for i in range(layers)]
    found += [RingSpec(Kind.ATTENTION_STATE, i, 8192, "float32") for i in c4]
    return found + [RingSpec(Kind.INDEXER_STATE, i, 2048, "float32") for i in c4]


def layout(specs=None, **change):
    sizes = {"page_size": PAGE, "window": 128, "overlap": 4} | change
    return CheckpointLayout.of(specs or rings(), **sizes)


def test_sections_tile_the_record_in_the_documented_order():
    found = layout(list(reversed(rings())))
    offset = 0
    for section in found.sections:
        assert section.offset == offset
        offset += section.nbytes
    assert [s.spec.kind for s in found.sections] == sorted(
        (s.spec.kind for s in found.sections), key=list(Kind).index
    )
    assert found.payload_bytes == offset <= found.record_bytes
    assert found.record_bytes % 4096 == 0


def test_fingerprint_tells_every_change_apart_and_nothing_else():
    base = layout().fingerprint
    assert base == layout(list(reversed(rings()))).fingerprint
    changed = [
        layout(rings(layers=6)),
        layout(rings(c4=(1, 2))),
        layout(rings(width=640)),
        layout(rings(dtype="float8_e4m3fn")),
        layout(window=64),
        layout(overlap=8),
        layout(page_size=512),
    ]
    assert len({base, *(c.fingerprint for c in changed)}) == len(changed) + 1


def test_layout_refuses_what_cannot_be_a_checkpoint():
    with pytest.raises(ValueError, match="does not hold"):
        layout(window=512)
    with pytest.raises(ValueError, match="given twice"):
        layout(rings() + rings()[:1])
