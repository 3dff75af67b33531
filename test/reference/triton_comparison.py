"""Reference ops against upstream's Triton kernels in the interpreter; a script, run by its test.

Prints one JSON object: case name to the largest difference found (0 for integers that are equal), or
to a string that says what does not match. TRITON_INTERPRET must be set before triton is imported.
"""

import json
import math
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from sglang.kernels.ops.attention import fused_qk_norm_rope_store  # noqa: E402
from sglang.kernels.ops.attention.dsv4 import attn_glue_hip, metadata_kernel, rope  # noqa: E402
from sglang.kernels.ops.attention.dsv4.unified_kv_kernels import (  # noqa: E402
    paged_decode,
    paged_prefill,
    runtime,
)
from sglang.kernels.ops.kvcache import dsv4_c128_cleanup, dsv4_unified_kv_store  # noqa: E402
from sglang.kernels.ops.layernorm import mhc, mhc_head  # noqa: E402
from sglang.kernels.ops.memory import common as memory  # noqa: E402
from sglang.kernels.ops.speculative import (  # noqa: E402
    cache_locs,
    eagle,
    gather_spec_extras,
    spec_tree,
)
from sglang.srt.mem_cache import allocation  # noqa: E402
from sglang_unified_kv.reference.ops import (  # noqa: E402
    attention,
    hyper_connections,
    indices,
    norm_rope,
    speculation,
)

TOKENS, WINDOW, SWA_PAGES = 5, 128, 5 * 128
# Across 256: the end of a page and of a C128 block.
CHUNK_START, SLOT = 253, 3
HEADS, DIM = 4, 512

torch.manual_seed(0)
POSITIONS = torch.arange(CHUNK_START, CHUNK_START + TOKENS)
LENGTHS = (POSITIONS + 1).int()
SLOTS = torch.full((TOKENS,), SLOT)
C4 = torch.full((TOKENS, 512), -1, dtype=torch.int32)
C128 = torch.full((TOKENS, 64), -1, dtype=torch.int32)
for _token in range(TOKENS):
    _rows = int(LENGTHS[_token]) // 4
    C4[_token, :_rows] = torch.randperm(100)[:_rows].int()
    _rows = int(LENGTHS[_token]) // 128
    C128[_token, :_rows] = torch.arange(5, 5 + _rows).int()
POOL = torch.randn(SWA_PAGES + 200, DIM).half()
SINK = torch.randn(HEADS)
SCALE = DIM**-0.5


class _CudaLook:
    """The attention wrappers refuse tensors that are not on a GPU; the interpreter does not care."""

    def __enter__(self):
        torch.Tensor.is_cuda = property(lambda self: True)

    def __exit__(self, *exception):
        del torch.Tensor.is_cuda


def difference(theirs, ours):
    """Largest absolute difference over tensors of equal shape and dtype; text when they are not."""
    if isinstance(theirs, torch.Tensor):
        theirs, ours = [theirs], [ours]
    worst = 0.0
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if a is None or b is None:
            if a is not b:
                return f"output {i}: {a} and {b}"
        elif a.shape != b.shape or a.dtype != b.dtype:
            return f"output {i}: {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
        elif a.numel():
            largest = (a.double() - b.double()).abs().max().item()
            worst = math.inf if math.isnan(largest) else max(worst, largest)
    return worst


def metadata():
    table = torch.tensor([[1, 3]] * TOKENS, dtype=torch.int32)
    arguments = LENGTHS, POSITIONS.int(), POSITIONS + 256, table, 256, True
    theirs = metadata_kernel.init_compression_metadata(*arguments)
    return difference(theirs, indices.compression_metadata(*arguments))


def page_table():
    req_to_token = torch.randint(0, 4096, (6, 1024), dtype=torch.int32)
    arguments = req_to_token, SLOTS, 900, 256
    theirs = attn_glue_hip.page_table_from_req_to_token(*arguments)
    return difference(theirs, indices.page_table(*arguments))


def sparse_buffers():
    arguments = {
        "c4_topk_lengths_clamp1": LENGTHS * 4,
        "c4_topk_lengths_raw": LENGTHS * 4,
        "c1_topk_lengths_clamp1": None,
        "c2_topk_lengths_clamp1": None,
        "index_topk": 512,
        "page_index_align": 64,
    }
    theirs, ours = attn_glue_hip.sparse_buffers(**arguments), indices.sparse_buffers(**arguments)
    if theirs.keys() != ours.keys():
        return f"keys {sorted(theirs)} and {sorted(ours)}"
    return difference(list(theirs.values()), [ours[name] for name in theirs])


def prefill_streams(ratio):
    arguments = {
        "compress_ratio": ratio,
        "state_slot": SLOTS,
        "positions": POSITIONS,
        "chunk_start": torch.full((TOKENS,), CHUNK_START),
        "cu_q": torch.zeros(TOKENS, dtype=torch.int64),
        "win": WINDOW,
        "ring_stride": WINDOW,
        "swa_pages": SWA_PAGES,
        "c128_page_indices": C128,
        "c4_sparse_page_indices": C4,
    }
    theirs = runtime.build_prefill_indices(**arguments)
    return theirs, indices.prefill_indices(**arguments)


def prefill_indices(ratio):
    def used(streams):
        prefix, prefix_indptr, extend, extend_indptr = streams
        end = int(prefix_indptr[-1]), int(extend_indptr[-1])
        return prefix[: end[0]], prefix_indptr, extend[: end[1]], extend_indptr

    theirs, ours = prefill_streams(ratio)
    return difference(used(theirs), used(ours))


def prefill_attention(ratio):
    # float16: the interpreter's bfloat16 dot product is wrong.
    queries = torch.randn(TOKENS, HEADS, DIM).half()
    keys = torch.randn(TOKENS, DIM).half()
    prefix, prefix_indptr, extend, extend_indptr = prefill_streams(ratio)[0]
    with _CudaLook():
        theirs = paged_prefill._sparse_attn_v4_paged_prefill_triton(
            queries, POOL, prefix, prefix_indptr, keys, extend, extend_indptr, SINK, SCALE
        )
    ours = attention.prefill(
        q=queries,
        unified_kv=POOL,
        kv_indices_prefix=prefix,
        kv_indptr_prefix=prefix_indptr,
        kv_extend=keys,
        kv_indices_extend=extend,
        kv_indptr_extend=extend_indptr,
        attn_sink=SINK,
        softmax_scale=SCALE,
    )
    return difference(theirs, ours)


def decode_streams():
    """The builder of the decode streams with upstream's two kernels and with ours in their place."""
    arguments = {
        "state_slot": SLOTS,
        "positions": POSITIONS,
        "swa_len": LENGTHS.clamp(max=WINDOW),
        "hca_len": LENGTHS // 128,
        "csa_len": LENGTHS // 4,
        "hca_page_indices": C128,
        "csa_width": 512,
        "win": WINDOW,
        "ring_stride": WINDOW,
        "swa_pages": SWA_PAGES,
    }
    theirs = runtime.build_decode_streams(**arguments)
    kernels = runtime.write_v4_paged_decode_indices, runtime.fill_compress_tail
    runtime.write_v4_paged_decode_indices = indices.decode_window_indices
    runtime.fill_compress_tail = indices.fill_compress_tail
    try:
        return theirs, runtime.build_decode_streams(**arguments)
    finally:
        runtime.write_v4_paged_decode_indices, runtime.fill_compress_tail = kernels


def decode_indices():
    def used(streams):
        swa, swa_indptr, hca, hca_indptr, csa, csa_indptr = streams
        # The C4 tail is filled per layer; its window part is written here.
        window = [
            csa[int(start) : int(start) + min(int(n), WINDOW)]
            for start, n in zip(csa_indptr[:-1], LENGTHS, strict=True)
        ]
        hca = hca[: int(hca_indptr[-1])]
        return swa[: int(swa_indptr[-1])], swa_indptr, hca, hca_indptr, csa_indptr, *window

    theirs, ours = decode_streams()
    return difference(used(theirs), used(ours))


def decode_attention():
    queries = torch.randn(TOKENS, HEADS, DIM).half()
    stream, indptr = decode_streams()[0][2:4]
    with _CudaLook():
        theirs = paged_decode._sparse_attn_v4_paged_decode_triton(
            queries, POOL, stream, indptr, SINK, SCALE, kv_splits=1
        )
    ours = attention.decode(
        q=queries,
        unified_kv=POOL,
        kv_indices=stream,
        kv_indptr=indptr,
        attn_sink=SINK,
        softmax_scale=SCALE,
    )
    return difference(theirs, ours)


def window_store():
    keys = torch.randn(TOKENS, DIM).half()
    pools = POOL.clone(), POOL.clone()
    stores = dsv4_unified_kv_store.store_swa_into_unified, indices.store_window
    for store, pool in zip(stores, pools, strict=True):
        store(
            kv=keys,
            state_slot=SLOTS,
            positions=POSITIONS,
            unified_kv=pool,
            win=16,
            ring_stride=WINDOW,
            final_pos=torch.full((TOKENS,), CHUNK_START + TOKENS - 1),
        )
    return difference(*pools)


FREQS = torch.polar(torch.ones(600, 32), torch.rand(600, 32) * 6)


def rope_inverse():
    theirs = torch.randn(TOKENS, HEADS, 64).bfloat16()
    ours = theirs.clone()
    rope.apply_rotary_emb_triton(theirs, FREQS, positions=POSITIONS, inverse=True)
    norm_rope.rope_inplace(ours, None, FREQS, POSITIONS, True)
    return difference(theirs, ours)


def norm_and_rope():
    weight = torch.rand(DIM) + 0.5
    theirs = torch.randn(TOKENS, DIM)
    ours = theirs.clone()
    rope.fused_norm_rope_inplace_triton(theirs, weight, 1e-6, FREQS, positions=POSITIONS)
    norm_rope.norm_rope_inplace(ours, weight, 1e-6, FREQS, POSITIONS)
    return difference(theirs, ours)


def decode_norm_rope_store():
    weight = torch.rand(DIM) + 0.5
    tables = FREQS.real.bfloat16()[:, None, None], FREQS.imag.bfloat16()[:, None, None]
    queries = torch.randn(TOKENS, HEADS * DIM).bfloat16()
    keys = torch.randn(TOKENS, DIM).bfloat16()
    results = []
    for store in (
        fused_qk_norm_rope_store.fused_qk_norm_rope_swa_store,
        norm_rope.qk_norm_rope_swa_store,
    ):
        pool = torch.zeros(900, DIM).bfloat16()
        rotated = store(
            q=queries.clone(),
            kv=keys.clone(),
            q_norm_weight=None,
            kv_norm_weight=weight,
            q_rms_eps=1e-6,
            kv_rms_eps=1e-6,
            rope_head_dim=64,
            cos_cache=tables[0],
            sin_cache=tables[1],
            positions=POSITIONS,
            swa_cache=pool,
            swa_loc=(POSITIONS + 1).int(),
            swa_page_size=1,
            bf16_store=True,
        )
        results.append((rotated.view(TOKENS, HEADS, DIM), pool))
    return difference(*results)


def sinkhorn():
    arguments = torch.randn(TOKENS, 1, 24), torch.rand(3), torch.randn(24), 4, 4, 1e-6
    theirs = mhc._hc_split_sinkhorn_triton(*arguments)
    return difference(theirs, hyper_connections.split_sinkhorn(*arguments))


def stream_combine():
    arguments = torch.randn(TOKENS, 1024), torch.rand(TOKENS, 4), 4, torch.bfloat16
    return difference(mhc.mhc_combine(*arguments), hyper_connections.combine(*arguments))


def stream_head():
    arguments = (
        torch.randn(TOKENS, 4, 256).bfloat16(),
        torch.randn(4, 1024) / 32,
        torch.rand(1),
        torch.randn(4),
        1e-6,
        1e-6,
    )
    return difference(mhc_head.fused_hc_head(*arguments), hyper_connections.head(*arguments))


ROWS = torch.tensor([2, 0, 3])
LENGTHS_OF_ROWS = torch.tensor([5, 256, 0])
REQ_TO_TOKEN = torch.randperm(4 * 512).int().view(4, 512)
DRAFTS = 4


def chain_tree():
    """One draft per step: what upstream's tree kernel makes of it, and the mask's cells of the chain."""
    results = []
    parents = torch.arange(-1, DRAFTS - 2).expand(3, -1).contiguous()
    scores = torch.arange(DRAFTS - 1).expand(3, -1).contiguous()
    for build in (spec_tree.sgl_build_tree_kernel_triton, speculation.build_chain):
        mask = torch.zeros(3 * DRAFTS * DRAFTS, dtype=torch.bool)
        links = torch.full((3, 3, DRAFTS), -1)
        positions = torch.empty(3 * DRAFTS, dtype=torch.long)
        tree = mask, positions, *links
        mode = spec_tree.TreeMaskMode.QLEN_ONLY
        build(parents, scores, LENGTHS_OF_ROWS, *tree, 1, DRAFTS - 1, DRAFTS, mode)
        results.append([positions, *links])
    return difference(*results)


def greedy_acceptance():
    """Every number of accepted drafts from none to all, drafts that agree again behind a wrong one."""
    target = torch.randint(0, 50, (6, DRAFTS))
    candidates = torch.cat([torch.full((6, 1), 99), target[:, :-1]], 1)
    for row, wrong in enumerate((1, 2, 3)):
        candidates[row, wrong] = 77
    candidates[3, 1:3] = 77
    links = torch.full((3, 6, DRAFTS), -1)
    speculation.build_chain(
        None, None, torch.zeros(6).long(), None, torch.empty(24).long(), *links, 1, 3, DRAFTS, None
    )
    results = []
    for verify in (spec_tree.verify_tree_greedy_triton, speculation.verify_chain):
        accepted = torch.full((6, DRAFTS), -1, dtype=torch.int32)
        predicts, counts = torch.zeros(24, dtype=torch.int32), torch.empty(6, dtype=torch.int32)
        verify(predicts, accepted, counts, candidates, *links, target)
        # Tokens behind the last accepted one are nobody's.
        used = predicts.view(6, DRAFTS) * (torch.arange(DRAFTS) <= counts[:, None])
        results.append((accepted, counts, used))
    return difference(*results)


def last_of_each():
    tokens, lengths = (
        torch.arange(12, dtype=torch.int32),
        torch.tensor([1, 4, 2], dtype=torch.int32),
    )
    results = []
    for fill in (eagle.fill_bonus_tokens_func, speculation.last_accepted):
        bonus = torch.empty(3, dtype=torch.int32)
        fill(tokens, lengths, bonus, 4, 3)
        results.append(bonus)
    return difference(*results)


def drafted_slots():
    results = []
    for assign in (
        cache_locs.assign_draft_cache_locs_contiguous_func,
        speculation.draft_slots,
    ):
        slots = torch.empty(3 * DRAFTS, dtype=torch.long)
        assign(ROWS, REQ_TO_TOKEN, LENGTHS_OF_ROWS, slots, 1, DRAFTS)
        results.append(slots)
    return difference(*results)


def verified_slots():
    theirs = torch.empty(3 * DRAFTS, dtype=torch.long)
    cache_locs.assign_extend_cache_locs_uniform[(3,)](
        ROWS, REQ_TO_TOKEN, LENGTHS_OF_ROWS, theirs, REQ_TO_TOKEN.shape[1], DRAFTS
    )
    ours = speculation.extend_slots(ROWS, REQ_TO_TOKEN, LENGTHS_OF_ROWS, 3, DRAFTS)
    return difference(theirs, ours)


def last_slots():
    arguments = REQ_TO_TOKEN, ROWS, LENGTHS_OF_ROWS
    return difference(memory.get_last_loc_triton(*arguments), speculation.last_slots(*arguments))


def written_slots():
    results = []
    new = torch.arange(9000, 9000 + 7).int()
    for write in (allocation.assign_req_to_token_pool_func, speculation.write_slots):
        table = REQ_TO_TOKEN.clone()
        write(ROWS, table, LENGTHS_OF_ROWS, LENGTHS_OF_ROWS + torch.tensor([3, 0, 4]), new, 3)
        results.append(table)
    return difference(*results)


def rejected_c128_states():
    results = []
    for clear in (
        dsv4_c128_cleanup.clear_unaccepted_c128_draft_states,
        speculation.clear_rejected_c128,
    ):
        state = torch.ones(4 * 256, 2 * DIM)
        accepted = torch.tensor([1, 4, 2], dtype=torch.int32)
        clear(state, ROWS, LENGTHS_OF_ROWS, accepted, ring_size=256, num_draft_tokens=DRAFTS)
        results.append(state.clamp_min(-1e9))
    return difference(*results)


def relayed_drafts():
    buffers = torch.rand(4, 1), torch.randint(0, 9, (4, 1)), torch.arange(4), torch.rand(4, 64)
    theirs = gather_spec_extras.gather_spec_extras(ROWS, *buffers)
    return difference(theirs, speculation.relayed_drafts(ROWS, *buffers))


CASES = {
    "compression metadata": metadata,
    "page table": page_table,
    "sparse buffers": sparse_buffers,
    "prefill indices c0": lambda: prefill_indices(0),
    "prefill indices c4": lambda: prefill_indices(4),
    "prefill indices c128": lambda: prefill_indices(128),
    "decode indices": decode_indices,
    "window store": window_store,
    "prefill attention c0": lambda: prefill_attention(0),
    "prefill attention c4": lambda: prefill_attention(4),
    "prefill attention c128": lambda: prefill_attention(128),
    "decode attention": decode_attention,
    "rope inverse": rope_inverse,
    "norm and rope": norm_and_rope,
    "decode norm, rope and store": decode_norm_rope_store,
    "sinkhorn": sinkhorn,
    "stream combine": stream_combine,
    "stream head": stream_head,
    "chain tree": chain_tree,
    "greedy acceptance": greedy_acceptance,
    "last accepted token": last_of_each,
    "drafted slots": drafted_slots,
    "verified slots": verified_slots,
    "last slots": last_slots,
    "written slots": written_slots,
    "rejected C128 states": rejected_c128_states,
    "relayed drafts": relayed_drafts,
}

if __name__ == "__main__":
    json.dump({name: case() for name, case in CASES.items()}, sys.stdout)
