"""Exact reuse: the gate in front of the cache, captures and restores around the forward."""

from . import (  # noqa: F401, I001
    extension_points,
    pool_sizing,
    registry,
    storage,
    weights,
    scheduler,
    speculation,
    model_runner,
    attention,
)
