"""Upstream's own torch calls, computed by :mod:`.arithmetic` while a model forward runs.

The model's projections, norms and gates are plain torch: ``F.linear``, ``x.pow(2).mean(-1)`` and
the like. Inside :class:`InvariantTorch` those whose bits may depend on the number of rows are
computed by sums that do not; every other call passes. Reference ops step out of it with
:func:`plain_torch`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from sglang_unified_kv.reference.ops import arithmetic


def _matmul(a: torch.Tensor, b: torch.Tensor, *, out_dtype=None, out=None) -> torch.Tensor:
    y = arithmetic.matmul(a, b).to(out_dtype or a.dtype)
    return y if out is None else out.copy_(y)


def _linear(x, weight, bias=None) -> torch.Tensor:
    y = _matmul(x, weight.t())
    return y if bias is None else y + bias


def _einsum(equation: str, *operands: torch.Tensor) -> torch.Tensor:
    dtype = arithmetic.product_dtype()
    y = torch.einsum(equation, *(x.to(dtype) for x in operands))
    return y.float().to(operands[0].dtype)


def _sum(x, dim=None, keepdim=False, *, dtype=None) -> torch.Tensor:
    if dim is None or dtype is not None or not x.is_floating_point():
        return x.sum() if dim is None else x.sum(dim, keepdim=keepdim, dtype=dtype)
    y = arithmetic.fold_sum(x.float(), dim).to(x.dtype)
    return y.unsqueeze(dim) if keepdim else y


def _mean(x, dim, keepdim=False) -> torch.Tensor:
    # Upstream takes means of squares of bfloat16 numbers, so float64 is exact here too.
    return x.mean(dim, keepdim=keepdim, dtype=arithmetic.product_dtype()).to(x.dtype)


def _silu(x, inplace=False) -> torch.Tensor:
    y = arithmetic.silu(x).to(x.dtype)
    return x.copy_(y) if inplace else y


def _softplus(x) -> torch.Tensor:
    return arithmetic.softplus(x).to(x.dtype)


RANGE = "reference op"

_OURS: dict[Any, Callable[..., torch.Tensor]] = {
    F.linear: _linear,
    torch.mm: _matmul,
    torch.matmul: _matmul,
    torch.einsum: _einsum,
    torch.Tensor.sum: _sum,
    torch.Tensor.mean: _mean,
    F.silu: _silu,
    F.softplus: _softplus,
}


class InvariantTorch(TorchFunctionMode):
    """Context in which the calls of the table above are made by :mod:`.arithmetic`.

    A keyword that a replacement does not know is a TypeError: upstream then calls torch in a way
    that has not been thought about.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _OURS.get(func, func)(*args, **(kwargs or {}))


def plain_torch(op: Callable) -> Callable:
    """``op`` with plain torch calls, wherever it is called from; a profile shows it as :data:`RANGE`."""

    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        profiled = torch.autograd._profiler_enabled()
        named = torch.profiler.record_function(RANGE) if profiled else nullcontext()
        with torch._C.DisableTorchFunction(), named:
            return op(*args, **kwargs)

    return call
