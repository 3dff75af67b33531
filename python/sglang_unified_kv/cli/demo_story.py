"""The story both servers live through: cold, recycled slots, device hit, eviction, host hit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from .client import Generation, SGLangClient
from .demo_verdict import CACHED_TOKENS, Case, compare

POOL_TOKENS = 4096
"""Device KV pool (``--max-total-tokens``), 16 pages: room for a prompt and the churn beside it."""
SLOTS = 4
"""Request slots (``--max-running-requests``): as many churn prompts run at once, one per slot."""
OUTPUT_TOKENS = 64
CHURN_TOKENS = 200
"""More than the 128 rows of a window, less than a page: dirties every slot, evicts nothing."""
CHURN_OUTPUT_TOKENS = 8
EVICTION_TOKENS = 2304
"""9 pages. Two such prompts in turn claim every page: a single one as large as the pool would
wait forever, because SGLang admits a request only if a page more than it needs is there."""
STEPS = 6 * len(CACHED_TOKENS)
"""Calls of ``step`` in one story."""

_FIRST_TOKEN, _VOCAB = 6, 1024


@dataclass
class Outcome:
    """What one server did. Keys of ``cold_cached_tokens`` are ``server/prompt length``."""

    cold_cached_tokens: dict[str, int] = field(default_factory=dict)
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
    for length in CACHED_TOKENS:
        subject = prompt(length, length)
        step(f"{length} tokens, cold")
        client.flush_cache()
        cold = client.generate(subject, max_new_tokens=OUTPUT_TOKENS)
        outcome.cold_cached_tokens[f"{server}/{length}"] = cold.cached_tokens
        step(f"{length} tokens, other requests recycle every slot")
        _recycle_slots(client, seed=10 * length + 2)
        step(f"{length} tokens, device hit")
        warm = client.generate(subject, max_new_tokens=OUTPUT_TOKENS)
        outcome.cases.append(_case(server, "device", length, cold, warm))
        step(f"{length} tokens, eviction to the host")
        for seed in (10 * length, 10 * length + 1):
            client.generate(prompt(seed, EVICTION_TOKENS), max_new_tokens=1)
        step(f"{length} tokens, other requests recycle every slot")
        _recycle_slots(client, seed=10 * length + 100)
        step(f"{length} tokens, host hit")
        warm = client.generate(subject, max_new_tokens=OUTPUT_TOKENS)
        outcome.cases.append(_case(server, "host", length, cold, warm))
    return outcome


def _recycle_slots(client: SGLangClient, seed: int) -> None:
    churn = [prompt(seed + i, CHURN_TOKENS) for i in range(SLOTS)]
    client.generate_batch(churn, max_new_tokens=CHURN_OUTPUT_TOKENS)


def _case(server: str, hit: str, length: int, cold: Generation, warm: Generation) -> Case:
    return Case(
        server=server,
        hit=hit,
        prompt=length,
        cached_tokens=warm.cached_tokens,
        cached_device=warm.cached_device,
        cached_host=warm.cached_host,
        comparison=compare((cold.output_ids, cold.logprobs), (warm.output_ids, warm.logprobs)),
    )
