"""What a server does with requests, each a byte test against the stock engine's cold runs.

One workload runs under every scheduling mode; what does not depend on the mode runs once.
"""

from types import SimpleNamespace

import pytest
from oracle import Recorder, assert_equal_runs, differing, poison_rings, rows_before, watch
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from sglang_unified_kv.edits.report import export
from sglang_unified_kv.reference.harness import prompt

PAGE = 256
# Around pages, and 0 to 3 tokens past the end of a C4 block (700 = 175 * 4).
LENGTHS = (511, 512, 513, 700, 701, 702, 703, 767, 768, 769)
TRUNK = prompt(300, 600)
BRANCHES = [TRUNK + prompt(301 + i, 40 + 30 * i) for i in range(4)]
MODES = {
    "chunked": {},
    "overlap": dict(disable_overlap_schedule=False),
    "mixed": dict(enable_mixed_chunk=True),
    "overlap-mixed": dict(disable_overlap_schedule=False, enable_mixed_chunk=True),
    "lpm": dict(schedule_policy="lpm"),
    "priority": dict(enable_priority_scheduling=True),
}


@pytest.fixture(scope="module")
def cold(make_engine):
    """Cold runs by prompt."""
    text = prompt(0, 1100)
    with make_engine(stock=True, chunked_prefill_size=256) as engine:
        recorder = Recorder(engine)
        runs = {tuple(text[:n]): recorder.cold(text[:n], 2) for n in (*LENGTHS, 1100)}
        runs |= {tuple(ids): recorder.cold(ids, 2) for ids in BRANCHES}
    runs["text"] = text
    return runs


BY_DEFAULT = ("chunked",)


@pytest.fixture(
    scope="module",
    params=[pytest.param(m, marks=() if m in BY_DEFAULT else pytest.mark.slow) for m in MODES],
)
def engine(request, make_engine, cold):
    with make_engine(chunked_prefill_size=512, **MODES[request.param]) as built:
        yield built


@pytest.fixture
def manager(engine):
    engine.flush()
    poison_rings(engine)
    yield engine.tree.checkpoints
    engine.drain()
    engine.tree.checkpoints.check_idle()


def assert_resumed(run, cold_run):
    """A hit's rings at its first position are those of the cold run that passed through it."""
    if run.cached_tokens:
        assert differing(run.resumed, cold_run.at_boundary[run.cached_tokens]) == []


def test_hits_around_pages_and_c4_blocks(engine, manager, cold):
    text, recorder = cold["text"], Recorder(engine)
    recorder.run(text, 2)
    for first in range(0, len(LENGTHS), 4):
        poison_rings(engine)
        lengths = LENGTHS[first : first + 4]
        runs = recorder.run_many([text[:n] for n in lengths], 2)
        for length, run in zip(lengths, runs, strict=True):
            expected = cold[tuple(text[:length])]
            assert run.cached_tokens == (length - 1) // PAGE * PAGE, length
            assert_resumed(run, expected)
            assert_equal_runs(run, expected)


def test_requests_of_one_batch_share_a_prefix(engine, manager, cold):
    recorder = Recorder(engine)
    for _ in range(2):
        runs = recorder.run_many(BRANCHES, 2)
        for ids, run in zip(BRANCHES, runs, strict=True):
            assert_resumed(run, cold[tuple(ids)])
            assert_equal_runs(run, cold[tuple(ids)])
        poison_rings(engine)
    assert all(run.cached_tokens == 512 for run in runs)


def test_every_stage_of_a_request_can_be_aborted(engine, manager, cold):
    text, recorder = cold["text"], Recorder(engine)
    for steps in (0, 1, 2, 4):
        rids = [engine.submit(ids, 4) for ids in (text[:769], BRANCHES[0])]
        for _ in range(steps):
            engine.step()
        for rid in rids:
            engine.abort(rid)
        engine.drain()
        manager.check_idle()
        poison_rings(engine)
    run = recorder.run(text, 2)
    assert_resumed(run, cold[tuple(text)])
    assert_equal_runs(run, cold[tuple(text)])


# -- once, in the plainest mode


def only_chunked(test):
    return pytest.mark.parametrize("engine", ["chunked"], indirect=True)(test)


@only_chunked
@pytest.mark.parametrize("new_tokens", [0, 1])
def test_a_request_for_no_or_one_token(engine, manager, cold, new_tokens):
    text, recorder = cold["text"], Recorder(engine)
    recorder.run(text[:700], new_tokens)
    poison_rings(engine)
    hit = recorder.run(text[:700], new_tokens)
    expected = cold[tuple(text[:700])]
    assert hit.cached_tokens == 512 and len(hit.output_ids) == new_tokens
    assert_resumed(hit, expected)
    assert hit.logits[0].equal(expected.logits[0])


@only_chunked
def test_counters_are_exported_where_sglang_reports(engine, manager):
    reporter = engine.scheduler.metrics_reporter
    assert not hasattr(reporter, export._MARK), "created without --enable-metrics"
    ticks = []
    setattr(reporter, export._MARK, SimpleNamespace(tick=lambda: ticks.append(1)))
    try:
        engine.step()
        assert len(ticks) == 1, "an idle round"
        # What its reports of prefills and of decode steps call, with metrics enabled.
        reporter._log_hicache_stats()
        assert len(ticks) == 2
    finally:
        delattr(reporter, export._MARK)


@only_chunked
def test_parallel_samples_of_one_prompt(engine, manager, cold):
    # What n > 1 is by the time it reaches the scheduler: the same prompt, several times.
    ids = cold["text"][:701]
    for run in Recorder(engine).run_many([ids] * 3, 2) + Recorder(engine).run_many([ids] * 3, 2):
        assert_resumed(run, cold[tuple(ids)])
        assert_equal_runs(run, cold[tuple(ids)])


@only_chunked
@pytest.mark.parametrize(
    "field", ["extra_key", pytest.param("cache_salt", marks=pytest.mark.slow), "lora_id"]
)
def test_requests_under_another_key_share_nothing(engine, manager, cold, field):
    ids, recorder = cold["text"][:700], Recorder(engine)
    expected = cold[tuple(ids)]
    hits = []
    for value in ("a", "b", "a", None, "b"):
        poison_rings(engine)
        run = recorder.run(ids, 2, **({field: value} if value else {}))
        assert_resumed(run, expected)
        assert_equal_runs(run, expected)
        hits.append(run.cached_tokens)
    assert hits == [0, 0, 512, 0, 512]


@only_chunked
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_paused_requests_go_on_exactly(engine, manager, cold, mode):
    text, recorder = cold["text"], Recorder(engine)
    recorder.run(text[:512], 1)
    poison_rings(engine)
    rids = {engine.submit(text[:n], 2): n for n in (700, 769)}
    while not engine.scheduler.running_batch.reqs:
        engine.step()
    engine.scheduler.pause_generation(PauseGenerationReqInput(mode=mode))
    if mode == "retract":
        poison_rings(engine)
    manager.check_integrity()
    engine.scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    outputs = engine.run_many(*rids)
    for output, length in zip(outputs, rids.values(), strict=True):
        assert output.output_ids == cold[tuple(text[:length])].output_ids
    assert_equal_runs(recorder.run(text[:700], 2), cold[tuple(text[:700])])


@only_chunked
def test_forced_retraction_stays_exact(engine, manager, cold, monkeypatch):
    monkeypatch.setattr(scheduler_module, "TEST_RETRACT", True)
    # Every second step, whatever ran before.
    engine.scheduler.forward_ct = 1
    monkeypatch.setattr(scheduler_module, "TEST_RETRACT_INTERVAL", 2)
    monkeypatch.setattr(scheduler_module, "TEST_RETRACT_NO_PREFILL_BS", 4)
    resumed = []

    def before(row):
        # A fresh row starts on a page; a chunk goes on where the one before ended, also on a page.
        if row.start % PAGE == 0 and row.start and not row.decode:
            resumed.append((row.rid, row.start, rows_before(engine, row.slot, row.start)))

    prompts = {engine.submit(ids, 2): ids for ids in BRANCHES}
    with watch(engine, before):
        outputs = engine.run_many(*prompts)
    for output in outputs:
        assert output.output_ids == cold[tuple(prompts[output.rid])].output_ids
    for rid, start, rows in resumed:
        assert differing(rows, cold[tuple(prompts[rid])].at_boundary[start]) == []
    assert len({(rid, start) for rid, start, _ in resumed}) < len(resumed), "nothing came back"
