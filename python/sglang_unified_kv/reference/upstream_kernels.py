"""Which of upstream's kernels run instead of the torch reference; only a GPU can run them.

``SGLANG_UNIFIED_KV_REFERENCE_UPSTREAM_KERNELS=triton,jit`` in the environment, or :func:`choose`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_unified_kv.reference.ops.invariant_torch import plain_torch

ENV = "SGLANG_UNIFIED_KV_REFERENCE_UPSTREAM_KERNELS"
KINDS = ("triton", "jit", "top-k", "tilelang", "sgl-kernel")
"""Top-k is one of the JIT kernels; what it returns is in another order every time.

Of the package sgl_kernel only HiCache's copies are run.
"""
TRITON, JIT, TOP_K, TILELANG, SGL_KERNEL = KINDS

_chosen: frozenset[str] = frozenset()


def choose(kinds: Iterable[str]) -> None:
    """Run upstream's kernels of these ``kinds`` from now on, and the torch reference of all others.

    Raises:
        ValueError: a kind that is not in :data:`KINDS`.
    """
    global _chosen
    wanted = frozenset(kinds)
    if unknown := wanted - set(KINDS):
        raise ValueError(f"{ENV}: {', '.join(sorted(unknown))}: must be of {', '.join(KINDS)}")
    _chosen = wanted


@contextmanager
def also(kind: str) -> Iterator[None]:
    """Run upstream's kernels of this kind too, for a while."""
    before = _chosen
    choose(before | {kind})
    try:
        yield
    finally:
        choose(before)


def from_environment() -> list[str]:
    """The kinds that the environment names."""
    return [kind for kind in os.environ.get(ENV, "").split(",") if kind]


def either(kind: str, reference: Callable) -> Callable:
    """An edit that runs ``reference``, or upstream's callable while ``kind`` is chosen.

    Both with plain torch calls, wherever they are called from.
    """
    reference = plain_torch(reference)

    def call(original: Callable, *args: Any, **kwargs: Any) -> Any:
        if kind not in _chosen:
            return reference(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return original(*args, **kwargs)

    call.__module__, call.__qualname__ = reference.__module__, reference.__qualname__
    return call
