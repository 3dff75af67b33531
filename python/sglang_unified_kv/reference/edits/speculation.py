"""EAGLE's kernels, and what upstream's draft model does on accelerators only."""

from __future__ import annotations

from sglang_unified_kv.reference.edits.series import FEATURE, SERIES
from sglang_unified_kv.reference.ops import arithmetic, speculation
from sglang_unified_kv.reference.ops.invariant_torch import InvariantTorch

_OPS = "sglang.kernels.ops.speculative"
_NEXT_N = "sglang.srt.models.deepseek_v4_nextn:DeepseekV4ForCausalLMNextN"

for _target, _params, _fingerprint, _ours, _why in (
    (
        f"{_OPS}.spec_tree:build_tree_kernel_efficient_func",
        "parent_list, top_scores_index, seq_lens, tree_mask, positions, retrieve_index, "
        "retrieve_next_token, retrieve_next_sibling, topk, spec_steps, num_verify_tokens, "
        "tree_mask_mode",
        "b137949fdf7eef32",
        speculation.build_chain,
        "CUDA/HIP source",
    ),
    (
        f"{_OPS}.spec_tree:verify_tree_greedy_func",
        "predicts, accept_index, accept_token_num, candidates, retrieve_index, "
        "retrieve_next_token, retrieve_next_sibling, target_predict, topk",
        "dae05d6e8dcf80ae",
        speculation.verify_chain,
        "CUDA/HIP source",
    ),
    (
        f"{_OPS}.eagle:fill_bonus_tokens_func",
        "accept_tokens, accept_lens, bonus_tokens, accept_stride, batch_size",
        "0c0844c876f9992a",
        speculation.last_accepted,
        "Triton",
    ),
    (
        f"{_OPS}.cache_locs:assign_draft_cache_locs_contiguous_func",
        "req_pool_indices, req_to_token, seq_lens, out_cache_loc, topk, num_cols, positions, mrope",
        "fffc7b57bab54d17",
        speculation.draft_slots,
        "Triton",
    ),
    (
        f"{_OPS}.cache_locs:assign_extend_cache_locs_uniform_func",
        "req_pool_indices, req_to_token, start_offset, batch_size, draft_token_num, device, *, "
        "full_v2p, swa_v2p, full_out, swa_out, page_size, positions_out, anchor_src, anchor_out",
        "f436af338700e77b",
        speculation.extend_slots,
        "Triton, or nothing at all off the platforms it names",
    ),
    (
        "sglang.kernels.ops.kvcache.dsv4_c128_cleanup:clear_unaccepted_c128_draft_states",
        "state, req_pool_indices, seq_lens, accept_lens, *, ring_size, num_draft_tokens",
        "101196c86b2e9091",
        speculation.clear_rejected_c128,
        "Triton",
    ),
    (
        f"{_OPS}.gather_spec_extras:gather_spec_extras",
        "indices, topk_p_buf, topk_index_buf, output_tokens_buf, hidden_states_buf",
        "d2e35aaf6abd7a83",
        speculation.relayed_drafts,
        "Triton",
    ),
    (
        "sglang.kernels.ops.memory.common:get_last_loc_triton",
        "req_to_token, req_pool_indices_tensor, prefix_lens_tensor",
        "1cc7065a5c474668",
        speculation.last_slots,
        "Triton",
    ),
    (
        "sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func",
        "req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size",
        "fdbe87d4a60cc13a",
        speculation.write_slots,
        "Triton",
    ),
):
    SERIES.replace(_target, feature=FEATURE, why=_why, params=_params, fingerprint=_fingerprint)(
        _ours
    )


@SERIES.replace(
    "sglang.srt.speculative.eagle_utils:_verify_uses_greedy",
    feature=FEATURE,
    why="as on ROCm, whose kernels verify greedily whatever the request's temperature",
    params="*, is_all_greedy, is_cpu, is_hip, is_xpu, use_rejection_sampling",
    fingerprint="aef4e7dc4b270f32",
)
def verify_uses_greedy(*, use_rejection_sampling, **_) -> bool:
    return not use_rejection_sampling


@SERIES.replace(
    "sglang.srt.models.deepseek_v4:DeepseekV4ForCausalLM.set_embed_and_head",
    feature=FEATURE,
    why="upstream then waits for a GPU, whichever device the model is on",
    params="self, embed, head",
    fingerprint="c6f9a9c3c63577f8",
)
def set_embed_and_head(self, embed, head) -> None:
    self.model.embed_tokens.weight = embed
    self.lm_head.weight = head


@SERIES.wrap(
    f"{_NEXT_N}.forward",
    feature=FEATURE,
    why="the draft model's own torch calls, as the target's: bits must not depend on the number of rows",
    params="self, input_ids, positions, forward_batch",
    fingerprint="1f3a55d84f6b0273",
)
def forward_with_invariant_torch(original, *args, **kwargs):
    if not arithmetic.chunk_invariant():
        return original(*args, **kwargs)
    with InvariantTorch():
        return original(*args, **kwargs)


@SERIES.replace(
    "sglang.srt.arg_groups.speculative_hook:_disable_overlap_schedule_for_cpu",
    feature=FEATURE,
    why="it speaks of SGLang's own CPU engine; on ROCm, which this one stands for, both go together",
    params="server_args",
    fingerprint="5c279ce84a76ea2b",
)
def keep_overlap_schedule(server_args) -> None:
    pass


@SERIES.wrap(
    "sglang.kernels.ops.attention.dsv4.attn_metadata_kernels:expand_prefill_causally",
    feature=FEATURE,
    why="with lengths on the device alone upstream goes to its Triton kernel, for CUDA tensors only",
    params="*, req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc, seq_lens_cpu, "
    "extend_seq_lens_cpu, num_tokens, padded_num_tokens",
    fingerprint="2bb6108fe49a34fb",
)
def expand_by_lengths(original, *, extend_seq_lens, extend_start_loc, seq_lens_cpu, **kwargs):
    if extend_start_loc is None and seq_lens_cpu is None:
        extend_start_loc = extend_seq_lens.cumsum(0) - extend_seq_lens
    return original(
        extend_seq_lens=extend_seq_lens,
        extend_start_loc=extend_start_loc,
        seq_lens_cpu=seq_lens_cpu,
        **kwargs,
    )
