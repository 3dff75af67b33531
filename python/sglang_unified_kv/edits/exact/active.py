"""What is engaged in this process: at most one scheduler, hence one strict cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from ...checkpoint.manager import CheckpointManager
    from .storage.weights_name import WeightsName


@dataclass
class Active:
    """The engaged checkpoint manager and whose rings it reads and writes.

    Attributes:
        manager: engaged.
        target: runner of the served model.
        draft: runner of the draft model, if there is one.
        weights: what the loaded weights are called in storage; None without HiCache.
        waiting: the target's forward batch while its captures wait for the draft's forward behind it.
    """

    manager: CheckpointManager
    target: ModelRunner
    draft: ModelRunner | None
    weights: WeightsName | None
    waiting: ForwardBatch | None = None


_active: Active | None = None


def activate(active: Active | None) -> None:
    """Make ``active`` what the hooks of this process act on; None makes them inert."""
    global _active
    _active = active


def manager_of(pool: object) -> CheckpointManager | None:
    """The manager if it is engaged for this KV pool, the target's or the draft's."""
    if _active is None or not (pool is _active.target.token_to_kv_pool or is_draft(pool)):
        return None
    return _active.manager


def is_draft(pool: object) -> bool:
    """Whether the KV pool is the engaged draft model's."""
    draft = _active.draft if _active is not None else None
    return draft is not None and draft.token_to_kv_pool is pool


def current() -> Active | None:
    """What is engaged in this process, if anything."""
    return _active


def current_manager() -> CheckpointManager | None:
    """The engaged manager of this process, if any."""
    return _active.manager if _active is not None else None
