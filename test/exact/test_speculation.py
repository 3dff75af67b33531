"""EAGLE on the next-n layer: after a hit, target and draft compute what they compute after a cold run."""

import inspect
from functools import partial

import pytest
import torch
from oracle import POISON, differing, poison_rings, retract_often, ring_buffers
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang_unified_kv.checkpoint import manager as manager_module
from sglang_unified_kv.checkpoint.layout import Kind
from sglang_unified_kv.edits.exact.build import rings_of
from sglang_unified_kv.edits.exact.pool_sizing import staging_bytes
from sglang_unified_kv.reference.harness import prompt
from speculation_runs import DRAFT_TOKENS, EAGLE, NEW_TOKENS, assert_equal_runs, cold, run

# Boundaries that may be resumed at: page hashes are over token pairs, and one token is always computed.
BOUNDARIES = {512: 256, 513: 256, 514: 512, 520: 512, 700: 512, 2700: 2560}
# Prompts whose generated tokens cross 512 in other places of a verify step.
SHORT = (503, 509, 511)
WIDER = {503, 513}
"""Only in the slow run."""
TAIL = prompt(9, 20)


def each(lengths):
    return pytest.mark.parametrize(
        "length",
        [pytest.param(n, marks=pytest.mark.slow) if n in WIDER else n for n in lengths],
    )


def text(length):
    return prompt(0, length)


class Stock:
    """Cold runs of the stock engine, and its hits."""

    def __init__(self, engine, left_out):
        self.cold = {n: cold(engine, text(n)) for n in {*BOUNDARIES, *SHORT} - left_out}
        self.longer = {}
        for length in {*SHORT} - left_out:
            ids = text(length) + self.cold[length].output_ids + TAIL
            self.longer[length] = ids, cold(engine, ids)
        self.hits = {}
        for length in (520, 700):
            engine.flush()
            engine.run(text(length))
            poison_rings(engine)
            self.hits[length] = run(engine, text(length))


@pytest.fixture(scope="module")
def stock(make_engine, next_n_path, request):
    asked = {
        item.callspec.params.get("length")
        for item in request.session.items
        if hasattr(item, "callspec")
    }
    # In pages, so that every boundary is passed through.
    with make_engine(stock=True, model=next_n_path, chunked_prefill_size=256, **EAGLE) as engine:
        return Stock(engine, WIDER - asked)


@pytest.fixture(
    scope="module", params=["overlap", pytest.param("sequential", marks=pytest.mark.slow)]
)
def engine(make_engine, next_n_path, stock, request):
    """With the overlap schedule lengths are on the device alone when a step is planned, as on ROCm."""
    overlap = request.param == "overlap"
    options = EAGLE | dict(model=next_n_path, disable_overlap_schedule=not overlap)
    with make_engine(chunked_prefill_size=512, **options) as built:
        assert built.scheduler.enable_overlap == overlap
        yield built


@pytest.fixture
def manager(engine):
    found = engine.tree.checkpoints
    engine.flush()
    yield found
    engine.drain()
    found.check_idle()


def test_drafts_are_accepted(stock):
    """The next-n layer is worth something, or equal acceptance would say nothing."""
    lengths = [found.accept_length for found in stock.cold.values()]
    assert sum(lengths) / len(lengths) >= 2


@each(BOUNDARIES)
def test_a_device_hit_equals_the_cold_run(engine, manager, stock, length):
    first = run(engine, text(length))
    assert first.cached_tokens == 0
    assert_equal_runs(first, stock.cold[length])
    poison_rings(engine)
    hit = run(engine, text(length))
    boundary = BOUNDARIES[length]
    assert hit.cached_tokens == hit.details["device"] == boundary
    assert differing(hit.resumed, stock.cold[length].at_boundary[boundary]) == []
    assert_equal_runs(hit, stock.cold[length])
    assert manager.stats.restored >= 1


@pytest.mark.parametrize("length", [520, 700])
def test_stock_drafts_something_else(stock, length):
    hit, reference = stock.hits[length], stock.cold[length]
    boundary = hit.cached_tokens
    assert boundary > 0
    assert "draft window 0" in differing(hit.resumed, reference.at_boundary[boundary])
    assert not torch.equal(hit.draft_logits[0], reference.draft_logits[0])


def test_stock_accepts_fewer_drafts_after_a_hit(stock):
    assert stock.hits[700].accept_length < stock.cold[700].accept_length


def test_without_the_draft_rings_the_draft_is_another(engine, manager, stock, monkeypatch):
    """The target is right all the same: only a comparison of the draft finds this."""
    draft = [r for r in manager.rings if r.spec.kind is Kind.DRAFT_WINDOW]
    assert len(draft) == 1
    restore = manager_module.restore

    def forget(*args):
        restore(*args)
        draft[0].buffer[: engine.pool.num_req_slots * draft[0].size] = POISON

    run(engine, text(520))
    poison_rings(engine)
    monkeypatch.setattr(manager_module, "restore", forget)
    hit, reference = run(engine, text(520)), stock.cold[520]
    assert hit.cached_tokens == 512 and hit.output_ids == reference.output_ids
    assert differing(hit.resumed, reference.at_boundary[512]) == ["draft window 0"]
    assert not torch.equal(hit.draft_logits[0], reference.draft_logits[0])


@each(SHORT)
def test_a_boundary_crossed_inside_a_verify_step(engine, manager, stock, length):
    first = run(engine, text(length))
    assert_equal_runs(first, stock.cold[length])
    (slot,) = (r.slot for r in manager.store._records.values() if r.boundary == 512)
    sections = zip(manager.mover.layout.sections, ring_buffers(engine), strict=True)
    for section, (name, *_) in sections:
        held = manager.mover.host[slot][section.offset : section.offset + section.nbytes]
        expected = stock.cold[length].at_boundary[512][name].contiguous().view(torch.uint8)
        assert torch.equal(held, expected.flatten()), name
    ids, reference = stock.longer[length]
    poison_rings(engine)
    hit = run(engine, ids)
    assert hit.cached_tokens == 512
    assert_equal_runs(hit, reference)


def test_verify_steps_that_miss_the_boundary_keep_nothing(engine, manager, stock):
    """Several steps look as if they reached 512; one does, and the records of the others are discarded."""
    before = manager.stats.not_reached
    for length in SHORT:
        engine.flush()
        run(engine, text(length))
    assert manager.stats.not_reached > before
    assert manager.store.reserved == 0


def test_the_draft_may_be_extended_by_the_replay_of_a_graph(engine, manager, stock, monkeypatch):
    """As on ROCm by default: its runner's ``forward``, and whatever hooks it, is not called then."""
    draft = engine.draft_runner
    forward = inspect.unwrap(type(draft).forward)
    monkeypatch.setattr(draft, "forward", partial(forward, draft))
    run(engine, text(509))
    ids, reference = stock.longer[509]
    poison_rings(engine)
    hit = run(engine, ids)
    assert hit.cached_tokens == 512
    assert_equal_runs(hit, reference)


def test_a_host_hit_equals_the_cold_run(engine, manager, stock):
    run(engine, text(700))
    engine.tree.evict(EvictParams(num_tokens=10**9))
    poison_rings(engine)
    hit = run(engine, text(700))
    assert hit.details == {"device": 0, "host": 512}
    assert_equal_runs(hit, stock.cold[700])


def test_several_requests_at_once(engine, manager, stock):
    lengths = (700, 520, 509)
    for _ in range(2):
        poison_rings(engine)
        rids = [engine.submit(text(n), NEW_TOKENS, return_logprob=True) for n in lengths]
        for length, output in zip(lengths, engine.run_many(*rids), strict=True):
            assert output.output_ids == stock.cold[length].output_ids
            assert output.output_logprobs == stock.cold[length].logprobs
        engine.drain()
    assert manager.stats.restored > 0


def test_a_retracted_request_comes_back_through_the_gate(engine, manager, stock, monkeypatch):
    lengths, released = (700, 509), retract_often(engine, monkeypatch)
    rids = [engine.submit(text(n), NEW_TOKENS, return_logprob=True) for n in lengths]
    for length, output in zip(lengths, engine.run_many(*rids), strict=True):
        assert output.output_ids == stock.cold[length].output_ids
        assert output.output_logprobs == stock.cold[length].logprobs
    assert False in released, "nothing was retracted"


def test_an_abort_between_plan_and_result_keeps_nothing(engine, manager):
    rid = engine.submit(text(509), 64)
    pending = manager._pending
    for _ in range(40):
        engine.step()
        request = next(iter(pending._requests.values()), None)
        if request is not None and any(v.slots for v in request.verifies):
            break
    else:
        # Without overlap the result of a step is known when the step is over.
        assert not engine.scheduler.enable_overlap
    engine.abort(rid)
    engine.drain()
    assert engine.is_done(rid) and manager.store.reserved == 0


def test_sizes_and_rings(engine, manager):
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    configurator = create_memory_pool_configurator(engine.model_runner.kv_cache_configurator)
    assert staging_bytes(configurator) == manager.mover.staging.nbytes
    assert {r.size for r in manager.rings if r.spec.kind is Kind.DRAFT_WINDOW} == {
        128 + DRAFT_TOKENS - 1
    }


def test_a_draft_model_with_compressed_layers_is_refused(engine):
    with pytest.raises(ValueError, match="compressed layers, whose state no checkpoint holds"):
        rings_of(engine.pool, engine.pool)
