"""Captures of verify steps, which know whether they reached a boundary only when their result is known."""

from collections import deque

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
    manager.plan([Row("r0", 0, engine.generation[0], 0, 512, False)])
    manager.begin_forward()
    assert manager.armed and manager.unfinished
    manager.close_step()
    assert not manager.unfinished
    manager.release("r0")
