"""Cache factory: the strict cache is handed in as a subclass; the methods it overrides are checked."""

from __future__ import annotations

from functools import partial

from ... import engage
from ..series import SERIES
from .active import activate
from .speculation import draft_runner

_FEATURE = "bit-exact hicache"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache"
_STRICT = "sglang_unified_kv.edits.exact.cache.StrictUnifiedRadixCache"


@SERIES.wrap(
    "sglang.srt.mem_cache.registry:create_unified_radix_cache",
    feature=_FEATURE,
    why="takes the cache class as an argument",
    params="ctx, *, cache_class",
    fingerprint="efaffb4ac2d8b578",
)
def create_unified_radix_cache(original, ctx, *, cache_class=None):
    # An engine that this process ran before may have left its manager.
    activate(None)
    if engage.current() is None:
        return original(ctx, cache_class=cache_class)
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.runtime_context import get_spec

    from .cache import StrictUnifiedRadixCache

    if cache_class not in (None, UnifiedRadixCache):
        raise ValueError(
            f"strict prefix reuse cannot subclass the radix cache {cache_class.__name__}; remove the "
            "option that selects it or unset SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE and "
            "SGLANG_UNIFIED_KV_BIT_EXACT_RADIX"
        )
    draft = draft_runner(ctx.tp_worker.model_runner)
    if get_spec().speculative_algorithm is not None and draft is None:
        raise ValueError("the draft model is not known: its window would not be in the checkpoints")
    strict = partial(
        StrictUnifiedRadixCache,
        target=ctx.tp_worker.model_runner,
        draft=draft,
        model_config=ctx.model_config,
    )
    cache = original(ctx, cache_class=strict)
    if cache.cache_controller is None:
        # No HiCache, so SGLang did not ask it to set up host memory.
        cache.init_checkpoints(ctx.params)
    return cache


OVERRIDES = {
    "__init__": ("self, params", "f28465f79ed7d781", "our fields exist before its reset"),
    "init_hicache": (
        "self, server_args, params",
        "da91e0c4fed15241",
        "host pools are sized here; ours behind them",
    ),
    "match_prefix": ("self, params", "14f42df18d6eedb4", "the strict gate"),
    "insert": ("self, params", "7059494fdad65977", "asks which ranges the tree adopted"),
    "checkpoint_into_tree": (
        "self, req, *, up_to, **kwargs",
        "f68aeb8c88ed10d0",
        "captures become visible with the pages",
    ),
    "on_release": (
        "self, req, *, checkpointed",
        "387346129d28ed0f",
        "a request that gave its row back keeps nothing",
    ),
    "_reset_full": ("self", "1cb01d9cafc6ad18", "a flushed tree has no checkpoints"),
    "swa_reprefill_tail_tokens": (
        "self, req",
        "224ba3ea2bf7ae4d",
        "a restored window is not computed again",
    ),
    "attach_storage_backend": (
        "self, storage_backend, storage_backend_extra_config_json, served_model_name, "
        "hicache_storage_prefetch_policy, hicache_write_policy",
        "7bff432bd8560255",
        "refuses what start refuses; names the objects",
    ),
    "detach_storage_backend": (
        "self",
        "5ffaa85a456aba66",
        "no storage thread holds a slot any more",
    ),
    "clear_storage_backend": (
        "self",
        "68784a9691e770e8",
        "emptied storage may be given every record again",
    ),
    "_build_sidecar_transfers": (
        "self, phase, kv_xfer, comp_xfers",
        "93e43db672b2c344",
        "records ride on prefetch and backup operations",
    ),
    "prefetch_from_storage": (
        "self, request, last_host_node_id, new_input_tokens, last_hash, prefix_keys, "
        "matched_prefix_tokens, extra_key, cache_salt, storage_hit_end",
        "72e7f59d7c340e72",
        "plans which records a prefetch may bring",
    ),
    "_alloc_prefetch_aux_staging": (
        "self, info, hit_tokens",
        "28ff8fc4ded97665",
        "reserves host slots in lockstep",
    ),
    "_handle_prefetch_result": (
        "self, operation",
        "d61da837d413d7e4",
        "pages and records of a prefetch become visible",
    ),
    "_drain_storage_control_queues_impl": (
        "self, n_storage_hit, n_ack_prefetch, n_backup, n_release, extra_release_counts, log_metrics",
        "fad5970a1194db6e",
        "slots come back when the ranks agree that a storage thread is done",
    ),
    "release_host_resources": (
        "self",
        "a00f1cdfc4b46d75",
        "the hooks of this process fall silent before memory is unpinned",
    ),
}
for _name, (_params, _fingerprint, _why) in OVERRIDES.items():
    SERIES.override(
        f"{_CACHE}.{_name}",
        ours=f"{_STRICT}.{_name}",
        feature=_FEATURE,
        why=_why,
        params=_params,
        fingerprint=_fingerprint,
    )

for _target, _params, _fingerprint, _why in (
    (
        f"{_CACHE}.init_load_back",
        "self, params",
        "814c6b0685ba049e",
        "counts what it loads from the device end of the match",
    ),
    (
        f"{_CACHE}.load_back",
        "self, node_id, mem_quota, req",
        "cc2df0bd32aa75cd",
        "loads the whole path or nothing and keeps it locked",
    ),
    (
        "sglang.srt.mem_cache.common:match_kv_cache",
        "req, tree_cache, token_ids, *, cow_mamba, max_prefix_len",
        "1f3b0e2c895cf0ad",
        "every admission matches through the cache and resumes at the device end",
    ),
    (
        "sglang.srt.mem_cache.common:checkpoint_kv_cache",
        "req, tree_cache",
        "61d4ff19b3d53de6",
        "pages of a running request reach the tree through checkpoint_into_tree",
    ),
    (
        "sglang.srt.managers.schedule_batch:Req.init_next_round_input",
        "self, tree_cache, cow_mamba",
        "53d797a0a57b13b3",
        "a request is matched again in the round that admits it",
    ),
    (
        "sglang.srt.mem_cache.allocation:alloc_for_extend",
        "batch",
        "79929fe4dbc6fcec",
        "the prefix of a fresh row is read before the row is allocated",
    ),
):
    SERIES.relies_on(_target, feature=_FEATURE, why=_why, params=_params, fingerprint=_fingerprint)
