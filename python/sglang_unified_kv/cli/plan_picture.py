"""The picture of ``sglang-unified-kv plan --plot``: capacity over slots, host memory over the stride."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from ..plan.capacity import GB, Machine, Sizes
from .extra import require_extra


def draw(path: Path, sizes_of: Callable[[int], Sizes], machine: Machine, asked: int) -> None:
    """Write the picture.

    Args:
        sizes_of: sizes of a rank for so many running requests.
        asked: running requests of the plan.
    """
    require_extra(Console(stderr=True), "matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    counts = sorted({max(asked * step // 8, 1) for step in range(1, 17)})
    found = [sizes_of(count) for count in counts]
    left.plot(counts, [s.tokens / 1e6 for s in found], label="window sized by slots")
    left.plot(counts, [s.tokens_scaled / 1e6 for s in found], label="window sized by tokens")
    left.axvline(asked, color="grey", linewidth=0.8)
    left.set(
        xlabel="max running requests of a rank", ylabel="full tokens, millions", ylim=(0, None)
    )
    left.legend()
    if found[0].hisparse:
        cold = [s.hisparse.cold_bytes / GB for s in found if s.hisparse]
        right.plot(counts, cold, label="cold C4 rows")
        right.set(xlabel="max running requests of a rank", ylim=(0, None))
    else:
        _strides(right, sizes_of(asked))
    right.axhline(machine.host_bytes / GB, color="red", linewidth=0.8, label="host memory")
    right.set(ylabel="host memory of a rank, GB")
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _strides(axes: Any, sizes: Sizes) -> None:
    """Host memory of the checkpoints over their stride, beside HiCache's pages."""
    strides = (1, 2, 4, 8, 16)
    needed = [sizes.host_pages // stride * sizes.per_checkpoint / GB for stride in strides]
    pages = sum(sizes.host_page.values()) * sizes.host_pages / GB
    axes.bar([str(s) for s in strides], needed, label="a checkpoint at every boundary")
    axes.axhline(pages, color="grey", linewidth=0.8, label="HiCache's pages")
    axes.set(xlabel="stride, pages")
