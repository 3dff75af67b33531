"""HiSparse swap-in: which C4 rows a decode step lacks, and their copies from the host.

The plan of a request is made by one program, the copies by as many as fill the chip. The plan's three steps
hand values to each other through memory: in one launch with barriers between them, or in three launches where
nothing promises that a barrier orders a program's own stores (ROCm).
"""

import triton
import triton.language as tl

MARK, LOOK_UP, PLACE, ALL = (tl.constexpr(step) for step in range(4))


@triton.jit
def plan_swap(
    top_k,
    lengths,
    requests,
    real,
    tokens,
    locations,
    order,
    cold,
    marks,
    out,
    sources,
    targets,
    counts,
    top_k_stride,
    slot_stride,
    cold_stride,
    marks_stride,
    out_stride,
    miss_stride,
    K: tl.constexpr,
    HOT: tl.constexpr,
    K_BLOCK: tl.constexpr,
    HOT_BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Grid ``(requests,)``; tensors as in ``hisparse/swap.py``. The positions of a request differ.

    ``marks`` int32 ``[requests, marks_stride]`` is zero before and after.
    """
    b = tl.program_id(0)
    k = tl.arange(0, K_BLOCK)
    out += b.to(tl.int64) * out_stride
    is_real = b < tl.load(real)
    slot = tl.load(requests + b, mask=is_real, other=0).to(tl.int64)
    length = tl.load(lengths + b, mask=is_real, other=0).to(tl.int32)
    position = tl.load(top_k + b.to(tl.int64) * top_k_stride + k, mask=k < K, other=-1)
    valid = (position >= 0) & (position < length)
    locations += slot * slot_stride
    resident = length <= HOT
    newest = valid & (position == length - 1)
    wanted = valid & (position < length - 1) & (length > HOT)

    tokens += slot * slot_stride
    order += slot * HOT
    marks += b.to(tl.int64) * marks_stride
    if (STEP == MARK) | (STEP == ALL):
        tl.store(marks + position, k + 1, mask=wanted)
    if STEP == ALL:
        tl.debug_barrier()
    if (STEP == LOOK_UP) | (STEP == ALL):
        here = tl.where(resident, position, HOT)
        known = tl.load(locations + here, mask=valid & (resident | newest), other=-1)
        tl.store(out + k, known, mask=(k < K) & ~wanted)
        if length > HOT:
            h = tl.arange(0, HOT_BLOCK)
            inside = h < HOT
            place = tl.load(order + h, mask=inside, other=0).to(tl.int32)
            held = tl.load(tokens + place, mask=inside, other=-1)
            asked = tl.load(marks + held, mask=inside & (held >= 0), other=0)
            hit = asked > 0
            tl.store(out + asked - 1, tl.load(locations + place, mask=hit, other=0), mask=hit)
            tl.store(marks + held, 0, mask=hit)
            # Order: stale rows, then those that the misses take, then the hits.
            hits = tl.sum(hit.to(tl.int32), 0)
            kept = HOT - tl.sum(wanted.to(tl.int32), 0)
            misses = HOT - hits - kept
            nth_hit = tl.cumsum(hit.to(tl.int32), 0) - 1
            nth_other = h - 1 - nth_hit
            later = tl.where(nth_other < misses, kept + nth_other, nth_other - misses)
            moved = tl.where(hit, HOT - hits + nth_hit, later)
            # The sums above wait for every load of the order, so none comes behind this store.
            tl.store(order + moved, place.to(tl.int16), mask=inside)
    if STEP == ALL:
        tl.debug_barrier()
    if (STEP == PLACE) | (STEP == ALL):
        missing = wanted & (tl.load(marks + position, mask=wanted, other=0) > 0)
        nth = tl.cumsum(missing.to(tl.int32), 0) - 1
        kept = HOT - tl.sum(wanted.to(tl.int32), 0)
        victim = tl.load(order + kept + nth, mask=missing, other=0).to(tl.int32)
        row = tl.load(locations + victim, mask=missing, other=0)
        tl.store(tokens + victim, position, mask=missing)
        tl.store(out + k, row, mask=missing)
        miss = b.to(tl.int64) * miss_stride + nth
        source = tl.load(cold + slot * cold_stride + position, mask=missing, other=0)
        tl.store(targets + miss, row, mask=missing)
        tl.store(sources + miss, source, mask=missing)
        tl.store(counts + b, tl.sum(missing.to(tl.int32), 0))
        tl.store(marks + position, 0, mask=missing)


@triton.jit(do_not_specialize=["first_layer"])
def copy_rows(
    sources,
    targets,
    source_rows,
    target_rows,
    counts,
    rows_stride,
    first_layer,
    row_words,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows between buffers that tables of addresses name.

    Grid ``(requests, splits, layers)``. ``sources`` and ``targets`` int64 ``[layers]``: addresses of int64
    ``[rows, row_words]``. Request ``b`` copies ``counts[b]`` rows, from ``source_rows[b]`` to
    ``target_rows[b]``.
    """
    b = tl.program_id(0).to(tl.int64)
    layer = first_layer + tl.program_id(2)
    source = tl.load(sources + layer).to(tl.pointer_type(tl.int64))
    target = tl.load(targets + layer).to(tl.pointer_type(tl.int64))
    count = tl.load(counts + b)
    word = tl.arange(0, BLOCK)[None, :]
    for first in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        i = first + tl.arange(0, ROWS)
        inside = i < count
        of = tl.load(source_rows + b * rows_stride + i, mask=inside, other=0).to(tl.int64)
        to = tl.load(target_rows + b * rows_stride + i, mask=inside, other=0).to(tl.int64)
        mask = inside[:, None] & (word < row_words)
        row = tl.load(source + of[:, None] * row_words + word, mask=mask)
        tl.store(target + to[:, None] * row_words + word, row, mask=mask)
