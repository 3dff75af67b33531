"""The decode node of a disaggregated deployment: a request that is to come needs a slot, not tokens."""

from __future__ import annotations

from ...ring.accounting import prealloc_budget
from ..series import RING
from .allocator import FEATURE, counted, logical

_QUEUE = "sglang.srt.disaggregation.decode:DecodePreallocQueue"


@RING.wrap(
    f"{_QUEUE}._swa_tail_allocatable_token_budget",
    feature=FEATURE,
    why="G2: it sets tokens aside for decode steps, which stay in the ring they have",
    params="self, retractable_tokens, retractable_swa_tokens, count_retracted, n_active, reserved_tokens, "
    "extra_reserved_reqs",
    fingerprint="af0207f4d7672ddf",
)
def budget(
    original,
    self,
    retractable_tokens=None,
    retractable_swa_tokens=None,
    count_retracted=True,
    *args,
    **kwargs,
) -> int:
    allocator = self.token_to_kv_pool_allocator
    if not counted(allocator):
        return original(
            self, retractable_tokens, retractable_swa_tokens, count_retracted, *args, **kwargs
        )
    retracted = len(self.retracted_queue) if count_retracted else 0
    return prealloc_budget(
        allocator.swa_available_size(), allocator.swa_ring_cost_tokens, retracted
    )


@RING.wrap(
    f"{_QUEUE}._prealloc_required_tokens",
    feature=FEATURE,
    why="G2: its window tail and reserve refuse for good what a small server has slots for",
    params="self, req",
    fingerprint="5bfd5fbd462f019a",
)
def required(original, self, req) -> tuple[int, int]:
    full, tail = original(self, req)
    allocator = self.token_to_kv_pool_allocator
    return full, allocator.swa_ring_cost_tokens if counted(allocator) else tail


@RING.wrap(
    f"{_QUEUE}._prealloc_reservation_fits",
    feature=FEATURE,
    why="G2: admission adds all tokens that the request may generate to its window tail. G8: what counts as "
    "evictable need not go, and upstream asserts that it did; a request that does not fit stays queued",
    params="self, full_tokens, swa_tokens, *, full_allocatable_tokens, swa_allocatable_tokens",
    fingerprint="9b0312497c60cfe0",
)
def fits(original, self, full_tokens, swa_tokens, **budgets) -> bool:
    allocator = self.token_to_kv_pool_allocator
    if not counted(allocator):
        return original(self, full_tokens, swa_tokens, **budgets)
    return original(
        self, full_tokens, allocator.swa_ring_cost_tokens, **budgets
    ) and _pages_are_free(self, full_tokens - self.num_reserved_decode_tokens)


def _pages_are_free(queue, tokens: int) -> bool:
    """Evict until ``tokens`` are free; False if that does not help.

    Every caller asks for the pages it takes at once and the reserve for decode steps, or for more.
    """
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    allocator = logical(queue.token_to_kv_pool_allocator)
    shortfall = tokens - allocator.full_available_size()
    if shortfall > 0:
        queue.tree_cache.evict_for_alloc(EvictParams(num_tokens=shortfall))
    return allocator.full_available_size() >= tokens


@RING.wrap(
    f"{_QUEUE}.pre_allocated_token_counts",
    feature=FEATURE,
    why="sglang:prealloc_swa_token_usage counts a tail that crosses a page as two slots, and passes 1",
    params="self",
    fingerprint="e5c40eeed59e95e6",
)
def preallocated(original, self) -> tuple[int, int]:
    full, tail = original(self)
    allocator = self.token_to_kv_pool_allocator
    if not counted(allocator):
        return full, tail
    waiting = sum(not entry.host_staged for entry in self.transfer_queue.queue)
    return full, waiting * allocator.swa_ring_cost_tokens
