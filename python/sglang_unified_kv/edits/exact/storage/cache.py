"""The strict cache's third tier: records travel with SGLang's own prefetch and backup operations."""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import CacheTransferPhase
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_lora

from .... import engage
from ....checkpoint.storage import Fetch
from .threads import fetch_of
from .transfers import FetchTransfer, SaveTransfer

if TYPE_CHECKING:
    from ....checkpoint.manager import CheckpointManager
    from ....checkpoint.record_format import RecordFormat
    from .record_pool import RecordHostPool
    from .weights_name import WeightsName


logger = logging.getLogger(__name__)


class StorageStrictCache(UnifiedRadixCache):
    """Storage half of the strict cache. All of it runs on the scheduler's thread."""

    checkpoints: CheckpointManager
    records: RecordHostPool
    _weights: WeightsName | None
    _prefetching: tuple[RadixKey, str | None, int] | None

    def _record_format(self) -> RecordFormat:
        raise NotImplementedError

    # -- lifecycle

    def _bind_storage(self) -> None:
        """File what is stored from now on under what the engine holds now."""
        controller = self.cache_controller
        storage = controller.storage_backend if controller is not None else None
        if storage is None:
            return
        record_format = self._record_format()
        if self._weights is not None and not self._weights.lasting:
            logger.warning(
                "Several ranks whose weights were updated, or whose storage was attached after the start: "
                "what they store from now on is not found after the next start. A server that is started "
                "with --hicache-storage-backend and these weights stores what is found."
            )
        storage.bind(record_format, self.records, self.checkpoints, self.page_size)
        logger.info(
            "Storage namespace %s: servers share stored prefixes where it and the served model name "
            "are the same.",
            record_format.namespace.hex(),
        )

    def resume_if_empty(self) -> None:
        """After a weight update: reuse and store again, unless something of the old weights is left."""
        controller = self.cache_controller
        host = controller.mem_pool_host if controller is not None else None
        if any(self.total_size()) or (host is not None and host.available_size() < host.size):
            return
        if self.checkpoints.storage.idle:
            self._resume()

    def _resume(self) -> bool:
        """End the suspension of a weight update on emptied caches; False if there is none or it goes on."""
        if not self.checkpoints.suspended:
            return False
        if why := self.checkpoints.suspended_by:
            logger.warning("The cache is empty, and still no prefix is reused or stored: %s.", why)
            return False
        # What the new weights compute must not meet what the old ones stored.
        self._bind_storage()
        self.checkpoints.resume()
        return True

    def attach_storage_backend(
        self,
        storage_backend: str,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> tuple[bool, str]:
        refused = [engage.storage_obstacle(storage_backend)]
        if self.checkpoints.strict_provenance:
            refused.append(engage.STRICT_PROVENANCE_WITH_STORAGE)
        if get_lora().enable_lora:
            refused.append(engage.LORA_WITH_STORAGE)
        if hicache_write_policy not in (None, "write_through"):
            refused.append(f"hicache_write_policy {hicache_write_policy}: leave it write_through")
        if self.checkpoints.suspended:
            # The weights may be changing, and they name what is stored.
            refused.append("the weights were updated: flush the cache, then attach")
        if reasons := [reason for reason in refused if reason]:
            return False, "; ".join(reasons)
        ok, message = super().attach_storage_backend(
            storage_backend,
            storage_backend_extra_config_json,
            served_model_name,
            hicache_storage_prefetch_policy,
            hicache_write_policy,
        )
        if ok:
            self._bind_storage()
        return ok, message

    def detach_storage_backend(self) -> tuple[bool, str]:
        ok, message = super().detach_storage_backend()
        if ok:
            self.checkpoints.storage.finish_all()
        return ok, message

    def clear_storage_backend(self) -> bool:
        ok = super().clear_storage_backend()
        # Whatever came of it: that is known to this rank alone, and to store a record again does no harm.
        self.checkpoints.store.forget_stored()
        return ok

    # -- saving

    def _build_sidecar_transfers(self, phase, kv_xfer, comp_xfers):
        transfers = super()._build_sidecar_transfers(phase, kv_xfer, comp_xfers)
        if phase == CacheTransferPhase.PREFETCH and self._prefetching is not None:
            transfers.append(FetchTransfer(self._plan_fetch(*self._prefetching)))
        elif phase == CacheTransferPhase.BACKUP_STORAGE:
            save = self.checkpoints.storage.save(kv_xfer.keys)
            if save is not None:
                transfers.append(SaveTransfer(save))
        return transfers

    def _save_attached(self, keys: list[str]) -> None:
        """Store records that were attached to pages which may have been stored before them."""
        if not self.enable_storage or not keys:
            return
        save = self.checkpoints.storage.save(keys)
        if save is not None:
            nothing = torch.empty(0, dtype=torch.int64)
            operation_id = self.cache_controller.write_storage(
                nothing, [], hash_value=[], extra_pools=[SaveTransfer(save)]
            )
            # As SGLang notes its own, so that the engine counts as busy until it is acknowledged.
            root = self.root_node_handle()
            lock = self.inc_host_lock_ref(root).to_dec_params()
            self.ongoing_backup[operation_id] = (root, lock)

    # -- fetching

    def prefetch_from_storage(
        self,
        request,
        last_host_node_id,
        new_input_tokens,
        last_hash=None,
        prefix_keys=None,
        matched_prefix_tokens=None,
        extra_key=None,
        cache_salt=None,
        storage_hit_end=None,
    ):
        # Without storage_hit_end: a hit that is taken for granted would skip the query for records.
        arguments = (request, last_host_node_id, new_input_tokens, last_hash, prefix_keys)
        namespace = {"extra_key": extra_key, "cache_salt": cache_salt}
        key = RadixKey(new_input_tokens, is_bigram=self.tree_core.is_eagle, **namespace)
        # Used if SGLang issues the prefetch, which it mostly does not.
        self._prefetching = (key, last_hash, len(matched_prefix_tokens or ()))
        try:
            return super().prefetch_from_storage(*arguments, matched_prefix_tokens, **namespace)
        finally:
            self._prefetching = None

    def _plan_fetch(self, key: RadixKey, last_hash: str | None, start: int) -> Fetch:
        store, resident = self.checkpoints.store, {}
        if len(store):
            # A record that is still here serves pages that only storage has.
            chain = get_storage_hash_str(key, last_hash, self.page_size)
            resident = {pages: name for pages, name in enumerate(chain, 1) if name in store}
        for name in resident.values():
            store.touch(name)
        return Fetch(start, cache_controller.STORAGE_BATCH_SIZE, resident)

    def _alloc_prefetch_aux_staging(self, info, hit_tokens: int) -> bool:
        if not super()._alloc_prefetch_aux_staging(info, hit_tokens):
            return False
        transfer = fetch_of(info.operation)
        pages = hit_tokens // self.page_size
        return transfer is None or self.checkpoints.storage.fetch(transfer.fetch, pages)

    def _handle_prefetch_result(self, operation) -> None:
        transfer = fetch_of(operation)
        if transfer is None:
            return super()._handle_prefetch_result(operation)
        fetch, keys = transfer.fetch, operation.hash_value
        pages = fetch.usable(operation.completed_tokens // self.page_size)
        # Pages behind the last record cannot be reused; SGLang frees what is not completed.
        operation.completed_tokens = pages * self.page_size
        super()._handle_prefetch_result(operation)
        loaded = self.prefetch_loaded_tokens_by_reqid.get(operation.handle, 0)
        own_pages = loaded == pages * self.page_size
        self.checkpoints.storage.publish(fetch, keys, pages, own_pages=own_pages)

    def _drain_storage_control_queues_impl(
        self, n_storage_hit, n_ack_prefetch, n_backup, n_release, extra_release_counts, log_metrics
    ) -> None:
        # This thread alone takes from the queues, so what is in front now is what is drained.
        controller = self.cache_controller
        acks = _front(controller.ack_prefetch_queue, n_ack_prefetch)
        backups = _front(controller.ack_backup_queue, n_backup)
        super()._drain_storage_control_queues_impl(
            n_storage_hit, n_ack_prefetch, n_backup, n_release, extra_release_counts, log_metrics
        )
        for ack in acks:
            transfer = fetch_of(ack.operation)
            if ack.completed_req and transfer is not None:
                self.checkpoints.storage.fetched(transfer.fetch)
        for operation in backups:
            for transfer in operation.pool_transfers or ():
                if isinstance(transfer, SaveTransfer):
                    self.checkpoints.storage.saved(transfer.save)


def _front(queue, count: int | None) -> list:
    with queue.mutex:
        return list(islice(queue.queue, count))
