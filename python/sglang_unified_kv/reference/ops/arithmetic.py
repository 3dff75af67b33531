"""Sums and elementary functions whose bits do not depend on what else is computed in the call.

A GEMM or a reduction may round a row differently when the number of rows changes, and a vectorised
function may round differently in the tail of an array. Chunk invariance forbids both, so

- sums of products of bfloat16 or fp8 numbers are taken in float64, where they are exact: no order
  of summation can show. That needs the terms of a sum to lie within 37 binary orders of magnitude
  of it; beyond, the error is below 2**-53 of the sum and would have to meet a rounding tie to be
  seen;
- other sums are folded in halves, a fixed tree of element-wise additions;
- functions are built from IEEE operations, ``exp`` and ``log``. Torch computes these two alike at
  every place of an array, but not ``sigmoid``, ``silu`` and ``softplus``.

``set_chunk_invariant(False)`` gives plain float32 torch instead, to show what unequal chunking
does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_chunk_invariant = True


def set_chunk_invariant(on: bool) -> None:
    """Choose exact sums (True, the default) or plain float32 torch for this process."""
    global _chunk_invariant
    _chunk_invariant = on


def chunk_invariant() -> bool:
    return _chunk_invariant


def product_dtype() -> torch.dtype:
    """Dtype in which products are summed."""
    return torch.float64 if _chunk_invariant else torch.float32


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` as float32; the sums are exact for operands of few significant bits."""
    dtype = product_dtype()
    return (a.to(dtype) @ b.to(dtype)).float()


def fold_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over ``dim`` by adding the upper half to the lower half until one element is left."""
    if not _chunk_invariant:
        return x.sum(dim)
    while (n := x.shape[dim]) > 1:
        if n == 4:
            a, b, c, d = x.unbind(dim)
            return (a + c) + (b + d)
        half = n // 2
        folded = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat([folded, x.narrow(dim, n - 1, 1)], dim) if n % 2 else folded
    return x.squeeze(dim)


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """Mean of squares over the last dimension, kept: ``[..., D] -> [..., 1]`` float32."""
    if x.dtype is torch.bfloat16:
        x = x.to(product_dtype())
        return (x * x).mean(-1, keepdim=True).float()
    x = x.float()
    return (fold_sum(x * x, -1) / x.shape[-1]).unsqueeze(-1)


def exp(x: torch.Tensor) -> torch.Tensor:
    return x.float().exp()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Logistic function in float32."""
    x = x.float()
    return 1.0 / (1.0 + exp(-x)) if _chunk_invariant else torch.sigmoid(x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)`` in float32."""
    x = x.float()
    return x * sigmoid(x) if _chunk_invariant else F.silu(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + exp(x))`` in float32."""
    x = x.float()
    if not _chunk_invariant:
        return F.softplus(x)
    return x.clamp_min(0.0) + (1.0 + exp(-x.abs())).log()


def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """float32 softmax over ``dim``."""
    x = x.float()
    if not _chunk_invariant:
        return x.softmax(dim)
    e = exp(x - x.amax(dim, keepdim=True))
    return e / fold_sum(e, dim).unsqueeze(dim)
