"""With few host pages: hits are as long as the simulator says while pages are evicted."""

import pytest
from sglang_unified_kv.checkpoint.policy import policy_of
from sglang_unified_kv.placement.replay import Replay
from test_placement import CHUNK, PAGE, Traffic, as_request

DEVICE_PAGES, RATIO = 8, 1.5


@pytest.fixture(scope="module")
def engine(make_engine):
    with make_engine(
        chunked_prefill_size=CHUNK, max_total_tokens=DEVICE_PAGES * PAGE, hicache_ratio=RATIO
    ) as built:
        yield built


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2, 4, 6])
def test_hits_are_as_long_as_the_simulator_says_while_pages_go(engine, seed):
    engine.flush()
    store = engine.tree.checkpoints.store
    limit = int(DEVICE_PAGES * RATIO)
    replay, unlimited = (
        Replay(policy_of("grid", page_size=PAGE), records=store.capacity, pages=p, chunk=CHUNK)
        for p in (limit, None)
    )
    traffic = Traffic(seed, recent=10)
    for _ in range(30):
        ids = traffic.next()[:1100]
        output = engine.run(ids, traffic.chance.choice((1, 2, 12)))
        engine.drain()
        traffic.texts.append([*ids, *output.output_ids])
        request = as_request(ids, output.output_ids)
        unlimited.serve(request)
        assert output.cached_tokens == replay.serve(request).hit
    assert store.evictions == 0 and replay.tally.page_evictions > 5
    if seed == 0:
        assert replay.tally.hit < unlimited.tally.hit, "no hit was lost with its pages"
