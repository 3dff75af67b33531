"""Builds the checkpoint manager from the engine's pools, and sizes its memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_bytes
from sglang.srt.runtime_context import get_schedule

from ... import engage
from ...checkpoint.layout import CheckpointLayout, Kind
from ...checkpoint.manager import CheckpointManager
from ...checkpoint.policy import FEWEST_RECORDS, PAGES_PER_RECORD, policy_of
from ...checkpoint.record_format import HEADER_BYTES
from ...checkpoint.rings import Ring
from ...checkpoint.staging import RecordMover, staging_slots
from ...checkpoint.store import CheckpointStore
from .storage.record_pool import RecordHostPool

if TYPE_CHECKING:
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from ...config import Settings

logger = logging.getLogger(__name__)

OVERLAP_ROWS = 4
"""C4 state rows before a boundary that the first compressed row behind it reads."""


def policy_name(settings: Settings) -> str:
    """The policy that was asked for; a stride alone asks for the grid."""
    return settings.checkpoint_policy or ("grid" if settings.offload_page_stride else "combined")


def stride_of(settings: Settings) -> int:
    """Pages between the closest captures: the flag, or one."""
    return settings.offload_page_stride or 1


def default_records(settings: Settings, pages: int) -> int:
    """Records that the store holds beside ``pages`` pages of the cache, unless a budget is given."""
    if policy_name(settings) == "grid":
        return pages // stride_of(settings)
    return max(pages // PAGES_PER_RECORD, min(pages, FEWEST_RECORDS))


def device_slots(settings: Settings, page_size: int, context_tokens: int) -> int:
    """Records of device staging; asked once when the KV pool is sized and once when it is allocated.

    Every policy may want the tail of each of many short prompts of a chunk.
    """
    return staging_slots(
        step_tokens=stride_of(settings) * page_size,
        chunk_tokens=max(get_schedule().chunked_prefill_size or 0, 0),
        context_tokens=context_tokens,
        override=settings.state_staging_pages,
    )


def rings_of(
    pool: DeepSeekV4TokenToKVPool, draft: DeepSeekV4TokenToKVPool | None = None
) -> list[Ring]:
    """Window, attention-state and indexer-state rings of the target model, then the draft's windows.

    In record order. A next-n layer attends to its window alone and has no overlap state.

    Raises:
        ValueError: the draft model has compressed layers.
    """
    rings = _windows_of(pool, Kind.WINDOW, Kind.WINDOW_ROPE)
    for kind, states in (
        (Kind.ATTENTION_STATE, pool.compress_state_pools),
        (Kind.INDEXER_STATE, pool.indexer_compress_state_pools),
    ):
        rings += [
            Ring.of(kind, layer, state.kv_score_buffer.kv_score, state.ring_size)
            for layer, state in enumerate(states)
            if state is not None and state.ratio == 4
        ]
    if draft is not None:
        if any(state is not None for state in draft.compress_state_pools):
            raise ValueError(
                "the draft model has compressed layers, whose state no checkpoint holds; use a draft model "
                "with compress ratio 0 or unset the bit-exact switch"
            )
        rings += _windows_of(draft, Kind.DRAFT_WINDOW, Kind.DRAFT_WINDOW_ROPE)
    return rings


def _windows_of(pool: DeepSeekV4TokenToKVPool, window: Kind, rope: Kind) -> list[Ring]:
    kinds = [(window, pool.unified_kv_pool.kv_buffer)]
    if pool.unified_kv_pool.fp8:
        # Two pools with the same rows: packed fp8 with its scales, and the rope half in bf16.
        kinds.append((rope, pool.unified_kv_pool.kv_buffer_rope))
    return [
        Ring.of(kind, pool._stage_start + i, buffer, pool.unified_swa_ring_size)
        for kind, buffers in kinds
        for i, buffer in enumerate(buffers)
    ]


def build_manager(
    cache: UnifiedRadixCache, pools: list[DeepSeekV4TokenToKVPool], context_tokens: int
) -> tuple[CheckpointManager, RecordHostPool]:
    """Allocate staging and host pool and put the manager together.

    Args:
        pools: the target's and, if there is a draft model, the draft's.
        context_tokens: longest request of the model.

    Raises:
        ValueError: the host budget holds no record, or exceeds free host memory.
    """
    settings = engage.engaged_settings()
    pool = pools[0]
    rings = rings_of(*pools)
    layout = CheckpointLayout.of(
        [r.spec for r in rings],
        page_size=cache.page_size,
        window=pool.unified_swa_window,
        overlap=OVERLAP_ROWS,
    )
    device = torch.device(pool.device)
    slots = device_slots(settings, cache.page_size, context_tokens)
    controller = cache.cache_controller
    if controller is not None:
        tokens, layout_name = controller.mem_pool_host.size, controller.mem_pool_host.layout
    else:
        # Without HiCache the device tree alone has pages.
        tokens, layout_name = cache.token_to_kv_pool_allocator.size_full, "layer_first"
    pages = tokens // cache.page_size
    slot_bytes = HEADER_BYTES + layout.record_bytes
    records = host_records(settings, slot_bytes, default_records(settings, pages))
    sizes = torch.tensor([records, slots])
    # Once, so that every rank places, evicts and drops alike (invariant 2).
    cache._all_reduce(sizes, torch.distributed.ReduceOp.MIN)
    records, slots = sizes.tolist()
    policy = policy_of(
        policy_name(settings),
        page_size=cache.page_size,
        # A bigram key is one shorter than its tokens.
        spare=1 + cache.tree_core.is_eagle,
        stride=stride_of(settings),
    )
    host_pool = RecordHostPool(records, layout.record_bytes, device, layout_name)
    mover = RecordMover(layout, host_pool.payload, slots, device)
    host_pool.serve(mover)
    manager = CheckpointManager(
        CheckpointStore(records, cache.page_size, weighed=policy.weighed),
        mover,
        rings,
        policy,
        strict_provenance=settings.provenance == "strict",
        verify=settings.dbg_checksum,
    )
    return manager, host_pool


def host_records(settings: Settings, slot_bytes: int, wanted: int) -> int:
    """Records of the host pool: :func:`budgeted_records` of this machine's free memory.

    Raises:
        ValueError: the budget holds no record, or exceeds what is free.
    """
    free = host_memory_budget_bytes()
    records = budgeted_records(settings, slot_bytes, wanted, free)
    if records < 1 or records * slot_bytes > free:
        raise ValueError(
            f"SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB={settings.checkpoint_host_gb}: {records} records of "
            f"{slot_bytes / 1e6:.3f} MB need {records * slot_bytes / 1e9:.3f} GB of "
            f"{free / 1e9:.2f} GB free host memory; at least one record must fit. Change the budget or "
            "reduce --hicache-ratio."
        )
    return records


def budgeted_records(settings: Settings, slot_bytes: int, wanted: int, free: int) -> int:
    """Records by the budget flag, or ``wanted`` capped at a quarter of ``free`` bytes; may not fit."""
    if settings.checkpoint_host_gb is not None:
        return int(settings.checkpoint_host_gb * 1e9 // slot_bytes)
    fitting = free // 4 // slot_bytes
    if wanted > fitting:
        logger.warning(
            "The checkpoint host pool is capped at a quarter of free host memory: %d records instead "
            "of %d (%.2f GB of %.2f GB free). Set SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB to choose.",
            fitting,
            wanted,
            fitting * slot_bytes / 1e9,
            free / 1e9,
        )
    return min(max(wanted, 1), fitting)
