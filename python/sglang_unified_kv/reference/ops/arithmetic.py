"""Sums and elementary functions whose bits do not depend on what else is computed in the call.

A GEMM or a reduction may round a row differently when the number of rows changes, and a vectorised
``exp`` differently in the tail of an array. Chunk invariance forbids both, so

- a product of two matrices of few significant bits (bfloat16, fp8) is summed in float64, where every
  partial sum is exact: an order of summation cannot show. Exactness needs the terms of a sum to lie
  within 37 binary orders of magnitude; beyond that the error is below 2**-53 of the sum, and it would
  have to meet a rounding tie of the result to be seen;
- other sums are folded in halves, a fixed tree of element-wise additions;
- exp and its kin are built from IEEE additions and multiplications.

``set_chunk_invariant(False)`` gives plain float32 torch instead, to show what unequal chunking does.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

_LOG2E = math.log2(math.e)
# 2**f on [-0.5, 0.5], Taylor to degree 7: relative error below 2**-24.
_EXP2_COEFFICIENTS = [math.log(2.0) ** n / math.factorial(n) for n in range(7, -1, -1)]

_chunk_invariant = True


def set_chunk_invariant(on: bool) -> None:
    """Choose exact sums (True, the default) or plain float32 torch for this process."""
    global _chunk_invariant
    _chunk_invariant = on


def chunk_invariant() -> bool:
    return _chunk_invariant


def product_dtype() -> torch.dtype:
    """Dtype in which matrix products are summed."""
    return torch.float64 if _chunk_invariant else torch.float32


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` as float32; exact sums for operands of at most 16 significant bits together."""
    dtype = product_dtype()
    return (a.to(dtype) @ b.to(dtype)).float()


def fold_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over ``dim`` by adding the upper half to the lower half until one element is left."""
    if not _chunk_invariant:
        return x.sum(dim)
    x = x.movedim(dim, 0)
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        folded = x[:half] + x[half : 2 * half]
        x = torch.cat([folded, x[2 * half :]]) if x.shape[0] % 2 else folded
    return x[0]


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """Mean of squares over the last dimension, kept: ``[..., D] -> [..., 1]`` float32."""
    x = x.float()
    return (fold_sum(x * x, -1) / x.shape[-1]).unsqueeze(-1)


def exp(x: torch.Tensor) -> torch.Tensor:
    """float32 exponential, clamped to the normal range (no infinities, underflow gives 0)."""
    x = x.float()
    if not _chunk_invariant:
        return x.exp()
    scaled = (x * _LOG2E).clamp_(-127.0, 127.0)
    whole = scaled.round()
    fraction = scaled.sub_(whole)
    result = torch.full_like(fraction, _EXP2_COEFFICIENTS[0])
    for coefficient in _EXP2_COEFFICIENTS[1:]:
        result.mul_(fraction).add_(coefficient)
    power = whole.to(torch.int32).add_(127).bitwise_left_shift_(23).view(torch.float32)
    return result.mul_(power)


def log(x: torch.Tensor) -> torch.Tensor:
    """float32 natural logarithm of positive normal numbers, by Halley's iteration on :func:`exp`."""
    x = x.float()
    if not _chunk_invariant:
        return x.log()
    y = (x.view(torch.int32) - 0x3F800000).float() * (math.log(2.0) / (1 << 23))
    for _ in range(3):
        e = exp(y)
        y = y + 2.0 * (x - e) / (x + e)
    return y


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + exp(-x)) if _chunk_invariant else torch.sigmoid(x.float())


def silu(x: torch.Tensor) -> torch.Tensor:
    return x.float() * sigmoid(x) if _chunk_invariant else F.silu(x.float())


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + exp(x))`` in float32."""
    x = x.float()
    if not _chunk_invariant:
        return F.softplus(x)
    return x.clamp_min(0.0) + log(1.0 + exp(-x.abs()))


def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """float32 softmax over ``dim``."""
    x = x.float()
    if not _chunk_invariant:
        return x.softmax(dim)
    e = exp(x - x.amax(dim, keepdim=True))
    return e / fold_sum(e, dim).unsqueeze(dim)
