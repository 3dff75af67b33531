"""Sparse attention over the unified pool, and the indexer's scores and top-k.

A *source* is ``(rows, indices, indptr)``: query ``t`` attends to the rows
``indices[indptr[t]:indptr[t+1]]`` (rows bf16 ``[*, D]``, indices int32, -1 for none, no row twice).
Keys are values. The sum over keys is exact in the chunk-invariant mode, so neither their order nor
the split between sources shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_unified_kv.reference.ops import arithmetic

_QUERIES_AT_ONCE = 64
_INDEXER_QUERIES_AT_ONCE = 256
# Softmax numerators are multiples of this, relative to the largest: their sums are exact.
_WEIGHT_STEPS = float(1 << 20)

Source = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def decode(*, q, unified_kv, kv_indices, kv_indptr, attn_sink, softmax_scale, kv_splits=None):
    """Attention of ``q`` ``[T, H, D]`` to one source; ``[T, H, D]`` in ``q``'s dtype."""
    return _attend(q, attn_sink, softmax_scale, [(unified_kv, kv_indices, kv_indptr)])


def prefill(
    *,
    q,
    unified_kv,
    kv_indices_prefix,
    kv_indptr_prefix,
    kv_extend,
    kv_indices_extend,
    kv_indptr_extend,
    attn_sink,
    softmax_scale,
):
    """Attention of ``q`` ``[T, H, D]`` to the pool (prefix) and this chunk's own keys (extend)."""
    sources = [
        (unified_kv, kv_indices_prefix, kv_indptr_prefix),
        (kv_extend, kv_indices_extend, kv_indptr_extend),
    ]
    return _attend(q, attn_sink, softmax_scale, sources)


def _attend(q, attn_sink, scale: float, sources: Sequence[Source]) -> torch.Tensor:
    tokens, heads, _ = q.shape
    out = torch.empty_like(q)
    sources = [(rows, indices, _with_padding(indptr, tokens)) for rows, indices, indptr in sources]
    bounds = [indptr.tolist() for _, _, indptr in sources]
    sink = attn_sink[:heads].float()
    for start in range(0, tokens, _QUERIES_AT_ONCE):
        stop = min(start + _QUERIES_AT_ONCE, tokens)
        keys, visible = [], []
        for (rows, indices, indptr), bound in zip(sources, bounds, strict=True):
            counts = indptr[start + 1 : stop + 1] - indptr[start:stop]
            used, mask = _shared_rows(indices[bound[start] : bound[stop]], counts, rows.shape[0])
            keys.append(rows[used])
            visible.append(mask)
        out[start:stop] = _softmax_attend(
            q[start:stop], torch.cat(keys), torch.cat(visible, 1), sink, scale
        )
    return out


def _with_padding(indptr: torch.Tensor, tokens: int) -> torch.Tensor:
    """``indptr`` ``[tokens + 1]``; queries that it does not know attend to nothing, and get zeros.

    SGLang makes the draft's streams before it pads the batch to the other ranks' size.
    """
    known = indptr[: tokens + 1]
    return torch.cat([known, known[-1:].expand(tokens + 1 - len(known))])


def _shared_rows(indices, counts, n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that any of these queries reads, ``[U]``, and which reads which, ``[t, U]`` bool."""
    query = torch.repeat_interleave(counts.long())
    real = indices >= 0
    index, query = indices[real].long(), query[real]
    present = torch.zeros(n_rows, dtype=torch.bool, device=indices.device)
    present[index] = True
    used = torch.nonzero(present).flatten()
    column = torch.cumsum(present, 0) - 1
    mask = torch.zeros(counts.numel(), used.numel(), dtype=torch.bool, device=indices.device)
    mask[query, column[index]] = True
    return used, mask


def _softmax_attend(q, keys, visible, sink, scale: float) -> torch.Tensor:
    """``q`` ``[t, H, D]`` over ``keys`` ``[U, D]`` where ``visible`` ``[t, U]``; sink ``[H]``."""
    t, heads, dim = q.shape
    dtype = arithmetic.product_dtype()
    keys = keys.to(dtype)
    scores = (q.reshape(t * heads, dim).to(dtype) @ keys.t()).float().view(t, heads, -1)
    scores.mul_(scale).masked_fill_(~visible.unsqueeze(1), float("-inf"))
    if scores.shape[-1] == 0:
        return torch.zeros_like(q)
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = arithmetic.exp(scores - top)
    if arithmetic.chunk_invariant():
        weights = weights.mul_(_WEIGHT_STEPS).round_()
        total = weights.sum(-1, dtype=dtype) / _WEIGHT_STEPS
    else:
        total = weights.sum(-1)
    total = total + arithmetic.exp(sink - top.squeeze(-1)).to(dtype)
    values = (weights.view(t * heads, -1).to(dtype) @ keys).view(t, heads, dim)
    if arithmetic.chunk_invariant():
        values = values / _WEIGHT_STEPS
    return (values / total.unsqueeze(-1)).to(q.dtype)


def indexer_scores(
    q_fp8,
    kvcache_fp8,
    weight,
    seq_lens,
    page_table,
    deep_gemm_metadata,
    max_seq_len,
    clean_logits=True,
) -> torch.Tensor:
    """Scores ``[B, max_seq_len]`` float32 of queries ``[B, 1, H, 128]`` against paged indexer keys.

    ``sum_h weight[b, h] * relu(q[b, h] . k) * key scale``, 0 beyond ``seq_lens``. Rows of one
    request share a page table and meet the same keys.
    """
    n, _, heads, dim = q_fp8.shape
    page_size = kvcache_fp8.shape[1]
    raw = kvcache_fp8.view(torch.uint8).view(-1, page_size * (dim + 4))
    out = torch.zeros(n, max_seq_len, dtype=torch.float32, device=q_fp8.device)
    start = 0
    for table, count in _requests(page_table):
        pages = raw[table.clamp_min(0).long()]
        split = page_size * dim
        keys = pages[:, :split].contiguous().view(q_fp8.dtype).view(-1, dim)
        key_scale = pages[:, split:].contiguous().view(torch.float32).flatten()
        width = min(keys.shape[0], max_seq_len)
        keys, key_scale = keys[:width].to(arithmetic.product_dtype()).t(), key_scale[:width]
        for first in range(start, start + count, _INDEXER_QUERIES_AT_ONCE):
            rows = slice(first, min(first + _INDEXER_QUERIES_AT_ONCE, start + count))
            queries = q_fp8[rows, 0].reshape(-1, dim).to(keys.dtype)
            dots = (queries @ keys).float().view(-1, heads, width).relu_()
            scores = arithmetic.fold_sum(dots * weight[rows].float().unsqueeze(-1), 1) * key_scale
            valid = torch.arange(width, device=scores.device) < seq_lens[rows].view(-1, 1)
            out[rows, :width] = scores.masked_fill_(~valid, 0.0)
        start += count
    return out


def _requests(page_table: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """Each request's page table and how many of the rows are its own."""
    if page_table.is_cuda and torch.cuda.is_current_stream_capturing():
        # Which rows are of one request is not known to the host: the same scores, one row at a time.
        return [(table, 1) for table in page_table]
    tables, counts = torch.unique_consecutive(page_table, dim=0, return_counts=True)
    return list(zip(tables, counts.tolist(), strict=True))


def topk_transform(
    scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices=None
) -> None:
    """Pool slots of each row's highest scores in position order; a tie goes to the lower position.

    ``out_page_indices`` ``[B, K]`` int32 gets ``page * page_size + offset``, -1 after the last;
    ``out_raw_indices`` gets the positions.
    """
    n, k = out_page_indices.shape
    width = scores.shape[1]
    length = seq_lens.view(-1, 1)
    chosen = torch.arange(width, device=scores.device).expand(n, width)
    if width > k:
        ranked = scores.masked_fill(chosen >= length, float("-inf"))
        chosen = ranked.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
    real = chosen < length
    page = torch.gather(page_tables, 1, torch.where(real, chosen // page_size, 0)).long()
    slots = torch.where(real, page * page_size + chosen % page_size, -1)
    out_page_indices.fill_(-1)
    out_page_indices[:, : slots.shape[1]] = slots.to(out_page_indices.dtype)
    if out_raw_indices is not None:
        out_raw_indices.fill_(-1)
        raw = torch.where(real, chosen, -1)
        out_raw_indices[:, : raw.shape[1]] = raw.to(out_raw_indices.dtype)
