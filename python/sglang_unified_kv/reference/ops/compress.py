"""The C4 and C128 compressors: plans, pooling of a block, norm + rope + store.

A plan is SGLang's: packed int32 rows seen as uint8.

- prefill, one per finished block: ``(seq_len, ragged id | buffered << 16, overlap page, page)``;
- prefill, one per position kept in the state ring: ``(ragged id, state row)``;
- decode, one per request: ``(seq_len, state row, overlap page, page)``.

A *page* here is ``ratio`` consecutive rows of the state ring, which is addressed by request:
``req_pool_idx * ring + position % ring``.
"""

from __future__ import annotations

import torch

from sglang_unified_kv.reference.ops import arithmetic
from sglang_unified_kv.reference.ops.norm_rope import fp8_group, hadamard, rms_norm, rotate_tail

_BLOCKS_AT_ONCE = 64
_MAX_CHUNK = 1 << 16


def _overlaps(ratio: int) -> bool:
    return ratio == 4


def _window(ratio: int) -> int:
    """Rows that one compressed row is pooled from."""
    return ratio * 2 if _overlaps(ratio) else ratio


def _pack(*columns: torch.Tensor) -> torch.Tensor:
    return torch.stack(columns, 1).to(torch.int32).contiguous().view(torch.uint8)


def _unpack(plan: torch.Tensor) -> torch.Tensor:
    return plan.view(torch.int32).long()


def _require_request_ring(ratio: int, use_req_ring: bool) -> None:
    if ratio == 4 and not use_req_ring:
        raise NotImplementedError("the reference engine has only the request-addressed C4 state")


def plan_prefill(
    compress_ratio,
    req_pool_indices,
    seq_lens,
    extend_lens,
    req_to_token,
    full_to_state,
    swa_page_size,
    ring_size,
    num_q_tokens,
    use_cuda_graph=False,
    use_req_ring=False,
):
    """Which blocks end in this chunk and which of its rows the state ring keeps."""
    from sglang.kernels.ops.attention.dsv4.compress import CompressorPrefillPlan

    _require_request_ring(compress_ratio, use_req_ring)
    if num_q_tokens > _MAX_CHUNK:
        raise ValueError(
            f"a batch of {num_q_tokens} prefill tokens: a plan addresses {_MAX_CHUNK}; "
            f"lower --chunked-prefill-size or --max-prefill-tokens"
        )
    ratio, window = compress_ratio, _window(compress_ratio)
    spare = ring_size - window + 2 if ring_size > window else 0
    blocks, kept, base = [], [], 0
    lengths = zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_lens.tolist(), strict=True)
    for batch, (request, seq_len, extend_len) in enumerate(lengths):
        row = torch.arange(extend_len)
        position = row + (seq_len - extend_len)
        state = request * ring_size + position % ring_size

        done = (position + 1) % ratio == 0
        p, j = position[done], row[done]
        buffered = window - (j + 1).clamp(max=window)
        overlap = request * ring_size + (p - ratio).clamp_min(0) % ring_size
        reads = buffered > 0
        blocks.append(
            torch.stack(
                [
                    p + 1,
                    (base + j) | (buffered << 16),
                    torch.where(reads, overlap // ratio, -1),
                    torch.where(reads, state[done] // ratio, batch),
                ],
                1,
            )
        )
        first = seq_len // ratio * ratio - (ratio if _overlaps(ratio) else 0)
        keep = position >= min(first, seq_len - spare)
        kept.append(torch.stack([base + row[keep], state[keep]], 1))
        base += extend_len
    device = req_to_token.device
    plan_c = _pack(*torch.cat(blocks).unbind(1)).to(device)
    plan_w = _pack(*torch.cat(kept).unbind(1)).to(device)
    return CompressorPrefillPlan(ratio, plan_c, plan_w, None)


def plan_decode(
    compress_ratio,
    req_pool_indices,
    req_to_token,
    full_to_state,
    seq_lens,
    swa_page_size,
    ring_size,
    use_req_ring=False,
):
    """State row of each request's new token and the pages its block is pooled from."""
    from sglang.kernels.ops.attention.dsv4.compress import CompressorDecodePlan

    _require_request_ring(compress_ratio, use_req_ring)
    position = seq_lens.long() - 1
    ring = req_pool_indices.long() * ring_size
    state = ring + position % ring_size
    overlap = ring + (position - compress_ratio).clamp_min(0) % ring_size
    columns = seq_lens.long(), state, overlap // compress_ratio, state // compress_ratio
    return CompressorDecodePlan(compress_ratio, _pack(*columns))


def compress_forward(
    kv_score_buffer,
    kv_score_input,
    ape,
    plan,
    *,
    head_dim,
    compress_ratio,
    out=None,
    is_online=False,
) -> torch.Tensor:
    """Pool every finished block of the plan into one row and update the state ring.

    Args:
        kv_score_buffer: state ring ``[pages, ratio, W]``; ``W`` is ``[kv, score]`` of ``head_dim``
            each, for C4 twice, ``[kv of the overlap, kv, score of the overlap, score]``.
        kv_score_input: ``[T, W]`` float32 rows of this forward.
        ape: ``[window, head_dim]`` added to the scores.

    Returns:
        ``[rows of the plan, head_dim]``; decode rows in the middle of a block stay zero.
    """
    if is_online:
        raise NotImplementedError("the reference engine has no online C128 compressor")
    rows = _unpack(plan[1])
    ring = kv_score_buffer.view(-1, kv_score_buffer.shape[-1])
    if out is None:
        out = kv_score_input.new_zeros((rows.shape[0], head_dim))
    window = _window(compress_ratio)
    if plan.is_decode:
        ring[rows[:, 1]] = kv_score_input.to(ring.dtype)
        chosen = torch.nonzero(rows[:, 0] % compress_ratio == 0).flatten()
        ragged, buffered = chosen, torch.full_like(chosen, window)
    else:
        chosen = torch.arange(rows.shape[0], device=rows.device)
        ragged, buffered = rows[:, 1] & 0xFFFF, rows[:, 1] >> 16
    for start in range(0, chosen.numel(), _BLOCKS_AT_ONCE):
        part = slice(start, start + _BLOCKS_AT_ONCE)
        block = chosen[part]
        entries = _window_rows(
            ring, kv_score_input, rows[block], ragged[part], buffered[part], compress_ratio
        )
        out[block] = _pool(entries, rows[block, 0], ape, head_dim, compress_ratio).to(out.dtype)
    if not plan.is_decode:
        kept = _unpack(plan.plan_w)
        ring[kept[:, 1]] = kv_score_input[kept[:, 0]].to(ring.dtype)
    return out


def _window_rows(ring, rows, plan, ragged, buffered, ratio) -> torch.Tensor:
    """Inputs ``[n, window, W]`` of ``n`` blocks: ``buffered`` from the ring, then the chunk's."""
    window = _window(ratio)
    entry = torch.arange(window, device=ring.device)
    page = plan[:, 3:4].expand(-1, window)
    if _overlaps(ratio):
        page = torch.where(entry < ratio, plan[:, 2:3], page)
    ring_row = (page * ratio + entry % ratio).clamp(0, ring.shape[0] - 1)
    chunk_row = (ragged[:, None] - (window - 1) + entry).clamp(0, rows.shape[0] - 1)
    from_ring = (entry < buffered[:, None]).unsqueeze(-1)
    return torch.where(from_ring, ring[ring_row].to(rows.dtype), rows[chunk_row])


def _pool(entries, seq_len, ape, head_dim, ratio) -> torch.Tensor:
    """Softmax-weighted sum over the window, per channel: ``[n, window, W] -> [n, head_dim]``."""
    if _overlaps(ratio):
        old_kv, kv, old_score, score = entries.float().split(head_dim, -1)
        kv = torch.cat([old_kv[:, :ratio], kv[:, ratio:]], 1)
        score = torch.cat([old_score[:, :ratio], score[:, ratio:]], 1)
        entry = torch.arange(2 * ratio, device=entries.device)
        missing = ((seq_len <= ratio)[:, None] & (entry < ratio)).unsqueeze(-1)
        kv = kv.masked_fill(missing, 0.0)
        score = score.masked_fill(missing, torch.finfo(torch.float32).min / 2)
    else:
        kv, score = entries.float().split(head_dim, -1)
    weight = arithmetic.softmax(score + ape.float(), 1)
    return arithmetic.fold_sum(kv * weight, 1)


def compress_norm_rope_store(
    kv,
    plan,
    *,
    norm_weight,
    norm_eps,
    freq_cis,
    out_loc,
    kvcache,
    page_size,
    use_fp4=False,
    bf16_store=False,
    fp8_2buff=False,
    **other_layouts,
) -> None:
    """Norm and rotate the pooled rows; store them as bf16 latent or as fp8 indexer keys.

    A block's rope position is its first token. The indexer page holds ``page_size`` rows of 128 fp8
    bytes, then ``page_size`` float32 scales.
    """
    if use_fp4 or fp8_2buff:
        raise NotImplementedError("the reference engine stores bf16 latents and fp8 indexer keys")
    rows, ratio = _unpack(plan[1]), plan.compress_ratio
    if plan.is_decode:
        done = torch.nonzero(rows[:, 0] % ratio == 0).flatten()
        kv, rows, loc = kv[done], rows[done], out_loc[done].long()
    else:
        loc = out_loc[rows[:, 1] & 0xFFFF].long()
    freqs = freq_cis[rows[:, 0] - ratio]
    x = rotate_tail(rms_norm(kv, norm_weight, norm_eps), freqs.real, freqs.imag)
    if bf16_store:
        kvcache.view(torch.bfloat16)[loc] = x.to(torch.bfloat16)
        return
    values, scale = fp8_group(hadamard(x))
    dim = values.shape[-1]
    pages = kvcache.view(torch.uint8).view(-1, page_size * (dim + 4))
    page, slot = (loc // page_size)[:, None], (loc % page_size)[:, None]
    byte = torch.arange(dim, device=loc.device)
    pages[page, slot * dim + byte] = values.view(torch.uint8)
    pages.view(torch.float32)[page, page_size * dim // 4 + slot] = scale
