"""Scheduler: a batch is planned when it is launched, and restores are requested when it is prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..checkpoint.manager import Row
from .active import current_manager
from .series import SERIES

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

_FEATURE = "bit-exact hicache"


@SERIES.wrap(
    "sglang.srt.mem_cache.allocation:_prefix_kv_indices",
    feature=_FEATURE,
    why="runs once for every request of an extend and tells a fresh row from a continued one",
    params="batch, req",
    fingerprint="53239ce78ed9dc4f",
)
def prefix_kv_indices(original, batch, req):
    if not req.kv.holds_kv and req.prefix_len > 0:
        batch.tree_cache.restore_swa_windows(req)
    return original(batch, req)


@SERIES.wrap(
    "sglang.srt.managers.scheduler:Scheduler.run_batch",
    feature=_FEATURE,
    why="rows, prefixes and extends of the batch are final and nothing is launched yet",
    params="self, batch, pp_proxy_tensors",
    fingerprint="c314c0d4b02c8565",
)
def run_batch(original, self, batch, *args, **kwargs):
    manager = current_manager()
    if manager is None or batch.forward_mode.is_idle():
        return original(self, batch, *args, **kwargs)
    manager.plan(rows_of(batch))
    try:
        return original(self, batch, *args, **kwargs)
    finally:
        manager.close_step()


def rows_of(batch: ScheduleBatch) -> list[Row]:
    """The batch's rows; mixed and converted decode rows are 1-token extends and read the same way."""
    pool = batch.req_to_token_pool
    slots = [req.kv.req_pool_idx for req in batch.reqs]
    generations = pool.req_generation[slots].tolist()
    if batch.forward_mode.is_extend():
        spans = [(p, p + e) for p, e in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
    else:
        spans = [(end - 1, end) for end in batch.seq_lens_cpu.tolist()]
    decode = not batch.forward_mode.is_extend()
    return [
        Row(req.rid, slot, generation, start, end, decode)
        for req, slot, generation, (start, end) in zip(
            batch.reqs, slots, generations, spans, strict=True
        )
    ]


SERIES.relies_on(
    "sglang.srt.managers.schedule_policy:PrefillAdder.add_one_req",
    feature=_FEATURE,
    why="a failed load-back resumes at the device match without another match",
    params="self, req, has_chunked_req, truncation_align_size",
    fingerprint="194314fb5aba05df",
)
SERIES.relies_on(
    "sglang.srt.mem_cache.memory_pool:ReqToTokenPool.alloc_rows",
    feature=_FEATURE,
    why="counts allocations of a row, which tells a fresh row from a continued one",
    params="self, need_size",
    fingerprint="0ae0b18bdab53aca",
)
SERIES.relies_on(
    "sglang.srt.mem_cache.common:release_kv_cache",
    feature=_FEATURE,
    why="every way to give a row back (finish, abort, retraction) ends in on_release",
    params="req, tree_cache, *, checkpoint",
    fingerprint="90e19434d1fa8c22",
)
