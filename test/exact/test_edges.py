"""What is easily missed by one: lengths around every edge, moments, names, and what lies in free rows.

Each test runs without speculation and with EAGLE, on storage; answers are compared with the stock engine's
cold run of the same prompt.
"""

import pytest
from oracle import poison_rings
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang_unified_kv.reference.harness import prompt
from speculation_runs import EAGLE
from storage_folder import STORAGE, at

PAGE, NEW = 256, 6
TEXT = prompt(70, 1100)
NAMED = prompt(74, 700)
# Pages, half a page (the window is 128 tokens), and the C4 blocks on both sides of each.
EDGES = [edge + step for edge in (256, 384, 512, 640, 768) for step in range(-5, 6)]
BY_DEFAULT = {256, 257, 384, 513, 640}
LENGTHS = [n if n in BY_DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in EDGES]
MODES = {"plain": {}, "eagle": dict(disable_overlap_schedule=False, **EAGLE)}


class Stock:
    """Answers of the stock engine, each cold."""

    def __init__(self, make):
        self._make, self._found = make, {}

    def __call__(self, *prompts):
        missing = [ids for ids in prompts if tuple(ids) not in self._found]
        if missing:
            with self._make(stock=True, env={}, hicache_storage_backend=None) as engine:
                for ids in missing:
                    engine.flush()
                    run = engine.run(ids, NEW, return_logprob=True)
                    assert run.cached_tokens == 0
                    self._found[tuple(ids)] = run.output_ids, run.output_logprobs
        return [self._found[tuple(ids)] for ids in prompts]


@pytest.fixture(
    scope="module",
    params=[pytest.param(m, marks=() if m == "eagle" else pytest.mark.slow) for m in MODES],
)
def make(request, make_engine, model_path, next_n_path, tmp_path_factory):
    """Engines of one mode on one folder."""
    folder = tmp_path_factory.mktemp("storage")
    model = next_n_path if request.param == "eagle" else model_path
    options = dict(model=model, chunked_prefill_size=512, **MODES[request.param])

    def build(**more):
        return make_engine(**{"env": at(folder), **options, **STORAGE, **more})

    return build


@pytest.fixture(scope="module")
def stock(make, request):
    """All that the tests of this run ask for, while no other engine is alive."""
    found = Stock(make)
    asked = {
        item.callspec.params["length"]
        for item in request.session.items
        if hasattr(item, "callspec") and "length" in item.callspec.params
    }
    found(*(TEXT[:n] for n in sorted(asked & {*EDGES})), TEXT[:700], TEXT, NAMED, *turns(found))
    return found


def turns(stock):
    """A conversation: each prompt is the one before, its answer, and something new."""
    found = [prompt(71, 500)]
    for turn in range(2):
        ((answer, _),) = stock(found[-1])
        found.append([*found[-1], *answer, *prompt(72 + turn, 150)])
    return found


@pytest.fixture(scope="module")
def engine(make, stock):
    with make() as built:
        yield built


@pytest.fixture
def manager(engine):
    engine.flush()
    poison_rings(engine)
    found = engine.tree.checkpoints
    yield found
    found.check_idle()


def ask(engine, ids, **request):
    run = engine.run(ids, NEW, return_logprob=True, **request)
    engine.drain()
    return run


def answer(run):
    return run.output_ids, run.output_logprobs


def deepest(engine, length):
    """Tokens that a prompt of a cached text reuses: one is always computed, and a pair needs two."""
    return (length - 1 - engine.tree.tree_core.is_eagle) // PAGE * PAGE


@pytest.mark.parametrize("length", LENGTHS)
def test_a_length(engine, manager, stock, length):
    (cold,) = stock(TEXT[:length])
    ask(engine, TEXT)
    for tier in ("device", "storage"):
        poison_rings(engine)
        hit = ask(engine, TEXT[:length])
        assert hit.cached_tokens == deepest(engine, length)
        assert not hit.cached_tokens or hit.details[tier] == hit.cached_tokens
        assert answer(hit) == cold
        engine.flush()


def test_the_same_prompt_the_instant_its_answer_ends(engine, manager, stock):
    (cold,) = stock(TEXT[:700])
    for _ in range(3):
        rid = engine.submit(TEXT[:700], NEW, return_logprob=True)
        while not engine.is_done(rid):
            engine.step()
        poison_rings_of_free_slots(engine)
        assert answer(engine.output(rid)) == cold


def poison_rings_of_free_slots(engine):
    if engine.req_to_token_pool.available_size() == engine.req_to_token_pool.size:
        poison_rings(engine)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_whatever_free_rows_hold(engine, manager, stock, value):
    ask(engine, TEXT)
    for ids in (TEXT[:700], TEXT):
        poison_rings(engine, value)
        assert answer(ask(engine, ids)) == stock(ids)[0]


@pytest.mark.slow
def test_extra_keys_and_salts_through_storage(engine, manager, stock):
    (cold,) = stock(NAMED)
    names = [{}, {"extra_key": "a"}, {"extra_key": "b"}, {"cache_salt": "a"}]
    names += [{"extra_key": "a", "cache_salt": "a"}, {"extra_key": "a", "cache_salt": "b"}]
    for expected in (0, 512):
        for name in names:
            poison_rings(engine)
            run = ask(engine, NAMED, **name)
            assert run.cached_tokens == expected, name
            assert answer(run) == cold
        engine.flush()
    assert ask(engine, NAMED, extra_key="c").cached_tokens == 0


def test_the_same_pages_come_again_beside_a_request_that_decodes(engine, manager, stock):
    (cold,) = stock(TEXT[:700])
    decoding = engine.submit(TEXT[:700], 40, return_logprob=True)
    for _ in range(4):
        engine.step()
    for _ in range(3):
        again = engine.submit(TEXT[:700], NEW, return_logprob=True)
        (run,) = engine.run_many(again)
        assert answer(run) == cold
        engine.tree.evict(EvictParams(num_tokens=10**9))
    (long,) = engine.run_many(decoding)
    assert (long.output_ids[:NEW], long.output_logprobs[:NEW]) == cold


def test_conversations_through_every_tier_and_a_restart(engine, manager, make, stock):
    def talk(engine, tier):
        for ids in turns(stock):
            poison_rings(engine)
            run = ask(engine, ids)
            assert answer(run) == stock(ids)[0]
            assert tier is None or run.cached_tokens == deepest(engine, len(ids))
        assert run.details[tier or "device"]
        engine.flush()

    for tier in (None, "storage"):
        talk(engine, tier)
    engine.close()
    with make() as restarted:
        talk(restarted, "storage")
        restarted.tree.checkpoints.check_idle()
