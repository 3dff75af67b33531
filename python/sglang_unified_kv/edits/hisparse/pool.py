"""The pool: C4 regions of a fraction of the size, and SGLang's HiSparse device pool as a view into them."""

from __future__ import annotations

from ...hisparse.rows import RATIO, Promises, region_rows
from ..series import HISPARSE_SERIES
from .arguments import FEATURE, hisparse_on

_POOLS = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
_HIP = "sglang.srt.layers.attention.deepseek_v4_backend_hip_radix:DeepseekV4HipRadixBackend"


@HISPARSE_SERIES.wrap(
    f"{_POOLS}:DeepSeekV4UnifiedKVPool.__init__",
    feature=FEATURE,
    why="H3: allocates C4 rows for every token of the host; C128 rows and rings stay",
    params="self, *, stage_ratios, num_slots, num_blocks, page_size, qk_nope_head_dim, qk_rope_head_dim, "
    "device, memory_saver_adapter, custom_mem_pool, swa_ring_size, fp8",
    fingerprint="35c2e00636fa099b",
)
def allocate(original, self, *, stage_ratios, num_blocks, page_size, **sizes) -> None:
    ratios = list(stage_ratios)
    sizes["page_size"] = page_size
    if RATIO not in ratios or not hisparse_on():
        return original(self, stage_ratios=ratios, num_blocks=num_blocks, **sizes)
    from sglang.srt.mem_cache.sparsity import parse_hisparse_config

    # A block is what 128 tokens have: one C128 row, 32 C4 rows.
    ratio = parse_hisparse_config().host_to_device_ratio
    rows = region_rows(num_blocks * 128, ratio, page_size // RATIO)
    c4 = [RATIO] * ratios.count(RATIO)
    original(self, stage_ratios=c4, num_blocks=rows // self.K_PER_BLOCK[RATIO], **sizes)
    hot = zip(self.kv_buffer, self.kv_buffer_rope, strict=True)
    others = [r for r in ratios if r != RATIO]
    original(self, stage_ratios=others, num_blocks=num_blocks, **sizes)
    rest = zip(self.kv_buffer, self.kv_buffer_rope, strict=True)
    buffers = [next(hot if r == RATIO else rest) for r in ratios]
    self.kv_buffer, self.kv_buffer_rope = map(list, zip(*buffers, strict=True))


@HISPARSE_SERIES.wrap(
    f"{_POOLS}:DeepSeekV4TokenToKVPool._init_compressed_pools",
    feature=FEATURE,
    why="H2: where the packed layout gets its HiSparse pool; the unified layout has none",
    params="self, *, stage_ratios, page_size, dtype, device, enable_memory_saver, enable_hisparse, "
    "kv_pool_cls",
    fingerprint="3a317240cd94e371",
)
def attach(original, self, *, enable_hisparse, **options) -> None:
    original(self, enable_hisparse=enable_hisparse, **options)
    if not (enable_hisparse and self._unified_kv and self.kv_pools.keys() >= {RATIO}):
        return
    if hisparse_on():
        from .device_pool import UnifiedC4DevicePool

        self.kv_pools[RATIO] = self.c4_kv_pool = UnifiedC4DevicePool(self)


@HISPARSE_SERIES.wrap(
    f"{_HIP}.make_core_attn_metadata",
    feature=FEATURE,
    why="H2: where C4 rows are stored, decided once for all layers of a forward",
    params="self, req_to_token, req_pool_indices_repeated, seq_lens_casual, max_seq_len, out_loc, "
    "need_compress, is_prefill, num_tokens, dspark_block_size, swa_replay_start, num_groups",
    fingerprint="43f75227dc3ed92f",
)
def store_on_device(original, self, *args, **kwargs):
    metadata = original(self, *args, **kwargs)
    if metadata.unified is not None and (pool := device_pool_of(self.token_to_kv_pool)):
        metadata.unified.c4_out_loc = pool.stored_at(metadata.c4_out_loc)
    return metadata


def device_pool_of(pool):
    """The pool's :class:`.hisparse_device_pool.UnifiedC4DevicePool`; None without HiSparse of ours."""
    if not hisparse_on():
        return None
    from .device_pool import UnifiedC4DevicePool

    return pool.c4_kv_pool if isinstance(pool.c4_kv_pool, UnifiedC4DevicePool) else None


PROMISES = "_unified_kv_promises"
"""Where an allocator keeps them."""


def promises_of(allocator) -> Promises | None:
    """The device rows of a unified pool and who was promised some; None on any other layout."""
    return getattr(allocator, PROMISES, None)
