"""Kernels that exist as CUDA, HIP, TileLang or Triton code only, each with torch in its place.

The callables stand in ``reference/ops``; here is only what they stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_unified_kv.reference.edits.series import FEATURE, SERIES
from sglang_unified_kv.reference.ops import (
    attention,
    compress,
    hyper_connections,
    indices,
    norm_rope,
)
from sglang_unified_kv.reference.ops.invariant_torch import plain_torch
from sglang_unified_kv.reference.upstream_kernels import JIT, TILELANG, TOP_K, TRITON, either

_OPS = "sglang.kernels.ops"
_DSV4 = f"{_OPS}.attention.dsv4"
_UNIFIED = f"{_DSV4}.unified_kv_kernels"

_WHY = {
    JIT: "CUDA/HIP source compiled at first use",
    TOP_K: "CUDA/HIP source compiled at first use",
    TRITON: "Triton: needs a GPU, or its interpreter at milliseconds per program",
    TILELANG: "TileLang: needs a GPU",
}

# target, its parameters and fingerprint, ours, what upstream's is
_KERNELS: list[tuple[str, str, str, Callable[..., Any], str]] = [
    (
        f"{_DSV4}.norm_rope:fused_rope_inplace",
        "q, k, freqs_cis, positions, inverse",
        "c4fe38d373b29790",
        norm_rope.rope_inplace,
        JIT,
    ),
    (
        f"{_DSV4}.norm_rope:fused_norm_rope_inplace",
        "kv, weight, eps, freq_cis, positions",
        "b1f245e7bd986d40",
        norm_rope.norm_rope_inplace,
        JIT,
    ),
    (
        f"{_DSV4}.norm_rope:fused_q_norm_rope",
        "q_input, q_output, eps, freqs_cis, positions",
        "75df54d972c9c830",
        norm_rope.q_norm_rope,
        JIT,
    ),
    (
        f"{_DSV4}.norm_rope:fused_q_indexer_rope_hadamard_quant",
        "q_input, weight, weight_scale, freqs_cis, positions",
        "72eebcda88838281",
        norm_rope.q_indexer_rope_hadamard_quant,
        JIT,
    ),
    (
        f"{_OPS}.attention.fused_qk_norm_rope_store:fused_qk_norm_rope_swa_store",
        "q, kv, q_norm_weight, kv_norm_weight, q_rms_eps, kv_rms_eps, rope_head_dim, cos_cache, "
        "sin_cache, positions, swa_cache, swa_loc, swa_page_size, q_out, dtype, bf16_store, "
        "fp8_2buff, swa_rope_cache, k_nope_out, k_rope_out, q_rope_out",
        "24b72f0fe6c7e2de",
        norm_rope.qk_norm_rope_swa_store,
        TRITON,
    ),
    (
        f"{_DSV4}.compress:CompressorPrefillPlan.generate",
        "compress_ratio, req_pool_indices, seq_lens, extend_lens, req_to_token, full_to_state, "
        "swa_page_size, ring_size, num_q_tokens, use_cuda_graph, use_req_ring",
        "dfcc3c08631d7af8",
        compress.plan_prefill,
        JIT,
    ),
    (
        f"{_DSV4}.compress:CompressorDecodePlan.generate",
        "compress_ratio, req_pool_indices, req_to_token, full_to_state, seq_lens, swa_page_size, "
        "ring_size, use_req_ring",
        "7f38a6579d3d76dc",
        compress.plan_decode,
        JIT,
    ),
    (
        f"{_DSV4}.compress:compress_forward",
        "kv_score_buffer, kv_score_input, ape, plan, *, head_dim, compress_ratio, out, is_online",
        "62c573f114e8bca6",
        compress.compress_forward,
        JIT,
    ),
    (
        f"{_DSV4}.compress:compress_norm_rope_store",
        "kv, plan, *, norm_weight, norm_eps, freq_cis, out_loc, kvcache, page_size, use_fp4, "
        "bf16_store, kvcache_scale, rope_cache, fp4_k_write_metadata, layout, fp8_2buff, "
        "kvcache_rope",
        "b93ca8199dc8e6bd",
        compress.compress_norm_rope_store,
        JIT,
    ),
    (
        f"{_UNIFIED}.runtime:decode",
        "*, q, unified_kv, kv_indices, kv_indptr, attn_sink, softmax_scale, kv_splits",
        "f97950f9cec42af5",
        attention.decode,
        TRITON,
    ),
    (
        f"{_UNIFIED}.runtime:prefill",
        "*, q, unified_kv, kv_indices_prefix, kv_indptr_prefix, kv_extend, kv_indices_extend, "
        "kv_indptr_extend, attn_sink, softmax_scale",
        "2c54402ea4f0e100",
        attention.prefill,
        TRITON,
    ),
    (
        f"{_DSV4}.topk:topk_transform_paged",
        "scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices",
        "d1b12a5c8b5f7c2c",
        attention.topk_transform,
        TOP_K,
    ),
    (
        f"{_OPS}.layernorm.mhc:hc_split_sinkhorn",
        "mixes, hc_scale, hc_base, hc_mult, sinkhorn_iters, eps",
        "49c9bec793d5f79d",
        hyper_connections.split_sinkhorn,
        TILELANG,
    ),
    (
        f"{_OPS}.layernorm.mhc:mhc_combine",
        "x_flat, pre, hc, out_dtype",
        "d8f1c2884648d1de",
        hyper_connections.combine,
        TRITON,
    ),
    (
        f"{_OPS}.layernorm.mhc_head:fused_hc_head",
        "x, hc_fn, hc_scale, hc_base, norm_eps, hc_eps",
        "ab13c5c99c4b752a",
        hyper_connections.head,
        TRITON,
    ),
    (
        f"{_OPS}.activation.silu_and_mul_clamp:silu_and_mul_clamp",
        "input, output, swiglu_limit",
        "dc7f66a2d5c028a8",
        hyper_connections.silu_and_mul_clamp,
        JIT,
    ),
    (
        f"{_DSV4}.metadata_kernel:init_compression_metadata",
        "seq_lens, positions, raw_out_loc, page_table, page_size, compute_page_indices",
        "77526181aabd1d8a",
        indices.compression_metadata,
        TRITON,
    ),
    (
        f"{_DSV4}.attn_glue_hip:page_table_from_req_to_token",
        "req_to_token, req_rows, max_seq_len, page_size",
        "a01c7b3ed10f3d5c",
        indices.page_table,
        TRITON,
    ),
    (
        f"{_DSV4}.attn_glue_hip:sparse_buffers",
        "*, c4_topk_lengths_clamp1, c4_topk_lengths_raw, c1_topk_lengths_clamp1, "
        "c2_topk_lengths_clamp1, index_topk, page_index_align",
        "3b61b1e7f13cdf9a",
        indices.sparse_buffers,
        TRITON,
    ),
    (
        f"{_UNIFIED}.runtime:build_prefill_indices",
        "*, compress_ratio, state_slot, positions, chunk_start, cu_q, win, ring_stride, swa_pages, "
        "c128_page_indices, c4_sparse_page_indices",
        "345dfa48c5a8b916",
        indices.prefill_indices,
        TRITON,
    ),
    (
        f"{_UNIFIED}.runtime:fill_compress_tail",
        "*, indices, indptr, prefix_len, page_indices, valid_len, swa_pages",
        "77c64a0e831a3f66",
        indices.fill_compress_tail,
        TRITON,
    ),
    (
        f"{_UNIFIED}.paged_decode_indices:write_v4_paged_decode_indices",
        "*, state_slot_per_seq, batch_id_per_token, positions, swa_indptr, csa_indptr, hca_indptr, "
        "swa_indices, csa_indices, hca_indices, T, win, ring_stride",
        "8878ef1e432d45e1",
        indices.decode_window_indices,
        TRITON,
    ),
    (
        f"{_OPS}.kvcache.dsv4_unified_kv_store:store_swa_into_unified",
        "*, kv, state_slot, positions, unified_kv, win, ring_stride, final_pos, kv_rope, "
        "unified_kv_rope",
        "a1d0c05a922fad37",
        indices.store_window,
        TRITON,
    ),
]

for _target, _params, _fingerprint, _ours, _kind in _KERNELS:
    SERIES.wrap(
        _target, feature=FEATURE, why=_WHY[_kind], params=_params, fingerprint=_fingerprint
    )(either(_kind, _ours))


SERIES.replace(
    "sglang.srt.layers.attention.dsv4.indexer:fp8_paged_mqa_logits_torch",
    feature=FEATURE,
    why="upstream's torch version gathers all keys per token and rounds its scores to bfloat16",
    params=(
        "q_fp8, kvcache_fp8, weight, seq_lens, page_table, deep_gemm_metadata, max_seq_len, "
        "clean_logits"
    ),
    fingerprint="6e4b137e24cc3bd7",
)(plain_torch(attention.indexer_scores))


@SERIES.replace(
    f"{_UNIFIED}.paged_decode:_cu_count",
    feature=FEATURE,
    why="upstream asks aiter, which is there on ROCm only",
    params="",
    fingerprint="50029c2c578bc3a3",
)
def compute_units() -> int:
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
