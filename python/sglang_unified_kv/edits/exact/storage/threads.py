"""SGLang's storage threads: the backend gets our proxy, and each read of pages is followed by its record."""

from __future__ import annotations

from dataclasses import replace

from .... import engage
from ...series import SERIES

_FEATURE = "bit-exact hicache"


@SERIES.wrap(
    "sglang.srt.managers.cache_controller:HiCacheController._generate_storage_config",
    feature=_FEATURE,
    why="what a backend knows of ranks; with SGLANG_UNIFIED_KV_STORAGE_PER_RANK each is alone, and the "
    "names of its objects say which one it is",
    params="self, model_name, storage_backend_extra_config",
    fingerprint="2a70b7a520614be0",
)
def generate_storage_config(original, self, *args, **kwargs):
    config = original(self, *args, **kwargs)
    engagement = engage.current()
    if engagement is None or not engagement.settings.storage_per_rank:
        return config
    return replace(config, tp_rank=0, tp_size=1)


@SERIES.wrap(
    "sglang.srt.mem_cache.storage.backend_factory:StorageBackendFactory.create_backend",
    feature=_FEATURE,
    why="the one place that every storage backend comes from, at start and when attached later",
    params="cls, backend_name, storage_config, mem_pool_host, **kwargs",
    fingerprint="b1ae987888230c2c",
)
def create_backend(original, cls, backend_name, storage_config, mem_pool_host, **kwargs):
    if engage.current() is None:
        return original(cls, backend_name, storage_config, mem_pool_host, **kwargs)
    from .backend import StrictStorage
    from .sealed_pages import seals_pages

    # Read before a dynamic backend takes its part of the configuration.
    sealed = seals_pages(backend_name, storage_config.extra_config or {})
    backend = original(cls, backend_name, storage_config, mem_pool_host, **kwargs)
    try:
        return StrictStorage(backend, seal_pages=sealed)
    except ValueError:
        if hasattr(backend, "close"):
            backend.close()
        raise


@SERIES.wrap(
    "sglang.srt.managers.cache_controller:HiCacheController._page_transfer_kv_batch",
    feature=_FEATURE,
    why="runs on the thread that reads pages, before it tells the ranks' common progress",
    params="self, operation, batch_hashes, batch_host_indices, extra_info, kv_derived_transfers",
    fingerprint="c0068e76a865b95b",
)
def page_transfer_kv_batch(
    original, self, operation, batch_hashes, batch_host_indices, extra_info, kv_derived_transfers
):
    transfer = fetch_of(operation)
    pages = [t for t in kv_derived_transfers if t is not transfer]
    arrived = original(self, operation, batch_hashes, batch_host_indices, extra_info, pages)
    if transfer is not None:
        restorable = operation.pool_storage_result.restorable_prefix_pages or ()
        fetch_record(self.storage_backend, transfer.fetch, batch_hashes[:arrived], restorable)
    return arrived


def fetch_record(storage, fetch, keys, restorable) -> None:
    """Bring the deepest record of a batch of pages that arrived.

    Args:
        keys: page hashes of the pages that arrived.
        restorable: boundaries of the whole prefetch, in pages, that the query found a record for.
    """
    first = fetch.pages_read
    fetch.pages_read += len(keys)
    slot = fetch.slots.get(first // fetch.span)
    page = storage.page_size
    for boundary in sorted((b for b in restorable if first < b <= fetch.pages_read), reverse=True):
        if boundary in fetch.resident:
            fetch.arrived[boundary] = None
            return
        key = keys[boundary - first - 1]
        if slot is not None and storage.get_record(key, fetch.start + boundary * page, slot):
            fetch.arrived[boundary] = slot
            return


@SERIES.wrap(
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller:"
    "HybridCacheController._reduce_prefetch_ack",
    feature=_FEATURE,
    why="ranks agree on the progress of a prefetch here, once per batch on every rank",
    params="self, ack",
    fingerprint="52173938527c3bed",
)
def reduce_prefetch_ack(original, self, ack):
    import torch

    original(self, ack)
    transfer = fetch_of(ack.operation)
    groups = self.prefetch_completion_sync_groups
    if transfer is None or ack.completed_tokens is None or not groups:
        return
    # A record counts only if every rank got it. Behind the common progress this thread may be ahead.
    fetch = transfer.fetch
    flags = torch.zeros(ack.completed_tokens // self.page_size + 1, dtype=torch.int)
    told = [boundary for boundary in list(fetch.arrived) if boundary < len(flags)]
    flags[told] = 1
    self._all_reduce(flags, torch.distributed.ReduceOp.MIN, groups)
    for boundary in told:
        if not flags[boundary]:
            del fetch.arrived[boundary]


def fetch_of(operation):
    """The :class:`FetchTransfer` that rides on a prefetch operation, if one does."""
    from .transfers import FetchTransfer

    transfers = getattr(operation, "pool_transfers", None) or ()
    return next((t for t in transfers if isinstance(t, FetchTransfer)), None)


_CONTROLLER = "sglang.srt.managers.cache_controller:HiCacheController"
_HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller:HybridCacheController"
_PAGES = "sglang.srt.mem_cache.memory_pool_host:DeepSeekV4PagedHostPool"
_SAME_BYTES = "a page leaves host memory with its layers in order, whatever the host layout"
for _target, _params, _fingerprint, _why in (
    (
        f"{_CONTROLLER}._page_transfer",
        "self, operation",
        "65fd220add1f9895",
        "reads batches of 128 pages and tells progress after each",
    ),
    (
        f"{_CONTROLLER}.prefetch_io_aux_func",
        "self",
        "39d26c3b369aaab2",
        "ends every operation with one completed_req",
    ),
    (
        f"{_HYBRID}.backup_thread_func",
        "self",
        "c7f238edf3f03432",
        "acknowledges every operation, whatever came of it",
    ),
    (
        f"{_HYBRID}._storage_hit_query",
        "self, operation",
        "d8840bebd1bc57da",
        "asks the backend with the operation's pool transfers",
    ),
    (
        f"{_HYBRID}._sync_prefetch_hit_query",
        "self, operation, storage_hit_count",
        "9839c89bc9a71cb8",
        "agrees on restorable prefixes over trailing pages",
    ),
    (
        f"{_HYBRID}._page_backup_with_stable_layout",
        "self, operation",
        "3317fa4dd923ccfd",
        "writes records behind pages, then the commit",
    ),
    (
        f"{_HYBRID}.register_host_pool_entry",
        "self, entry",
        "891a3fd98111637d",
        "adds the record pool to the group and the backend",
    ),
    (f"{_PAGES}.get_data_page", "self, index, flat", "fd505548fcf376a7", _SAME_BYTES),
    (
        f"{_PAGES}.set_from_flat_data_page",
        "self, index, data_page",
        "1153362ad94babbf",
        _SAME_BYTES,
    ),
    (f"{_PAGES}.get_page_buffer_meta", "self, indices", "ecf63ce4ba4b2b39", _SAME_BYTES),
):
    SERIES.relies_on(_target, feature=_FEATURE, why=_why, params=_params, fingerprint=_fingerprint)
