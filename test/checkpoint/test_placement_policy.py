"""Sparse placement: what is chosen, that chunking does not matter, and what manager and store make of it."""

import typing
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_engine import PAGE, Engine, chain
from sglang_unified_kv.checkpoint.density import FORGET_AFTER, REMEMBERED, Density, _within
from sglang_unified_kv.checkpoint.policy import POLICIES, Grid, Path, Span, Sparse, policy_of
from sglang_unified_kv.checkpoint.publish import NewRange
from sglang_unified_kv.checkpoint.savings import Savings
from sglang_unified_kv.checkpoint.store import CheckpointStore
from sglang_unified_kv.config import CHECKPOINT_POLICY, ConfigError, Settings, load_settings

STRIDE = "SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE"

policies = st.builds(
    Sparse,
    page_size=st.just(PAGE),
    spare=st.integers(1, 2),
    branch=st.booleans(),
    spacing=st.integers(0, 3),
    least=st.integers(1, 3),
    share=st.sampled_from([0, 4]),
    output_every=st.integers(1, 3),
    fills=st.booleans(),
)
paths = st.builds(
    lambda resumed, known, new, grid: Path(
        resumed * PAGE, (resumed + known) * PAGE, (resumed + known) * PAGE + new, grid
    ),
    st.integers(0, 6),
    st.integers(0, 6),
    st.integers(1, 3000),
    st.integers(0, 3),
)


@settings(deadline=None)
@given(policies, paths, st.lists(st.integers(1, 900), min_size=1, max_size=8))
def test_chunking_does_not_change_what_is_captured(policy, path, chunks):
    found, position = [], path.resumed
    for chunk in chunks:
        found += policy.boundaries(Span(position, position + chunk), path)
        position += chunk
    assert found == policy.boundaries(Span(path.resumed, position), path)
    assert found == sorted(set(found)) and all(b % PAGE == 0 and b > path.resumed for b in found)


@settings(deadline=None)
@given(paths, st.integers(1, 2))
def test_tails_are_where_the_same_and_a_longer_prompt_resume(path, spare):
    found = Sparse(PAGE, spare).boundaries(Span(path.resumed, path.prompt), path)
    usable = (path.prompt - spare) // PAGE * PAGE
    assert set(found) == {b for b in (usable, path.prompt // PAGE * PAGE) if b > path.resumed}


@settings(deadline=None)
@given(paths)
def test_a_known_path_is_captured_where_it_is_left(path):
    found = Sparse(PAGE, branch=True).boundaries(Span(path.resumed, path.prompt), path)
    assert (path.matched in found) == (path.matched > path.resumed)


@settings(deadline=None)
@given(paths, st.integers(1, 3), st.sampled_from([0, 4]))
def test_a_tail_saves_what_it_must_and_no_hit_loses_more(path, least, share):
    policy = Sparse(PAGE, least=least, share=share)
    found = policy.boundaries(Span(path.resumed, path.prompt), path)
    usable = (path.prompt - 1) // PAGE * PAGE
    lost = usable - max((b for b in found if b <= usable), default=path.resumed)
    assert lost <= max((least - 1) * PAGE, usable / share if share else 0)
    for below, boundary in zip([path.resumed, *found], found, strict=False):
        assert boundary - below >= max(least * PAGE, boundary / share if share else 0)


def test_a_page_behind_six_is_too_little_and_no_spacing_reaches_into_a_known_path():
    path = Path(6 * PAGE, 6 * PAGE, 7 * PAGE + 9)
    span = Span(path.resumed, path.prompt)
    assert Sparse(PAGE).boundaries(span, path) == [7 * PAGE]
    assert Sparse(PAGE, share=4).boundaries(span, path) == []
    known = Path(PAGE, 8 * PAGE, 10 * PAGE + 9)
    found = Sparse(PAGE, branch=True, spacing=4).boundaries(Span(PAGE, known.prompt), known)
    assert found == [8 * PAGE, 10 * PAGE]


def test_outputs_are_counted_from_the_deepest_checkpoint_of_the_prompt():
    path = Path(512, 512, 700)
    assert Sparse(PAGE, output_every=2).boundaries(Span(700, 2100), path) == [1024, 1536, 2048]
    assert Sparse(PAGE, output_every=2).boundaries(Span(1023, 1024), path) == [1024]


@settings(deadline=None)
@given(policies, paths)
def test_fillers_are_what_the_grid_adds(policy, path):
    span = Span(path.resumed, path.prompt)
    roomy = replace(policy, fills=False, least=1, share=0)
    without = (roomy if policy.fills and path.grid else policy).boundaries(span, path)
    fillers = policy.fillers(path)
    assert set(policy.boundaries(span, path)) == fillers.union(without)
    assert fillers.isdisjoint(without)
    grid = [
        b for b in range(path.resumed + 1, path.prompt + 1) if b % (PAGE * max(path.grid, 1)) == 0
    ]
    assert fillers.union(without).issuperset(grid) or not (policy.fills and path.grid)


def test_with_room_no_tail_is_left_out():
    thin, path = Sparse(PAGE, least=2, output_every=2, fills=True), Path(256, 256, 700)
    assert thin.boundaries(Span(256, 1400), path) == [768, 1280]
    assert thin.boundaries(Span(256, 1400), replace(path, grid=9)) == [512, 768, 1024, 1280]


def test_names():
    assert (
        typing.get_args(Settings.model_fields["checkpoint_policy"].annotation)[0]
        == (typing.Literal[POLICIES])
    )
    for name in POLICIES:
        assert policy_of(name, page_size=PAGE).page_size == PAGE
    assert policy_of("grid", page_size=PAGE, stride=3) == Grid(PAGE, 3)
    with pytest.raises(ValueError, match="no placement policy is called 'best'"):
        policy_of("best", page_size=PAGE)


# -- density


def admitted(density, name, pages, times=1):
    for i in range(times):
        grid = density.admit([f"{name}{i}:{p}" for p in range(pages)], 0, 0, pages * PAGE)
    return grid


def reused(density, name, after, pages=20):
    """A prompt whose record is used once ``after`` others have come; the grid it gets."""
    names = [f"{name}:{p}" for p in range(pages)]
    density.admit(names, 0, 0, pages * PAGE)
    density.publish(names[-1])
    admitted(density, f"{name}-", pages, after)
    return density.admit([*names, "new"], pages * PAGE, pages * PAGE, (pages + 1) * PAGE)


def left_at(density, place, times=60, pages=20):
    """Prompts, each of which another leaves at ``place(i)`` pages at once; the grid of the latest."""
    for i in range(times):
        names = [f"{i}:{p}" for p in range(pages)]
        density.admit(names, 0, 0, pages * PAGE)
        density.publish(names[-1])
        grid = density.admit([*names, "new"], 0, place(i) * PAGE, (pages + 1) * PAGE)
    return grid


def anywhere(i):
    return 1 + 7 * i % 20


def test_a_store_affords_what_it_can_hold_until_its_records_are_used():
    for capacity, grid in ((1000, 1), (30, 2), (10, 6), (3, 16), (1, 0)):
        assert left_at(Density(capacity, PAGE), anywhere) == grid, capacity


def used_later(density, lag, every, place, pages=20):
    """Uses come ``lag`` requests later, one in ``every`` leaves at ``place`` pages; the latest grid."""
    for i in range(160):
        density.admit([f"{i}:{p}" for p in range(pages)], 0, 0, pages * PAGE)
        density.publish(f"{i}:{pages - 1}")
        names = [*(f"{i - lag}:{p}" for p in range(pages)), "new"]
        matched = 0 if i < lag else place if i % every == 0 else pages
        found = density.admit(names, 0, matched * PAGE, (pages + 1) * PAGE)
    return found


def test_fillers_take_no_room_from_points_for_little():
    # A store that holds all points for as long as they are used, and one with room beside them.
    assert used_later(Density(120, PAGE), 40, 50, 15) == 0
    assert used_later(Density(2000, PAGE), 40, 50, 15) > 0


def test_fillers_that_make_points_too_short_lived_take_no_room():
    # All points are used ten requests later, and ten records hold one a request so long.
    assert used_later(Density(10, PAGE), 10, 8, 3) == 0


def test_a_grid_cuts_half_a_step_short_and_lasts_in_the_room_that_points_leave():
    assert used_later(Density(40, PAGE), 3, 2, 3) == 4
    assert used_later(Density(160, PAGE), 10, 2, 3) == 4


def test_fillers_are_worth_what_leaves_beside_points():
    density = Density(1000, PAGE)
    assert density.worth == 0
    left_at(density, lambda i: 20)
    assert density.worth == 0
    left_at(density, anywhere)
    assert 0 < density.worth < 0.5
    between = Density(1000, PAGE)
    left_at(between, lambda i: 5)
    assert between.worth == 1
    mostly = Density(1000, PAGE)
    left_at(mostly, lambda i: 5 if i else 20)
    assert mostly.worth == 1


def test_what_counts_half_counts_in_the_same_proportions():
    density = Density(1000, PAGE)
    left_at(density, anywhere)

    def figures():
        sums = (density._points, density._new_pages, density._served, *density._more)
        return [density.worth, sum(density._saved) / density._served, *density._used()] + [
            value / density._counted for value in sums
        ]

    before, requests = figures(), density._counted
    density._halve()
    assert figures() == pytest.approx(before) and density._counted == requests / 2


def test_a_filler_that_was_used_is_a_point():
    density = Density(1000, PAGE)
    density.publish("a", filler=True)
    assert density._points == 0
    for _ in range(2):
        density.admit(["a", "b"], PAGE, PAGE, 2 * PAGE)
        assert density._points == 1 and not density._since["a"][1]
    assert density._elsewhere == density._at_points == 1


def test_uses_between_two_powers_of_two_are_counted_in_part():
    # A third at once, two thirds after two or three requests.
    used = [1 / 3, 1 / 3, 1, 1]
    assert [_within(used, age) for age in (-1, 0.5, 1, 2, 3, 99)] == pytest.approx(
        [0, 1 / 6, 1 / 3, 1 / 3, 2 / 3, 1]
    )


def test_an_evicted_record_that_would_have_been_used_counts():
    density = Density(1000, PAGE)
    names = [f"r:{p}" for p in range(20)]
    density.publish(names[-1])
    admitted(density, "other", 20, 100)
    # It is not resumed at: the store no longer has it.
    density.admit([*names, "new"], 0, 20 * PAGE, 21 * PAGE)
    assert density.age == 128


def test_rare_late_uses_do_not_count():
    density = Density(1000, PAGE)
    reused(density, "late", 500)
    assert density.age == 512
    for i in range(200):
        reused(density, f"soon{i}", 1)
    assert density.age == 2


def test_what_is_long_ago_is_forgotten():
    density = Density(10**6, PAGE)
    reused(density, "late", 500)
    admitted(density, "other", 20, 5 * FORGET_AFTER)
    for i in range(10):
        reused(density, f"soon{i}", 1)
    assert density.age == 2


def test_what_is_remembered_is_bounded():
    density = Density(2, PAGE)
    for i in range(REMEMBERED + 100):
        density.publish(i)
    assert len(density._since) == REMEMBERED and 99 not in density._since


def test_a_stride_contradicts_another_policy_than_the_grid():
    assert load_settings({STRIDE: "2", CHECKPOINT_POLICY: "grid"}).offload_page_stride == 2
    with pytest.raises(ConfigError, match="'tails' has no stride"):
        load_settings({STRIDE: "2", CHECKPOINT_POLICY: "tails"})
    with pytest.raises(
        ConfigError, match="must be combined, sparse, grid, tails, branch or spaced"
    ):
        load_settings({CHECKPOINT_POLICY: "best"})


# -- the store, weighed


def publish(store, key, saves):
    store.publish(key, PAGE, store.reserve(), replace=True, mixed=False, saves=saves)
    store.check_integrity()


def test_what_saves_most_stays_but_not_for_ever():
    store = CheckpointStore(3, PAGE, weighed=True)
    publish(store, "deep", 1000)
    for key in range(8):
        publish(store, key, 300)
    # Every victim raises what a newcomer starts from, 300 at a time.
    assert "deep" in store
    publish(store, 8, 300)
    publish(store, 9, 300)
    assert "deep" not in store


def test_a_use_counts_with_what_it_saves_then():
    store = CheckpointStore(2, PAGE, weighed=True)
    publish(store, "a", 500)
    publish(store, "b", 400)
    store.touch("a", 100)
    assert store.order() == ["a", "b"]
    store.touch("a")
    store.unpin(store.pin("b"))
    assert store.order() == ["a", "b"]
    store.touch("a", 401)
    assert store.order() == ["b", "a"]


def test_what_a_record_saves_is_counted_from_the_one_below():
    store = CheckpointStore(4, PAGE, weighed=True)
    names = chain("r0", 4)
    for pages in (1, 4):
        slot = store.reserve()
        store.publish(names[pages - 1], pages * PAGE, slot, replace=True, mixed=False)
    assert [Savings(store, names).at(pages * PAGE) for pages in (1, 2, 4)] == [PAGE, PAGE, 3 * PAGE]


def test_what_only_fills_room_goes_first_and_counts_for_nobody_until_it_is_used():
    store, names = CheckpointStore(4, PAGE, weighed=True), chain("r0", 4)
    for pages in (1, 2, 3, 4):
        slot = store.reserve()
        store.publish(
            names[pages - 1],
            pages * PAGE,
            slot,
            replace=True,
            mixed=False,
            saves=Savings(store, names).at(pages * PAGE),
            filler=pages in (2, 3),
        )
    assert store.get(names[3]).saves == 3 * PAGE and store.get(names[2]).saves == 0
    assert store.order() == [names[1], names[2], names[0], names[3]]
    store.touch(names[2], Savings(store, names).at(3 * PAGE))
    assert Savings(store, names).at(4 * PAGE) == PAGE and not store.get(names[2]).filler


def test_a_filler_counts_by_its_worth():
    store, names = CheckpointStore(4, PAGE, weighed=True), chain("r0", 8)
    store.filler_worth = 0.25

    def add(pages, filler):
        saves = Savings(store, names).at(pages * PAGE)
        key, slot = names[pages - 1], store.reserve()
        store.publish(
            key, pages * PAGE, slot, replace=True, mixed=False, saves=saves, filler=filler
        )
        return store.get(key).saves

    assert add(4, filler=True) == PAGE
    # Over nothing 6 pages, over the filler 2: a quarter of the way.
    assert add(6, filler=False) == 5 * PAGE
    assert Savings(store, names).at(8 * PAGE) == 2 * PAGE
    store.filler_worth = 1.0
    assert Savings(store, names).at(6 * PAGE) == 2 * PAGE
    assert add(5, filler=True) == PAGE


def test_a_plain_store_ignores_it():
    store = CheckpointStore(2, PAGE)
    publish(store, "a", 5000)
    publish(store, "b", 1)
    publish(store, "c", 1)
    assert store.order() == ["b", "c"]


def test_a_store_that_is_used_for_long_does_not_grow():
    store = CheckpointStore(2, PAGE, weighed=True)
    publish(store, "a", 1)
    for _ in range(1000):
        store.touch("a", 1)
    assert len(store._queue) < 100


# -- the manager


def decode(engine, start, end):
    for position in range(start, end):
        engine.forward([("r0", 0, position, position + 1)], decode=True)


@pytest.mark.parametrize(
    "policy, kept", [(Grid(PAGE, 1), [512, 768]), (Sparse(PAGE), [768])], ids=["grid", "sparse"]
)
def test_of_an_output_the_last_tails_are_published(policy, kept):
    engine = Engine(policy=policy)
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 250)])
    decode(engine, 250, 780)
    engine.manager.commit("r0", chain("r0"), 768, [NewRange(0, 768, leaf=True)])
    engine.manager.release("r0")
    engine.manager.check_idle()
    assert (
        sorted(engine.manager.store.get(k).boundary for k in engine.manager.store.order()) == kept
    )
    assert engine.manager.stats.superseded == 3 - len(kept)


def test_a_step_behind_the_end_does_not_supersede_the_tail():
    engine = Engine(policy=Sparse(PAGE))
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 250)])
    decode(engine, 250, 512)
    # The request ended at 511 tokens; one step had been launched by then.
    engine.commit("r0", 511)
    engine.manager.release("r0")
    assert engine.manager.store.deepest(chain("r0"), 9999) == 256
    engine.manager.check_idle()


def test_the_second_request_that_leaves_a_path_makes_the_third_hit():
    engine = Engine(policy=Sparse(PAGE, branch=True))
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 1100)])
    engine.commit("r0", 1100)
    shared = [*chain("r0")[:2], *chain("r1")[2:]]
    assert engine.manager.deepest(shared, 1100) == 0
    engine.fresh(1)
    engine.admit("r1", 0, 1100, matched=512)
    engine.forward([("r1", 1, 0, 1100)])
    engine.manager.commit("r1", shared, 1024, [NewRange(512, 1024, leaf=True)])
    assert engine.manager.deepest(shared, 1000) == 512
    # What the tails save is counted from the new record.
    saved = {r.boundary: r.saves for r in map(engine.manager.store.get, shared) if r is not None}
    assert saved == {512: 512, 1024: 512}


def test_what_only_fills_room_is_published_as_such():
    engine = Engine(policy=Sparse(PAGE, fills=True))
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 1100)])
    assert engine.manager._paths["r0"].grid == 1, "an empty store has room"
    engine.commit("r0", 1100)
    store = engine.manager.store
    found = {r.boundary: (r.filler, r.saves) for r in map(store.get, store.order())}
    assert found == {256: (True, 0), 512: (True, 0), 768: (True, 0), 1024: (False, 1024)}
    since = engine.manager.placement.density._since
    assert [filler for _, filler in since.values()] == [True, True, True, False]
    engine.manager.release("r0")
    engine.manager.reset()
    assert not engine.manager.placement.density._since


def test_the_store_learns_what_fillers_are_worth():
    engine = Engine(policy=Sparse(PAGE, fills=True))
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 1100)])
    engine.commit("r0", 1100)
    assert engine.manager.store.filler_worth == 0
    engine.fresh(1)
    # Nobody left where a point is.
    engine.admit("r1", 0, 1100, matched=512)
    assert engine.manager.store.filler_worth == engine.manager.placement.density.worth == 1


def test_a_hit_weighs_a_record_by_what_it_saves_now():
    engine = Engine(policy=Sparse(PAGE))
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 1100)])
    engine.commit("r0", 1100)
    store, names = engine.manager.store, chain("r0")
    store.publish(names[2], 768, store.reserve(), replace=True, mixed=False)
    before = store.get(names[3]).saves
    engine.manager.touch(names, 1024)
    engine.manager.touch(names, 0)
    assert store.get(names[3]).saves == before > 256, "queued: young, and weighed when it is used"
    engine.manager.request_restore("r1", names, 1024)
    assert store.get(names[3]).saves == 256


def test_a_record_of_storage_is_a_point():
    density = Density(8, PAGE)
    names = chain("r0")
    for _ in range(3):
        density.admit(names, 512, 512, 700)
    assert (density._at_points, density._elsewhere) == (3, 0)
    assert density.worth == 0


def test_what_was_of_use_is_no_filler_when_it_is_captured_again():
    density = Density(8, PAGE)
    names = chain("r0")
    density.publish(names[1], filler=True)
    density.admit(names, 512, 512, 700)
    density.publish(names[1], filler=True)
    assert density._deepest(names, 2, fillers=False) == 2


def test_a_request_that_nobody_admitted_gets_no_row():
    from sglang_unified_kv.checkpoint.manager import CheckpointError, Row

    engine = Engine()
    with pytest.raises(CheckpointError, match="r0 was given a row without being admitted"):
        engine.manager.plan([Row("r0", 0, 1, 0, 600, False)])
