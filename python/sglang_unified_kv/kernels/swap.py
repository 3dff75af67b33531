"""HiSparse swap-in: which C4 rows a decode step lacks, and their copies from the host.

The plan of a request is made by one program, the copies by as many as fill the chip. The plan's three steps
hand values to each other through memory: in one launch with barriers between them, or in three launches where
nothing promises that a barrier orders a program's own stores (ROCm).
"""

import triton
import triton.language as tl

LOOK_UP, SWEEP, PLACE, ALL = (tl.constexpr(step) for step in range(4))


@triton.jit
def plan_swap(
    top_k,
    lengths,
    requests,
    real,
    tokens,
    locations,
    places,
    stamps,
    clocks,
    cold,
    victims,
    out,
    sources,
    targets,
    counts,
    tally,
    top_k_stride,
    slot_stride,
    positions,
    out_stride,
    miss_stride,
    K: tl.constexpr,
    HOT: tl.constexpr,
    K_BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Grid ``(requests,)``; tensors as in ``hisparse/swap.py``. The positions of a request differ.

    Nothing here depends on the size of the hot buffer: a request touches what belongs to its positions and to
    the ``2 * K`` places behind its hand.
    """
    b = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, K_BLOCK)
    out += b * out_stride
    victims += b * miss_stride
    is_real = b < tl.load(real)
    slot = tl.load(requests + b, mask=is_real, other=0).to(tl.int64)
    length = tl.load(lengths + b, mask=is_real, other=0).to(tl.int32)
    position = tl.load(top_k + b * top_k_stride + k, mask=k < K, other=-1)
    valid = (position >= 0) & (position < length)
    resident = length <= HOT
    newest = valid & (position == length - 1)
    wanted = valid & (position < length - 1) & (length > HOT)

    tokens += slot * slot_stride
    locations += slot * slot_stride
    places += slot * positions
    stamps += slot * HOT
    clocks += slot * 3
    now = tl.load(clocks + 2) + 1
    if (STEP == LOOK_UP) | (STEP == ALL):
        place = tl.load(places + position, mask=wanted, other=-1).to(tl.int32)
        hit = wanted & (place >= 0)
        known = tl.where(resident, position, tl.where(newest, HOT, place))
        found = valid & (resident | newest | hit)
        row = tl.load(locations + known, mask=found, other=-1)
        tl.store(out + k, row, mask=(k < K) & (found | ~wanted))
        tl.store(stamps + place, now, mask=hit)
        missed = tl.sum((wanted & ~hit).to(tl.int32), 0)
        tl.store(counts + b, missed)
        # Nobody else has this program's pair, and layers take their turns.
        tl.store(tally + 2 * b, tl.load(tally + 2 * b) + tl.sum(wanted.to(tl.int32), 0))
        tl.store(tally + 2 * b + 1, tl.load(tally + 2 * b + 1) + missed)
    if STEP == ALL:
        tl.debug_barrier()
    if (STEP == SWEEP) | (STEP == ALL):
        misses = tl.load(counts + b)
        if misses > 0:
            hand = tl.load(clocks)
            lap = tl.load(clocks + 1)
            i = tl.arange(0, 2 * K_BLOCK)
            swept = i < tl.minimum(2 * K, HOT)
            behind = (hand + i) % HOT
            read = tl.load(stamps + behind, mask=swept, other=now)
            # Rows that nobody read since the hand began this lap; then those that this step does not read.
            old = read < lap
            spare = (read < now) & ~old
            nth_spare = tl.sum(old.to(tl.int32), 0) + tl.cumsum(spare.to(tl.int32), 0) - 1
            nth = tl.where(old, tl.cumsum(old.to(tl.int32), 0) - 1, nth_spare)
            taken = (old | spare) & (nth < misses)
            tl.store(victims + nth, behind, mask=taken)
            tl.store(stamps + behind, now, mask=taken)
            # The sums above wait for every load of the clock, so none comes behind these stores.
            passed = hand + tl.max(tl.where(taken, i, -1), 0) + 1
            tl.store(clocks, passed % HOT)
            tl.store(clocks + 1, tl.where(passed >= HOT, now, lap))
    if STEP == ALL:
        tl.debug_barrier()
    if (STEP == PLACE) | (STEP == ALL):
        missing = wanted & (tl.load(places + position, mask=wanted, other=0) < 0)
        nth = tl.cumsum(missing.to(tl.int32), 0) - 1
        victim = tl.load(victims + nth, mask=missing, other=0)
        row = tl.load(locations + victim, mask=missing, other=0)
        left = tl.load(tokens + victim, mask=missing, other=0)
        tl.store(places + left, -1, mask=missing)
        tl.store(places + position, victim.to(tl.int16), mask=missing)
        tl.store(tokens + victim, position, mask=missing)
        tl.store(out + k, row, mask=missing)
        source = tl.load(cold + slot * positions + position, mask=missing, other=0)
        tl.store(targets + b * miss_stride + nth, row, mask=missing)
        tl.store(sources + b * miss_stride + nth, source, mask=missing)
        tl.store(clocks + 2, now, mask=is_real)


@triton.jit(do_not_specialize=["first_layer", "rows_stride"])
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
