"""Scheduler: a batch is planned when it is launched, and restores are requested when it is prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..series import SERIES
from .active import current_manager
from .request_key import key_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from ...checkpoint.manager import Row

_FEATURE = "bit-exact hicache"


@SERIES.wrap(
    "sglang.srt.mem_cache.allocation:_prefix_kv_indices",
    feature=_FEATURE,
    why="runs once for every request of an extend and tells a fresh row from a continued one",
    params="batch, req",
    fingerprint="53239ce78ed9dc4f",
)
def prefix_kv_indices(original, batch, req):
    if not req.kv.holds_kv:
        if current_manager() is not None:
            batch.tree_cache.admit(req)
        if req.prefix_len > 0:
            batch.tree_cache.restore_swa_windows(req)
    return original(batch, req)


@SERIES.wrap(
    "sglang.srt.mem_cache.common:touch_waiting_prefix",
    feature=_FEATURE,
    why="keeps records of queued requests as young as their pages; knows the request",
    params="req, tree_cache",
    fingerprint="b669c21bd30c44eb",
)
def touch_waiting_prefix(original, req, tree_cache):
    original(req, tree_cache)
    if current_manager() is not None:
        tree_cache.touch_checkpoint(req)


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
    from ...checkpoint.manager import CheckpointError

    manager.plan(rows_of(batch))
    try:
        result = original(self, batch, *args, **kwargs)
        if manager.planned:
            raise CheckpointError("a planned batch ended without the target model's forward")
        if manager.unfinished:
            raise CheckpointError("a batch ended without the forward that its captures follow")
        return result
    finally:
        manager.close_step()


def rows_of(batch: ScheduleBatch) -> list[Row]:
    """The batch's rows; mixed and converted decode rows are 1-token extends and read the same way."""
    from sglang.srt.runtime_context import get_spec

    from ...checkpoint.manager import Row

    verify = 0
    if batch.forward_mode.is_extend():
        spans = [(p, p + e) for p, e in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
    elif batch.spec_algorithm.is_none():
        spans = [(end - 1, end) for end in batch.seq_lens_cpu.tolist()]
    else:
        # The batch's own lengths may be on the device alone, or be an estimate.
        verify = get_spec().speculative_num_draft_tokens
        spans = [(req.kv.kv_committed_len,) * 2 for req in batch.reqs]
    generations = batch.req_to_token_pool.req_generation
    rows = []
    for req, (start, end) in zip(batch.reqs, spans, strict=True):
        # Without a row: released by a result that was processed after the batch was prepared.
        slot = req.kv.req_pool_idx if req.kv.holds_kv else None
        generation = -1 if slot is None else int(generations[slot])
        # Mixed and converted decode rows are extends, of what the request has generated.
        decode = start >= len(req.origin_input_ids)
        # SGLang gives the draft model what was sampled where it knows no next token of a chunk.
        known = req is not batch.chunked_req or batch.chunked_req_next_prompt_token is not None
        rows.append(Row(key_of(req), slot, generation, start, end, decode, verify, known))
    return rows


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
SERIES.relies_on(
    "sglang.srt.managers.schedule_batch:Req._compute_max_prefix_len",
    feature=_FEATURE,
    why="how deep SGLang lets a request match, asked again when it is admitted",
    params="self, input_len",
    fingerprint="a9050ccaee365873",
)
