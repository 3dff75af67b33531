"""Which reviewable part of an in-tree series each edit would land in."""

from __future__ import annotations

from fnmatch import fnmatchcase

from sglang_unified_kv.edits import SERIES
from sglang_unified_kv.hooking.series import Edit, Series

PARTS = {
    "Extension points": "No-op members of the base classes with a written ordering contract. Nothing calls "
    "them yet.",
    "Substrate": "The flag and its checks, sizes, the host pool of records as an entry of the host pool "
    "group, records in storage. Brings `checkpoint/layout`, `store`, `staging`, `storage`, "
    "`record_format`, `identity`. Nothing is captured yet.",
    "Capture": "Windows to records: inside a chunk from its rows, at its end from the ring; visible with "
    "the pages. Brings `checkpoint/geometry`, `policy`, `density`, `duel`, `placement`, "
    "`savings`, `capture`, `pending`, `publish`.",
    "Reuse": "The gate at both ends of a match, and restores. Brings `checkpoint/reuse`, `restore`, "
    "`manager`. Windows are exact from here on; states are not.",
    "States": "The C4 overlap states of attention and indexer in the same record. From here on hits are "
    "exact, and the switch may be turned on.",
}
"""The five parts of exact reuse, in order, and what each brings."""

_CACHE = "*unified_radix_cache:UnifiedRadixCache."
_OF_EXACT_REUSE = {
    "Extension points": ("*base_attn_backend:*", "*base_prefix_cache:*"),
    "States": ("*compressor_v2:*", "*HipRadixBackend.capture_compress_state_windows_decode"),
    "Capture": (
        f"{_CACHE}insert",
        f"{_CACHE}checkpoint_into_tree",
        "*:checkpoint_kv_cache",
        "*Scheduler.run_batch",
        "*_resolve_spec_v2_tokens",
        "*init_hicache_draft_plan",
        "*model_runner:ModelRunner.forward",
        "*eagle_worker_v2:*",
        "*_forward_unified_kv",
        "*HipRadixBackend.capture_swa_windows*",
    ),
    "Reuse": (
        f"{_CACHE}match_prefix",
        f"{_CACHE}on_release",
        f"{_CACHE}_reset_full",
        f"{_CACHE}swa_reprefill_tail_tokens",
        f"{_CACHE}init_load_back",
        f"{_CACHE}load_back",
        "*:match_kv_cache",
        "*init_next_round_input",
        "*:alloc_for_extend",
        "*weight_updater:*",
        "*:_prefix_kv_indices",
        "*:touch_waiting_prefix",
        "*add_one_req",
        "*_compute_max_prefix_len",
        "*alloc_rows",
        "*:release_kv_cache",
    ),
    "Substrate": (
        "*add_cli_args_from_dataclass",
        "*BeamCoordinator*",
        "*ServerArgs.check_server_args",
        "*handle_hicache_ratio_default",
        "*scheduler:Scheduler.__init__",
        "*pool_configurator:*",
        "*:create_unified_radix_cache",
        f"{_CACHE}__init__",
        f"{_CACHE}init_hicache",
        f"{_CACHE}*_storage_backend",
        f"{_CACHE}_build_sidecar_transfers",
        f"{_CACHE}*prefetch*",
        f"{_CACHE}_drain_storage_control_queues_impl",
        f"{_CACHE}release_host_resources",
        "*cache_controller:*",
        "*StorageBackendFactory*",
        "*clear_hicache_storage_wrapped",
        "*HiCacheFile.*",
        "*LRUFileEvictor.*",
        "*DeepSeekV4PagedHostPool.*",
    ),
}


def part_of(series: Series, edit: Edit) -> str:
    """The part of an edit: of exact reuse one of :data:`PARTS`, otherwise its series is its own part.

    Raises:
        ValueError: no part or several claim an edit of exact reuse.
    """
    if series is not SERIES:
        return edit.feature
    parts = [
        part
        for part, patterns in _OF_EXACT_REUSE.items()
        if any(fnmatchcase(edit.target, pattern) for pattern in patterns)
    ]
    if len(parts) != 1:
        raise ValueError(f"docs/in_tree_parts.py: parts of {edit.target} are {parts}; name one")
    return parts[0]
