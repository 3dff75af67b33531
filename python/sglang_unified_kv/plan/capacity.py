"""The operator's figures: what fits into a GPU and its host, and what runs out first. One rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..checkpoint.policy import policy_of
from ..config import CHECKPOINT_HOST_GB
from ..hisparse.capacity import HiSparseSizes
from ..ring.accounting import DOMINANT_SHARE
from .conversation import PAGE, Conversation

GB = 1e9
HOST_RESERVE = 10 << 30
"""Bytes of a host that SGLang leaves to others when it checks its host pools."""


@dataclass(frozen=True)
class Machine:
    """What SGLang cannot know before it runs. GB are 1e9 bytes.

    Attributes:
        hbm_gb: memory of one GPU.
        weights_gb: weights and everything else that is resident on it before the KV pools.
        host_gb: memory of the host that is free when the caches are built, for all ranks on it.
        ranks_per_host: ranks of the server on one host; each pins host pools of its own.

    >>> Machine(288, 125, host_gb=1000, ranks_per_host=8).host_bytes
    123657822720
    """

    hbm_gb: float
    weights_gb: float
    host_gb: float
    ranks_per_host: int = 1

    @property
    def host_bytes(self) -> int:
        """Host bytes that SGLang lets one rank pin: an equal share of what is free, less its reserve."""
        return max(int(self.host_gb * GB) - HOST_RESERVE, 0) // self.ranks_per_host

    def available(self, mem_fraction_static: float) -> int:
        """Bytes for KV pools, as SGLang takes them: a fraction of the GPU less what is resident."""
        return int((self.hbm_gb * mem_fraction_static - self.weights_gb) * GB)


@dataclass(frozen=True)
class Sizes:
    """Bytes and capacities of one rank, from the functions that size the real pools.

    Attributes:
        layers: first layer and one past the last of the pipeline stage that holds the fewest tokens; all
            layers without pipeline parallelism.
        per_token: device bytes of a cached token.
        per_slot: device bytes of a request slot: rings, compressor states and the tables of HiSparse.
        per_checkpoint: host bytes of a checkpoint.
        staging: device bytes of checkpoint staging.
        fixed: device bytes of all request slots.
        pools: device bytes of the cached tokens' pools.
        tokens: full tokens that the device caches.
        tokens_fitting: those that its memory has room for; more than ``tokens`` if a flag caps them.
        tokens_scaled: ``tokens`` if windows and C4 states were sized by tokens, as before the ring.
        slots: request slots.
        host_pages: pages of HiCache's host pools, which have one page for every 256 tokens.
        host_page: bytes of a host page by pool.
        exact: exact reuse is on, which needs room for at least one checkpoint.
        records: checkpoints of the host pool.
        stride: pages from checkpoint to checkpoint of the policy 'grid'.
        policy: where checkpoints are taken.
        pairs: the tree's entries are pairs of tokens, as with EAGLE.
        ahead: tokens that speculation allocates ahead of a running request.
        hisparse: HiSparse's own figures; None without it.
        host_shortfall: bytes that the host pools need beyond the machine's.
    """

    layers: tuple[int, int]
    per_token: float
    per_slot: float
    per_checkpoint: int
    staging: int
    fixed: int
    pools: int
    tokens: int
    tokens_fitting: int
    tokens_scaled: int
    slots: int
    host_pages: int
    host_page: dict[str, int]
    exact: bool
    records: int
    stride: int
    policy: str
    pairs: bool
    ahead: int
    hisparse: HiSparseSizes | None = None
    host_shortfall: int = 0

    @property
    def token_limit(self) -> str:
        """What :func:`prompts` calls the tokens of the device."""
        return "logical tokens" if self.hisparse else "device tokens"

    @property
    def host_bytes(self) -> dict[str, int]:
        """Pinned host bytes by pool."""
        if self.hisparse:
            return {"cold C4 rows": self.hisparse.cold_bytes}
        pools = {name: size * self.host_pages for name, size in self.host_page.items()}
        return pools | {"checkpoints": self.records * self.per_checkpoint}


def checkpoints(sizes: Sizes, talk: Conversation) -> int:
    """Checkpoints of a conversation by the policy of ``sizes``."""
    policy = policy_of(sizes.policy, page_size=PAGE, spare=1 + sizes.pairs, stride=sizes.stride)
    return talk.checkpoints(sizes.pairs, policy)


def prompts(sizes: Sizes, talk: Conversation) -> dict[str, int]:
    """How many different conversations each store holds at their ends, by what would run out."""
    held = {
        sizes.token_limit: sizes.tokens // (talk.running_pages(sizes.ahead) * PAGE),
        # One slot is SGLang's own, for padding.
        "request slots": sizes.slots - 1,
    }
    if sizes.hisparse:
        held["device C4 rows"] = sizes.hisparse.running(talk.last)
    if sizes.host_pages:
        held["host pages"] = sizes.host_pages // max(talk.pages(sizes.pairs), 1)
    if sizes.exact:
        held["checkpoints"] = sizes.records // max(checkpoints(sizes, talk), 1)
    return held


def first_limits(held: dict[str, int]) -> tuple[str, str | None]:
    """What limits running requests first, and what limits cached prompts first (None without HiCache)."""
    cached = [name for name in ("host pages", "checkpoints") if name in held]
    running = min((name for name in held if name not in cached), key=held.__getitem__)
    return running, min(cached, key=held.__getitem__) if cached else None


def device_refusals(sizes: Sizes, talk: Conversation) -> list[str]:
    """Why the device cannot run one such request; with what to change."""
    found = []
    held = prompts(sizes, talk)
    if not held[sizes.token_limit]:
        found.append(
            f"the device holds {sizes.tokens:,} tokens, and no request of {talk.last:,} + {talk.new:,}; "
            "plan for a shorter one, or give it more by --mem-fraction-static"
        )
    if sizes.hisparse and not held["device C4 rows"] and sizes.hisparse.longest_sequence > 0:
        found.append(
            f"a prompt of {talk.last:,} tokens would be refused: the device's C4 rows hold "
            f"{sizes.hisparse.longest_sequence:,}; lower host_to_device_ratio of --hisparse-config"
        )
    return found


def host_refusals(sizes: Sizes, machine: Machine) -> list[str]:
    """Why SGLang would refuse to start with these pools; with what to change."""
    if sizes.hisparse:
        return sizes.hisparse.refusals(machine.host_bytes)
    found = []
    if sizes.host_shortfall:
        host = sum(sizes.host_bytes.values())
        found.append(
            f"the host pools need {host / GB:.1f} GB of the rank's {machine.host_bytes / GB:.1f} GB, and the "
            f"start would be refused; lower --hicache-ratio or {CHECKPOINT_HOST_GB}"
        )
    if sizes.exact and not sizes.records:
        found.append(
            f"no checkpoint of {sizes.per_checkpoint / 1e6:.1f} MB fits, and the start would be refused; "
            f"raise {CHECKPOINT_HOST_GB} or lower --hicache-ratio"
        )
    return found


def warnings(sizes: Sizes, machine: Machine, available: int, talk: Conversation) -> list[str]:
    """What an operator should change although SGLang would start, in plain words."""
    found = []
    held = prompts(sizes, talk)
    if sizes.fixed > DOMINANT_SHARE * available:
        found.append(
            f"{sizes.slots} request slots take {sizes.fixed / GB:.1f} GB, {sizes.fixed / available:.0%} of "
            "the KV memory; lower --max-running-requests to what you serve"
        )
    if sizes.tokens < sizes.tokens_fitting:
        unused = (sizes.tokens_fitting - sizes.tokens) * sizes.per_token
        found.append(
            f"--max-total-tokens leaves {unused / GB:.1f} GB of the KV memory unused: "
            f"{sizes.tokens_fitting:,} tokens would fit"
        )
    if 0 < held[sizes.token_limit] < sizes.slots - 1:
        found.append(
            f"{sizes.slots - 1} requests may run, but the device holds {held[sizes.token_limit]} of "
            f"{talk.last:,} tokens with {talk.new:,} new ones; the rest will wait or be retracted"
        )
    if sizes.hisparse:
        return found + sizes.hisparse.warnings(sizes.slots - 1)
    if sizes.records and held["checkpoints"] < held.get("host pages", 0):
        records = held["host pages"] * checkpoints(sizes, talk)
        need = records * sizes.per_checkpoint / GB
        left = (machine.host_bytes - sum(sizes.host_page.values()) * sizes.host_pages) / GB
        remedy = "" if need <= left else f"; the pages leave {left:.1f}, so lower --hicache-ratio"
        found.append(
            f"checkpoints run out before pages: {held['checkpoints']} times {talk} against "
            f"{held['host pages']}, which need {CHECKPOINT_HOST_GB}={need:.1f}{remedy}"
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
