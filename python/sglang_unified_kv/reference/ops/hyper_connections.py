"""Manifold hyper-connections (mHC) and the clamped SwiGLU, per token."""

from __future__ import annotations

import torch

from sglang_unified_kv.reference.ops import arithmetic


def split_sinkhorn(mixes, hc_scale, hc_base, hc_mult=4, sinkhorn_iters=20, eps=1e-6):
    """Split ``mixes`` ``[b, s, (2+h)*h]`` into pre ``[b, s, h]``, post ``[b, s, h]`` and the doubly
    stochastic mixing ``[b, s, h, h]``."""
    h = hc_mult
    pre = arithmetic.sigmoid(mixes[..., :h] * hc_scale[0] + hc_base[:h]) + eps
    post = 2 * arithmetic.sigmoid(mixes[..., h : 2 * h] * hc_scale[1] + hc_base[h : 2 * h])
    comb = (mixes[..., 2 * h :] * hc_scale[2] + hc_base[2 * h :]).unflatten(-1, (h, h))
    comb = arithmetic.softmax(comb, -1) + eps
    comb = _normalise(comb, -2, eps)
    for _ in range(sinkhorn_iters - 1):
        comb = _normalise(_normalise(comb, -1, eps), -2, eps)
    return pre, post, comb


def _normalise(x: torch.Tensor, dim: int, eps: float) -> torch.Tensor:
    return x / (arithmetic.fold_sum(x, dim).unsqueeze(dim) + eps)


def combine(x_flat, pre, hc, out_dtype) -> torch.Tensor:
    """``y[t] = sum_k pre[t, k] * x[t, k]`` for ``x_flat`` ``[T, hc*D]``, as ``[T, D]``."""
    streams = x_flat.view(x_flat.shape[0], hc, -1).float()
    return arithmetic.fold_sum(streams * pre.unsqueeze(-1).float(), 1).to(out_dtype)


def head(x, hc_fn, hc_scale, hc_base, norm_eps, hc_eps) -> torch.Tensor:
    """Gated sum of the streams of ``x`` ``[T, hc, D]`` before the final norm, as ``[T, D]``."""
    flat = x.flatten(1)
    mixes = arithmetic.matmul(flat, hc_fn.t()) / torch.sqrt(arithmetic.mean_square(flat) + norm_eps)
    pre = arithmetic.sigmoid(mixes * hc_scale + hc_base) + hc_eps
    return combine(flat, pre, x.shape[1], x.dtype)


def silu_and_mul_clamp(input, output, swiglu_limit) -> None:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)`` of ``[T, 2*D]`` into ``output``."""
    gate, up = input.float().chunk(2, -1)
    clamped = up.clamp(-swiglu_limit, swiglu_limit)
    output.copy_(arithmetic.silu(gate.clamp(max=swiglu_limit)) * clamped)
