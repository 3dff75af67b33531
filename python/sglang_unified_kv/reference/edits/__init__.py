"""Everything that the reference engine touches in SGLang, one module per upstream area."""

from sglang_unified_kv.reference.edits import (
    arguments,
    attention,
    hicache,
    hisparse,
    kernels,
    model,
    parallel,
    speculation,
)
from sglang_unified_kv.reference.edits.series import SERIES

__all__ = [
    "SERIES",
    "arguments",
    "attention",
    "hicache",
    "hisparse",
    "kernels",
    "model",
    "parallel",
    "speculation",
]
