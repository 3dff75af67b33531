"""Attention backend and compressor: layers hand over what a chunk computes, before it is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...checkpoint.layout import DRAFT_KINDS, STATE_KINDS, WINDOW_KINDS, Kind
from ..series import SERIES
from .active import is_draft, manager_of

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_FEATURE = "bit-exact hicache"
_HIP = "sglang.srt.layers.attention.deepseek_v4_backend_hip_radix:DeepseekV4HipRadixBackend"
_COMPRESSOR = "sglang.srt.layers.attention.dsv4.compressor_v2:CompressorBackendMixin"


@SERIES.wrap(
    f"{_HIP}._forward_unified_kv",
    feature=_FEATURE,
    why="only place where a chunk's KV rows and the ring before the chunk exist together",
    params="self, *, q, kv, layer, forward_batch, compress_ratio, attn_sink, "
    "core_attn_metadata, save_kv_cache, q_rope, k_rope, wo_a_quant_freqs",
    fingerprint="d5fee8151aa3bb71",
)
def forward_unified_kv(original, self, *, kv, layer, forward_batch, k_rope=None, **kwargs):
    if kv is not None:
        self.capture_swa_windows(layer=layer, kv=kv, forward_batch=forward_batch, k_rope=k_rope)
    return original(self, kv=kv, layer=layer, forward_batch=forward_batch, k_rope=k_rope, **kwargs)


@SERIES.member(
    f"{_HIP}.capture_swa_windows", feature=_FEATURE, why="implements the extension point"
)
def capture_swa_windows(
    self,
    *,
    layer: RadixAttention,
    kv: torch.Tensor,
    forward_batch: ForwardBatch,
    k_rope: torch.Tensor | None = None,
) -> None:
    manager = manager_of(self.token_to_kv_pool)
    if manager is not None and manager.armed:
        pool = self.token_to_kv_pool
        # The raw buffers: the accessors wait for this layer's load-back, which never writes the ring.
        unified, i = pool.unified_kv_pool, layer.layer_id - pool._stage_start
        window, window_rope = (
            (Kind.DRAFT_WINDOW, Kind.DRAFT_WINDOW_ROPE)
            if is_draft(pool)
            else (Kind.WINDOW, Kind.WINDOW_ROPE)
        )
        manager.capture_interior(window, unified.kv_buffer[i].data_ptr(), kv)
        if k_rope is not None:
            rope = unified.kv_buffer_rope[i]
            manager.capture_interior(window_rope, rope.data_ptr(), k_rope)


@SERIES.wrap(
    f"{_COMPRESSOR}._forward_compress_all_in_one",
    feature=_FEATURE,
    why="only place where a chunk's compressor rows and the state ring before the chunk exist together",
    params="self, *, kv_score_buffer, kv_score_input, ape, head_dim, norm, freqs_cis_cache, "
    "kv_cache, is_indexer, rotate, compress_ratio, page_size, out_loc, "
    "use_fp4_indexer, bf16_store, kv_scale_cache, rope_cache, kv_layout, fp8_2buff, "
    "kv_cache_rope",
    fingerprint="a9da77fa860aade8",
)
def forward_compress_all_in_one(
    original, self, *, kv_score_buffer, kv_score_input, is_indexer, compress_ratio, **kwargs
):
    manager = manager_of(self.token_to_kv_pool)
    if manager is not None and manager.armed and compress_ratio == 4:
        kind = Kind.INDEXER_STATE if is_indexer else Kind.ATTENTION_STATE
        manager.capture_interior(kind, kv_score_buffer.data_ptr(), kv_score_input)
    return original(
        self,
        kv_score_buffer=kv_score_buffer,
        kv_score_input=kv_score_input,
        is_indexer=is_indexer,
        compress_ratio=compress_ratio,
        **kwargs,
    )


@SERIES.member(
    f"{_HIP}.capture_swa_windows_decode", feature=_FEATURE, why="implements the extension point"
)
def capture_swa_windows_decode(self, forward_batch: ForwardBatch) -> None:
    manager = manager_of(self.token_to_kv_pool)
    if manager is not None:
        manager.capture_ends(DRAFT_KINDS if is_draft(self.token_to_kv_pool) else WINDOW_KINDS)


@SERIES.member(
    f"{_HIP}.capture_compress_state_windows_decode",
    feature=_FEATURE,
    why="implements the extension point",
)
def capture_compress_state_windows_decode(self, forward_batch: ForwardBatch) -> None:
    manager = manager_of(self.token_to_kv_pool)
    # A draft model has no compressor, and the states are the target's.
    if manager is not None and not is_draft(self.token_to_kv_pool):
        manager.capture_ends(STATE_KINDS)
