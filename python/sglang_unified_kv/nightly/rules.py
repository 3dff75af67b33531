"""The rules of the verdict: pure arithmetic over numbers and log text.

Published figures are those of the upstream work on the same hardware; ``docs/nightly.md`` lists them with
their sources.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PAGE_TOKENS = 256
ROW_TOKENS = 4
"""Tokens of a C4 row."""
ROWS_PAGE = 64
"""C4 rows of a page; HiSparse counts whole pages."""

ENGAGED = "Unified KV engaged on "
"""What each rank says once at start."""

REQUIRED = (
    "[LB-DEV] device landing byte-exact",
    "[SWA-DBG] restore verified",
    "[C4-STATE-DBG] state ride bit-exact",
)
"""What ``SGLANG_SWA_DBG_CHECKSUM=1`` says of a restore that was compared."""
TROUBLE = ("MISMATCH", "BIND-MISS")
"""What it never says."""
REJECTED = "reuse_reject"
"""What it says of a hit that was cut back: no fault, but none of a prompt that is simply sent again."""

ONE_PERCENT = 2.326
"""Quantile of the normal distribution: noise exceeds it once in a hundred nights."""

GSM8K_PUBLISHED = {"non-thinking": 0.94, "thinking": 0.933}
HISPARSE_GUARD = 0.91
PREFILL_COST = {0.6: 0.058, 0.8: 0.073}
"""Share of the prompt that is cached -> share of the throughput that the published design loses."""
TPOT_COST = 0.02
OUTPUT_COST = 0.04
CAPACITY_GAIN = 1.36


def boundary(tokens: int) -> int:
    """The deepest page boundary of a prompt that leaves a token to compute.

    >>> boundary(2400), boundary(2305), boundary(2304)
    (2304, 2304, 2048)
    """
    return (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


def climb_faults(cached: Sequence[int], deepest: int, ranks: int) -> list[str]:
    """Why ``cached`` tokens of one prompt, sent again and again, do not climb from 0 to ``deepest``.

    Args:
        ranks: of data parallelism; each computes the prompt once.

    >>> climb_faults([0, 0, 512, 512], 512, ranks=2)
    []
    >>> climb_faults([0, 512, 256], 512, ranks=1)
    ['reuse fell from 512 to 256', 'the last reused 256, not 512']
    """
    faults = []
    if cached[0]:
        faults.append(f"the first reused {cached[0]}, so it was not cold")
    misses = sum(not tokens for tokens in cached)
    if misses > ranks:
        caches = "is 1 cache" if ranks == 1 else f"are {ranks} caches"
        faults.append(f"{misses} answers reused nothing, there {caches}")
    hits = [tokens for tokens in cached if tokens]
    for before, after in zip(hits, hits[1:], strict=False):
        if after < before:
            faults.append(f"reuse fell from {before} to {after}")
    if cached[-1] != deepest:
        faults.append(f"the last reused {cached[-1]}, not {deepest}")
    return faults


def lines_of(log: str, *texts: str) -> list[str]:
    """Lines of a log that hold one of ``texts``."""
    return [line for line in log.splitlines() if any(text in line for text in texts)]


def absent(log: str, texts: Iterable[str]) -> list[str]:
    """Those of ``texts`` that no line of a log holds."""
    return [text for text in texts if text not in log]


def prefetches(log: str) -> list[tuple[int, int]]:
    """Matched and loaded tokens of every prefetch from storage that a log tells of."""
    found = re.findall(r"HiCache prefetch success .*matched=(\d+) loaded=(\d+)", log)
    return [(int(matched), int(loaded)) for matched, loaded in found]


def hisparse_tokens(log: str) -> list[tuple[int, int]]:
    """Device and host rows of every decode step that a log tells of, in whole pages."""
    found = re.findall(r"#gpu token: (\d+),.*#cpu token: (\d+)", log)
    return [(int(device), int(host)) for device, host in found]


def swap_faults(
    seen: Sequence[tuple[int, int]], prompt_tokens: int, new_tokens: int, buffer: int
) -> list[str]:
    """Why the rows of a request that decoded alone are not those of HiSparse.

    The device holds its hot buffer and one or two pages, the host every C4 row, in whole pages.

    Args:
        seen: :func:`hisparse_tokens` of its decode steps.
        buffer: rows of a hot buffer.

    >>> swap_faults([(640, 640)], prompt_tokens=2400, new_tokens=8, buffer=512)
    []
    """
    rows = prompt_tokens // ROW_TOKENS
    if rows <= buffer:
        return [f"{rows} rows fit into the buffer of {buffer}: nothing swaps"]
    running = [pair for pair in seen if pair[1]]
    if not running:
        return ["no decode step tells of rows on the host"]
    lowest = math.ceil(rows / ROWS_PAGE) * ROWS_PAGE
    highest = math.ceil((prompt_tokens + new_tokens) / ROW_TOKENS / ROWS_PAGE) * ROWS_PAGE
    faults = [
        f"#gpu token {device}: not {buffer} and one or two pages of {ROWS_PAGE}"
        for device, _ in running
        if device not in (buffer + ROWS_PAGE, buffer + 2 * ROWS_PAGE)
    ]
    faults += [
        f"#cpu token {host}: not between {lowest} and {highest}"
        for _, host in running
        if not lowest <= host <= highest
    ]
    return sorted(set(faults))


def check_faults(document: Mapping[str, Any]) -> list[str]:
    """What the results of ``sglang-unified-kv check`` say against exact reuse on a GPU.

    Not that answers are unlike the cold run's: kernels may round otherwise for the shapes of a hit, and a
    repetition that reused nothing is such a cold run.

    >>> tail = {"tail": 16, "hits": 60, "hits_outside_majority": 2, "unlike_cold": 60}
    >>> check_faults({"tails": [tail], "doubts": []})
    ['tail 16: 2 of 60 answers that reused are outside their majority']
    """
    return [
        f"tail {tail['tail']}: {tail['hits_outside_majority']} of {tail['hits']} answers that reused "
        "are outside their majority"
        for tail in document["tails"]
        if tail["hits_outside_majority"]
    ] + document["doubts"]


@dataclass(frozen=True)
class Score:
    """Right answers of a number of questions.

    >>> Score(933, 1000).share
    0.933
    """

    right: int
    questions: int

    @property
    def share(self) -> float:
        return self.right / self.questions

    def __str__(self) -> str:
        return f"{self.share:.3f} of {self.questions}"


def noise(on: Score, off: Score) -> float:
    """How far ``on`` may lie below ``off``: one-sided two-proportion z-test at one percent.

    >>> round(noise(Score(1230, 1311), Score(1235, 1311)), 4)
    0.0216
    """
    pooled = (on.right + off.right) / (on.questions + off.questions)
    return ONE_PERCENT * math.sqrt(pooled * (1 - pooled) * (1 / on.questions + 1 / off.questions))


def floor(published: float, questions: int) -> float:
    """The least score that is no worse than ``published`` beyond noise, at one percent.

    >>> round(floor(0.94, 1311), 4)
    0.9247
    """
    return published - ONE_PERCENT * math.sqrt(published * (1 - published) / questions)


@dataclass(frozen=True)
class Cost:
    """What ``on`` loses against ``off``, which ran before it and after it.

    Attributes:
        lost: share lost against the mean of both. A drift that is steady cancels out of it.
        against: share lost against each of the two.
        drift: how far the second run of ``off`` is above the first, as a share of it.
    """

    lost: float
    against: tuple[float, float]
    drift: float

    def steady(self, limit: float) -> bool:
        """Whether a verdict can be had: either run of ``off`` gives the same one, or they are close."""
        first, second = (lost < limit for lost in self.against)
        return first == second or abs(self.drift) <= limit


def cost(off: float, on: float, again: float, time: bool = False) -> Cost | None:
    """The cost of a rate, or of a time; None where there is nothing to divide by.

    Args:
        off, on, again: figures of ``off``, of ``on`` and of ``off`` once more.
        time: lower is better. What counts is then the share by which its inverse falls.

    >>> found = cost(100.0, 95.0, 98.0)
    >>> [round(lost, 3) for lost in (found.lost, *found.against, found.drift)]
    [0.04, 0.05, 0.031, -0.02]
    """
    if min(off, again) <= 0 or (time and on <= 0):
        return None

    def lost(yardstick: float) -> float:
        return 1 - (yardstick / on if time else on / yardstick)

    return Cost(lost((off + again) / 2), (lost(off), lost(again)), again / off - 1)
