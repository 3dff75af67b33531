"""Rows of rings to records and back, as 8-byte words or, from a chunk, as elements.

One launch moves all layers: a table on the device says where each ring is. Rows are never interpreted but
where a chunk hands them over in another dtype than the ring's.
"""

import triton
import triton.language as tl


@triton.jit
def move_ring_rows(
    table,
    slots,
    ends,
    staged,
    staging,
    record_words,
    TO_STAGING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows ``[end - rows, end)`` of a request slot between its ring and its staged record.

    Grid ``(ceil(most words of a section / BLOCK), sections, requests)``. ``staging`` is int64
    ``[slots, record_words]``; ``slots``, ``ends`` and ``staged`` are int64 ``[requests]``. ``table`` is int64
    ``[sections, 5]``: ring address, words of a row, rows per request slot, rows of a record, and where the
    section begins in a record, in words.
    """
    entry = table + tl.program_id(1) * 5
    row_words = tl.load(entry + 1)
    rows = tl.load(entry + 3)
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = word < rows * row_words
    size = tl.load(entry + 2)
    request = tl.program_id(2)
    position = tl.load(ends + request) - rows + word // row_words
    row = tl.load(slots + request) * size + position % size
    ring = tl.load(entry).to(tl.pointer_type(tl.int64)) + row * row_words + word % row_words
    record = staging + tl.load(staged + request) * record_words + tl.load(entry + 4) + word
    if TO_STAGING:
        tl.store(record, tl.load(ring, mask=inside), mask=inside)
    else:
        tl.store(ring, tl.load(record, mask=inside), mask=inside)


@triton.jit
def gather_chunk_rows(
    chunk,
    ring,
    section,
    chunk_index,
    ring_index,
    staged,
    chunk_stride,
    ring_stride,
    record_stride,
    rows,
    width,
    BLOCK: tl.constexpr,
):
    """Rows of boundaries inside a chunk: from the chunk, or from the ring for positions before it.

    Grid ``(captures * rows, ceil(width / BLOCK))``. ``section`` points at the section in the first staged
    record, strides are in elements; ``ring_index`` is -1 where the row is in the chunk.
    """
    item = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    before = tl.load(ring_index + item)
    here = before < 0
    fresh = tl.load(
        chunk + tl.load(chunk_index + item) * chunk_stride + column, mask=inside & here, other=0
    )
    old = tl.load(ring + before * ring_stride + column, mask=inside & (before >= 0), other=0)
    taken = tl.where(here, fresh.to(old.dtype), old)
    record = section + tl.load(staged + item // rows) * record_stride + (item % rows) * width
    tl.store(record + column, taken, mask=inside)
