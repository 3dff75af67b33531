"""The unified radix cache with the strict gate in front. It translates; decisions are in ``checkpoint``."""

from __future__ import annotations

import logging
from array import array
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from ...checkpoint.publish import NewRange
from ...checkpoint.reuse import TreeMatch, gate
from .active import Active, activate
from .build import build_manager
from .request_key import key_of
from .storage.cache import StorageStrictCache
from .storage.namespace import record_format_of
from .storage.weights_name import WeightsName

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult, MatchResult
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

    from ...checkpoint.record_format import RecordFormat


logger = logging.getLogger(__name__)


class StrictUnifiedRadixCache(StorageStrictCache):
    """Reuses a prefix only where pages, window and overlap states are all there.

    Args:
        params: upstream's.
        target: runner of the served model, loaded, its pools allocated.
        draft: runner of the draft model, if there is one, in the same state.
        model_config: SGLang's.
    """

    def __init__(
        self,
        params: CacheInitParams,
        *,
        target: ModelRunner,
        draft: ModelRunner | None,
        model_config: ModelConfig,
    ) -> None:
        self._runners = [runner for runner in (target, draft) if runner is not None]
        self._model_config = model_config
        # The base constructor resets, and reset reaches these.
        self.checkpoints = None  # type: ignore[assignment]  # nobody else sees it before init_checkpoints
        self._weights: WeightsName | None = None
        self._prefetching = None
        self._chains: WeakKeyDictionary[Req, list[str]] = WeakKeyDictionary()
        self._inserted: tuple[InsertParams, InsertResult] | None = None
        super().__init__(params)

    def init_hicache(self, server_args: ServerArgs, params: CacheInitParams) -> None:
        super().init_hicache(server_args, params)
        models = [runner.model for runner in self._runners]
        stored = self.cache_controller.storage_backend is not None
        self._weights = WeightsName(models, stored=stored)
        self.init_checkpoints(params)
        self.cache_controller.register_host_pool_entry(self.records.entry())
        self._bind_storage()

    def init_checkpoints(self, params: CacheInitParams) -> None:
        """Allocate the checkpoint store and let the hooks of this process act on it."""
        pools = [runner.token_to_kv_pool for runner in self._runners]
        self.checkpoints, self.records = build_manager(self, pools, self._model_config.context_len)
        target, *draft = self._runners
        activate(Active(self.checkpoints, target, draft[0] if draft else None, self._weights))
        # Builds SGLang's native hash now, seconds before the first request instead of during it.
        get_storage_hash_str(RadixKey(array("q", [0]) * self.page_size), None, self.page_size)

    def swa_reprefill_tail_tokens(self, req: Req | None = None) -> int:
        return 0

    # -- matching

    @rank_consensus(same_params=["params"], same_results=["result.full_kv_hit_length"])
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        if self.disable:
            return super().match_prefix(params)
        key = self._view(params.key)
        chain = self._chain(params.req, key)
        deepest = partial(self.checkpoints.deepest, chain)

        def match(limit: int) -> TreeMatch:
            # A bigram key of n units spans n + 1 tokens.
            cut = self._view(params.key, limit + self.tree_core.is_eagle if limit else 0)
            result = super(StrictUnifiedRadixCache, self).match_prefix(replace(params, key=cut))
            return TreeMatch(result.device_prefix_len, result.host_hit_length, result)

        gated = gate(match, deepest, len(key))
        for boundary in (gated.device, gated.total):
            self.checkpoints.touch(chain, boundary)
        if gated.rejected and self.checkpoints.verifier is not None:
            rid = key_of(params.req) if params.req is not None else None
            logger.info("reuse_reject rid=%s tree=%d used=%d", rid, gated.rejected, gated.total)
        return gated.at_total._replace(
            device_prefix_len=gated.device,
            last_device_node=gated.at_device.last_device_node,
            host_hit_length=gated.total - gated.device,
        )

    def touch_checkpoint(self, req: Req) -> None:
        """Count a use of the record that a queued request would resume from."""
        key = RadixKey(
            req.origin_input_ids + req.output_ids, req.extra_key, cache_salt=req.cache_salt
        )
        chain = self._chain(req, self._view(key))
        self.checkpoints.touch(chain, self.checkpoints.deepest(chain, len(self._view(key))))

    def admit(self, req: Req) -> None:
        """A request is about to get a row: note how far the tree knows its tokens."""
        tokens = req.full_untruncated_fill_ids
        limit = req._compute_max_prefix_len(len(tokens))
        key = RadixKey(tokens, req.extra_key, limit=limit, cache_salt=req.cache_salt)
        key, matched = self._view(key), req.prefix_len
        # Otherwise it resumes as deep as it can, or as SGLang lets it.
        if len(key) - matched >= self.page_size and req.positional_embed_overrides is None:
            result = super().match_prefix(MatchPrefixParams(key=key, req=req))
            matched = max(result.device_prefix_len + result.host_hit_length, matched)
        chain = self._chain(req, key)
        self.checkpoints.admit(key_of(req), chain, req.prefix_len, matched, len(tokens))

    def restore_swa_windows(self, req: Req) -> None:
        tokens = req.full_untruncated_fill_ids
        key = RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)
        chain = self._chain(req, self._view(key))
        self.checkpoints.request_restore(key_of(req), chain, req.prefix_len)

    # -- inserting

    def insert(self, params: InsertParams) -> InsertResult:
        params.track_adopted_ranges = True
        result = super().insert(params)
        self._inserted = (params, result)
        return result

    def checkpoint_into_tree(self, req: Req, *, up_to: int, **kwargs) -> None:
        if self.checkpoints.suspended:
            # The tree may hold pages of other weights, which an insert would give to the request's row.
            return
        self._inserted = None
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        if self._inserted is None or self._inserted[1].rotation_tail_declined:
            return
        params, result = self._inserted
        attached = self.checkpoints.commit(
            key_of(req), self._chain(req, params.key), len(params.key), new_ranges(result)
        )
        self._save_attached(attached)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        checkpointed = checkpointed and not self.checkpoints.suspended
        # A bigram key is one shorter than the tokens it spans.
        inserted = req.owned_kv_len() - self.tree_core.is_eagle if checkpointed else 0
        self.checkpoints.release(key_of(req), inserted)
        super().on_release(req, checkpointed=checkpointed)

    def _reset_full(self) -> None:
        super()._reset_full()
        if self.checkpoints is not None and not self._resume():
            self.checkpoints.reset()

    def release_host_resources(self) -> None:
        activate(None)
        if self.cache_controller is None:
            self.records.destroy()
        super().release_host_resources()

    def _record_format(self) -> RecordFormat:
        assert self._weights is not None, "there is no storage without HiCache"
        return record_format_of(self, self._model_config.hf_config, self._weights.now())

    # -- identities

    def _view(self, key: RadixKey, limit: int | None = None) -> RadixKey:
        """``key`` cut at ``limit`` tokens, bigram where the tree is."""
        if limit is None:
            limit = key.limit
        elif key.limit is not None:
            limit = min(limit, key.limit)
        return RadixKey(
            key.token_ids,
            key.extra_key,
            is_bigram=self.tree_core.is_eagle,
            limit=limit,
            cache_salt=key.cache_salt,
        )

    def _chain(self, req: Req | None, key: RadixKey) -> list[str]:
        """Page hashes of ``key``, upstream's own; at least its full pages, append-only per request."""
        chain = self._chains.setdefault(req, []) if req is not None else []
        pages = len(key) // self.page_size
        if len(chain) < pages:
            tail = key[len(chain) * self.page_size : pages * self.page_size]
            chain += get_storage_hash_str(tail, chain[-1] if chain else None, self.page_size)
        return chain


def new_ranges(result: InsertResult) -> list[NewRange]:
    """What an insert took over from the inserting run, new leaves told from overwritten nodes."""
    ranges = []
    for start, end in (result.adopted_ranges or {}).get(ComponentType.FULL, ()):
        middle = min(max(start, result.prefix_len), end)
        if start < middle:
            ranges.append(NewRange(start, middle, leaf=False))
        if middle < end:
            ranges.append(NewRange(middle, end, leaf=True))
    return ranges
