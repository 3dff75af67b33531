"""The demo's comparison and verdict: every way not to pass."""

import json
from dataclasses import replace

import pytest
from sglang_unified_kv.cli.demo_verdict import (
    CACHED_TOKENS,
    CASE_NAMES,
    HITS,
    Case,
    as_json,
    compare,
    shortcomings,
)

COLD_IDS, COLD_LOGPROBS = [5, 6, 7], [-1.0, -0.5, -0.25]
SAME = compare((COLD_IDS, COLD_LOGPROBS), (COLD_IDS, COLD_LOGPROBS))
OTHER_LOGPROB = compare((COLD_IDS, COLD_LOGPROBS), (COLD_IDS, [-1.0, -0.5, -0.5]))
OTHER_TOKEN = compare((COLD_IDS, COLD_LOGPROBS), ([5, 9, 7], [-1.0, -1.0, -9.0]))
COLD = {f"{server}/{n}": 0 for server in ("stock", "exact") for n in (700, 2700)}


def passing():
    """The cases of a run that passes, by name."""
    cases = {}
    for name in CASE_NAMES:
        server, hit, length = name.split("/")
        cached = CACHED_TOKENS[int(length)]
        cases[name] = Case(
            server=server,
            hit=hit,
            prompt=int(length),
            cached_tokens=cached,
            cached_by={"device": 0, "host": 0, "storage": 0} | {HITS[hit]: cached},
            comparison=OTHER_TOKEN if server == "stock" else SAME,
        )
    return cases


def judged(cases, cold=COLD):
    return shortcomings(cold, list(cases.values()))


def changed(name, **values):
    cases = passing()
    cases[name] = replace(cases[name], **values)
    return cases


def test_a_passing_run_has_no_shortcomings_and_the_documented_json():
    cases = passing()
    assert judged(cases) == []
    document = json.loads(json.dumps(as_json("0.5.23", list(cases.values()), [])))
    assert document["sglang"] == "0.5.23" and document["verdict"] == "exact"
    assert [case["name"] for case in document["cases"]] == list(CASE_NAMES)
    assert set(CASE_NAMES) == {
        f"{s}/{h}/{n}" for s in ("stock", "exact") for h in ("device", "host") for n in (700, 2700)
    } | {"exact/restart/700", "exact/restart/2700"}
    assert document["cases"][0] == {
        "name": "stock/device/700",
        "cached_tokens": 512,
        "tokens_equal": False,
        "logprobs_equal": False,
        "max_abs_dlogprob": 0.5,
    }
    assert document["cases"][-1] == {
        "name": "exact/restart/2700",
        "cached_tokens": 2560,
        "tokens_equal": True,
        "logprobs_equal": True,
        "max_abs_dlogprob": 0.0,
    }


def test_any_shortcoming_makes_the_verdict_not_exact():
    assert as_json("0.5.23", list(passing().values()), ["x"])["verdict"] == "not exact"


@pytest.mark.parametrize("name", CASE_NAMES)
def test_a_missing_case_fails(name):
    cases = passing()
    del cases[name]
    assert any(line.startswith("cases are") for line in judged(cases))


def test_no_case_at_all_fails():
    assert judged({})


def test_a_case_told_twice_fails():
    cases = passing()
    cases["again"] = cases["exact/host/700"]
    assert any(line.startswith("cases are") for line in judged(cases))


@pytest.mark.parametrize("name", [name for name in CASE_NAMES if name.startswith("exact")])
@pytest.mark.parametrize("comparison", [OTHER_LOGPROB, OTHER_TOKEN], ids=["logprob", "token"])
def test_an_exact_case_that_differs_fails(name, comparison):
    (reason,) = judged(changed(name, comparison=comparison))
    assert reason.startswith(f"{name}: ") and "differ from the cold run" in reason


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("exact/device/700", {"cached_tokens": 256, "cached_by": {"device": 256}}),
        ("exact/host/700", {"cached_tokens": 256, "cached_by": {"host": 256}}),
        ("exact/device/2700", {"cached_tokens": 512, "cached_by": {"device": 512}}),
        ("exact/host/2700", {"cached_tokens": 2304, "cached_by": {"host": 2304}}),
        ("exact/restart/2700", {"cached_tokens": 2304, "cached_by": {"storage": 2304}}),
    ],
)
def test_an_exact_hit_that_is_too_short_fails(name, values):
    assert judged(changed(name, **values)) == [
        f"{name}: cached_tokens is {values['cached_tokens']}, "
        f"not {512 if name.endswith('/700') else 2560}"
    ]


def test_a_stock_hit_may_have_any_length_but_none():
    name = "stock/device/2700"
    assert judged(changed(name, cached_tokens=256, cached_by={"device": 256})) == []
    assert judged(changed(name, cached_tokens=0, cached_by={})) == [
        f"{name}: nothing was cached, this was no hit"
    ]


@pytest.mark.parametrize(
    ("name", "sources"),
    [
        ("exact/device/700", {"device": 256, "host": 256}),
        ("exact/host/2700", {"device": 256, "host": 2304}),
        ("exact/host/700", {"device": 512}),
        ("stock/host/700", {"device": 256, "host": 256}),
        ("exact/device/700", {"device": 512, "host": 256}),
        ("exact/restart/700", {"host": 512}),
        ("exact/device/700", {}),
    ],
)
def test_a_hit_from_the_wrong_place_fails(name, sources):
    (reason,) = judged(changed(name, cached_by=sources))
    assert f"cached tokens came from {sources}, not all from {HITS[name.split('/')[1]]}" in reason


@pytest.mark.parametrize("name", COLD)
@pytest.mark.parametrize("cached", [256, None])
def test_a_cold_run_that_was_not_cold_or_never_ran_fails(name, cached):
    cold = {key: n for key, n in COLD.items() if key != name}
    if cached is not None:
        cold[name] = cached
    server, length = name.split("/")
    assert judged(passing(), cold) == [f"{server}/cold/{length}: cached_tokens is {cached}, not 0"]


def test_a_stock_that_never_differs_fails_and_one_difference_suffices():
    cases = passing()
    for name, case in cases.items():
        if case.server == "stock":
            cases[name] = replace(case, comparison=SAME)
    assert judged(cases) == [
        "no stock case differs from its cold run: the fault does not show here"
    ]
    cases["stock/host/2700"] = replace(cases["stock/host/2700"], comparison=OTHER_LOGPROB)
    assert judged(cases) == []


def test_compare_tells_equal_texts_from_equal_bits():
    assert SAME.tokens_equal and SAME.logprobs_equal and SAME.dlogprobs == (0.0, 0.0, 0.0)
    last_bit = compare((COLD_IDS, COLD_LOGPROBS), (COLD_IDS, [-1.0, -0.5, -0.25000000000000006]))
    assert last_bit.tokens_equal and not last_bit.logprobs_equal
    assert 0 < last_bit.max_abs_dlogprob < 1e-15
    sign_of_zero = compare(([5], [0.0]), ([5], [-0.0]))
    assert sign_of_zero.tokens_equal and not sign_of_zero.logprobs_equal


def test_compare_stops_behind_the_first_differing_token():
    assert OTHER_TOKEN.dlogprobs == (0.0, 0.5)
    # Another token of the same probability is still another text.
    tie = compare((COLD_IDS, COLD_LOGPROBS), ([5, 6, 8], COLD_LOGPROBS))
    assert not tie.tokens_equal and not tie.logprobs_equal and tie.max_abs_dlogprob == 0.0


@pytest.mark.parametrize("warm", [([5, 6], [-1.0, -0.5]), ([], []), ([5, 6, 7], [-1.0, -0.5])])
def test_compare_refuses_continuations_of_unequal_length(warm):
    with pytest.raises(ValueError, match="cannot be compared"):
        compare((COLD_IDS, COLD_LOGPROBS), warm)


def test_compare_refuses_nothing():
    with pytest.raises(ValueError, match="cannot be compared"):
        compare(([], []), ([], []))
