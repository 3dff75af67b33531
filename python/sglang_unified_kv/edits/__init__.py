"""All contact with SGLang's internals, one module per upstream area, in the order of application.

Importing declares the edits; nothing is touched before ``Series.apply()``.
"""

from . import (  # noqa: F401, I001
    server_args,
    engagement,
    extension_points,
    pool_sizing,
    registry,
    storage_transfers,
    storage_clear,
    storage_folder,
    weights,
    scheduler,
    speculation,
    model_runner,
    attention,
    ring_allocator,
    ring_prealloc,
    ring_sizing,
    hisparse_args,
    hisparse_pool,
    hisparse_sizing,
    hisparse_allocator,
    hisparse_runner,
    report,
)
from .series import HISPARSE_SERIES, REPORT, RING, SERIES

__all__ = ["HISPARSE_SERIES", "REPORT", "RING", "SERIES"]
