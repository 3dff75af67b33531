"""The manager on rings whose rows say which request and position they hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_engine import PAGE, SLOTS, WINDOW, Engine, chain
from sglang_unified_kv.checkpoint.layout import Kind
from sglang_unified_kv.checkpoint.manager import CheckpointError, Row
from sglang_unified_kv.checkpoint.placement import Placement
from sglang_unified_kv.checkpoint.policy import Grid
from sglang_unified_kv.checkpoint.publish import NewRange


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 700), min_size=1, max_size=4), min_size=1, max_size=3),
    stride=st.integers(1, 2),
    extra=st.sampled_from([0, 3]),
    staging=st.integers(1, 12),
)
def test_every_capture_restores_to_what_the_run_held(lengths, stride, extra, staging):
    engine = Engine(records=64, staging=staging, stride=stride, extra=extra)
    ends = [0] * len(lengths)
    for i in range(len(lengths)):
        engine.fresh(i)
    for step in range(max(map(len, lengths))):
        spans = []
        for i, chunks in enumerate(lengths):
            if step < len(chunks):
                spans.append((f"r{i}", i, ends[i], ends[i] + chunks[step]))
                ends[i] += chunks[step]
        engine.forward(spans)
    stats = engine.manager.stats
    assert stats.dropped_no_slot == 0
    expected = sum(end // (PAGE * stride) for end in ends)
    assert stats.captured == expected - stats.dropped_no_staging
    for i, end in enumerate(ends):
        engine.commit(f"r{i}", end)
        for boundary in range(PAGE * stride, end + 1, PAGE * stride):
            if chain(f"r{i}")[boundary // PAGE - 1] in engine.manager.store:
                engine.resume(f"r{i}", "r99", SLOTS - 1, boundary, boundary + 5)
        engine.manager.release(f"r{i}")
    engine.manager.check_idle()


def test_decode_captures_at_the_page_boundary_alone():
    engine = Engine()
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 510)])
    for position in range(510, 514):
        engine.forward([("r0", 0, position, position + 1)], decode=True)
    assert engine.manager.stats.captured == 2
    engine.commit("r0", 514)
    engine.resume("r0", "r1", 1, 512, 600)


def test_more_ends_than_staging_slots_go_in_waves():
    engine = Engine(staging=1)
    spans = [(f"r{i}", i, 0, 256) for i in range(4)]
    for _, slot, _, _ in spans:
        engine.fresh(slot)
    engine.forward(spans)
    assert engine.manager.stats.captured == 4 and engine.manager.stats.dropped_no_staging == 0
    for i in range(4):
        engine.commit(f"r{i}", 256)
        engine.resume(f"r{i}", "r9", 4, 256, 300)


def test_h17_more_interior_boundaries_than_staging_drop_the_shallow_ones_and_count():
    engine = Engine(staging=2)
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 1100)])
    engine.commit("r0", 1100)
    assert engine.manager.stats.dropped_no_staging == 2
    assert [
        b for b in (256, 512, 768, 1024) if chain("r0")[b // PAGE - 1] in engine.manager.store
    ] == [
        768,
        1024,
    ]


def test_full_store_drops_the_capture_and_counts():
    engine = Engine(records=1)
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 600)])
    assert engine.manager.stats.dropped_no_slot == 1
    engine.commit("r0", 512)
    assert engine.manager.store.deepest(chain("r0"), 600) == 512


def test_invariant_1_h4_new_leaf_replaces_and_a_skipped_capture_removes():
    engine = Engine(stride=2)
    for rid, slot in (("r0", 0), ("r1", 1)):
        engine.fresh(slot)
        engine.forward([(rid, slot, 0, 1100)])
    same = chain("r0")
    engine.manager.commit("r0", same, 1024, [NewRange(0, 1024, leaf=True)])
    engine.manager.placement = Placement(Grid(PAGE, 4), engine.manager.store)
    engine.manager.release("r1")
    engine.fresh(2)
    engine.forward([("r2", 2, 0, 1100)])
    # The pages of r0 left the tree; r2 brings new ones and captured 1024 only.
    engine.manager.commit("r2", same, 1024, [NewRange(0, 1024, leaf=True)])
    assert engine.manager.store.deepest(same, 1023) == 0, "r0's record at 512 pairs with r2's pages"
    assert engine.manager.stats.replaced == 1 and engine.manager.stats.removed == 1
    engine.fresh(3)
    engine.manager.request_restore("r3", same, 1024)
    engine.plan([Row("r3", 3, engine.generation[3], 1024, 1100, False)])
    engine.manager.begin_forward()
    assert engine.rings[0].buffer[3 * WINDOW, 0] == 2, "the record must be r2's"


def test_invariant_1_h4_h5_overlap_keeps_the_record_and_attaches_a_missing_one_as_mixed():
    engine = Engine()
    for rid, slot in (("r0", 0), ("r1", 1)):
        engine.fresh(slot)
        engine.forward([(rid, slot, 0, 600)])
    same = chain("r0")
    engine.manager.commit("r0", same, 512, [NewRange(0, 512, leaf=True)])
    engine.manager.store.remove(same[1])
    engine.manager.commit("r1", same, 512, [NewRange(0, 256, leaf=False)])
    stats = engine.manager.stats
    # Mixed are the record kept beside re-pointed pages and the one attached to another run's pages.
    assert (stats.kept_existing, stats.mixed) == (1, 2)
    assert not engine.manager.store.pin(same[0]).mixed and engine.manager.store.pin(same[1]).mixed


def test_strict_provenance_drops_what_live_attaches_and_removes_under_overwritten_pages():
    engine = Engine(strict=True)
    for rid, slot in (("r0", 0), ("r1", 1)):
        engine.fresh(slot)
        engine.forward([(rid, slot, 0, 600)])
    same = chain("r0")
    engine.manager.commit("r0", same, 512, [NewRange(0, 512, leaf=True)])
    engine.manager.commit("r1", same, 512, [NewRange(0, 256, leaf=False)])
    assert same[0] not in engine.manager.store, "its pages are another run's now"
    assert same[1] in engine.manager.store, "untouched pages keep their record"
    assert engine.manager.stats.dropped_provenance == 2
    engine.manager.release("r0")
    engine.manager.release("r1")
    engine.manager.check_idle()


def test_strict_provenance_drops_everything_behind_a_page_of_another_run():
    engine = Engine(strict=True)
    for rid, slot in (("r0", 0), ("r1", 1)):
        engine.fresh(slot)
        engine.forward([(rid, slot, 0, 1100)])
    same = chain("r0")
    engine.manager.commit("r0", same, 512, [NewRange(0, 512, leaf=True)])
    for boundary in (256, 512):
        engine.manager.store.remove(same[boundary // PAGE - 1])
    # r1's [0, 512) was computed again and thrown away for r0's pages; [512, 1024) is its own.
    engine.manager.commit("r1", same, 1024, [NewRange(512, 1024, leaf=True)])
    assert len(engine.manager.store) == 0
    assert engine.manager.stats.dropped_provenance == 4


def test_a_run_that_resumed_from_a_checkpoint_stays_pure_under_strict_provenance():
    engine = Engine(strict=True)
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 600)])
    engine.commit("r0", 512)
    engine.fresh(1)
    engine.manager.request_restore("r1", chain("r0"), 512)
    engine.forward([("r1", 1, 512, 1100)])
    engine.manager.commit("r1", chain("r0"), 1024, [NewRange(512, 1024, leaf=True)])
    assert engine.manager.store.deepest(chain("r0"), 1100) == 1024


def test_interior_records_are_saved_before_their_staging_slots_are_used_again():
    engine = Engine(staging=1)
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 512)])
    engine.commit("r0", 512)
    for boundary in (256, 512):
        engine.resume("r0", "r1", 1, boundary, boundary + 40)


def test_staging_refuses_a_slot_whose_record_is_not_saved():
    mover = Engine(staging=2).manager.mover
    mover.take(2)
    with pytest.raises(AssertionError, match="not saved"):
        mover.take(1)


def test_dropped_captures_evict_nothing_and_every_request_keeps_its_deepest():
    engine = Engine(records=4, staging=2)
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 256)])
    engine.commit("r0", 256)
    for slot in (1, 2):
        engine.fresh(slot)
    engine.forward([("r1", 1, 0, 1100), ("r2", 2, 0, 900)])
    assert engine.manager.stats.dropped_no_staging == 5
    assert engine.manager.store.evictions == 0 and chain("r0")[0] in engine.manager.store
    for rid, length, deepest in (("r1", 1100, 1024), ("r2", 900, 768)):
        engine.commit(rid, length)
        assert engine.manager.store.deepest(chain(rid), length) == deepest


def test_decode_captures_of_a_request_supersede_its_older_ones():
    engine = Engine(records=8)
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 300)])
    for page in range(2, 7):
        end = page * PAGE
        engine.forward([("r0", 0, end - PAGE + (44 if page == 2 else 0), end - 1)])
        engine.manager.release("nobody")
        engine.forward([("r0", 0, end - 1, end)], decode=True)
    assert engine.manager.stats.superseded == 3
    engine.commit("r0", 6 * PAGE)
    held = [
        b for b in range(PAGE, 7 * PAGE, PAGE) if chain("r0")[b // PAGE - 1] in engine.manager.store
    ]
    assert held == [256, 1280, 1536], "the prompt's and the last two of the output"


def test_a_row_released_before_launch_is_computed_for_nobody():
    engine = Engine()
    engine.fresh(0)
    engine.fresh(1)
    engine.plan(
        [Row("gone", None, -1, 255, 256, True), Row("r1", 1, engine.generation[1], 0, 600, False)]
    )
    engine.manager.begin_forward()
    for i, ring in enumerate(engine.rings):
        flat = torch.cat([engine.rows("r8", i, 255, 256), engine.rows("r1", i, 0, 600)])
        engine.manager.capture_interior(ring.spec.kind, ring.buffer.data_ptr(), flat)
    assert not list(engine.manager.end_waves())
    engine.manager.close_step()
    engine.commit("r1", 512)
    engine.resume("r1", "r2", 2, 512, 600)
    engine.manager.release("r1")
    engine.manager.check_idle()


def test_invariant_3_h6_a_fresh_row_without_its_restore_ends_the_process():
    engine = Engine()
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 600)])
    engine.commit("r0", 512)
    with pytest.raises(CheckpointError, match="admitted at 768 tokens but no checkpoint"):
        engine.manager.request_restore("r1", chain("r0"), 768)
    engine.fresh(1)
    with pytest.raises(CheckpointError, match="fresh slot 1, restore from 0"):
        engine.forward([("r1", 1, 512, 600)])


def test_invariant_3_a_continued_row_must_not_be_restored():
    engine = Engine()
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 600)])
    engine.commit("r0", 512)
    engine.manager.request_restore("r0", chain("r0"), 512)
    with pytest.raises(CheckpointError, match="its own slot 0, restore from 512"):
        engine.forward([("r0", 0, 600, 700)])


def test_invariant_3_h7_a_one_token_extend_is_not_taken_for_a_fresh_row():
    engine = Engine()
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 511)])
    engine.fresh(1)
    engine.forward([("r1", 1, 0, 300), ("r0", 0, 511, 512)])
    engine.commit("r0", 512)
    engine.resume("r0", "r9", 4, 512, 600)


def test_invariant_3_h6_captures_of_a_batch_never_evict_what_it_restores():
    engine = Engine(records=2)
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 512)])
    engine.commit("r0", 512)
    engine.fresh(1)
    engine.manager.request_restore("r1", chain("r0"), 512)
    engine.fresh(2)
    engine.forward([("r2", 2, 0, 600), ("r1", 1, 512, 600)])
    assert chain("r0")[1] in engine.manager.store and engine.manager.stats.dropped_no_slot == 1
    ring = engine.rings[0]
    rows = [ring.buffer[ring.size + p % ring.size] for p in range(512, 600)]
    assert torch.equal(torch.stack(rows), engine.rows("r1", 0, 512, 600))


def test_invariant_6_h21_release_leaves_nothing_pinned_or_pending():
    engine = Engine()
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 600)])
    engine.commit("r0", 512)
    engine.manager.request_restore("r1", chain("r0"), 512)
    engine.forward([("r0", 0, 600, 800)])
    for rid in ("r1", "r0", "never seen"):
        engine.manager.release(rid)
    assert engine.manager.stats.discarded == 1
    engine.manager.check_idle()


def test_a_section_that_no_layer_handed_over_is_an_error_not_a_record():
    engine = Engine()
    engine.fresh(0)
    engine.plan([Row("r0", 0, 1, 0, 600, False)])
    engine.manager.begin_forward()
    with pytest.raises(RuntimeError, match="were not captured in this forward"):
        next(engine.manager.end_waves(), None)


def test_a_kind_that_the_backend_did_not_capture_is_an_error_not_a_record():
    engine = Engine()
    engine.fresh(0)
    engine.plan([Row("r0", 0, 1, 0, 256, False)])
    engine.manager.begin_forward()
    waves = engine.manager.end_waves()
    next(waves)
    engine.manager.capture_ends(frozenset({Kind.WINDOW}))
    with pytest.raises(RuntimeError, match="were not captured behind this forward"):
        next(waves)


def test_reset_forgets_everything():
    engine = Engine()
    engine.fresh(0)
    engine.forward([("r0", 0, 0, 600)])
    engine.manager.reset()
    engine.manager.check_idle()
    assert len(engine.manager.store) == 0
