"""G2, G8: the decode node of a disaggregated deployment admits by request slots, and waits for pages."""

import pytest
from decode_node import DecodeNode
from ring_objects import PAGE, Cached, allocator_of

RADIX = pytest.mark.parametrize("radix", [False, True], ids=["plain", "radix"])


@RADIX
@pytest.mark.parametrize("slots", [1, 6, 24])
def test_g2_every_slot_is_used_and_the_rest_waits(slots, radix):
    node = DecodeNode(True, slots, radix=radix)
    empty = node.free()
    entries = node.enqueue(slots + 2)
    admitted = node.pop()
    assert admitted == [entry.req for entry in entries[:slots]]
    assert [entry.kv_receiver.sent for entry in entries] == [1] * slots + [0] * 2
    assert node.queue.queue == entries[slots:] and not node.aborted
    assert node.pop() == []
    node.finish(admitted[-1])
    assert node.pop() == [entries[slots].req]
    assert node.queue.queue == entries[slots + 1 :] and not node.aborted
    for request in list(node.running):
        node.finish(request)
    assert node.free() == empty


@RADIX
@pytest.mark.parametrize("slots", [6, 24])
def test_g2_stock_charges_tokens(slots, radix):
    """Room for all that a request may generate is kept in the ring's tokens, which it never takes."""
    node = DecodeNode(False, slots, radix=radix)
    node.enqueue(1)
    assert len(node.pop()) <= 1
    node.enqueue(slots + 1)
    assert node.pop() == [] and node.free()[0] >= slots - 1


@RADIX
def test_g2_the_last_of_many_slots(radix):
    node = DecodeNode(True, 256, radix=radix)
    node.enqueue(255, length=10, new=1)
    assert len(node.pop()) == 255
    node.enqueue(2)
    assert len(node.pop()) == 1 and not node.aborted


@RADIX
def test_g2_retracted_requests_come_first(radix):
    node = DecodeNode(True, 6, radix=radix)
    node.enqueue(3)
    assert len(node.pop()) == 3
    retracted = node.retract(2)
    entries = node.enqueue(2)
    assert node.pop() == [entries[0].req]
    assert node.resume() == retracted
    assert node.pop() == []


@RADIX
@pytest.mark.parametrize("fixes", [False, True], ids=["stock", "fixed"])
def test_g2_every_slot_is_resumed(fixes, radix):
    node = DecodeNode(fixes, 6, radix=radix)
    retracted = node.retract(8)
    resumed = node.resume()
    # With a radix cache, stock reserves 512 tokens of window for each.
    assert resumed == retracted[: 6 if fixes or not radix else 3]
    assert node.queue.retracted_queue == retracted[len(resumed) :]
    node.finish(resumed[0])
    assert node.resume() == retracted[len(resumed) :][:1]


@pytest.mark.parametrize("fixes", [False, True], ids=["stock", "fixed"])
def test_g2_a_small_server_does_not_refuse_what_it_has_a_slot_for(fixes):
    """Stock compares a window tail and a reserve of 768 tokens with two slots' 512."""
    node = DecodeNode(fixes, 2, radix=True)
    assert node.refuses_for_good(node.request()) is not fixes


def test_reclaiming_says_what_is_short():
    allocator, rows = allocator_of(True, 2, 4096)
    assert allocator.reclaim_for_prealloc(None, 4096, 768) is None
    rows.alloc_rows(2)
    assert allocator.reclaim_for_prealloc(None, 4096, 768) == "every request slot is taken"


@pytest.mark.parametrize("fixes", [False, True], ids=["stock", "fixed"])
@pytest.mark.parametrize("path", ["pop", "resume", "stage"])
def test_g8_without_pages_a_request_stays_queued(path, fixes):
    """15 prompts are cached and count as evictable; four pages are free, and eight are needed."""
    node = DecodeNode(fixes, 24, tokens=15 * Cached.LENGTH + 4 * PAGE, radix=True, cached=15)
    before = node.free()
    assert before == (24, 4)
    # Admission alone shares a cached prefix, whose lock must go again.
    small = dict(length=6000, new=10, start=0) if path == "pop" else dict(length=2000, new=10)
    if path == "resume":
        (request,) = node.retract(1, **small)
        allocate = node.resume
    else:
        (entry,) = node.enqueue(1, **small)
        request = entry.req
        allocate = node.pop if path == "pop" else lambda: node.stage(entry)
    with node.nothing_can_be_evicted():
        if not fixes:
            with pytest.raises(AssertionError, match="KV cache is full"):
                allocate()
            return
        for _ in range(2):
            assert not allocate()
    assert node.free() == before and not node.aborted
    assert not request.kv.holds_kv and node.tree.full_protected_size() == 0
    assert request in [*node.queue.retracted_queue, *(e.req for e in node.queue.queue)]
    assert allocate()
    assert request.kv.holds_kv and node.free()[0] == 23
    node.finish(request)
    assert node.free()[0] == 24


def test_g8_evicts_what_stock_evicts():
    """Where eviction helps, nothing changes."""
    options = dict(slots=24, tokens=15 * Cached.LENGTH + 4 * PAGE, radix=True, cached=15)
    found = []
    for fixes in (False, True):
        node = DecodeNode(fixes, **options)
        node.enqueue(3, length=3000, new=10)
        found.append((len(node.pop()), node.free(), node.tree.full_evictable_size()))
    assert found[0] == found[1] and found[1][0] == 3


def test_waiting_transfers_are_counted_in_slots():
    shares = []
    for fixes in (False, True):
        node = DecodeNode(fixes, 24)
        entries = node.enqueue(4, length=300, new=1)
        assert len(node.pop()) == 4
        node.hold(entries)
        full, windows = node.queue.pre_allocated_token_counts()
        assert full == 4 * 2 * PAGE
        shares.append(windows / node.allocator.size_swa)
    assert shares[1] == 4 / 24 < shares[0]
