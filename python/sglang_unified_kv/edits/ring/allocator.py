"""The sliding-window allocator: in ring mode nothing is short of tokens, only of request slots.

Whether an allocator is counted anew is decided when it is built: the switch is on and its pool has a ring
per request. Every other allocator takes SGLang's own path, line by line.
"""

from __future__ import annotations

from ...config import load_settings
from ...hooking.series import EditError
from ..hisparse.arguments import hisparse_on
from ..series import RING

FEATURE = "ring accounting"
_SWA = "sglang.srt.mem_cache.allocator.swa"
_ALLOCATOR = f"{_SWA}:SWATokenToKVPoolAllocator"
_HISPARSE = "sglang.srt.mem_cache.allocator.hisparse:DeepSeekV4HiSparseTokenToKVPoolAllocator"
_MARK = "_unified_kv_ring_fixes"
_NO_MAP = 2
"""Entries of what stands for the map; a real one has a page more than the pool has tokens."""


def logical(allocator):
    """``allocator``, or the one that it wraps if it is HiSparse's."""
    return getattr(allocator, "logical_attn_allocator", allocator)


def counted(allocator) -> bool:
    """Whether the fixes hold for ``allocator``, or for the one that a HiSparse allocator wraps."""
    return getattr(logical(allocator), _MARK, False)


@RING.wrap(
    f"{_ALLOCATOR}.__init__",
    feature=FEATURE,
    why="G5: the map from full to sliding-window slots says nothing in ring mode, at 8 bytes a token",
    params="self, size, size_swa, page_size, dtype, device, kvcache, need_sort, req_to_token_pool",
    fingerprint="0263ccd87e07cb85",
)
def decide_and_drop_map(original, self, *args, **kwargs) -> None:
    original(self, *args, **kwargs)
    if not (asked() and self.swa_req_ring):
        return
    if reasons := RING.audit():
        raise EditError(reasons)
    setattr(self, _MARK, True)
    if _replays_window():
        return
    # A zero and the -1 that SGLang keeps at the end: the type is right for kernels that only pass it on.
    self.full_to_swa_index_mapping = self.full_to_swa_index_mapping[-_NO_MAP:].clone()
    self._kvcache.register_mapping(self.full_to_swa_index_mapping)


def asked() -> bool:
    """Whether the ring is to be counted by slots: by its own switch, or because HiSparse needs it."""
    return load_settings().ring_fixes or hisparse_on()


def _replays_window() -> bool:
    """Bounded replay reads the map in a kernel of its own."""
    from sglang.srt.runtime_context import get_exec

    features = get_exec().features
    return bool(
        features.enable_encoder_swa_bounded_replay or features.enable_decoder_swa_bounded_replay
    )


@RING.wrap(
    "sglang.srt.mem_cache.deepseek_v4_memory_pool:DeepSeekV4TokenToKVPool"
    ".translate_loc_from_full_to_swa",
    feature=FEATURE,
    why="G5: what the map that is gone would answer",
    params="self, kv_indices",
    fingerprint="f2d526c3df4a9b25",
)
def translate(original, self, kv_indices):
    mapping = self.full_to_swa_index_mapping
    if mapping is None or mapping.numel() != _NO_MAP:
        return original(self, kv_indices)
    # 0 for every slot, -1 for "no slot".
    return -(kv_indices < 0).to(mapping.dtype)


@RING.wrap(
    f"{_ALLOCATOR}.set_full_to_swa_mapping",
    feature=FEATURE,
    why="G5: the tree pairs recovered windows with full slots, also where no window has a slot",
    params="self, full_indices, swa_indices",
    fingerprint="db9deeb164fcf2b9",
)
def set_mapping(original, self, full_indices, swa_indices) -> None:
    if not counted(self):
        original(self, full_indices, swa_indices)


@RING.wrap(
    f"{_ALLOCATOR}.clear_full_to_swa_mapping",
    feature=FEATURE,
    why="G5: as set_full_to_swa_mapping",
    params="self, full_indices",
    fingerprint="4f957d78eaf0e84b",
)
def clear_mapping(original, self, full_indices) -> None:
    if not counted(self):
        original(self, full_indices)


@RING.wrap(
    f"{_ALLOCATOR}.free_full",
    feature=FEATURE,
    why="G5: it asks the map whether a sliding-window slot is left to free; there never is one",
    params="self, free_index",
    fingerprint="124a6930f6eac5a2",
)
def free_full(original, self, free_index) -> None:
    if not counted(self):
        return original(self, free_index)
    if free_index.numel():
        self.full_attn_allocator.free(free_index)


@RING.wrap(
    f"{_ALLOCATOR}.free_full_segment",
    feature=FEATURE,
    why="G5: as free_full",
    params="self, free_index, *, start_pos",
    fingerprint="9a8006283892347a",
)
def free_full_segment(original, self, free_index, *, start_pos) -> None:
    if not counted(self):
        return original(self, free_index, start_pos=start_pos)
    if free_index.numel():
        self.full_attn_allocator.free_segment(free_index, start_pos=start_pos)


@RING.wrap(
    f"{_ALLOCATOR}.evict_to_free_tokens",
    feature=FEATURE,
    why="G1: evicting cached windows frees no ring, so a shortage of slots must not cost prefixes",
    params="self, tree_cache, num_tokens",
    fingerprint="06e14e35cf5d04fa",
)
def evict_for_full_tokens(original, self, tree_cache, num_tokens) -> None:
    if not counted(self):
        return original(self, tree_cache, num_tokens)
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    shortfall = num_tokens - self.full_available_size()
    if shortfall > 0 and tree_cache is not None and tree_cache.supports_prefix_sharing():
        tree_cache.evict_for_alloc(EvictParams(num_tokens=shortfall))


@RING.wrap(
    f"{_ALLOCATOR}.reclaim_for_prealloc",
    feature=FEATURE,
    why="G1, G2: a preallocation needs a free slot, which eviction cannot give",
    params="self, tree_cache, full_tokens, swa_tokens",
    fingerprint="df69eef9a18398e2",
)
def reclaim_slot(original, self, tree_cache, full_tokens, swa_tokens) -> str | None:
    if not counted(self):
        return original(self, tree_cache, full_tokens, swa_tokens)
    if self.swa_available_size() >= self.swa_ring_cost_tokens:
        return None
    return "every request slot is taken"


@RING.wrap(
    f"{_SWA}:is_swa_req_ring",
    feature=FEATURE,
    why="G3: a HiSparse allocator wraps the one that has the ring, and is not asked",
    params="allocator",
    fingerprint="d4ec0c042987d3dd",
)
def is_swa_req_ring(original, allocator) -> bool:
    return original(allocator) or (counted(allocator) and original(logical(allocator)))


RING.member(
    f"{_HISPARSE}.swa_req_ring",
    feature=FEATURE,
    why="G3: what is_swa_req_ring's callers read next",
)(property(lambda self: self.logical_attn_allocator.swa_req_ring))

RING.member(
    f"{_HISPARSE}.swa_ring_cost_tokens",
    feature=FEATURE,
    why="G3: an 8,192-token chunk was charged as tokens and cut to 1,536",
)(property(lambda self: self.logical_attn_allocator.swa_ring_cost_tokens))
