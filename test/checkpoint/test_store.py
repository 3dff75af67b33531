"""CheckpointStore: slots, pins, logical LRU. A model-based state machine holds check_integrity."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang_unified_kv.checkpoint.store import CheckpointStore, Published

PAGE = 256


def publish(store, key, boundary=PAGE, replace=True, mixed=False):
    slot = store.reserve()
    assert slot is not None
    return store.publish(key, boundary, slot, replace=replace, mixed=mixed)


def test_least_recently_used_goes_first_and_use_is_touch_or_pin():
    store = CheckpointStore(3, PAGE)
    for key in "abc":
        publish(store, key)
    store.touch("a")
    store.unpin(store.pin("b"))
    publish(store, "d")
    assert "c" not in store and all(k in store for k in "abd")
    assert store.evictions == 1


def test_a_pinned_record_is_never_evicted_and_its_slot_never_reused():
    store = CheckpointStore(2, PAGE)
    publish(store, "a")
    publish(store, "b")
    pinned = [store.pin("a"), store.pin("b")]
    assert store.reserve() is None
    store.remove("a")
    assert store.reserve() is None, "the slot of a removed record is still read by its restore"
    store.check_integrity()
    store.unpin(pinned[0])
    assert store.reserve() == pinned[0].slot
    store.check_integrity()


def test_replacing_a_pinned_record_keeps_the_old_bytes_until_unpinned():
    store = CheckpointStore(2, PAGE)
    publish(store, "a")
    old = store.pin("a")
    assert publish(store, "a") is Published.REPLACED
    assert store.pin("a").slot != old.slot
    assert store.reserve() is None
    store.unpin(old)
    assert store.reserve() == old.slot


def test_without_replace_an_existing_record_stays_and_the_slot_comes_back():
    store = CheckpointStore(2, PAGE)
    publish(store, "a")
    kept = store.pin("a")
    assert publish(store, "a", replace=False, mixed=True) is Published.KEPT_EXISTING
    assert store.pin("a") is kept and not kept.mixed and store.reserved == 0


def test_deepest_is_bounded_by_limit_and_chain():
    store = CheckpointStore(4, PAGE)
    chain = ["p1", "p2", "p3", "p4"]
    publish(store, "p1", 256)
    publish(store, "p3", 768)
    assert [store.deepest(chain, n) for n in (0, 255, 256, 767, 768, 9999)] == [
        0,
        0,
        256,
        256,
        768,
        768,
    ]
    assert store.deepest(chain[:2], 9999) == 256


def test_pins_from_before_a_reset_are_void():
    store = CheckpointStore(1, PAGE)
    publish(store, "a")
    record = store.pin("a")
    store.clear()
    store.unpin(record)
    store.check_integrity()
    publish(store, "a")
    store.unpin(record)
    assert store.pin("a").pins == 1


def test_capacity_must_hold_a_record():
    with pytest.raises(ValueError, match="at least one record, got 0"):
        CheckpointStore(0, PAGE)


class StoreMachine(RuleBasedStateMachine):
    """The store against a dictionary and a use-ordered list."""

    keys = st.sampled_from("abcdefgh")

    def __init__(self):
        super().__init__()
        self.store = CheckpointStore(4, PAGE)
        self.order: list[str] = []
        self.reserved: list[int] = []
        self.pins = []

    def used(self, key):
        if key in self.order:
            self.order.remove(key)
            self.order.append(key)

    @rule()
    def reserve(self):
        pinned = {r.key for r in self.pins if r.live}
        before = list(self.order)
        evictable = [k for k in before if k not in pinned]
        held = len(self.reserved) + len(before) + len({r.slot for r in self.pins if not r.live})
        evictions = self.store.evictions
        slot = self.store.reserve()
        if held < 4:
            assert slot is not None and self.store.evictions == evictions
        elif evictable:
            assert slot is not None
            # Pinned records in front are in use, hence the youngest now.
            while self.order[0] != evictable[0]:
                self.used(self.order[0])
            self.order.remove(evictable[0])
            assert evictable[0] not in self.store
        else:
            assert slot is None
        if slot is not None:
            self.reserved.append(slot)

    @precondition(lambda self: self.reserved)
    @rule(key=keys, replace=st.booleans())
    def publish(self, key, replace):
        slot = self.reserved.pop()
        outcome = self.store.publish(key, PAGE, slot, replace=replace, mixed=False)
        if key in self.order and not replace:
            assert outcome is Published.KEPT_EXISTING
            return
        assert outcome is (Published.REPLACED if key in self.order else Published.NEW)
        if key in self.order:
            self.order.remove(key)
        self.order.append(key)

    @precondition(lambda self: self.reserved)
    @rule()
    def discard(self):
        self.store.discard(self.reserved.pop())

    @rule(key=keys)
    def touch(self, key):
        self.store.touch(key)
        self.used(key)

    @rule(key=keys)
    def pin(self, key):
        record = self.store.pin(key)
        assert (record is not None) == (key in self.order)
        if record is not None:
            self.pins.append(record)
            self.used(key)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self):
        self.store.unpin(self.pins.pop())

    @rule(key=keys)
    def remove(self, key):
        assert self.store.remove(key) == (key in self.order)
        if key in self.order:
            self.order.remove(key)

    @invariant()
    def agrees(self):
        self.store.check_integrity()
        assert self.store.order() == self.order
        assert self.store.reserved == len(self.reserved)


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase
