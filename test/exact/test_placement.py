"""Placement on the real engine: hits are exact, and just as long as the simulator says."""

import random

import pytest
from oracle import Recorder, assert_equal_runs, poison_rings
from sglang_unified_kv.checkpoint.placement import Placement
from sglang_unified_kv.checkpoint.policy import policy_of
from sglang_unified_kv.placement.replay import Replay
from sglang_unified_kv.placement.trace import Request
from sglang_unified_kv.reference.harness import prompt

PAGE, RECORDS, CHUNK = 256, 12, 512


@pytest.fixture(scope="module")
def engine(make_engine):
    env = {
        "SGLANG_UNIFIED_KV_CHECKPOINT_POLICY": None,
        "SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB": "0.0074",
    }
    # Room for all pages on the device: what is evicted are records.
    with make_engine(chunked_prefill_size=CHUNK, max_total_tokens=40960, env=env) as built:
        assert built.tree.checkpoints.store.capacity == RECORDS
        yield built


@pytest.fixture
def manager(engine):
    found = engine.tree.checkpoints
    placement = found.placement
    engine.flush()
    yield found
    engine.drain()
    found.placement, found.store.weighed = placement, placement.policy.weighed
    found.check_idle()


def use(manager, name, stride=1):
    policy = policy_of(name, page_size=PAGE, stride=stride)
    manager.placement, manager.store.weighed = Placement(policy, manager.store), policy.weighed
    return Replay(policy, records=RECORDS, chunk=CHUNK)


def as_request(ids, output):
    """The request as the simulator sees it: pages named by all tokens up to their ends."""
    text = [*ids, *output]
    pages = [hash(tuple(text[:end])) for end in range(PAGE, len(text), PAGE)]
    return Request(len(ids), len(output), pages)


class Traffic:
    """Random prompts: new ones, next turns of earlier ones, and ones that leave an earlier text anywhere."""

    def __init__(self, seed, recent=6):
        self.chance = random.Random(seed)
        self.texts = []
        self.recent = recent

    def next(self):
        chance = self.chance
        kind = chance.choice(("new", "turn", "turn", "again", "cut", "page"))
        fresh = prompt(chance.randrange(10**6), chance.choice((5, 60, 250, 300, 700)))
        if not self.texts or kind == "new":
            return fresh
        text = chance.choice(self.texts[-self.recent :])
        if len(text) > 1800 or kind == "again":
            return text
        if kind == "turn":
            return [*text, *fresh]
        if kind == "page":
            return [*text, *fresh][: max(len(text) // PAGE * PAGE, PAGE)]
        return [*text[: chance.randrange(1, len(text))], *fresh]


def test_the_default_is_the_combined_policy(engine):
    assert engine.tree.checkpoints.policy == policy_of("combined", page_size=PAGE)
    assert engine.tree.checkpoints.store.weighed


CASES = [
    pytest.param(*case, marks=() if i == 0 else pytest.mark.slow)
    for i, case in enumerate(
        [
            ("combined", 1, 24, 0),
            ("branch", 1, 40, 1),
            ("grid", 1, 40, 2),
            ("grid", 2, 40, 3),
            ("tails", 1, 40, 4),
            ("spaced", 1, 40, 5),
            ("sparse", 1, 40, 6),
            *(("combined", 1, 40, seed) for seed in range(7, 12)),
        ]
    )
]


@pytest.mark.parametrize("name, stride, requests, seed", CASES)
def test_hits_are_as_long_as_the_simulator_says(engine, manager, name, stride, requests, seed):
    replay, traffic = use(manager, name, stride), Traffic(seed)
    evictions, hits = manager.store.evictions, 0
    for _ in range(requests):
        ids = traffic.next()
        output = engine.run(ids, traffic.chance.choice((1, 2, 12)))
        engine.drain()
        traffic.texts.append([*ids, *output.output_ids])
        served = replay.serve(as_request(ids, output.output_ids))
        assert output.cached_tokens == served.hit
        hits += served.hit > 0
    assert manager.store.evictions - evictions == replay.tally.evictions > 0
    assert manager.placement.density.age == replay.placement.density.age
    assert manager.store.stride == replay.store.stride
    assert hits > 5


@pytest.mark.parametrize(
    "name",
    [
        "combined",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("sparse", "branch", "spaced")),
    ],
)
def test_hits_are_exact(engine, manager, name):
    use(manager, name)
    recorder, traffic = Recorder(engine), Traffic(23)
    runs = []
    for _ in range(12):
        ids = traffic.next()
        poison_rings(engine)
        run = recorder.run(ids)
        traffic.texts.append([*ids, *run.output_ids])
        runs.append((ids, run))
    hits = [(ids, run) for ids, run in runs if run.cached_tokens]
    # "sparse" leaves out most of what such short prompts share.
    assert len(hits) >= (2 if name == "sparse" else 4)
    for ids, run in hits:
        assert_equal_runs(run, recorder.cold(ids))


def test_the_second_visitor_of_a_branch_makes_the_third_hit(engine, manager):
    use(manager, "branch")
    trunk = prompt(7, 1400)
    recorder = Recorder(engine)
    assert recorder.run(trunk).cached_tokens == 0
    second, third = ([*trunk[:600], *prompt(seed, 500)] for seed in (8, 9))
    assert recorder.run(second).cached_tokens == 0
    poison_rings(engine)
    hit = recorder.run(third)
    assert hit.cached_tokens == 512
    assert_equal_runs(hit, recorder.cold(third))


def test_a_prompt_of_whole_pages_and_its_next_turn_both_hit(engine, manager):
    use(manager, "tails")
    whole = prompt(11, 768)
    recorder = Recorder(engine)
    said = recorder.run(whole).output_ids
    assert recorder.run(whole).cached_tokens == 512
    assert recorder.run([*whole, *said, 9, 9]).cached_tokens == 768
