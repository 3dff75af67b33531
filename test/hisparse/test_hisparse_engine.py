"""The whole engine: what decodes through swapped rows is what decodes with all rows on the device."""

import pytest
import torch
from hisparse_engine import (
    BUFFER,
    PAGE,
    TOKENS,
    assert_nothing_is_held,
    coordinator_of,
    engine_of,
    run,
    run_together,
)
from sglang_unified_kv.edits.report.export import features_of
from sglang_unified_kv.edits.report.samples import samples_of
from sglang_unified_kv.reference.harness import prompt

LONG = 2400
"""Tokens with 600 rows: more than the buffer holds and than a step reads."""
ENGINE = {"chunked_prefill_size": 1024}


def passcode(code: int, at: int) -> list[int]:
    """A prompt that differs from the others in 64 tokens at ``at`` alone."""
    ids = prompt(7, LONG)
    ids[at : at + 64] = prompt(1000 + code, 64)
    return ids


TOP, COLD = 0, 2080
"""Where rows are hot at first, and behind those that are, before the window."""
PROMPTS = {
    "top 1": passcode(1, TOP),
    "top 2": passcode(2, TOP),
    "cold 1": passcode(1, COLD),
    "cold 2": passcode(2, COLD),
    "short": prompt(3, 300),
    "tiny": prompt(9, 40),
    "grows": prompt(4, 4 * BUFFER - 1),
}


@pytest.fixture(scope="module")
def resident(make_engine):
    """Every prompt without HiSparse."""
    with engine_of(make_engine, hisparse=False, **ENGINE) as engine:
        return {name: run(engine, ids) for name, ids in PROMPTS.items()}


@pytest.fixture(scope="module")
def engine(make_engine, resident):
    # After the reference: one engine at a time.
    with engine_of(make_engine, hisparse=True, **ENGINE) as engine:
        yield engine


@pytest.fixture
def loads(engine, monkeypatch):
    """Number of rows of each load from the host."""
    counts = []
    swap = coordinator_of(engine).swap
    load = swap.load

    def counted(layer, host_rows, device_rows):
        counts.append(len(host_rows))
        load(layer, host_rows, device_rows)

    monkeypatch.setattr(swap, "load", counted)
    return counts


@pytest.mark.parametrize("name, swaps", {"short": False, "grows": True, "top 1": True}.items())
def test_equals_the_run_without(engine, resident, loads, name, swaps):
    assert run(engine, PROMPTS[name]).same_bits(resident[name])
    assert bool(sum(loads)) is swaps
    assert_nothing_is_held(engine)


def test_the_answer_depends_on_rows_that_come_from_the_host(engine, resident, monkeypatch):
    assert not torch.equal(resident["cold 1"].logits, resident["cold 2"].logits)
    swap = coordinator_of(engine).swap
    monkeypatch.setattr(swap, "load", lambda layer, host_rows, device_rows: None)
    skipped = run(engine, PROMPTS["cold 1"])
    assert not torch.equal(skipped.logits, resident["cold 1"].logits)


def test_what_was_hot_comes_back_from_the_host(engine, resident, monkeypatch):
    assert not torch.equal(resident["top 1"].logits, resident["top 2"].logits)
    coordinator = coordinator_of(engine)
    allocate = coordinator.alloc_device_buffer

    def allocate_and_forget(req):
        allocate(req)
        slot = req.kv.req_pool_idx
        rows = coordinator.req_to_device_buffer[slot, :BUFFER]
        for layer in coordinator.mem_pool_device.rows(0):
            layer[rows] = 0x3F
        # Every place is held by a position that this prompt does not have.
        others = torch.arange(1000, 1000 + BUFFER)
        at = coordinator.residency
        at.tokens[:, slot, :BUFFER] = others
        at.places[:, slot] = -1
        at.places[:, slot, others] = torch.arange(BUFFER, dtype=torch.int16)

    monkeypatch.setattr(coordinator, "alloc_device_buffer", allocate_and_forget)
    assert run(engine, PROMPTS["top 1"]).same_bits(resident["top 1"])


def test_positions_without_a_row_reach_no_ring(engine):
    pool = coordinator_of(engine).mem_pool_device
    rings = engine.pool.unified_swa_pages
    found = pool.stored_at(torch.tensor([-1, 0, 5], dtype=torch.int32))
    assert found.tolist() == [rings] * 3 and found.dtype == torch.int32


def test_the_log_counts_device_and_host_rows(engine):
    rid = engine.submit(PROMPTS["top 1"], 6)
    coordinator = coordinator_of(engine)
    while not coordinator.req_device_buffer_size.any():
        engine.step()
    engine.step()
    parts = engine.scheduler.pool_stats_observer.get_pool_stats().get_decode_usage_msg_parts()
    # The buffer, the page of the newest row, and the page that this row shares with rows now cold.
    assert f"#gpu token: {BUFFER + 2 * PAGE}" in parts
    assert f"#cpu token: {-(-(LONG // 4) // PAGE) * PAGE}" in parts
    assert "#full token: 2560" in parts
    engine.run_many(rid)
    engine.step()
    assert_nothing_is_held(engine)


def test_what_is_exported_is_what_was_copied(engine, loads):
    assert features_of(engine.scheduler) == ["ring", "hisparse"]

    def exported():
        samples = samples_of(engine.scheduler)
        names = {(s.name.removeprefix("sglang:unified_kv_"), *s.labels): s.value for s in samples}
        return names

    coordinator, before = coordinator_of(engine), exported()
    rid = engine.submit(PROMPTS["top 1"], 6)
    while not coordinator.req_device_buffer_size.any():
        engine.step()
    during = exported()
    engine.run_many(rid)
    engine.step()
    after = exported()
    assert_nothing_is_held(engine)
    swapped, reads = (
        after[(f"hisparse_{name}_total",)] - before[(f"hisparse_{name}_total",)]
        for name in ("swap_ins", "reads")
    )
    assert 0 < swapped == sum(loads) < reads
    layers = len(coordinator.mem_pool_device.rows(0))
    row_bytes = coordinator.mem_pool_device.rows(0)[0].shape[1]
    moved = {
        path: after["hisparse_bytes_total", path] - before["hisparse_bytes_total", path]
        for path in ("host_to_device", "device_to_host")
    }
    # Its 600 rows, the last of them once more behind the prompt, and those that decode completes.
    assert moved["host_to_device"] == swapped * row_bytes
    assert 600 * layers * row_bytes <= moved["device_to_host"] <= 603 * layers * row_bytes
    totals = {"host": coordinator.mem_pool_host.size, "device": TOKENS // 3 // 4}
    for pool, least in (("host", 600), ("device", BUFFER)):
        name = f"hisparse_{pool}_rows"
        states = ("free", "used") if pool == "host" else ("free", "promised", "used")
        for moment in (before, during, after):
            assert sum(moment[name, state] for state in states) == totals[pool]
        assert before[name, "used"] == after[name, "used"] == 0
        assert during[name, "used"] >= least


def test_short_and_long_requests_together(engine, resident):
    """The device has rows for three of them at a time, so one waits."""
    names = ["top 1", "short", "cold 1", "tiny"]
    answers = run_together(engine, [PROMPTS[name] for name in names])
    for name, answer in zip(names, answers, strict=True):
        assert answer.same_tokens(resident[name]), name
    assert_nothing_is_held(engine)


@pytest.mark.parametrize(
    "when, name",
    [
        ("queued", "short"),
        ("in chunks", "cold 1"),
        ("on its way to the host", "short"),
        ("decoding", "cold 1"),
    ],
)
def test_an_aborted_request_leaves_nothing(engine, resident, when, name):
    scheduler, coordinator = engine.scheduler, coordinator_of(engine)
    stays = engine.submit(PROMPTS["tiny"], 12, return_logprob=True)
    goes = engine.submit(PROMPTS[name], 12)
    reached = {
        "queued": lambda: True,
        "in chunks": lambda: scheduler.chunked_req is not None,
        "on its way to the host": lambda: (
            goes in [a.req.rid for a in coordinator.ack_staging_queue]
        ),
        "decoding": lambda: goes in [r.rid for r in scheduler.running_batch.reqs],
    }[when]
    while not reached():
        engine.step()
    engine.abort(goes)
    kept, gone = engine.run_many(stays, goes)
    assert gone.finish_reason["type"] == "abort"
    assert kept.output_ids == resident["tiny"].output_ids
    assert kept.output_logprobs == resident["tiny"].logprobs
    engine.step()
    assert_nothing_is_held(engine)


def test_a_retracted_request_answers_the_same(engine, resident, monkeypatch):
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    seen = {"steps": 0, "retracted": []}
    check, retract = ScheduleBatch.check_decode_mem, ScheduleBatch.retract_decode

    def short_once(self, selected_indices=None):
        if selected_indices is None and len(self.reqs) == 2:
            seen["steps"] += 1
            if seen["steps"] == 6:
                return False
        return check(self, selected_indices)

    def noted(self):
        found = retract(self)
        seen["retracted"] += [len(req.origin_input_ids) for req in found[0]]
        return found

    monkeypatch.setattr(ScheduleBatch, "check_decode_mem", short_once)
    monkeypatch.setattr(ScheduleBatch, "retract_decode", noted)
    answers = run_together(engine, [PROMPTS["short"], PROMPTS["cold 1"]])
    assert seen["retracted"] == [LONG]
    assert answers[0].same_tokens(resident["short"])
    assert answers[1].same_tokens(resident["cold 1"])
    assert_nothing_is_held(engine)


def test_a_prompt_that_never_fits_is_refused_at_once(engine):
    allocator = engine.scheduler.token_to_kv_pool_allocator
    longest = allocator.hisparse_attn_allocator.size * 4 + 3
    assert longest == TOKENS // 3 + 3
    refused = engine.run(prompt(1, longest + 1), 4)
    assert refused.finish_reason["type"] == "abort"
    assert (
        f"exceeds the KV memory budget: input_len={longest + 1}" in refused.finish_reason["message"]
    )
    # What fits may not grow beyond what it could be retracted from.
    limits = {"token_capacity": TOKENS, "sliding_window_size": 128, "chunk_size": 1024}
    assert allocator.max_new_tokens_for_memory(longest - 5, 100, **limits) == 5
    assert_nothing_is_held(engine)
