"""What a plan chooses where the launch flags leave it open: requests that run, and the host's division."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil, floor, log10
from typing import Protocol

from .capacity import GB, Machine, Sizes, checkpoints, prompts
from .conversation import PAGE, Conversation

SLACK = 0.05
"""Of a rank's host memory that a choice leaves free. SGLang asks what is free before each pool, and a rank
that asks late sees what others have pinned; its own automatic sizing leaves as much."""


@dataclass(frozen=True)
class Split:
    """A division of a rank's host memory.

    Attributes:
        prompts: with all their pages and checkpoints.
        hicache_ratio: host tokens for each device token.
        checkpoint_host_gb: of checkpoints, GB; 0 without exact reuse.
    """

    prompts: int
    hicache_ratio: float
    checkpoint_host_gb: float


def best_split(
    sizes: Sizes, machine: Machine, talk: Conversation, budget: float | None = None
) -> Split | None:
    """The division that holds the most different conversations, to three digits of the ratio.

    Args:
        budget: GB of checkpoints, where they are given.

    None where no such conversation fits.
    """
    pages = max(talk.pages(sizes.pairs), 1)
    page, records = sum(sizes.host_page.values()), 0
    if sizes.exact:
        records = checkpoints(sizes, talk)
    free = machine.host_bytes * (1 - SLACK)
    one = pages * page
    if budget is None:
        one += records * sizes.per_checkpoint
    else:
        free -= budget * GB
    # As much of the device's tokens as fits, and the records that belong to them; in three digits.
    most = free / one * pages * PAGE / sizes.tokens if sizes.tokens else 0
    if most <= 0:
        return None
    step = 10.0 ** (floor(log10(most)) - 2)
    for steps in range(floor(most / step), 0, -1):
        ratio = float(f"{steps * step:.3g}")
        host_pages = int(sizes.tokens // PAGE * ratio)
        held = host_pages // pages
        need = 0.0
        if budget is None and sizes.exact:
            need = gigabytes(max(held * records, 1) * sizes.per_checkpoint)
        if held and host_pages * page / GB + need <= free / GB:
            if budget is not None and records:
                held = min(held, int(budget * GB // sizes.per_checkpoint) // records)
            return Split(held, ratio, need if budget is None else budget)
    return None


def budget_of(sizes: Sizes, machine: Machine, talk: Conversation) -> float:
    """GB of checkpoints for pages that are given: those of ``sizes``, or what the pages' conversations need.

    At most what the pages leave.
    """
    pages = sizes.host_pages or sizes.tokens // PAGE
    held = pages // max(talk.pages(sizes.pairs), 1)
    wanted = max(held * checkpoints(sizes, talk), sizes.records, 1) * sizes.per_checkpoint
    left = machine.host_bytes - sizes.host_pages * sum(sizes.host_page.values())
    return min(gigabytes(wanted), max(floor(100 * left / GB) / 100, 0))


def gigabytes(size: int) -> float:
    """Of bytes, rounded up to a hundredth."""
    return ceil(100 * size / GB) / 100


class SizesOf(Protocol):
    """Sizes of a rank; None leaves the launch flags' and the environment's value.

    More running requests never leave more tokens.
    """

    def __call__(
        self,
        *,
        running: int | None = None,
        ratio: float | None = None,
        budget: float | None = None,
    ) -> Sizes: ...


def most_running(sizes_of: SizesOf, talk: Conversation) -> int:
    """The most requests that run at once on a rank, each in the last turn of a conversation of its own.

    Every request takes a slot, and slots take memory from the tokens.
    """

    def fits(running: int) -> bool:
        sizes = sizes_of(running=running)
        held = prompts(sizes, talk)
        rows = held.get("device C4 rows", running)
        return min(held[sizes.token_limit], rows, sizes.slots - 1) >= running

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Given:
    """What the launch says; None where it leaves a choice.

    Attributes:
        hicache: there is a host pool to size.
        ratio: ``--hicache-ratio``.
        budget: GB of checkpoints.
        running: ``--max-running-requests``, of the server.
    """

    hicache: bool
    ratio: float | None
    budget: float | None
    running: int | None


@dataclass(frozen=True)
class Choice:
    """A plan. What was given is kept; the rest is chosen.

    Attributes:
        sizes: with all of it.
        fitting: requests that fit on the device of a rank at once.
        split: the best division of the host's memory; None if there is none or nothing is to be divided.
        ratio, budget, running: as planned, of a rank; None where the launch has no such thing, or leaves it.
    """

    sizes: Sizes
    fitting: int
    split: Split | None
    ratio: float | None
    budget: float | None
    running: int | None

    def without_host(self, given: Given) -> bool:
        """No division of the host's memory holds one conversation."""
        return given.hicache and self.ratio is None


def choose(sizes_of: SizesOf, machine: Machine, talk: Conversation, given: Given) -> Choice:
    """Keep what is given and choose the rest.

    SGLang has no ratio of its own for DeepSeek-V4: left to itself, it fails to size the host pools.
    """
    fitting = most_running(sizes_of, talk)
    running = max(fitting, 1) if given.running is None else None
    sized = partial(sizes_of, running=running)
    ratio, budget = given.ratio, given.budget
    # Whatever the ratio: it changes nothing on the device.
    sizes = sized(ratio=ratio or 1.0)
    split = best_split(sizes, machine, talk, budget) if given.hicache else None
    if given.hicache and ratio is None:
        if split is None:
            return Choice(sized(ratio=0.0), fitting, None, None, budget, running)
        ratio, budget = split.hicache_ratio, split.checkpoint_host_gb
    elif sizes.exact and budget is None:
        budget = budget_of(sizes, machine, talk)
    budget = budget if sizes.exact else None
    return Choice(sized(ratio=ratio, budget=budget), fitting, split, ratio, budget, running)
