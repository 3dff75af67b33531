"""Captures of verify steps, which know whether they reached a boundary only when their result is known."""

from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_engine import PAGE, WINDOW, Engine, chain
from sglang_unified_kv.checkpoint.manager import CheckpointError, Row

TOKENS = 4


def engine_with_drafts(**options):
    return Engine(extra=TOKENS - 1, draft=True, **options)


@settings(max_examples=80, deadline=None)
@given(
    prompt=st.integers(WINDOW, 2 * PAGE),
    accepts=st.lists(st.integers(1, TOKENS), min_size=1, max_size=250),
    lag=st.integers(0, 1),
)
def test_the_step_that_reached_the_boundary_keeps_it(prompt, accepts, lag):
    """With ``lag`` a step is planned before the result of the one before it is known, as under overlap."""
    engine, manager = engine_with_drafts(records=24), None
    manager = engine.manager
    engine.fresh(0)
    engine.forward([("r0", 0, 0, prompt)])
    known = start = prompt
    unknown = deque()
    for accepted in accepts:
        engine.verify("r0", 0, known, start, TOKENS)
        unknown.append((start, start + accepted))
        start += accepted
        while len(unknown) > lag:
            first, known = unknown.popleft()
            manager.verified("r0", first, known)
            manager.check_integrity()
    while unknown:
        manager.verified("r0", *unknown.popleft())
    engine.commit("r0", start)
    engine.manager.release("r0")
    manager.check_idle()
    assert manager.store.reserved == 0
    crossed = [b for b in range(PAGE, start + 1, PAGE) if b > prompt]
    found = [b for b in crossed if chain("r0")[b // PAGE - 1] in manager.store]
    # A request keeps its latest decode captures alone.
    assert found == crossed[-2:]
    for boundary in found:
        engine.resume("r0", "r9", 1, boundary, boundary + 40)


def test_a_boundary_that_no_step_reached_is_discarded():
    engine = engine_with_drafts()
    manager = engine.manager
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 509)])
    engine.verify("r0", 0, 509, 509, TOKENS)
    assert manager.store.reserved == 2, "the prompt's boundary and the one that may be reached"
    manager.verified("r0", 509, 511)
    assert manager.stats.not_reached == 1 and manager.store.reserved == 1


def test_release_discards_what_verify_steps_in_flight_hold():
    engine = engine_with_drafts()
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 509)])
    engine.verify("r0", 0, 509, 509, TOKENS)
    engine.manager.release("r0")
    engine.manager.check_idle()
    assert engine.manager.store.reserved == 0


@pytest.mark.parametrize(
    ("start", "end"), [(508, 509), (509, 514)], ids=["earlier than planned", "more than it can"]
)
def test_a_result_that_was_not_planned_ends_the_process(start, end):
    engine = engine_with_drafts()
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 509)])
    with pytest.raises(CheckpointError, match=r"verified \[509, 510\), which was not planned"):
        engine.manager.verified("r0", 509, 510)
    engine.verify("r0", 0, 509, 509, TOKENS)
    with pytest.raises(CheckpointError, match=rf"verified \[{start}, {end}\), planned was"):
        engine.manager.verified("r0", start, end)


def test_captures_that_no_forward_took_are_seen():
    """A draft model whose forward did not follow the target's."""
    engine = engine_with_drafts()
    engine.fresh(0)
    manager = engine.manager
    engine.plan([Row("r0", 0, engine.generation[0], 0, 512, False)])
    manager.begin_forward()
    assert manager.armed and manager.unfinished
    manager.close_step()
    assert not manager.unfinished
    manager.release("r0")


def test_a_draft_row_of_a_token_that_never_came_is_in_no_record():
    """A chunk ended at 500, and the draft's last row is from a token that was only sampled."""
    engine = engine_with_drafts()
    manager = engine.manager
    engine.fresh(0)
    engine.plan([Row("r0", 0, engine.generation[0], 0, 500, False, next_known=False)])
    manager.close_step()
    step = [Row("r0", 0, engine.generation[0], 500, 1000, False)]
    manager.plan(step)
    planned = {c.boundary for c in manager._step.interior + manager._step.ends}
    manager.close_step()
    # The window of 512 reaches back to the foreign row at 499, that of 768 does not.
    assert planned == {768} and manager.stats.dropped_draft == 1
    manager.release("r0")
    manager.check_idle()
    engine.plan([Row("r0", 0, engine.generation[0], 500, 1000, False)])
    assert {c.boundary for c in manager._step.interior} == {512, 768}


def test_without_a_draft_the_sampled_token_is_in_no_row():
    engine = Engine()
    engine.fresh(0)
    engine.plan([Row("r0", 0, engine.generation[0], 0, 512, False, next_known=False)])
    assert {c.boundary for c in engine.manager._step.interior + engine.manager._step.ends} == {
        256,
        512,
    }


@pytest.mark.parametrize(("next_token", "known"), [(7, True), (None, False)])
def test_sglang_says_whether_a_chunk_knows_its_next_token(monkeypatch, next_token, known):
    from sglang_unified_kv.edits.exact import scheduler

    monkeypatch.setattr(scheduler, "key_of", lambda req: "r")
    chunked, other = (
        SimpleNamespace(kv=SimpleNamespace(req_pool_idx=i, holds_kv=True), origin_input_ids=[0] * 9)
        for i in range(2)
    )
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True),
        prefix_lens=[0, 0],
        extend_lens=[512, 512],
        reqs=[chunked, other],
        chunked_req=chunked,
        chunked_req_next_prompt_token=next_token,
        req_to_token_pool=SimpleNamespace(req_generation=[1, 1]),
    )
    # What the other samples is its next token.
    assert [row.next_known for row in scheduler.rows_of(batch)] == [known, True]
