"""C4 rows behind the rings of the unified pool, as SGLang's HiSparse sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.deepseek_v4_memory_pool import HiSparseC4DevicePool

from ...hisparse.rows import RATIO

if TYPE_CHECKING:
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool


class UnifiedC4DevicePool(HiSparseC4DevicePool):
    """A view into ``rows[rings:]`` of every C4 layer; nothing is allocated.

    Row 0 is no request's: what has no row of its own is written there.

    Args:
        pool: whose unified buffers are allocated.
    """

    def __init__(self, pool: DeepSeekV4TokenToKVPool):
        # Not the parent's, which allocates packed pages.
        views, page_bytes = pool.unified_region_buffers(RATIO)
        self.page_size = pool.page_size // RATIO
        self.size = (len(views[0]) - 1) * self.page_size
        self.layer_num = len(views)
        self.start_layer, self.end_layer = 0, len(views)
        self.device = pool.device
        self.dtype = self.store_dtype = torch.uint8
        self.compress_ratio = RATIO
        self.kv_buffer = views
        self.bytes_per_page_padded = page_bytes
        self.kv_cache_total_dim = page_bytes // self.page_size
        self.layer_transfer_counter = None
        rope = pool.unified_rope_region_buffers(RATIO)
        self.parts: list[list[torch.Tensor]] = [views] + ([rope[0]] if rope else [])
        """Pages of bytes per layer: latents, and under fp8 their rope halves beside them."""
        self._rings = pool.unified_swa_pages

    def rows(self, part: int) -> list[torch.Tensor]:
        """uint8 ``[rows, row bytes]`` per layer."""
        return [page.view(-1, page.shape[1] // self.page_size) for page in self.parts[part]]

    def stored_at(self, compressed: torch.Tensor) -> torch.Tensor:
        """Row of the unified buffer for each logical C4 position.

        -1 and what is unmapped go to row 0 of the region: none may reach the rings
        before it.
        """
        rows = self._translate_loc_to_hisparse_device(compressed.long().clamp(min=0))
        return (rows + self._rings).to(compressed.dtype)
