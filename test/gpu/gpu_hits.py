"""Hits of one tier."""

from oracle import poison_rings
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

TIERS = ("device", "host", "storage")


def hit_from(tier, engine, recorder, ids, new_tokens=3):
    """Run ``ids`` with everything above ``tier`` emptied and every ring poisoned."""
    engine.drain()
    if tier == "host":
        engine.tree.evict(EvictParams(num_tokens=10**9))
    elif tier == "storage":
        engine.flush()
    poison_rings(engine)
    hit = recorder.run(ids, new_tokens)
    assert hit.details.items() >= {**dict.fromkeys(TIERS[:2], 0), tier: hit.cached_tokens}.items()
    return hit
