"""Metadata and index streams of a forward: which pool rows each token reads and writes.

Streams are ragged: ``indices`` holds the rows of token ``t`` at ``[indptr[t], indptr[t+1])``, the
window (oldest first) and then the compressed rows, shifted by ``swa_pages`` into the unified pool.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def compression_metadata(
    seq_lens, positions, raw_out_loc, page_table=None, page_size=0, compute_page_indices=True
):
    """Where each token's compressed rows go and how many it sees.

    Returns:
        For C4, then for C128: store location (0 inside a block), rope position, row count, row
        count of at least 1; last each token's C128 rows ``[T, 2 * pages]`` int32, -1 padded, or
        None.
    """
    n = raw_out_loc.shape[0]
    result = []
    for ratio in (4, 128):
        rows = (seq_lens // ratio).to(torch.int32)
        done = seq_lens[:n] % ratio == 0
        result += [
            torch.where(done, raw_out_loc // ratio, 0).to(torch.int64),
            (positions & ~(ratio - 1)).to(torch.int32),
            rows,
            rows.clamp_min(1),
        ]
    page_indices = None
    if compute_page_indices:
        per_page = page_size // 128
        column = torch.arange(per_page * page_table.shape[1], device=page_table.device)
        page_indices = page_table[:, column // per_page] * per_page + column % per_page
        page_indices = page_indices.masked_fill(column >= result[6][:, None], -1).to(torch.int32)
    return (*result, page_indices)


def page_table(req_to_token, req_rows, max_seq_len, page_size) -> torch.Tensor:
    """Pages ``[T, ceil(max_seq_len / page_size)]`` int32 of each token's request."""
    return (req_to_token[req_rows.long(), :max_seq_len:page_size] // page_size).to(torch.int32)


def sparse_buffers(
    *,
    c4_topk_lengths_clamp1,
    c4_topk_lengths_raw,
    c1_topk_lengths_clamp1,
    c2_topk_lengths_clamp1,
    index_topk,
    page_index_align,
) -> dict[str, torch.Tensor]:
    """Lengths capped at ``index_topk``, and the empty (-1) C4 index buffer the indexer fills."""
    if c1_topk_lengths_clamp1 is not None or c2_topk_lengths_clamp1 is not None:
        raise NotImplementedError("the reference engine has compress ratios 0, 4 and 128 only")
    width = -(-index_topk // page_index_align) * page_index_align
    rows = c4_topk_lengths_raw.shape[0]
    return {
        "c4_sparse_topk_lengths": c4_topk_lengths_clamp1.clamp(max=index_topk),
        "c4_sparse_topk_lengths_raw": c4_topk_lengths_raw.clamp(max=index_topk),
        "c4_sparse_page_indices": torch.full(
            (rows, width), -1, dtype=torch.int32, device=c4_topk_lengths_raw.device
        ),
    }


def _ragged(mask: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row-wise concatenation of ``values[mask]`` in a buffer of full size, and its indptr."""
    indices = torch.zeros(mask.numel(), dtype=torch.int32, device=mask.device)
    chosen = values[mask]
    indices[: chosen.numel()] = chosen.to(torch.int32)
    return indices, F.pad(torch.cumsum(mask.sum(1), 0), (1, 0)).to(torch.int32)


def prefill_indices(
    *,
    compress_ratio,
    state_slot,
    positions,
    chunk_start,
    cu_q,
    win,
    ring_stride,
    swa_pages,
    c128_page_indices,
    c4_sparse_page_indices,
):
    """Streams ``(prefix indices, indptr, extend indices, indptr)`` of a prefill chunk.

    Window positions before ``chunk_start`` are ring rows of the prefix, later ones rows of the
    chunk's own keys, where ``cu_q`` is the request's first. ``positions`` may be longer: what pads a batch
    to the other ranks' size gets no stream.
    """
    positions = positions[: state_slot.shape[0]]
    position, chunk = positions.long()[:, None], chunk_start.long()[:, None]
    step = torch.arange(win, device=positions.device)
    oldest = (position - win + 1).clamp_min(0)

    in_chunk = (position - chunk + 1).clamp(max=win)
    extend = cu_q.long()[:, None] + (position - chunk) - in_chunk + 1 + step
    extend_mask = step < in_chunk

    ring = state_slot.long()[:, None] * ring_stride
    prefix = ring + (oldest + step) % ring_stride
    prefix_mask = step < (chunk - oldest).clamp(0, win)
    pages = {0: None, 4: c4_sparse_page_indices, 128: c128_page_indices}[compress_ratio]
    if pages is not None:
        pages = pages[: positions.shape[0]].long()
        prefix = torch.cat([prefix, pages + swa_pages], 1)
        prefix_mask = torch.cat([prefix_mask, pages >= 0], 1)
    return *_ragged(prefix_mask, prefix), *_ragged(extend_mask, extend)


def fill_compress_tail(*, indices, indptr, prefix_len, page_indices, valid_len, swa_pages) -> None:
    """Write each token's compressed rows behind the ``prefix_len`` window rows of its stream."""
    n, width = page_indices.shape
    column = torch.arange(width, device=page_indices.device)
    mask = column < valid_len.long()[:, None]
    target = (indptr[:n].long() + prefix_len.long())[:, None] + column
    rows = torch.where(page_indices >= 0, page_indices + swa_pages, -1)
    indices[target[mask]] = rows[mask].to(torch.int32)


def decode_window_indices(
    *,
    state_slot_per_seq,
    batch_id_per_token,
    positions,
    swa_indptr,
    csa_indptr,
    hca_indptr,
    swa_indices,
    csa_indices,
    hca_indices,
    T,
    win,
    ring_stride,
) -> None:
    """Write each token's window ring rows at the start of its three decode streams."""
    batch = batch_id_per_token[:T].long()
    position = positions[:T].long()[:, None]
    length = (position + 1).clamp(max=win)
    step = torch.arange(win, device=positions.device)
    mask = (step < length) & (batch >= 0)[:, None]
    ring = state_slot_per_seq[batch.clamp_min(0)].long()[:, None] * ring_stride
    rows = (ring + (position - length + 1 + step) % ring_stride).to(torch.int32)
    streams = (swa_indptr, swa_indices), (csa_indptr, csa_indices), (hca_indptr, hca_indices)
    for indptr, indices in streams:
        indices[(indptr[:T].long()[:, None] + step)[mask]] = rows[mask]


def store_window(
    *,
    kv,
    state_slot,
    positions,
    unified_kv,
    win,
    ring_stride,
    final_pos=None,
    kv_rope=None,
    unified_kv_rope=None,
) -> None:
    """Store keys ``[T, D]`` in their ring rows; with ``final_pos`` the last ``win`` positions."""
    if kv_rope is not None:
        raise NotImplementedError("the reference engine has no fp8 unified_kv layout")
    rows = state_slot.long() * ring_stride + positions % ring_stride
    if final_pos is not None:
        kept = positions > final_pos - win
        rows, kv = rows[kept], kv[kept]
    unified_kv[rows] = kv
