"""Pins and slots of records on their way to and from storage."""

import pytest
from sglang_unified_kv.checkpoint.stats import Stats
from sglang_unified_kv.checkpoint.storage import Fetch, StorageTraffic
from sglang_unified_kv.checkpoint.store import CheckpointStore

PAGE = 256


@pytest.fixture
def store():
    return CheckpointStore(8, PAGE)


@pytest.fixture
def traffic(store):
    return StorageTraffic(store, Stats())


def publish(store, *keys):
    for key in keys:
        store.publish(key, PAGE, store.reserve(), replace=False, mixed=False)


def test_a_record_being_saved_keeps_its_slot(store, traffic):
    publish(store, "a")
    save = traffic.save(["a"])
    slot = save.records[0].slot
    taken = [store.reserve() for _ in range(7)]
    assert store.reserve() is None and slot not in taken
    traffic.saved(save)
    assert store.reserve() == slot


def test_a_record_is_saved_once_until_storage_is_emptied(store, traffic):
    publish(store, "a", "b")
    assert [r.key for r in traffic.save(["a", "missing"]).records] == ["a"]
    assert [r.key for r in traffic.save(["a", "b"]).records] == ["b"]
    assert traffic.save(["a", "b"]) is None
    store.forget_stored()
    assert len(traffic.save(["a", "b"]).records) == 2


def test_at_most_half_of_the_store_waits_for_storage(store, traffic):
    publish(store, *"abcdef")
    first = traffic.save("abcdef")
    assert len(first.records) == traffic.saving == 4
    assert traffic._stats.save_dropped == 2
    traffic.saved(first)
    assert [r.key for r in first.records] == list("fedc")
    assert [r.key for r in traffic.save("abcdef").records] == list("ba")


def test_a_replaced_record_is_freed_when_saved(store, traffic):
    publish(store, "a")
    save = traffic.save(["a"])
    store.publish("a", PAGE, store.reserve(), replace=True, mixed=False)
    store.check_integrity()
    traffic.saved(save)
    store.check_integrity()
    assert store.pinned == 0


def test_a_fetch_reserves_a_slot_per_batch_deepest_first(store, traffic):
    pinned = [store.reserve() for _ in range(6)]
    fetch = Fetch(0, span=2)
    assert traffic.fetch(fetch, 7) and set(fetch.slots) == {3, 2}
    traffic.fetched(fetch)
    for slot in pinned:
        store.discard(slot)
    store.check_integrity()
    assert store.reserved == traffic.fetching == 0


def test_a_fetch_without_any_slot_is_declined_unless_records_are_resident(store, traffic):
    publish(store, "b")
    store.pin("b")
    for _ in range(7):
        store.reserve()
    assert not traffic.fetch(Fetch(0, 128), 4)
    assert traffic.fetch(Fetch(0, 128, {2: "b"}), 4)


def test_a_batch_that_ends_at_a_resident_record_needs_no_slot(store, traffic):
    publish(store, "b", "c")
    fetch = Fetch(0, 2, {2: "b", 3: "c"})
    assert traffic.fetch(fetch, 4) and set(fetch.slots) == {1}
    whole = Fetch(0, 2, {2: "b", 3: "c"})
    assert traffic.fetch(whole, 3) and not whole.slots


def test_a_resident_record_that_had_to_make_room_is_read_from_storage(traffic):
    small = CheckpointStore(1, PAGE)
    traffic = StorageTraffic(small, Stats())
    publish(small, "a")
    fetch = Fetch(0, 128, {1: "a"})
    assert traffic.fetch(fetch, 4)
    assert fetch.slots and not fetch.resident and "a" not in small


def test_pinned_records_are_passed_over_once(store):
    publish(store, *"abcdefgh")
    for key in "abc":
        store._records[key].pins = 1
    store.reserve()
    assert store.order() == list("efghabc")


def test_what_arrived_is_published_and_the_rest_given_back(store, traffic):
    fetch = Fetch(512, span=2)
    traffic.fetch(fetch, 6)
    fetch.arrived.update({2: fetch.slots[0], 4: fetch.slots[1], 6: fetch.slots[2]})
    assert fetch.usable(5) == 4 and fetch.usable(1) == 0
    traffic.publish(fetch, list("uvwxyz"), 4, own_pages=True)
    assert store.get("v").boundary == 1024 and store.get("x").boundary == 1536
    assert "z" not in store and store.get("v").stored and not store.get("v").mixed
    traffic.fetched(fetch)
    store.check_integrity()
    assert store.reserved == 0 and traffic._stats.fetch_unused == 1


def test_records_of_another_run_than_their_pages_are_mixed(store, traffic):
    publish(store, "v")
    fetch = Fetch(0, 128, {2: "v"})
    traffic.fetch(fetch, 2)
    fetch.arrived.update({2: None})
    traffic.publish(fetch, list("uv"), 2, own_pages=True)
    assert traffic._stats.mixed == 1
    traffic.fetched(fetch)
    other = Fetch(0, 128)
    traffic.fetch(other, 1)
    other.arrived[1] = other.slots[0]
    traffic.publish(other, ["w"], 1, own_pages=False)
    assert store.get("w").mixed and traffic._stats.mixed == 2


def test_a_record_in_memory_is_not_replaced_by_the_stored_one(store, traffic):
    fetch = Fetch(0, 128)
    traffic.fetch(fetch, 1)
    publish(store, "a")
    kept = store.get("a").slot
    fetch.arrived[1] = fetch.slots[0]
    traffic.publish(fetch, ["a"], 1, own_pages=True)
    traffic.fetched(fetch)
    store.check_integrity()
    assert store.get("a").slot == kept


def test_after_a_reset_old_operations_touch_nothing(store, traffic):
    publish(store, "a")
    save, fetch = traffic.save(["a"]), Fetch(0, 128)
    traffic.fetch(fetch, 1)
    fetch.arrived[1] = fetch.slots[0]
    store.clear()
    traffic.clear()
    publish(store, "a")
    traffic.saved(save)
    traffic.publish(fetch, ["b"], 1, own_pages=True)
    traffic.fetched(fetch)
    store.check_integrity()
    assert "b" not in store and store.pinned == store.reserved == 0


def test_stopped_threads_hold_nothing_and_what_they_left_is_saved_later(store, traffic):
    publish(store, "a")
    traffic.save(["a"])
    traffic.fetch(Fetch(0, 128), 300)
    traffic.finish_all()
    traffic.check_idle()
    store.check_integrity()
    assert store.pinned == store.reserved == traffic.saving == 0
    assert not store.get("a").stored
