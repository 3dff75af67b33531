"""A few minutes of the fuzzer, and hits of every kind in every tier that it must reach."""

import random
from dataclasses import replace

import fuzz
import pytest

EVERYWHERE = frozenset(fuzz.TIERS)
ON_DEVICE = frozenset({"device"})
# Tiers that resumes of a kind must come from. Retracted requests are not prefetched by SGLang, but what an
# earlier prefetch of theirs brought counts as storage.
NEEDED = {
    "sequential": EVERYWHERE,
    "overlap": EVERYWHERE,
    "lpm": EVERYWHERE,
    "mixed chunk": EVERYWHERE,
    "priority": EVERYWHERE,
    "speculation": EVERYWHERE,
    "stride 2": EVERYWHERE,
    "one staging slot": ON_DEVICE,
    "combined placement": EVERYWHERE,
    "sparse placement": EVERYWHERE,
    "strict provenance": frozenset({"device", "host"}),
    "HiCache off": ON_DEVICE,
    "several in a batch": EVERYWHERE,
    "retraction": EVERYWHERE,
    "after abort": EVERYWHERE,
    "after pause": EVERYWHERE,
    "0 new tokens": EVERYWHERE,
    "1 new tokens": EVERYWHERE,
    "extra_key": EVERYWHERE,
    "cache_salt": EVERYWHERE,
    "next turn": EVERYWHERE,
    "page edge": EVERYWHERE,
    "C4 edge": EVERYWHERE,
}
MOST_ROUNDS = 3
MOST_BRIEF_ROUNDS = 6
BRIEF = [s for s in fuzz.SETUPS if s.features == ("speculation", "overlap")]


def test_random_workloads_resume_exactly(make_engine, next_n_path):
    """Every resume is judged where it happens; here, that they came from every tier."""
    report = fuzz.Report()
    book = fuzz.make_book(make_engine, next_n_path, 3, prompts=5, turns=2)
    for seed, setup in enumerate(BRIEF):
        # Storage threads decide when a request gets what it waits for, so one script may not reach all.
        for round_ in range(MOST_BRIEF_ROUNDS):
            fuzz.run_setup(make_engine, setup, book, report, 100 * round_ + seed, 45, next_n_path)
            if _reached(report, setup.features[0]) == EVERYWHERE and report.faults:
                break
    print(*report.lines(), sep="\n")
    for setup in BRIEF:
        assert _reached(report, setup.features[0]) == EVERYWHERE, report.lines()
    assert report.faults


def test_an_aborted_request_is_judged_by_what_its_cold_run_has(
    make_engine, next_n_path, tmp_path, monkeypatch
):
    """The verify step after the abort goes beyond what was asked for."""
    ids = tuple(fuzz.prompt(0, 300))
    with make_engine(model=next_n_path, chunked_prefill_size=512, **fuzz.EAGLE) as engine:
        book = fuzz.Book(engine, random.Random(0), prompts=0, turns=0)
        cold = fuzz.cold(engine, ids, fuzz.NEW_TOKENS)
        before = 1 + sum(cold.accepted[:-1])
        assert before < fuzz.NEW_TOKENS < before + cold.accepted[-1]
        trial = fuzz.Trial(engine, fuzz.SETUPS[4], book, fuzz.Report(), 0, tmp_path)
        rid = engine.submit(ids, fuzz.NEW_TOKENS, return_logprob=True)
        trial.ids[rid] = ids
        made = 0
        while made < before:
            engine.step()
            made = sum(len(req.output_ids) for req in engine.scheduler.running_batch.reqs)
        trial.abort()
        engine.drain()
        answer = engine.output(rid)
        monkeypatch.setattr(engine, "is_done", lambda rid: True)
        monkeypatch.setattr(engine, "output", lambda rid: answer)

        def judge(expected):
            book.runs[ids], trial.ids[rid], trial.features[rid] = expected, ids, set()
            trial.collect()

        assert len(answer.output_ids) > fuzz.NEW_TOKENS == len(cold.output_ids)
        judge(cold)
        for name, values in (("output_ids", cold.output_ids), ("logprobs", cold.logprobs)):
            for index in (0, fuzz.NEW_TOKENS - 1):
                wrong = [v + 1 if i == index else v for i, v in enumerate(values)]
                with pytest.raises(AssertionError, match=rid):
                    judge(replace(cold, **{name: wrong}))
        trial.aborted.clear()
        with pytest.raises(AssertionError, match=rid):
            judge(cold)


def _reached(report, feature) -> set[str]:
    return {tier for tier in fuzz.TIERS if report.resumes[feature, tier]}


@pytest.fixture(scope="module")
def report(make_engine, next_n_path):
    """Every setup once, and again until every kind was reached."""
    found = fuzz.Report()
    book = fuzz.make_book(make_engine, next_n_path, 3, prompts=8, turns=3)
    for round_ in range(MOST_ROUNDS):
        for index, setup in enumerate(fuzz.SETUPS):
            if round_ and not _missing(found, setup):
                continue
            seed = 100 * round_ + index
            fuzz.run_setup(make_engine, setup, book, found, seed, 70, next_n_path)
    print(*found.lines(), sep="\n")
    return found


def _missing(report, setup) -> bool:
    """Whether a setup can still reach what is needed."""
    reach = set(setup.features) | (NEEDED.keys() - {f for s in fuzz.SETUPS for f in s.features})
    return any(
        not report.resumes[feature, tier]
        for feature in reach & NEEDED.keys()
        for tier in NEEDED[feature]
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("feature", NEEDED)
def test_resumes_are_exact_in_every_tier(report, feature):
    """The same for every setup, and that each kind of resume happened."""
    assert _reached(report, feature) >= NEEDED[feature], report.lines()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_faults_were_injected(report):
    assert report.faults["failed load-back"] and len(report.faults) >= 3
