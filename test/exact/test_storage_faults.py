"""Random damage to the folder between a flush and a repeat: every answer equals its cold run."""

import random
from collections import Counter

import pytest
from folder_damage import DAMAGES
from oracle import Recorder, assert_equal_runs, differing, poison_rings
from storage_folder import STORAGE, at, storage_threads

LENGTHS = (444, 700, 950, 1100)
LEAST_HITS = 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def engine(make_engine, oracle, folder):
    with make_engine(chunked_prefill_size=512, env=at(folder), **STORAGE) as built:
        yield built


@pytest.fixture(scope="module")
def objects(engine, oracle, folder):
    engine.run(oracle.text[:1100], 1)
    engine.flush()
    return {path: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "trials", [30, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_no_damage_reaches_an_answer(engine, oracle, folder, objects, trials):
    manager, recorder = engine.tree.checkpoints, Recorder(engine)
    outcomes: dict[str, Counter] = {damage.__name__: Counter() for damage in DAMAGES}
    hits = 0
    for trial in range(trials):
        chance = random.Random(trial)
        for path in folder.iterdir():
            path.unlink()
        for path, data in objects.items():
            path.write_bytes(data)
        damage = chance.choice(DAMAGES)
        for _ in range(chance.randrange(1, 3)):
            damage(chance, folder)
        poison_rings(engine)
        length = chance.choice(LENGTHS)
        run = recorder.run(oracle.text[:length], 1)
        full = (length - 1) // 256 * 256
        where = f"trial {trial}: {damage.__name__}, {length} tokens, hit {run.cached_tokens}"
        if run.cached_tokens:
            assert differing(run.resumed, oracle.at(run.cached_tokens)) == [], where
        assert_equal_runs(run, oracle.run(length).first(1))
        outcomes[damage.__name__][
            "full" if run.cached_tokens == full else "shallower" if run.cached_tokens else "miss"
        ] += 1
        hits += run.cached_tokens > 0
        engine.flush()
        manager.check_idle()
    for name, counts in outcomes.items():
        print(f"{name:20} {dict(counts)}")
    stats = manager.stats
    print(
        f"records refused {stats.fetch_rejected}, pages refused {stats.pages_rejected}, hits {hits}"
    )
    assert hits >= LEAST_HITS * trials
    assert stats.fetch_rejected and stats.pages_rejected
    assert all(thread.is_alive() for thread in storage_threads(engine))
