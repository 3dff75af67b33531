"""The bound for policies that go by what they see, against all of them on traces small enough to try all."""

from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_unified_kv.placement.bound import matches, useful_pages
from sglang_unified_kv.placement.observed import OBSERVATIONS, most_hits_by_class
from sglang_unified_kv.placement.trace import PAGE, Request


def request(path):
    names = [hash(tuple(path[:n])) for n in range(1, len(path) + 1)]
    return Request(len(path) * PAGE + 9, 1, names)


traces = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=4).map(request), min_size=1, max_size=6
)


def by_tail(request, matched, boundary):
    return min(request.prompt // PAGE - boundary, 2), matched > 0


def subsets(items):
    items = sorted(items)
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


def replay(requests, classes, pages):
    """Captures and hit pages if these classes are captured, and these pages by the second to pass."""
    captured, seen, captures, hits = set(), set(), 0, 0
    for r, matched in zip(requests, matches(requests), strict=True):
        hits += max((n for n in range(1, matched + 1) if r.pages[n - 1] in captured), default=0)
        for boundary, page in enumerate(r.pages, 1):
            chosen = page in pages if page in seen else by_tail(r, matched, boundary) in classes
            if chosen and page not in captured:
                captured.add(page)
                captures += 1
            seen.add(page)
    return captures, hits


@settings(deadline=None, max_examples=25)
@given(traces)
def test_no_choice_of_classes_and_pages_beats_the_bound(requests):
    classes = {
        by_tail(r, m, boundary)
        for r, m in zip(requests, matches(requests), strict=True)
        for boundary in range(1, len(r.pages) + 1)
    }
    most: dict[int, int] = {}
    for chosen in subsets(classes):
        for pages in subsets(useful_pages(requests)):
            captures, hits = replay(requests, chosen, set(pages))
            most[captures] = max(most.get(captures, 0), hits)
    bounds = most_hits_by_class(requests, list(most), by_tail, rounds=8)
    for captures, bound in zip(most, bounds, strict=True):
        assert most[captures] <= bound + 1e-6, captures


SAME = [request([0, 0, 0, 0])] * 2
"""A prompt of four pages, twice."""


@pytest.mark.parametrize(
    "requests, observe, captures, hits",
    [
        # The last boundary alone is a class of one capture.
        (SAME, lambda r, m, b: b, 1, 4),
        (SAME, lambda r, m, b: b, 0.5, 2),
        # Any of four, by lot: 1, 2, 3 or 4 pages; the third prompt too.
        (SAME, lambda r, m, b: 0, 1, 2.5),
        (SAME, lambda r, m, b: 0, 4, 4),
        ([*SAME, SAME[0]], lambda r, m, b: 0, 1, 5),
        # A tenth of what the second prompt captures at its end, for eight behind it.
        (SAME * 5, lambda r, m, b: 0, 0.1, 3.2),
        ([request([0])], lambda r, m, b: 0, 1, 0),
        (SAME, lambda r, m, b: b, 0, 0),
    ],
)
def test_the_bound_is_close_where_the_best_is_known(requests, observe, captures, hits):
    (bound,) = most_hits_by_class(requests, [captures], observe, rounds=100)
    assert hits - 1e-6 <= bound <= hits + 0.05


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_what_is_seen_tells_tails_from_the_rest(name):
    observe, turn = OBSERVATIONS[name], Request(2000, 600, list(range(10)))
    seen = [observe(turn, 1, boundary) for boundary in range(2, 11)]
    # The prompt has 7 pages, the output 3 more.
    assert len(set(seen)) == len(seen)
    assert (observe(turn, 1, 7) != observe(turn, 5, 7)) == (name != "coarse")
