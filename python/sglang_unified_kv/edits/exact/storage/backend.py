"""What stands between SGLang's storage threads and a storage backend.

One proxy around the backend, whichever it is. It files every object under our namespace, ties the bytes
of pages and records to their keys, and turns whatever does not verify, or raises, into a miss.
"""

from __future__ import annotations

import builtins
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from .clear import clear_namespace
from .record_pool import RECORD_POOL
from .sealed_pages import SealedPool
from .transfers import FetchTransfer, SaveTransfer

if TYPE_CHECKING:
    from ....checkpoint.manager import CheckpointManager
    from ....checkpoint.record_format import RecordFormat
    from ....checkpoint.storage import Save
    from .record_pool import RecordHostPool

logger = logging.getLogger(__name__)


class StrictStorage(HiCacheStorage):
    """Proxy of a storage backend; :meth:`bind` before the first transfer.

    Args:
        backend: the real one.
        seal_pages: the backend moves flat pages, so pages get a trailer. A zero-copy backend moves the
            pool's own memory, and the integrity of pages is its own affair; records are verified either way.

    Raises:
        ValueError: the backend cannot move records beside pages.
    """

    def __new__(cls, backend: HiCacheStorage, **_options):
        # SGLang reports a backend by the name of its class.
        return super().__new__(type(type(backend).__name__, (cls,), {}))

    def __init__(self, backend: HiCacheStorage, *, seal_pages: bool):
        for call in ("batch_exists_v2", "batch_get_v2", "batch_set_v2"):
            if getattr(type(backend), call) is getattr(HiCacheStorage, call):
                raise ValueError(
                    f"storage backend {type(backend).__name__} has no {call}, which exact prefix reuse "
                    "moves its records with: choose another --hicache-storage-backend"
                )
        self._backend = backend
        self._seal_pages = seal_pages
        self._sealed: dict[PoolName, SealedPool] = {}
        self._lock = threading.Lock()

    def bind(
        self,
        record_format: RecordFormat,
        records: RecordHostPool,
        manager: CheckpointManager,
        page_size: int,
    ) -> None:
        """Set what objects are filed under. No transfer may be under way."""
        self._format = record_format
        self._records = records
        self._manager = manager
        self._mover = manager.mover
        self._stats = manager.stats
        self.page_size = page_size
        self._prefix = record_format.namespace.hex() + "-"

    def __getattr__(self, name):
        # Whatever else a backend offers (close, reports): its own.
        return getattr(self._backend, name)

    # -- pools

    def register_mem_pool_host(self, mem_pool_host) -> None:
        self._backend.register_mem_pool_host(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool, host_pool_name) -> None:
        if self._seal_pages and host_pool_name not in (PoolName.KV, RECORD_POOL):
            host_pool = self._sealed[host_pool_name] = SealedPool(host_pool, str(host_pool_name))
        self._backend.register_mem_host_pool_v2(host_pool, host_pool_name)

    def on_host_pools_registered(self) -> None:
        self._backend.on_host_pools_registered()

    # -- keys

    def _named(self, keys: Iterable[str] | None) -> list[str] | None:
        return None if keys is None else [self._prefix + key for key in keys]

    def _info(self, extra_info: HiCacheStorageExtraInfo | None) -> HiCacheStorageExtraInfo | None:
        if extra_info is None or extra_info.prefix_keys is None:
            return extra_info
        return replace(extra_info, prefix_keys=self._named(extra_info.prefix_keys))

    def _count(self, counter: str, by: int) -> None:
        # Three threads call in here.
        with self._lock:
            setattr(self._stats, counter, getattr(self._stats, counter) + by)

    def _guarded(self, what: str, otherwise, call: Callable, *args, say: bool = True):
        if self._manager.suspended:
            # The namespace is not that of the loaded weights.
            return otherwise
        try:
            return call(*args)
        except Exception as error:
            # Not a failure of ours to hide: counted, said, and the caller sees a miss.
            self._count("storage_errors", 1)
            if say:
                logger.warning("HiCache storage: %s failed, counted as a miss: %r", what, error)
            return otherwise

    # -- pages: the calls of SGLang's threads

    def exists(self, key):
        return self._guarded("exists", False, self._backend.exists, self._prefix + key)

    def batch_exists(self, keys, extra_info=None):
        return self._guarded(
            "batch_exists", 0, self._backend.batch_exists, self._named(keys), self._info(extra_info)
        )

    def get(self, key, target_location=None, target_sizes=None):
        args = (self._prefix + key, target_location, target_sizes)
        return self._guarded("get", None, self._backend.get, *args)

    def set(self, key, value=None, target_location=None, target_sizes=None):
        args = (self._prefix + key, value, target_location, target_sizes)
        return self._guarded("set", False, self._backend.set, *args)

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        args = (self._named(keys), target_locations, target_sizes)
        return self._guarded("batch_get", [None] * len(keys), self._backend.batch_get, *args)

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        args = (self._named(keys), values, target_locations, target_sizes)
        return self._guarded("batch_set", False, self._backend.batch_set, *args)

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        args = (self._named(keys), host_indices, self._info(extra_info))
        return self._guarded("batch_get_v1", [False] * len(keys), self._backend.batch_get_v1, *args)

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        args = (self._named(keys), host_indices, self._info(extra_info))
        return self._guarded("batch_set_v1", [False] * len(keys), self._backend.batch_set_v1, *args)

    def batch_exists_v2(self, keys, pool_transfers=None, extra_info=None) -> PoolTransferResult:
        pages = [t for t in pool_transfers or () if not isinstance(t, FetchTransfer)]
        fetch = next((t.fetch for t in pool_transfers or () if isinstance(t, FetchTransfer)), None)
        found = self._exists_v2(keys, pages, extra_info)
        if fetch is None or not found.kv_hit_pages:
            return found
        stored = self._record_boundaries(keys[: found.kv_hit_pages], extra_info)
        stored.update(b for b in fetch.resident if b <= found.kv_hit_pages)
        return PoolTransferResult(
            max(stored, default=0), found.extra_pool_hit_pages, sorted(stored)
        )

    def _exists_v2(self, keys, transfers, extra_info) -> PoolTransferResult:
        args = (self._named(keys), transfers, self._info(extra_info))
        empty = PoolTransferResult.empty()
        return self._guarded("batch_exists_v2", empty, self._backend.batch_exists_v2, *args)

    def _record_boundaries(self, keys: list[str], extra_info) -> builtins.set[int]:
        """Boundaries, in pages, whose record is stored: all, or at least the deepest of each batch.

        A backend that does not report every restorable prefix reports the deepest, so it is asked again
        for what the batches before it hold.
        """
        probe = [PoolTransfer(RECORD_POOL, hit_policy=PoolHitPolicy.TRAILING_PAGES)]
        stored: set[int] = set()
        limit = len(keys)
        while limit > 0:
            result = self._exists_v2(keys[:limit], probe, extra_info)
            if result.restorable_prefix_pages is not None:
                return set(result.restorable_prefix_pages)
            if not result.kv_hit_pages:
                break
            stored.add(result.kv_hit_pages)
            span = cache_controller.STORAGE_BATCH_SIZE
            limit = (result.kv_hit_pages - 1) // span * span
        return stored

    def batch_get_v2(self, transfers, extra_info=None) -> dict[str, list[bool]]:
        return self._move("batch_get_v2", self._backend.batch_get_v2, transfers, extra_info)

    def batch_set_v2(self, transfers, extra_info=None) -> dict[str, list[bool]]:
        for transfer in transfers:
            if isinstance(transfer, SaveTransfer):
                self._seal(transfer.save)
        done = self._move("batch_set_v2", self._backend.batch_set_v2, transfers, extra_info)
        saved = done.get(RECORD_POOL, [])
        self._count("saved", sum(saved))
        self._count("save_failed", len(saved) - sum(saved))
        return done

    def _move(self, what: str, call, transfers, extra_info) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys = transfer.keys or []
            # Indices count tokens for pages and slots for records.
            size = len(transfer.host_indices) // len(keys) if keys else 0
            done: list[bool] = []
            # Backends with bounce buffers take a batch at a time.
            span = cache_controller.STORAGE_BATCH_SIZE
            for first in range(0, len(keys), span):
                last = min(first + span, len(keys))
                indices = transfer.host_indices[first * size : last * size]
                batch = PoolTransfer(transfer.name, indices, keys=keys[first:last])
                done += self._move_batch(what, call, batch, size, extra_info)
            results[transfer.name] = done
        return results

    def _move_batch(self, what: str, call, transfer, size: int, extra_info) -> list[bool]:
        """Move at most one batch; what raises or does not verify is False."""
        keys, indices = transfer.keys, transfer.host_indices
        moved = self._attempt(what, call, transfer, size, extra_info, say=True)
        if moved is not None or len(keys) == 1:
            return moved or [False]
        # One bad object must not cost those in front of it; behind it nothing counts, and a backend that
        # is down must not be asked again for each.
        done: list[bool] = []
        for i, key in enumerate(keys):
            one = PoolTransfer(transfer.name, indices[i * size : (i + 1) * size], keys=[key])
            moved = self._attempt(what, call, one, size, extra_info, say=False)
            if moved is None:
                break
            done += moved
        return done + [False] * (len(keys) - len(done))

    def _attempt(self, what, call, transfer, size, extra_info, *, say) -> list[bool] | None:
        keys, indices = transfer.keys, transfer.host_indices
        pages = dict(zip(indices[::size].tolist(), keys, strict=True))
        sealed = self._sealed.get(transfer.name)
        if sealed is not None:
            sealed.expect(self._format.namespace, pages)

        def move():
            named = PoolTransfer(transfer.name, indices, keys=self._named(keys))
            arrived = call([named], self._info(extra_info))[transfer.name]
            return [bool(ok) for _, ok in zip(keys, arrived, strict=True)]

        done = self._guarded(what, None, move, say=say)
        bad = set() if sealed is None else sealed.rejected(pages)
        if done is None:
            return None
        if bad:
            self._count("pages_rejected", len(bad))
            logger.warning(
                "HiCache storage: %d of %d pages of pool %s do not verify (first key %s), counted as "
                "misses.",
                len(bad),
                len(keys),
                transfer.name,
                next(pages[i] for i in pages if i in bad),
            )
        return [ok and i not in bad for i, ok in zip(pages, done, strict=True)]

    # -- records

    def _slot(self, slot: int) -> np.ndarray:
        return self._records.slots[slot].numpy()

    def _seal(self, save: Save) -> None:
        for record in save.records:
            self._mover.wait_written(record.slot)
            self._format.seal(self._slot(record.slot), record.key, record.boundary)

    def get_record(self, key: str, boundary: int, slot: int) -> bool:
        """Fetch the record of ``key`` into a host slot; False unless what arrived is that record."""
        self._mover.wait_unused(slot)
        self._format.erase(self._slot(slot))
        indices = torch.tensor([slot], dtype=torch.int64)
        (arrived,) = self.batch_get_v2([PoolTransfer(RECORD_POOL, indices, keys=[key])])[
            RECORD_POOL
        ]
        if not arrived:
            return False
        self._count("read", 1)
        wrong = self._format.verify(self._slot(slot), key, boundary)
        if wrong is not None:
            self._count("fetch_rejected", 1)
            logger.warning(
                "HiCache storage: the record of %s at %d tokens does not verify (%s), counted as a miss.",
                key,
                boundary,
                wrong,
            )
        return wrong is None

    # -- upkeep

    def clear(self) -> None:
        """Delete the objects of this namespace; raises as :func:`clear_namespace`, which SGLang logs."""
        deleted = clear_namespace(self._backend, self._prefix)
        logger.info("HiCache storage: %d objects of %s* were deleted.", deleted, self._prefix)

    def get_stats(self):
        return self._backend.get_stats()
