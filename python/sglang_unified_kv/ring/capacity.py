"""The operator's figures: what fits into a GPU and its host, and what runs out first. One rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, log10

from ..checkpoint.policy import Path, PlacementPolicy, Span, policy_of
from ..hisparse.capacity import HiSparseSizes
from .accounting import DOMINANT_SHARE

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


def running_pages(length: int, new: int, ahead: int) -> int:
    """Pages that a running request holds at its end.

    Under the overlap schedule the step behind the last token is already allocated.

    >>> running_pages(700, 68, 0), running_pages(700, 69, 0), running_pages(700, 61, 8)
    (3, 4, 4)
    """
    return ceil((length + new + ahead) / PAGE)


def stored_pages(length: int, new: int, pairs: bool) -> int:
    """Whole pages that a finished request leaves in the tree.

    Its last token was never computed, and an entry of the tree may be a pair of tokens. What speculation
    accepted beyond ``new`` is stored too, a few tokens at most.

    >>> stored_pages(700, 68, pairs=False), stored_pages(700, 69, pairs=False)
    (2, 3)
    """
    return (length + new - 1 - pairs) // PAGE


def stored_checkpoints(length: int, new: int, pairs: bool, policy: PlacementPolicy) -> int:
    """Checkpoints of a request that shares nothing with others: its prompt's, and its output's last.

    What a store with room to spare takes beside them is not counted.

    >>> stored_checkpoints(300, 800, False, policy_of("grid", page_size=PAGE))
    3
    >>> stored_checkpoints(300, 800, False, policy_of("tails", page_size=PAGE))
    2
    """
    end, path = stored_pages(length, new, pairs) * PAGE, Path(0, 0, length)
    prompt = [b for b in policy.boundaries(Span(0, length), path) if b <= end]
    output = policy.boundaries(Span(length, end), path) if end > length else []
    return len(prompt) + min(len(output), policy.output_tails(path))


def checkpoints(sizes: Sizes, length: int, new: int) -> int:
    """:func:`stored_checkpoints` by the policy of ``sizes``."""
    policy = policy_of(sizes.policy, page_size=PAGE, spare=1 + sizes.pairs, stride=sizes.stride)
    return stored_checkpoints(length, new, sizes.pairs, policy)


def prompts(sizes: Sizes, length: int, new: int) -> dict[str, int]:
    """How many different prompts of ``length`` tokens each store holds, by what would run out.

    Requests run with ``new`` tokens of output, and are cached with it.
    """
    held = {
        sizes.token_limit: sizes.tokens // (running_pages(length, new, sizes.ahead) * PAGE),
        # One slot is SGLang's own, for padding.
        "request slots": sizes.slots - 1,
    }
    if sizes.hisparse:
        held["device C4 rows"] = sizes.hisparse.running(length)
    if sizes.host_pages:
        held["host pages"] = sizes.host_pages // max(stored_pages(length, new, sizes.pairs), 1)
    if sizes.exact:
        held["checkpoints"] = sizes.records // max(checkpoints(sizes, length, new), 1)
    return held


def first_limits(held: dict[str, int]) -> tuple[str, str | None]:
    """What limits running requests first, and what limits cached prompts first (None without HiCache)."""
    cached = [name for name in ("host pages", "checkpoints") if name in held]
    running = min((name for name in held if name not in cached), key=held.__getitem__)
    return running, min(cached, key=held.__getitem__) if cached else None


@dataclass(frozen=True)
class Split:
    """How host memory is divided so that it holds the most prompts.

    Attributes:
        prompts: with all their pages and checkpoints.
        hicache_ratio: host tokens for each device token.
        checkpoint_host_gb: of checkpoints, GB.
    """

    prompts: int
    hicache_ratio: float
    checkpoint_host_gb: float


def best_split(sizes: Sizes, machine: Machine, length: int, new: int) -> Split | None:
    """The best division for different prompts of ``length`` and ``new`` tokens, to three digits of the ratio.

    None without both pools, or where no such prompt fits.
    """
    if not (sizes.host_pages and sizes.exact):
        return None
    pages = max(stored_pages(length, new, sizes.pairs), 1)
    page, records = sum(sizes.host_page.values()), checkpoints(sizes, length, new)
    prompt = pages * page + records * sizes.per_checkpoint
    # As much of the device's tokens as fits, and the records that belong to them; in three digits.
    most = machine.host_gb * GB / prompt * pages * PAGE / sizes.tokens
    step = 10.0 ** (floor(log10(most)) - 2)
    for steps in range(floor(most / step), 0, -1):
        ratio = float(f"{steps * step:.3g}")
        host_pages = int(ratio * sizes.tokens) // PAGE
        held = host_pages // pages
        budget = ceil(100 * max(held * records, 1) * sizes.per_checkpoint / GB) / 100
        if held and host_pages * page / GB + budget <= machine.host_gb:
            return Split(held, ratio, budget)
    return None


def warnings(sizes: Sizes, machine: Machine, available: int, length: int, new: int) -> list[str]:
    """What an operator should change, in plain words."""
    found = []
    held = prompts(sizes, length, new)
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
    if held[sizes.token_limit] < sizes.slots - 1:
        found.append(
            f"{sizes.slots - 1} requests may run, but the device holds {held[sizes.token_limit]} prompts of "
            f"{length:,} tokens with {new:,} new ones; the rest will wait or be retracted"
        )
    if sizes.hisparse:
        return found + sizes.hisparse.warnings(sizes.slots - 1, int(machine.host_gb * GB))
    if sizes.host_shortfall:
        host = sum(sizes.host_bytes.values())
        found.append(
            f"the host pools need {host / GB:.1f} GB of {machine.host_gb:.1f} GB, and the start would be "
            "refused; lower --hicache-ratio or SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB"
        )
    if sizes.exact and not sizes.records:
        found.append(
            f"no checkpoint of {sizes.per_checkpoint / 1e6:.1f} MB fits, and the start would be refused; "
            "raise SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB or lower --hicache-ratio"
        )
    elif "checkpoints" in held and held["checkpoints"] < held.get("host pages", 0):
        records = held["host pages"] * checkpoints(sizes, length, new)
        need = records * sizes.per_checkpoint / GB
        left = machine.host_gb - sum(sizes.host_page.values()) * sizes.host_pages / GB
        remedy = "" if need <= left else f"; the pages leave {left:.1f}, so lower --hicache-ratio"
        found.append(
            f"checkpoints run out before pages: {held['checkpoints']} prompts of {length:,} tokens against "
            f"{held['host pages']}, which need SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB={need:.1f}{remedy}"
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
