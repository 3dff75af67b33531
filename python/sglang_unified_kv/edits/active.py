"""What is engaged in this process: at most one scheduler, hence one strict cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    from ..checkpoint.manager import CheckpointManager


@dataclass(frozen=True)
class Active:
    """The engaged checkpoint manager and the target model's KV pool whose rings it reads and writes."""

    manager: CheckpointManager
    pool: DeepSeekV4TokenToKVPool


_active: Active | None = None


def activate(active: Active | None) -> None:
    """Make ``active`` what the hooks of this process act on; None makes them inert."""
    global _active
    _active = active


def manager_of(pool: object) -> CheckpointManager | None:
    """The manager if it is engaged for this KV pool; a draft model's pool has none (invariant 5)."""
    return _active.manager if _active is not None and _active.pool is pool else None


def current_manager() -> CheckpointManager | None:
    """The engaged manager of this process, if any."""
    return _active.manager if _active is not None else None
