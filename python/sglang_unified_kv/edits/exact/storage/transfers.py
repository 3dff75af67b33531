"""Pool transfers that carry records on SGLang's own prefetch and backup operations."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from ....checkpoint.storage import Fetch, Save
from .record_pool import RECORD_POOL


class FetchTransfer(PoolTransfer):
    """Carries a :class:`Fetch` on SGLang's prefetch operation.

    It looks like a pool derived from KV with trailing pages: the hit query then agrees on the restorable
    prefixes over all ranks, and everything that allocates, frees or counts by pool passes it over.
    """

    def __init__(self, fetch: Fetch):
        super().__init__(
            RECORD_POOL, hit_policy=PoolHitPolicy.TRAILING_PAGES, indices_from_pool=PoolName.KV
        )
        self.fetch = fetch


class SaveTransfer(PoolTransfer):
    """Carries a :class:`Save` on SGLang's backup operation."""

    def __init__(self, save: Save):
        super().__init__(
            RECORD_POOL,
            host_indices=torch.tensor([r.slot for r in save.records], dtype=torch.int64),
            keys=[r.key for r in save.records],
        )
        self.save = save
