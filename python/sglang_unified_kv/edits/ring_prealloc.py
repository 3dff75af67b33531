"""The decode node of a disaggregated deployment: a request that is to come needs a slot, not tokens."""

from __future__ import annotations

from ..ring.accounting import prealloc_budget
from .ring_allocator import FEATURE, counted
from .series import RING

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
    why="G2: admission adds all tokens that the request may generate to its window tail",
    params="self, full_tokens, swa_tokens, *, full_allocatable_tokens, swa_allocatable_tokens",
    fingerprint="9b0312497c60cfe0",
)
def fits(original, self, full_tokens, swa_tokens, **budgets) -> bool:
    allocator = self.token_to_kv_pool_allocator
    if counted(allocator):
        swa_tokens = allocator.swa_ring_cost_tokens
    return original(self, full_tokens, swa_tokens, **budgets)
