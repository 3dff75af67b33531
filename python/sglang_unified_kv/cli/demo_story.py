"""The story both servers live through: cold, recycled slots, device hit, eviction, host hit.

The exact server is then stopped, started again, and asked for the same prompts once more.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ..launches import LINES
from .client import Generation, SGLangClient
from .demo_verdict import CACHED_TOKENS, Case, compare

LINE = LINES["tiny storage"]
"""What both servers are launched from. Its device pool has 16 pages: 12 for both prompts, and what SGLang
wants free so that the churn evicts none of them."""
SLOTS = LINE.size("--max-running-requests")
CHURN_TOKENS = 200
"""More than the 128 rows of a window, less than a page: dirties a slot whole, caches nothing."""
EVICTION_TOKENS = 2304
"""9 pages. Two such prompts in turn claim every page. A single one as large as the pool would wait
forever: SGLang admits a request only where a page more than it needs could be freed."""
OUTPUT_TOKENS = 24
STEPS = {
    "stock": 3 + 3 * len(CACHED_TOKENS),
    "exact": 4 + 4 * len(CACHED_TOKENS),
}
"""Calls of ``step`` in the story of each server."""

_FIRST_TOKEN, _VOCAB = 6, 1024


@dataclass
class Outcome:
    """What one server did.

    Attributes:
        cold_cached_tokens: by ``server/prompt length``.
        cold: the cold answers, by prompt length.
        cases: every hit.
    """

    cold_cached_tokens: dict[str, int] = field(default_factory=dict)
    cold: dict[int, Generation] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)


def prompt(seed: int, tokens: int) -> list[int]:
    """A reproducible prompt of random ordinary tokens."""
    source = random.Random(seed)
    return [source.randrange(_FIRST_TOKEN, _VOCAB) for _ in range(tokens)]


def tell(server: str, client: SGLangClient, step: Callable[[str], None]) -> Outcome:
    """Run the story against one server.

    Args:
        server: ``stock`` or ``exact``, the first part of the names of the cases.
        step: told what is about to be done.

    Raises:
        ClientError: the server failed.
    """
    outcome = Outcome()
    client.flush_cache()
    for length in CACHED_TOKENS:
        step(f"cold prompt of {length} tokens")
        cold = client.generate(prompt(length, length), max_new_tokens=OUTPUT_TOKENS)
        outcome.cold[length] = cold
        outcome.cold_cached_tokens[f"{server}/{length}"] = cold.cached_tokens
    for round_, hit in enumerate(("device", "host")):
        if hit == "host":
            step("other prompts evict both to the host")
            for seed in (1, 2):
                client.generate(prompt(seed, EVICTION_TOKENS), max_new_tokens=1)
        step("other requests recycle the slots")
        _recycle_slots(client, first_seed=10 + SLOTS * round_)
        _hit(server, hit, client, outcome, step)
    return outcome


def tell_on(
    server: str, client: SGLangClient, step: Callable[[str], None], outcome: Outcome
) -> None:
    """Go on with the story on the restarted server, whose memory tiers are empty.

    Raises:
        ClientError: the server failed.
    """
    _hit(server, "restart", client, outcome, step)


def _hit(
    server: str, hit: str, client: SGLangClient, outcome: Outcome, step: Callable[[str], None]
) -> None:
    for length in CACHED_TOKENS:
        step(f"{hit} hit of {length} tokens")
        warm = client.generate(prompt(length, length), max_new_tokens=OUTPUT_TOKENS)
        outcome.cases.append(_case(server, hit, length, outcome.cold[length], warm))


def _recycle_slots(client: SGLangClient, first_seed: int) -> None:
    # One at a time: the next slot is then a dirty one, whichever end of the free list is used. At
    # once, they would evict the prompts: SGLang counts the free window rings of busy slots as
    # missing tokens.
    for seed in range(first_seed, first_seed + SLOTS):
        client.generate(prompt(seed, CHURN_TOKENS), max_new_tokens=1)


def _case(server: str, hit: str, length: int, cold: Generation, warm: Generation) -> Case:
    return Case(
        server=server,
        hit=hit,
        prompt=length,
        cached_tokens=warm.cached_tokens,
        cached_by=warm.cached_by,
        comparison=compare((cold.output_ids, cold.logprobs), (warm.output_ids, warm.logprobs)),
    )
