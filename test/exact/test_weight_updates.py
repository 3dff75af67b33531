"""Weights that change while the server runs: what others computed is never read, stored, or mixed in."""

from unittest import mock

import pytest
import torch
from oracle import Recorder, assert_equal_runs, poison_rings
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from sglang_unified_kv.reference.harness import prompt
from speculation_runs import EAGLE
from weight_updates import Updates, write_other

PATHS = ("disk", "tensor", "distributed", "ipc")
# Under a page, over one, and in two chunks.
LENGTHS = (200, 300, 444, 700)
TEXT = prompt(0, 1100)
MODES = {
    "plain": {},
    "eagle": dict(disable_overlap_schedule=False, **EAGLE),
}


@pytest.fixture(scope="module")
def models(model_path, next_n_path, tmp_path_factory):
    """By mode: the model that is served, and the one that it is updated to."""
    folder = tmp_path_factory.mktemp("weights")
    found = {"plain": model_path, "eagle": next_n_path}
    return {mode: (path, write_other(path, folder / mode)) for mode, path in found.items()}


@pytest.fixture(scope="module")
def colds(models, make_engine):
    """Cold runs of the stock engine on both models, by path of the model and length."""
    found = {}
    for path in models["plain"]:
        with make_engine(stock=True, model=path, chunked_prefill_size=256) as engine:
            recorder = Recorder(engine)
            found |= {(path, n): recorder.cold(TEXT[:n]) for n in LENGTHS}
    return found


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def engine(mode, models, make_engine, colds):
    options = MODES[mode]
    with make_engine(model=models[mode][0], chunked_prefill_size=512, **options) as built:
        yield built


@pytest.fixture
def updates(engine, mode, models):
    """The engine on the first model, with empty caches; and again afterwards."""
    found = Updates(engine)
    engine.flush()
    poison_rings(engine)
    yield found
    engine.drain()
    engine.tree.checkpoints.check_integrity()
    found.disk(models[mode][0], True)
    engine.flush()
    engine.tree.checkpoints.check_idle()
    assert not engine.tree.checkpoints.suspended


def only(mode, *slow):
    modes = [mode, *(pytest.param(one, marks=pytest.mark.slow) for one in slow)]
    return pytest.mark.parametrize("mode", modes, indirect=True, scope="module")


def available(engine):
    """Tokens that are free or can be evicted, and request rows that are free."""
    tree = engine.tree
    return (
        tree.token_to_kv_pool_allocator.full_available_size() + tree.full_evictable_size(),
        engine.req_to_token_pool.available_size(),
    )


@only("plain")
@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[pytest.mark.slow] * (p == "distributed")) for p in PATHS]
)
def test_after_an_update_nothing_of_the_old_weights_is_read(engine, updates, models, colds, path):
    recorder, (_, new) = Recorder(engine), models["plain"]
    lengths = LENGTHS if path == "disk" else LENGTHS[-1:]
    for length in lengths:
        recorder.run(TEXT[:length])
    tokens, before = engine.tree.total_size(), available(engine)
    assert tokens[0] >= 512
    updates[path](new, False)
    captured = engine.tree.checkpoints.stats.captured
    for length in (*lengths, *reversed(lengths)):
        poison_rings(engine)
        run = recorder.run(TEXT[:length])
        assert run.cached_tokens == 0
        assert_equal_runs(run, colds[new, length])
    assert engine.tree.total_size() == tokens, "nothing is inserted"
    assert available(engine) == before, "requests gave back what they had"
    assert engine.tree.checkpoints.stats.captured == captured
    engine.flush()
    for expected in (0, 512):
        poison_rings(engine)
        run = recorder.run(TEXT[:700])
        assert run.cached_tokens == expected
        assert_equal_runs(run, colds[new, 700])


@only("plain")
@pytest.mark.parametrize(
    "path", [p if p == "disk" else pytest.param(p, marks=pytest.mark.slow) for p in PATHS]
)
def test_an_update_that_flushes_goes_on_with_reuse(engine, updates, models, colds, path):
    recorder, (_, new) = Recorder(engine), models["plain"]
    recorder.run(TEXT[:700])
    updates[path](new, True)
    assert not engine.tree.checkpoints.suspended
    for expected in (0, 512):
        poison_rings(engine)
        run = recorder.run(TEXT[:700])
        assert run.cached_tokens == expected
        assert_equal_runs(run, colds[new, 700])


def row_of(engine, rid):
    """Pages of the running request's row, and how far it is computed."""
    scheduler = engine.scheduler
    reqs = [
        *scheduler.running_batch.reqs,
        *(scheduler.last_batch.reqs if scheduler.last_batch else ()),
    ]
    if scheduler.chunked_req is not None:
        reqs.append(scheduler.chunked_req)
    req = next((r for r in reqs if r.rid == rid and r.kv.holds_kv), None)
    if req is None:
        return None
    length = req.kv.kv_committed_len
    return engine.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :length].tolist()


@only("eagle", "plain")
@pytest.mark.parametrize(
    "steps",
    [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)],
)
def test_a_request_in_the_middle_of_an_update_keeps_its_pages(
    engine, updates, mode, models, steps, caplog, monkeypatch
):
    caplog.set_level("INFO")
    monkeypatch.setattr(engine.tree.checkpoints, "verifier", mock.Mock())
    other = engine.run(TEXT[:300], 2)
    assert other.cached_tokens == 0
    rid = engine.submit(TEXT, 6)
    for _ in range(steps):
        engine.step()
    tokens, before = None, []
    updates.disk(models[mode][1], False)
    while not engine.is_done(rid):
        tokens = tokens or engine.tree.total_size()
        row = row_of(engine, rid) or before
        assert row[: len(before)] == before, "its row was bound to other pages"
        before = row
        engine.step()
    assert before and engine.tree.total_size() == tokens, "nothing is inserted"
    engine.output(rid)
    engine.drain()
    assert not [r for r in caplog.records if "BIND-MISS" in r.getMessage()]
    assert available(engine)[1] == engine.req_to_token_pool.size
    engine.tree.checkpoints.check_idle()
    engine.flush()
    assert available(engine)[0] == engine.tree.token_to_kv_pool_allocator.size_full
    assert engine.run(TEXT, 2).cached_tokens == 0


FORMS = {
    # Never in the tree before it ends; in the tree after the result of its first chunk.
    "short": (200, 4),
    "first chunk": (700, 1),
}


@only("eagle", "plain")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", [None, pytest.param("tensor", marks=pytest.mark.slow)])
def test_a_session_ends_while_requests_run(engine, updates, mode, models, path, form):
    length, steps = FORMS[form]
    manager, (_, new) = engine.tree.checkpoints, models[mode]
    cold = engine.run(TEXT[:length], 24)
    engine.flush()
    rid = engine.submit(TEXT[:length], 24)
    for _ in range(steps):
        engine.step()
    engine.scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))
    if path is None:
        updates.begin()
        updates.end()
    else:
        updates[path](new, True)
    assert manager.suspended, "the request has KV of the weights before"
    engine.scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    (output,) = engine.run_many(rid)
    engine.drain()
    if path is None:
        assert output.output_ids == cold.output_ids
    assert manager.suspended and not any(engine.tree.total_size())
    assert engine.run(TEXT[:length], 2).cached_tokens == 0
    engine.flush()
    assert not manager.suspended
    engine.run(TEXT[:700], 2)
    assert engine.run(TEXT[:700], 2).cached_tokens == 512


@only("plain")
def test_inside_a_session_a_flush_does_not_bring_reuse_back(engine, updates, models, colds):
    manager, (served, _) = engine.tree.checkpoints, models["plain"]
    updates.begin()
    engine.flush()
    assert manager.suspended, "weights may still change, from a peer's memory"
    for _ in range(2):
        assert engine.run(TEXT[:700], 2).cached_tokens == 0
    updates.end()
    assert not manager.suspended
    recorder = Recorder(engine)
    for expected in (0, 512):
        poison_rings(engine)
        run = recorder.run(TEXT[:700])
        assert run.cached_tokens == expected
        assert_equal_runs(run, colds[served, 700])


@pytest.fixture
def released(engine):
    """The weights' memory is zeroed while it is released, and comes back as it was."""
    updater, params = (
        engine.scheduler.weight_updater,
        dict(engine.model_runner.model.named_parameters()),
    )
    kept = {name: tensor.detach().clone() for name, tensor in params.items()}

    def pause(tag):
        if tag == "weights":
            for tensor in params.values():
                tensor.data.zero_()

    def resume(tag):
        if tag == "weights":
            for name, tensor in params.items():
                tensor.data.copy_(kept[name])

    with (
        mock.patch.object(updater.memory_saver_adapter, "pause", pause),
        mock.patch.object(updater.memory_saver_adapter, "resume", resume),
        # SGLang asks for the GPU's here.
        mock.patch.object(torch, "get_device_module", lambda *_: torch.cpu),
    ):
        yield updater


@only("plain")
@pytest.mark.parametrize("tags", [None, ["weights"], ["kv_cache"]], ids=str)
def test_weights_whose_memory_is_released_are_not_reused(
    engine, updates, released, models, colds, caplog, tags
):
    manager, (served, _) = engine.tree.checkpoints, models["plain"]
    recorder = Recorder(engine)
    recorder.run(TEXT[:700])
    released.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))
    engine.flush()
    weights = tags != ["kv_cache"]
    assert manager.suspended == weights
    said = "still no prefix is reused or stored: the memory of the weights is released"
    assert any(said in record.getMessage() for record in caplog.records) == weights
    released.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))
    assert not manager.suspended
    for expected in (0, 512):
        poison_rings(engine)
        run = recorder.run(TEXT[:700])
        assert run.cached_tokens == expected
        assert_equal_runs(run, colds[served, 700])


@only("plain")
def test_pages_from_before_a_release_of_the_weights_wait_for_a_flush(engine, updates, released):
    manager, tags = engine.tree.checkpoints, ["weights"]
    engine.run(TEXT[:700], 2)
    released.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))
    released.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))
    assert manager.suspended and engine.run(TEXT[:700], 2).cached_tokens == 0
    engine.flush()
    assert not manager.suspended


@only("plain")
@pytest.mark.parametrize("call", ["begin", "end"])
def test_a_session_whose_call_fails_is_what_sglang_takes_it_for(engine, updates, call, monkeypatch):
    """The barrier of the ranks comes after SGLang has opened or closed its session."""
    manager, updater = engine.tree.checkpoints, engine.scheduler.weight_updater
    if call == "end":
        updates.begin()
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.distributed, "barrier", mock.Mock(side_effect=RuntimeError("rank 1 is gone"))
        )
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            getattr(updates, call)()
    assert (updater._session is not None) == (call == "begin")
    assert manager.suspended
    engine.flush()
    assert manager.suspended == (call == "begin")
    if call == "begin":
        updates.end()
        assert not manager.suspended


@only("plain")
def test_a_session_does_not_end_the_suspension_over_old_pages(engine, updates, models):
    engine.run(TEXT[:700], 2)
    updates.begin()
    updates.end()
    assert engine.tree.checkpoints.suspended and any(engine.tree.total_size())


@only("plain")
def test_a_request_waits_while_a_session_ends(engine, updates, models, colds):
    manager, (served, _) = engine.tree.checkpoints, models["plain"]
    engine.scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))
    rids = {engine.submit(TEXT[:700], 3): 700}
    updates.begin()
    updates.end()
    assert not manager.suspended, "it holds nothing"
    engine.scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    (run,) = Recorder(engine).finish(rids)
    assert_equal_runs(run, colds[served, 700])
