"""The allocator: what is free is counted in logical tokens, what a prompt needs at once in device rows."""

from __future__ import annotations

import logging

from ...hisparse.rows import HotBuffer, Promises
from ..series import HISPARSE_SERIES
from .arguments import FEATURE
from .pool import PROMISES, device_pool_of, promises_of

logger = logging.getLogger(__name__)

_ALLOCATOR = "sglang.srt.mem_cache.allocator.hisparse:DeepSeekV4HiSparseTokenToKVPoolAllocator"
_BASE = "sglang.srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator"


@HISPARSE_SERIES.wrap(
    f"{_ALLOCATOR}.__init__",
    feature=FEATURE,
    why="whether its pool is unified is known here",
    params="self, logical_attn_allocator",
    fingerprint="1a0154b5def9eed1",
)
def mark(original, self, logical_attn_allocator) -> None:
    original(self, logical_attn_allocator)
    pool = device_pool_of(self._kvcache)
    if pool is None:
        return
    from sglang.srt.mem_cache.sparsity import parse_hisparse_config

    config = parse_hisparse_config()
    rows = self.hisparse_attn_allocator
    buffer = HotBuffer(config.device_buffer_size, pool.page_size)
    if pool.size < buffer.padded:
        raise ValueError(
            f"--hisparse-config host_to_device_ratio={config.host_to_device_ratio}: the device holds "
            f"{pool.size} C4 rows, one request needs {buffer.padded}; lower the ratio or "
            "device_buffer_size, or raise --max-total-tokens"
        )
    setattr(self, PROMISES, Promises(buffer, pool.size, rows.available_size))


_LOGICAL = (
    "H3: decode steps take no device rows, so the device does not bound what may be generated"
)


@HISPARSE_SERIES.wrap(
    f"{_ALLOCATOR}.available_size",
    feature=FEATURE,
    why=_LOGICAL,
    params="self",
    fingerprint="731a124a5ce40c0d",
)
def available_size(original, self) -> int:
    if promises_of(self) is None:
        return original(self)
    return self.logical_attn_allocator.available_size()


@HISPARSE_SERIES.wrap(
    f"{_ALLOCATOR}.full_available_size",
    feature=FEATURE,
    why=_LOGICAL,
    params="self",
    fingerprint="2d488f15fa94b7d5",
)
def full_available_size(original, self) -> int:
    if promises_of(self) is None:
        return original(self)
    return self.logical_attn_allocator.full_available_size()


@HISPARSE_SERIES.wrap(
    f"{_ALLOCATOR}.free_full",
    feature=FEATURE,
    why="what lies before the window is released here alone, and with it the device rows of a request "
    "that never got its hot buffer",
    params="self, free_indices",
    fingerprint="5aa9a56898089e4a",
)
def free_full(original, self, free_indices) -> None:
    original(self, free_indices)
    # Inside a group SGLang only collects, and comes back at its end.
    if promises_of(self) is not None and self.free_group is None and free_indices.numel():
        self.free_hisparse(free_indices)


@HISPARSE_SERIES.wrap(
    f"{_ALLOCATOR}.create_prefill_budget",
    feature=FEATURE,
    why="a prompt lies on the device as a whole while it is computed, and needs a hot buffer afterwards",
    params="self, tree_cache, *, num_mixed_decode_tokens",
    fingerprint="f07b3bae8e524f7d",
)
def prefill_budget(original, self, tree_cache, *, num_mixed_decode_tokens=0):
    if promises_of(self) is None:
        return original(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
    from .budget import HiSparsePrefillBudget

    return HiSparsePrefillBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)


@HISPARSE_SERIES.wrap(
    f"{_BASE}.max_new_tokens_for_memory",
    feature=FEATURE,
    why="a prompt that never fits is refused when it arrives, and none may grow so long that it could not "
    "come back from a retraction",
    params="self, input_tokens, max_new_tokens, *, token_capacity, sliding_window_size, chunk_size",
    fingerprint="091d67254dd5b44a",
)
def max_new_tokens(original, self, input_tokens, max_new_tokens, **limits) -> int | None:
    allowed = original(self, input_tokens, max_new_tokens, **limits)
    promises = promises_of(self)
    if promises is None or allowed is None:
        return allowed
    room = promises.longest_sequence - input_tokens
    if room >= 0:
        return min(allowed, room)
    logger.warning(
        "A prompt of %d tokens is refused: the device's C4 region holds prompts of %d (%d rows). Lower "
        "host_to_device_ratio of --hisparse-config to serve longer ones.",
        input_tokens,
        promises.longest_sequence,
        promises.region,
    )
    return None
