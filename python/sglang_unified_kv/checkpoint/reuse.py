"""The strict gate: how much of a cached prefix may be reused.

Both ends of a match are gated. ``device`` is where the request resumes if loading the host part back
fails, so it has to be a checkpoint as well as the total.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class TreeMatch(NamedTuple):
    """What the radix tree offers for a key.

    Attributes:
        device: tokens resident on the device.
        host: tokens behind them that are on the host only.
        result: the tree's own result object.
    """

    device: int
    host: int
    result: Any


class GatedMatch(NamedTuple):
    """A match both ends of which are checkpoints.

    Attributes:
        device: tokens on the device, a checkpoint boundary or 0.
        total: tokens on device and host, a checkpoint boundary or 0.
        at_device: the tree's result for a key cut at ``device``.
        at_total: the tree's result for a key cut at ``total``.
        rejected: matched tokens of which an end was not used, for want of a checkpoint; 0 if none.
    """

    device: int
    total: int
    at_device: Any
    at_total: Any
    rejected: int = 0


def gate(
    match: Callable[[int], TreeMatch], deepest: Callable[[int], int], length: int
) -> GatedMatch:
    """Deepest match that checkpoints cover at both ends.

    Args:
        match: asks the tree for the key cut at a boundary. May split nodes and touch the tree's LRU, so
            it is called with as short a key as is known to suffice.
        deepest: deepest checkpoint boundary not beyond a length, 0 if none.
        length: tokens of the key.

    >>> tree = lambda cut: TreeMatch(min(cut, 512), max(0, min(cut, 1024) - 512), cut)
    >>> store = lambda limit: max((b for b in (256, 1024) if b <= limit), default=0)
    >>> gate(tree, store, 1099)
    GatedMatch(device=256, total=1024, at_device=256, at_total=1024, rejected=512)
    """
    limit = deepest(length)
    found = match(limit)
    rejected = 0
    while found.device + found.host != limit:
        rejected = found.device + found.host
        # Deepest below what the tree has; strictly smaller, so this ends.
        limit = deepest(rejected)
        found = match(limit)
    rejected = rejected if rejected > limit else 0
    if found.host == 0:
        return GatedMatch(limit, limit, found.result, found.result, rejected)
    device = deepest(found.device)
    if device == found.device:
        return GatedMatch(device, limit, found.result, found.result, rejected)
    at_device = match(device)
    # The cut at ``device`` may have split the path, so ask again for the deeper end.
    return GatedMatch(device, limit, at_device.result, match(limit).result, found.device)
