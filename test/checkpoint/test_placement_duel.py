"""Grids against points: ghosts, who is in charge, how the store thins out, and what a placement is told."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_unified_kv.checkpoint.duel import LIKELY, MARGIN, STRIDES, WINDOW, Duel, Ghost
from sglang_unified_kv.checkpoint.placement import Placement
from sglang_unified_kv.checkpoint.policy import Grid, Path, Span, Sparse, policy_of
from sglang_unified_kv.checkpoint.savings import Savings
from sglang_unified_kv.checkpoint.store import OCTAVES, CheckpointStore
from sglang_unified_kv.placement.replay import Replay
from sglang_unified_kv.placement.trace import Request, made_up

PAGE = 256
COMBINED = policy_of("combined", page_size=PAGE)


def names(text, pages):
    return [f"{text}:{n}" for n in range(pages)]


def request(path):
    return Request(
        len(path) * PAGE + 9, 1, [hash(tuple(path[:n])) for n in range(1, len(path) + 1)]
    )


def asked(chain, matched, prompt, resumed=0):
    return Path(resumed, matched, prompt, known=min(prompt - 1, len(chain) * PAGE))


# -- ghosts


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=25),
    st.integers(8, 30),
    st.sampled_from([1, 2, 4]),
)
def test_a_ghost_of_a_grid_hits_what_a_store_with_that_grid_hits(texts, capacity, stride):
    policy = Grid(PAGE, stride)
    # A request's captures wait in slots of the store's: one at a time they do not crowd each other out.
    replay, ghost = Replay(policy, records=capacity, chunk=PAGE), Ghost(policy, capacity)
    for one in map(request, texts):
        served = replay.serve(one)
        path = asked(one.pages, served.matched, one.prompt)
        assert ghost.admit(one.pages, path) == served.hit
        assert list(ghost._keys) == replay.store.order()


def test_a_ghost_holds_no_more_than_its_store_and_the_deepest_of_a_prompt():
    ghost, chain = Ghost(Grid(PAGE, 2), 3), names("a", 20)
    assert ghost.admit(chain, asked(chain, 0, 20 * PAGE + 9)) == 0 and len(ghost) == 3
    assert ghost.admit(chain, asked(chain, 19 * PAGE, 20 * PAGE + 9)) == 18 * PAGE
    assert ghost.admit(chain, asked(chain, 15 * PAGE, 15 * PAGE + 9)) == 0


def test_the_page_that_ends_with_a_prompt_is_captured_when_its_hash_is_known():
    ghost, chain = Ghost(Grid(PAGE, 1), 9), names("a", 4)
    ghost.admit(chain[:3], asked(chain[:3], 0, 4 * PAGE))
    assert list(ghost._keys) == chain[:3]
    ghost.commit(chain, asked(chain[:3], 0, 4 * PAGE), 4 * PAGE)
    assert list(ghost._keys) == chain
    # Pairs of tokens: one page less is known.
    ghost.admit(names("b", 2), asked(names("b", 2), 0, 3 * PAGE + 1))
    assert len(ghost) == 6


def test_a_ghost_of_points_captures_no_fillers():
    ghost, chain = Ghost(COMBINED, 100), names("a", 300)
    ghost.admit(chain, asked(chain, 0, 299 * PAGE + 9))
    assert set(ghost._keys) == {chain[n - 1] for n in (299 - 256, 299 - 64, 299)}
    ghost.commit(chain, asked(chain, 0, 290 * PAGE + 9), 300 * PAGE)
    assert len(ghost) == 4 and chain[299] in ghost._keys, "of an output the last one"


def test_what_was_unknown_at_admission_is_captured_with_the_whole_prompt():
    # Pairs of tokens: the last page of a prompt of three pages and a token is named at its first commit.
    ghost, chain = Ghost(Grid(PAGE, 1), 99), names("a", 8)
    path = asked(chain[:2], 0, 3 * PAGE + 1)
    ghost.admit(chain[:2], path)
    ghost.commit(chain, path, 5 * PAGE)
    assert list(ghost._keys) == chain[:5]
    # A prompt that was not matched at all.
    other = names("b", 4)
    ghost.commit(other, asked([], 0, 4 * PAGE + 9), 4 * PAGE)
    assert set(other) <= set(ghost._keys)


def test_a_ghost_of_points_captures_where_a_path_is_left():
    ghost, chain = Ghost(COMBINED, 100), names("a", 40)
    ghost.admit(chain, asked(chain, 17 * PAGE, 40 * PAGE + 9))
    assert chain[16] in ghost._keys


def test_what_is_captured_again_is_younger():
    ghost, first = Ghost(Grid(PAGE, 1), 4), names("a", 3)
    ghost.admit(first, asked(first, 0, 3 * PAGE + 9))
    ghost.admit(["other"], asked(["other"], 0, PAGE + 9))
    ghost.admit(first, asked(first, 0, 3 * PAGE + 9))
    assert list(ghost._keys) == ["other", *first]


# -- the duel


def play(duel, worth, place, count, resumed=None, pages=40):
    """Prompts, each of which the next leaves at ``place(i)`` pages; what the latest gets."""
    for i in range(count):
        chain = names(f"{worth}{place(0)}{i}", pages)
        duel.admit(chain, asked(chain, 0, pages * PAGE), worth)
        matched = place(i) * PAGE
        left = [*chain[: place(i)], *names(f"{i}-", pages)]
        behind = matched if resumed is None else resumed
        found = duel.admit(left, asked(left, matched, matched + PAGE, behind), worth)
    return found


def test_where_points_are_likelier_a_grid_must_hit_more_by_the_margin():
    duel = Duel(COMBINED, 4000)
    assert play(duel, 0.0, lambda i: 32, 5) == 0
    share = 1 + MARGIN
    assert play(Duel(COMBINED, 4000), 0.0, lambda i: 32, 9, int(32 * PAGE / share) + 1) == 0
    assert play(Duel(COMBINED, 4000), 0.0, lambda i: 32, 9, int(32 * PAGE / share) - 1) == 1


def test_where_prompts_leave_anywhere_points_must():
    assert play(Duel(COMBINED, 4000), LIKELY, lambda i: 32, 9) == 1
    for more, alone in ((-1, True), (1, False)):
        duel = Duel(COMBINED, 4000)
        assert play(duel, 0.0, lambda i: 32, 9, int(32 * PAGE * (1 + MARGIN)) + more) == 0
        assert (duel.admit(["none"], asked(["none"], 0, 9), LIKELY) > 0) == alone


def test_the_stride_is_the_one_that_hits_most_and_stays_if_another_hits_the_same():
    # Every second of two requests captures 40 pages or a part of it: used at once, or 9 prompts later.
    assert play(Duel(COMBINED, 40), 1.0, lambda i: 33, 60) == 1
    duel = Duel(COMBINED, 40)
    for i in range(120):
        chain = names(i, 40)
        duel.admit(chain, asked(chain, 0, 40 * PAGE), 1.0)
        if i >= 9:
            left = [*names(i - 9, 36), "new"]
            found = duel.admit(left, asked(left, 36 * PAGE, 36 * PAGE + 9), 1.0)
    assert found == 16, "36 pages down to 32: 2 records a prompt"
    duel._by_grid[STRIDES.index(2)] = duel._by_grid[STRIDES.index(16)]
    duel.admit(names("none", 1), asked(names("none", 1), 0, 9), 1.0)
    assert duel.admit(names("none", 1), asked(names("none", 1), 0, 9), 1.0) == 16


def test_while_a_grid_is_in_charge_points_count_by_their_ghost():
    duel = Duel(COMBINED, 200)
    assert play(duel, LIKELY, lambda i: 32, 9) == 1
    # Resumed by a grid: that says nothing of points, whose ghost holds nothing at 7 pages.
    assert play(duel, 0.0, lambda i: 7, 400) == 1
    assert play(duel, 0.0, lambda i: 39, 300, pages=39) == 0


@pytest.mark.parametrize("capacity, requests", [(8, WINDOW), (4 * WINDOW, WINDOW), (4000, 1000)])
def test_a_large_store_judges_by_more_requests(capacity, requests):
    duel = Duel(COMBINED, capacity)
    chain = names("a", 8)
    duel.admit(chain, asked(chain, 0, 8 * PAGE), 0.0)
    duel.admit(chain, asked(chain, 8 * PAGE, 8 * PAGE + 9, 8 * PAGE), 0.0)
    before = duel._by_points
    duel.admit(["other"], asked(["other"], 0, 9), 0.0)
    assert duel._by_points == pytest.approx(before * (1 - 1 / requests)) and before == 8 * PAGE


def test_outputs_take_part_and_nothing_behind_a_prompt_that_has_none():
    duel, chain = Duel(COMBINED, 100), names("a", 16)
    duel.admit(chain, asked(chain, 0, 4 * PAGE), 0.0)
    duel.commit(chain, asked(chain, 0, 4 * PAGE), 4 * PAGE)
    assert [len(grid) for grid in duel._grids] == [4, 2, 1, 0, 0, 0, 0]
    duel.commit(chain, asked(chain, 0, 4 * PAGE), 16 * PAGE)
    assert [len(grid) for grid in duel._grids] == [6, 4, 3, 2, 1, 0, 0]
    assert chain[14] in duel._points._keys


def test_a_cleared_duel_is_a_new_one():
    duel, chain = Duel(COMBINED, 4000), names("a", 40)
    play(duel, 0.0, lambda i: 32, 3)
    play(duel, LIKELY, lambda i: 32, 9)
    assert duel._octave is not None and duel._by_points > 0 and max(duel._by_grid) > 0
    duel.clear()
    assert not any(map(len, (*duel._grids, duel._points)))
    assert (duel._octave, duel._by_points, max(duel._by_grid)) == (None, 0, 0)
    assert duel.admit(chain, asked(chain, 0, 40 * PAGE), 0.0) == 0


# -- the store


def publish(store, chain, pages, filler=False):
    boundary = pages * PAGE
    saves = Savings(store, chain).at(boundary)
    store.publish(
        chain[pages - 1],
        boundary,
        store.reserve(),
        replace=True,
        mixed=False,
        saves=saves,
        filler=filler,
    )
    store.check_integrity()


def test_a_store_with_a_stride_evicts_what_lies_between_and_then_the_oldest():
    store, chain = CheckpointStore(6, PAGE, weighed=True), names("a", 200)
    # 64 saves much, and 128 shares its octave.
    for pages in (64, 1, 2, 3, 4, 128):
        publish(store, chain, pages)
    store.touch(chain[0])
    store.stride = 4
    left = []
    for pages in (196, 192, 188, 184, 180):
        before = set(store.order())
        publish(store, chain, pages)
        left += before - set(store.order())
    assert left == [chain[n - 1] for n in (2, 3, 1, 64, 4)]
    store.stride = 0
    publish(store, chain, 200)
    assert chain[127] in store, "by score again"


def test_a_pinned_record_is_passed_over():
    store, chain = CheckpointStore(2, PAGE, weighed=True), names("a", 9)
    store.stride = 2
    publish(store, chain, 1)
    publish(store, chain, 2)
    pin = store.pin(chain[0])
    publish(store, chain, 4)
    assert chain[0] in store and chain[1] not in store
    store.pin(chain[3])
    assert store.reserve() is None
    store.unpin(pin)
    assert store.reserve() is not None and chain[0] not in store


def test_a_pinned_record_is_passed_over_once():
    store, chain = CheckpointStore(4, PAGE, weighed=True), names("a", 9)
    store.stride = 1
    for pages in (1, 3, 5, 7):
        publish(store, chain, pages)
    store.pin(chain[0])
    store.pin(chain[2])
    store.touch(chain[4])
    store.touch(chain[6])
    assert store.reserve() is not None and chain[4] not in store
    assert list(store._by_use[0]) == [chain[6], chain[0], chain[2]]
    store.check_integrity()


def test_a_cleared_store_has_no_stride_and_fillers_are_worth_nothing():
    store = CheckpointStore(2, PAGE, weighed=True)
    store.stride, store.filler_worth = 8, 0.5
    publish(store, names("a", 2), 1)
    store.clear()
    assert store.stride == store.filler_worth == 0 and not any(store._by_use)


@settings(deadline=None)
@given(st.dictionaries(st.integers(1, 12), st.booleans()), st.floats(0, 1), st.randoms())
def test_one_walk_finds_what_every_boundary_saves(records, worth, chance):
    store, chain = CheckpointStore(40, PAGE, weighed=True), names("a", 12)
    store.filler_worth = worth
    for pages, filler in records.items():
        publish(store, chain, pages, filler)
    savings = Savings(store, chain)
    for pages in sorted(chance.sample(range(1, 13), 5)):
        below = {n: f for n, f in records.items() if n < pages}
        record, point = (
            max(found, default=0) for found in (below, [n for n in below if not below[n]])
        )
        saves = (pages - point) * PAGE - int(worth * (record - point) * PAGE)
        assert savings.at(pages * PAGE) == savings.at(pages * PAGE) == saves
        # What is published on the way counts for those above.
        records[pages] = False
        publish(store, chain, pages)


def test_a_commit_walks_a_chain_once(monkeypatch):
    asked = []
    get = CheckpointStore.get
    monkeypatch.setattr(
        CheckpointStore, "get", lambda self, key: asked.append(key) or get(self, key)
    )
    replay = Replay(Sparse(PAGE, fills=True), records=1000, chunk=0)
    replay.serve(Request(400 * PAGE + 9, 1, list(range(400))))
    assert len(replay.store) == 400 and len(asked) < 900


# -- what a policy is told


def test_a_grid_alone_captures_nothing_else():
    path = Path(256, 512, 2700, grid=4, alone=True)
    assert COMBINED.boundaries(Span(256, 5000), path) == [1024, 2048, 3072, 4096]
    assert COMBINED.boundaries(Span(1023, 1024), path) == [1024]
    every, second, none = (Path(0, 0, 9, grid) for grid in (1, 2, 0))
    # A grid of every page keeps what the policy of that name keeps.
    assert [COMBINED.output_tails(p) for p in (path, every, second, none)] == [2, 2, 1, 1]


def test_a_placement_tells_store_and_policy():
    store = CheckpointStore(1000, PAGE, weighed=True)
    placement, chain = Placement(COMBINED, store), names("a", 40)
    assert placement.admit(chain, 0, 0, 40 * PAGE) == replace(asked(chain, 0, 40 * PAGE), grid=1)
    # Nobody left where a point is.
    path = placement.admit(chain, 0, 20 * PAGE, 40 * PAGE)
    assert (path.alone, path.grid, store.stride) == (True, 1, 1)
    assert store.filler_worth == placement.density.worth == 1
    # A capture at 20 pages is where the prompt left: a point, 8 is a filler.
    fillers = placement.commit(chain, path, 40 * PAGE, [8 * PAGE, 20 * PAGE])
    assert 8 * PAGE in fillers and 20 * PAGE not in fillers
    assert [placement.density._since[chain[n - 1]][1] for n in (8, 20)] == [True, False]
    assert placement.commit(chain, path, 40 * PAGE, ()) == fillers
    # The page that ends with the prompt.
    assert all(chain[39] in ghost._keys for ghost in placement._duel._grids[:4])
    placement.clear()
    assert not placement.density._since and not any(map(len, placement._duel._grids))


def test_other_policies_learn_nothing():
    store = CheckpointStore(100, PAGE)
    placement, chain = Placement(Grid(PAGE, 1), store), names("a", 40)
    for _ in range(3):
        assert placement.admit(chain, 0, 20 * PAGE, 40 * PAGE) == Path(0, 20 * PAGE, 40 * PAGE)
        assert placement.commit(chain, Path(0, 0, 9), 40 * PAGE, [256]) == ()
    assert store.stride == 0 and not placement.density._since
    assert not any(map(len, placement._duel._grids))


def test_a_simulated_store_learns_what_fillers_are_worth():
    replay = Replay(COMBINED, records=10**4)
    replay.serve(Request(40 * PAGE + 9, 1, list(range(40))))
    assert sum(r.filler for r in map(replay.store.get, replay.store.order())) == 39
    replay.serve(Request(40 * PAGE + 9, 1, [*range(20), *range(100, 120)]))
    assert replay.store.filler_worth == replay.placement.density.worth == 1


def test_what_ghosts_hold_is_bounded():
    duel, chance = Duel(COMBINED, 10), random.Random(1)
    for i in range(100):
        pages = chance.randrange(1, 300)
        duel.admit(names(i, pages), asked(names(i, pages), 0, pages * PAGE), 1.0)
        duel.commit(
            names(i, pages + 9), asked(names(i, pages), 0, pages * PAGE), (pages + 9) * PAGE
        )
    assert all(len(ghost) == 10 for ghost in (*duel._grids, duel._points))
    assert STRIDES[-1] == 64 and OCTAVES == len(STRIDES)


def test_equal_calls_decide_alike():
    first, second = (Replay(COMBINED, records=30) for _ in range(2))
    strides = set()
    for asked in made_up("cuts", 200):
        assert first.serve(asked) == second.serve(asked)
        assert first.store.stride == second.store.stride
        strides.add(first.store.stride)
    assert first.store.order() == second.store.order() and len(strides) > 2
