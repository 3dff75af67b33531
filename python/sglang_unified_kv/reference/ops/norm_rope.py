"""RMS norm, rotary embedding, Hadamard rotation and fp8 grouping, per row.

``freqs_cis`` is ``[positions, R/2]`` complex64; rotated values are the last ``R`` of a row, in
interleaved pairs. All arithmetic is float32, results are rounded once to the output's dtype.
"""

from __future__ import annotations

import functools

import torch

from sglang_unified_kv.reference.ops import arithmetic

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """``x / rms(x) * weight`` over the last dimension, float32."""
    x = x.float() / torch.sqrt(arithmetic.mean_square(x) + eps)
    return x if weight is None else x * weight.float()


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False
) -> torch.Tensor:
    """Interleaved pairs of ``x`` ``[..., R]`` rotated by ``cos`` and ``sin`` ``[..., R/2]``."""
    x = x.float()
    even, odd = x[..., 0::2], x[..., 1::2]
    if inverse:
        sin = -sin
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def rotate_tail(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` with its last ``2 * cos.shape[-1]`` values rotated."""
    width = 2 * cos.shape[-1]
    return torch.cat([x[..., :-width], rotate(x[..., -width:], cos, sin)], -1)


def _angles(
    freqs_cis: torch.Tensor, positions: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin ``[T, (1,) R/2]`` of ``positions``, with a head dimension for rank-3 operands."""
    freqs = freqs_cis[positions.long()]
    if rank == 3:
        freqs = freqs.unsqueeze(1)
    return freqs.real, freqs.imag


def rope_inplace(q, k, freqs_cis, positions, inverse=False) -> None:
    """Rotate ``q`` and ``k`` (``[T, R]`` or ``[T, H, R]``; ``k`` may be None) in place."""
    for x in (q, k):
        if x is not None:
            x.copy_(rotate(x, *_angles(freqs_cis, positions, x.dim()), inverse))


def norm_rope_inplace(kv, weight, eps, freq_cis, positions) -> None:
    """RMS norm, then rotate the tail of ``kv`` ``[T, D]`` in place."""
    kv.copy_(rotate_tail(rms_norm(kv, weight, eps), *_angles(freq_cis, positions, 2)))


def q_norm_rope(q_input, q_output, eps, freqs_cis, positions) -> None:
    """RMS norm without weight (none if ``eps`` is None) and rope of queries ``[T, H, D]``."""
    x = q_input.float() if eps is None else rms_norm(q_input, None, eps)
    q_output.copy_(rotate_tail(x, *_angles(freqs_cis, positions, 3)))


def qk_norm_rope_swa_store(
    q,
    kv,
    q_norm_weight,
    kv_norm_weight,
    q_rms_eps,
    kv_rms_eps,
    rope_head_dim,
    cos_cache,
    sin_cache,
    positions,
    swa_cache=None,
    swa_loc=None,
    swa_page_size=128,
    q_out=None,
    dtype=torch.bfloat16,
    bf16_store=False,
    **fp8_arguments,
) -> torch.Tensor:
    """The decode step's query, key and ring store: ``q`` ``[T, H*D]``, ``kv`` ``[T, D]`` in place.

    Returns the queries ``[T, H, D]``; ring rows ``swa_loc`` of ``swa_cache`` get the keys.
    """
    if not bf16_store:
        raise NotImplementedError("the reference engine has no fp8 unified_kv layout")
    rows = positions.long()
    cos, sin = cos_cache[rows].float().flatten(1), sin_cache[rows].float().flatten(1)
    heads = rms_norm(q.view(q.shape[0], -1, kv.shape[1]), q_norm_weight, q_rms_eps)
    query = rotate_tail(heads, cos.unsqueeze(1), sin.unsqueeze(1)).to(dtype)
    key = rotate_tail(rms_norm(kv, kv_norm_weight, kv_rms_eps), cos, sin).to(kv.dtype)
    kv.copy_(key)
    if swa_cache is not None:
        swa_cache[swa_loc.long()] = key.to(swa_cache.dtype)
    if q_out is None:
        return query
    return q_out.copy_(query)


@functools.cache
def _signs(n: int, device: torch.device) -> torch.Tensor:
    """Sylvester's Hadamard matrix ``[n, n]`` of +1 and -1 (``n`` a power of two)."""
    h = torch.ones(1, 1, device=device)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Hadamard rotation of the last dimension, float32."""
    n = x.shape[-1]
    return arithmetic.matmul(x, _signs(n, x.device)) * n**-0.5


def fp8_group(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` ``[..., G]`` as fp8 e4m3 and one float32 scale ``[..., 1]`` per row."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-4) / FP8_MAX
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def q_indexer_rope_hadamard_quant(
    q_input, weight, weight_scale, freqs_cis, positions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indexer queries ``[T, H, 128]`` as fp8, head weights ``[T, H, 1]`` with every scale in."""
    x = rotate_tail(q_input.float(), *_angles(freqs_cis, positions, 3))
    q8, scale = fp8_group(hadamard(x))
    return q8, weight.float().unsqueeze(-1) * weight_scale * scale
