"""Speculative decoding: where the draft model is known, and where the length that a step committed is."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ..series import SERIES
from .active import current_manager
from .request_key import key_of

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

_FEATURE = "bit-exact hicache"
_drafts_of: WeakKeyDictionary[ModelRunner, tuple[ModelRunner, ...]] = WeakKeyDictionary()


def draft_runner(target: ModelRunner) -> ModelRunner | None:
    """Runner of the draft model beside the target's, if there is one."""
    runners = _drafts_of.get(target, ())
    assert len(runners) <= 1, "engagement lets one draft model through"
    return runners[0] if runners else None


@SERIES.wrap(
    "sglang.srt.speculative.base_spec_worker:BaseSpecWorker.init_hicache_draft_plan",
    feature=_FEATURE,
    why="the draft pools are allocated and the cache is not built yet",
    params="self",
    fingerprint="6487e9b8fd47f9f4",
)
def init_hicache_draft_plan(original, self):
    _drafts_of[self.target_worker.model_runner] = self._draft_model_runners()
    return original(self)


@SERIES.wrap(
    "sglang.srt.managers.scheduler_components.batch_result_processor:"
    "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
    feature=_FEATURE,
    why="only place where the scheduler learns what a verify step committed, before the tree gets it",
    params="self, result, batch",
    fingerprint="dd103aa7dd424080",
)
def resolve_spec_v2_tokens(original, self, result, batch):
    manager = current_manager()
    if manager is None:
        return original(self, result, batch)
    # Others gave their row back, and with it what they had captured.
    live = [req for req in batch.reqs if not (req.is_retracted or req.finished())]
    starts = [req.kv.kv_committed_len for req in live]
    tokens = original(self, result, batch)
    for req, start in zip(live, starts, strict=True):
        manager.verified(key_of(req), start, req.kv.kv_committed_len)
    return tokens
