"""The operator's figures: what fits into a GPU and its host, and what runs out first. One rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from ..checkpoint.policy import Path, Span, policy_of

GB = 1e9
PAGE = 256


@dataclass(frozen=True)
class Machine:
    """What SGLang cannot know before it runs. GB are 1e9 bytes.

    Attributes:
        hbm_gb: memory of one GPU.
        weights_gb: weights and everything else that is resident on it before the KV pools.
        host_gb: host memory free for the caches of one rank.
    """

    hbm_gb: float
    weights_gb: float
    host_gb: float

    def available(self, mem_fraction_static: float) -> int:
        """Bytes for KV pools, as SGLang takes them: a fraction of the GPU less what is resident."""
        return int((self.hbm_gb * mem_fraction_static - self.weights_gb) * GB)


@dataclass(frozen=True)
class Sizes:
    """Bytes and capacities of one rank, from the functions that size the real pools.

    Attributes:
        per_token: device bytes of a cached token.
        per_slot: device bytes of a request slot: rings and compressor states.
        per_checkpoint: host bytes of a checkpoint.
        staging: device bytes of checkpoint staging.
        fixed: device bytes of all request slots.
        pools: device bytes of the cached tokens' pools.
        tokens: full tokens that the device caches.
        tokens_scaled: the same if windows and C4 states were sized by tokens, as before the ring.
        slots: request slots.
        host_pages: pages of HiCache's host pools, which have one page for every 256 tokens.
        host_page: bytes of a host page by pool.
        records: checkpoints of the host pool.
        stride: pages from checkpoint to checkpoint of the policy 'grid'.
        policy: where checkpoints are taken.
    """

    per_token: float
    per_slot: float
    per_checkpoint: int
    staging: int
    fixed: int
    pools: int
    tokens: int
    tokens_scaled: int
    slots: int
    host_pages: int
    host_page: dict[str, int]
    records: int
    stride: int
    policy: str = "grid"

    @property
    def host_bytes(self) -> dict[str, int]:
        """Pinned host bytes by pool."""
        pools = {name: size * self.host_pages for name, size in self.host_page.items()}
        return pools | {"checkpoints": self.records * self.per_checkpoint}


def checkpoints(sizes: Sizes, length: int) -> int:
    """Checkpoints that a prompt of ``length`` tokens takes which shares nothing with others.

    What a store with room to spare takes beside them is not counted.
    """
    policy = policy_of(sizes.policy, page_size=PAGE, stride=sizes.stride)
    return len(policy.boundaries(Span(0, length), Path(0, 0, length)))


def prompts(sizes: Sizes, length: int) -> dict[str, int]:
    """How many different prompts of ``length`` tokens each store holds, by what would run out.

    The last page of a prompt is always computed anew, so it needs neither.
    """
    pages = max(ceil(length / PAGE) - 1, 1)
    held = {
        "device tokens": sizes.tokens // (pages * PAGE),
        # One slot is SGLang's own, for padding.
        "request slots": sizes.slots - 1,
    }
    if sizes.host_pages:
        held["host pages"] = sizes.host_pages // pages
    if sizes.records:
        held["checkpoints"] = sizes.records // max(checkpoints(sizes, length), 1)
    return held


def first_limits(held: dict[str, int]) -> tuple[str, str | None]:
    """What limits running requests first, and what limits cached prompts first (None without HiCache)."""
    running = min(("device tokens", "request slots"), key=held.__getitem__)
    cached = [name for name in ("host pages", "checkpoints") if name in held]
    return running, min(cached, key=held.__getitem__) if cached else None


def warnings(sizes: Sizes, machine: Machine, available: int, length: int) -> list[str]:
    """What an operator should change, in plain words."""
    found = []
    held = prompts(sizes, length)
    if sizes.fixed > 0.1 * available:
        found.append(
            f"{sizes.slots} request slots take {sizes.fixed / GB:.1f} GB, {sizes.fixed / available:.0%} of "
            "the KV memory; lower --max-running-requests to what you serve"
        )
    if held["device tokens"] < sizes.slots - 1:
        found.append(
            f"{sizes.slots - 1} requests may run, but the device holds {held['device tokens']} prompts of "
            f"{length:,} tokens; the rest will wait or be retracted"
        )
    host = sum(sizes.host_bytes.values())
    if host > machine.host_gb * GB:
        found.append(
            f"the host pools need {host / GB:.1f} GB of {machine.host_gb:.1f} GB; lower --hicache-ratio or "
            "SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB"
        )
    if "checkpoints" in held and "host pages" in held and held["checkpoints"] < held["host pages"]:
        found.append(
            f"checkpoints run out before pages: {held['checkpoints']} prompts of {length:,} tokens against "
            f"{held['host pages']}; raise SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB or place fewer: "
            "SGLANG_UNIFIED_KV_CHECKPOINT_POLICY=sparse"
        )
    return found


def fitted_budget(capacity: Callable[[int], int], tokens: int, high: int = 1 << 40) -> int:
    """The smallest budget in bytes with which ``capacity`` (growing in it) is at least ``tokens``."""
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        if capacity(middle) >= tokens:
            high = middle
        else:
            low = middle
    return high
