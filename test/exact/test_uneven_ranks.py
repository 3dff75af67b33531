"""Data-parallel ranks whose batches differ in size and phase: SGLang pads each to the largest."""

import os
import random

import pytest
from rank_pair import rank_pair
from storage_folder import pages, records
from uneven_ranks import TOGETHER, Arrival, options_of, serve

FEW = [[Arrival(0, 1, 700), Arrival(1, 2, 300, 24)], [Arrival(5, 3, 560)]]
MORE = [[Arrival(0, 1, 700), Arrival(1, 2, 560), Arrival(1, 3, 300, 30)], [Arrival(7, 4, 800)]]


def alone(arrivals):
    """One round per request, the same on every rank: all batches are alike and nothing is padded."""
    ranks = len(arrivals)
    rest = sorted(request._replace(step=0) for ours in arrivals for request in ours)
    return [([[request]] * ranks, False) for request in rest]


def many(ranks, requests, seed=0):
    """Requests of 513 to 1,300 tokens for every rank, all at once or nearly so."""
    chance = random.Random(seed)
    lengths = [chance.randrange(513, 1301) for _ in range(requests)]
    return [
        [Arrival(chance.randrange(3), s, n) for s, n in enumerate(lengths) if s % ranks == rank]
        for rank in range(ranks)
    ]


def answers_of(found):
    """Every answer of every rank and round."""
    return [answer for ours in found for answers, _ in ours for answer in answers]


def contents(folder):
    return {path.name: path.read_bytes() for path in [*records(folder), *pages(folder)]}


def check(found, cold):
    """Every answer equals the cold run's; how many tokens were cached, in all."""
    for request, answer in answers_of(found):
        assert answer.computed == cold[request.asked], request
    return sum(answer.cached_tokens for _, answer in answers_of(found))


def run(model, tmp_path, arrivals, options, env):
    """Cold runs, uneven runs and hits, a kill in the middle, and a restart; what met in one step."""
    folder, even = tmp_path / "uneven", tmp_path / "even"
    ranks, turned = len(arrivals), arrivals[1:] + arrivals[:1]

    def start(serving, where, rounds):
        return serving(serve, str(model), where, rounds, options, env)

    with rank_pair(ranks) as serving:
        found = start(serving, even, alone(arrivals))
        assert not any(answer.cached_tokens for _, answer in answers_of(found))
        cold = {request.asked: answer.computed for request, answer in answers_of(found)}
        found = start(serving, folder, [(arrivals, False), (arrivals, False), (turned, True)])
        cached = check(found, cold)
        possible = sum((r.length - 2) // 256 * 256 for ours in arrivals for r in ours)
        assert cached == 2 * possible, "hits from memory, then of what other ranks stored"
        stored = contents(folder)
        assert stored and stored == contents(even)
        steps = set(zip(*(did for ours in found for _, did in [ours[0]]), strict=True))
        # Killed while they write again what is taken away here.
        chance = random.Random(0)
        for path in [*records(folder), *pages(folder)]:
            if chance.random() < 0.5:
                path.unlink()
        left = len(list(folder.iterdir()))
        serving.start(serve, str(model), folder, [(arrivals, False)], options, env)
        while len(list(folder.iterdir())) < left + 3:
            os.sched_yield()
    with rank_pair(ranks) as serving:
        found = start(serving, folder, [(turned, False), (arrivals, True)])
    assert check(found, cold) > possible
    assert contents(folder) == stored
    return steps


def phases(steps):
    """The modes that met in a step."""
    return {tuple(sorted({did.split()[0] for did in step})) for step in steps}


@pytest.mark.parametrize(
    "arrivals, env, overlap, drafts",
    [
        pytest.param(FEW, TOGETHER, True, True, id="prefill beside decode"),
        pytest.param(MORE, TOGETHER, True, True, id="more", marks=pytest.mark.slow),
        pytest.param(MORE, {}, True, True, id="as launched", marks=pytest.mark.slow),
        pytest.param(MORE, TOGETHER, False, True, id="no overlap", marks=pytest.mark.slow),
        pytest.param(MORE, {}, True, False, id="no drafts", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_under_unequal_load_answer_as_cold(
    next_n_path, tmp_path, arrivals, env, overlap, drafts
):
    steps = run(next_n_path, tmp_path, arrivals, options_of(2, overlap, drafts), env)
    assert {("decode", "idle"), ("extend", "idle")} <= phases(steps)
    # Without drafts SGLang lets them meet.
    assert (("decode", "extend") in phases(steps)) == (bool(env) or not drafts)
    assert any(a.startswith("decode") and b.startswith("decode") and a != b for a, b in steps)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("env", [TOGETHER, {}], ids=["prefill beside decode", "as launched"])
def test_eight_ranks_under_unequal_load_answer_as_cold(next_n_path, tmp_path, env):
    """On 16 cores; on two it takes more than an hour."""
    steps = run(next_n_path, tmp_path, many(8, 32), options_of(8, True), env)
    assert any(len(set(step)) > 2 for step in steps)
