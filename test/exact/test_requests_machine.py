"""Random requests with shared prefixes on the real scheduler, every hit against its cold run.

Rules submit, step, abort, flush and evict in any order; one that does not apply does nothing, since
what applies depends on the engine and Hypothesis wants its choices not to. After each, the store is
checked; each hit is compared with the rings of the cold run before the first layer reads them, and with
its output tokens at the end.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from oracle import Recorder, differing, poison_rings, rows_before, watch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang_unified_kv.reference.harness import prompt

NEEDED = 20
MOST_EXTRA_ROUNDS = 8
KINDS = ("device", "host", "after abort", "after flush", "after eviction")
NEW_TOKENS = 3

TRUNK, OTHER = prompt(100, 700), prompt(101, 600)
PROMPTS = [
    TRUNK[:300],
    TRUNK[:520],
    TRUNK[:700],
    TRUNK[:256] + prompt(102, 300),
    TRUNK[:512] + prompt(103, 60),
    OTHER[:300],
    OTHER[:600],
]


@pytest.fixture(scope="module")
def cold_runs(make_engine):
    with make_engine(stock=True, chunked_prefill_size=256) as engine:
        recorder = Recorder(engine)
        return [recorder.cold(ids, NEW_TOKENS) for ids in PROMPTS]


@pytest.fixture(scope="module", params=["grid", pytest.param("combined", marks=pytest.mark.slow)])
def engine(request, make_engine, cold_runs):
    # Ten pages on the device and twelve records: eviction on every level is normal here.
    with make_engine(
        chunked_prefill_size=512,
        max_total_tokens=2560,
        env={
            "SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB": "0.0074",
            "SGLANG_UNIFIED_KV_CHECKPOINT_POLICY": request.param,
        },
    ) as built:
        assert built.tree.checkpoints.store.capacity == 12
        yield built


def machine_of(engine, cold_runs, reached: Counter):
    # What happened to the engine since its last flush; like the engine it outlives an example.
    happened: set[str] = set()

    class Requests(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.engine, self.manager = engine, engine.tree.checkpoints
            self.prompt_of: dict[str, int] = {}
            self.started: set[str] = set()
            self.aborted: set[str] = set()
            self.finished = 0
            # The tree is left as the example before left it.
            poison_rings(engine)

        def before(self, row):
            if row.rid in self.started or row.decode:
                return
            self.started.add(row.rid)
            if row.start:
                cold = cold_runs[self.prompt_of[row.rid]]
                assert row.start in cold.at_boundary, row
                assert (
                    differing(rows_before(engine, row.slot, row.start), cold.at_boundary[row.start])
                    == []
                )

        def finish(self, rid):
            output = engine.output(rid)
            index = self.prompt_of.pop(rid)
            cold = cold_runs[index]
            self.finished += 1
            assert output.output_ids == cold.output_ids[: len(output.output_ids)]
            if rid in self.aborted:
                return
            assert len(output.output_ids) == NEW_TOKENS
            if output.cached_tokens:
                reached["host" if output.details["host"] else "device"] += 1
                reached.update(happened)

        @rule(indices=st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=3))
        def submit(self, indices):
            for index in indices[: 4 - len(self.prompt_of)]:
                self.prompt_of[engine.submit(PROMPTS[index], NEW_TOKENS)] = index

        @rule(steps=st.integers(1, 6))
        def step(self, steps):
            with watch(engine, self.before):
                for _ in range(steps):
                    engine.step()
            for rid in [r for r in self.prompt_of if engine.is_done(r)]:
                self.finish(rid)

        @rule()
        def finish_all(self):
            with watch(engine, self.before):
                while not all(map(engine.is_done, self.prompt_of)):
                    engine.step()
                engine.drain()
            for rid in list(self.prompt_of):
                self.finish(rid)
            self.manager.check_idle()
            engine.tree.sanity_check()

        @rule(which=st.integers(0, 5))
        def abort(self, which):
            if self.prompt_of:
                rid = list(self.prompt_of)[which % len(self.prompt_of)]
                self.aborted.add(rid)
                engine.abort(rid)
                happened.add("after abort")

        @rule()
        def flush(self):
            if self.finished <= 4:
                return
            self.finish_all()
            self.finished = 0
            engine.flush()
            poison_rings(engine)
            assert len(self.manager.store) == 0
            happened.clear()
            happened.add("after flush")

        @rule(tokens=st.sampled_from([256, 1024, 10**9]))
        def evict(self, tokens):
            self.finish_all()
            engine.tree.evict(EvictParams(num_tokens=tokens))
            happened.add("after eviction")

        @invariant()
        def whole(self):
            self.manager.check_integrity()

        def teardown(self):
            self.finish_all()

    return Requests


@pytest.mark.parametrize(
    "rounds", [1, pytest.param(6, marks=pytest.mark.slow)], ids=["default", "wide"]
)
def test_random_requests_hit_exactly(engine, cold_runs, rounds):
    """At least ``rounds`` rounds of eight examples, and as many as it takes to reach every kind often."""
    reached: Counter = Counter()
    for round_ in range(rounds + MOST_EXTRA_ROUNDS):
        if round_ >= rounds and all(reached[kind] >= NEEDED for kind in KINDS):
            break
        run_state_machine_as_test(
            seed(round_)(machine_of(engine, cold_runs, reached)),
            settings=settings(
                max_examples=8,
                stateful_step_count=40,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    print("hits reached:", dict(reached))
    assert all(reached[kind] >= NEEDED for kind in KINDS), reached
