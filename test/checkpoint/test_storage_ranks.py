"""Ranks agree on the records of a prefetch: what one of them lacks, none uses."""

import threading
from types import SimpleNamespace

import torch
from sglang.srt.managers.cache_controller import PrefetchAck
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PrefetchOperation
from sglang_unified_kv.checkpoint.storage import Fetch
from sglang_unified_kv.edits.exact.storage.threads import (
    fetch_of,
    fetch_record,
    reduce_prefetch_ack,
)
from sglang_unified_kv.edits.exact.storage.transfers import FetchTransfer

PAGE = 256


# The real MIN over processes belongs to the tests of tensor parallelism.


class Ranks:
    """Controllers whose all-reduce is a real MIN over threads, one per rank."""

    def __init__(self, count: int):
        self._values = [None] * count
        self._barrier = threading.Barrier(count)

    def controller(self, rank: int):
        def all_reduce(tensor, op, groups):
            assert op == torch.distributed.ReduceOp.MIN and groups == ["group"]
            self._values[rank] = tensor.clone()
            self._barrier.wait(60)
            tensor.copy_(torch.stack(self._values).amin(0))
            self._barrier.wait(60)

        return SimpleNamespace(
            page_size=PAGE, _all_reduce=all_reduce, prefetch_completion_sync_groups=["group"]
        )


def test_only_records_that_every_rank_got_within_the_common_progress_count():
    arrived = [{2: 0, 4: 1, 6: 2}, {2: 0, 6: 5}, {2: 3, 4: 4, 6: 1}]
    fetches, ranks = [], Ranks(3)
    # The third rank is a batch ahead: what it got behind the common progress is told later.
    pages = [4, 4, 4]
    for got in arrived:
        fetch = Fetch(0, 128)
        fetch.arrived.update(got)
        fetches.append(fetch)

    def reduce(rank):
        operation = SimpleNamespace(pool_transfers=[FetchTransfer(fetches[rank])])
        ack = PrefetchAck(rid="r", completed_tokens=pages[rank] * PAGE, operation=operation)
        reduce_prefetch_ack(lambda self, ack: None, ranks.controller(rank), ack)

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sorted(f.arrived) for f in fetches] == [[2, 6]] * 3
    assert {f.usable(4) for f in fetches} == {2}


class Storage:
    """Records by key; counts what it is asked for."""

    page_size = PAGE

    def __init__(self, *keys):
        self.keys, self.asked = set(keys), []

    def get_record(self, key, boundary, slot):
        self.asked.append((key, boundary, slot))
        return key in self.keys


def test_the_deepest_record_that_verifies_is_taken():
    storage, fetch = Storage("b"), Fetch(512, 128, slots={0: 7})
    fetch_record(storage, fetch, list("abcd"), restorable=[1, 2, 4])
    assert storage.asked == [("d", 512 + 4 * PAGE, 7), ("b", 512 + 2 * PAGE, 7)]
    assert fetch.arrived == {2: 7} and fetch.pages_read == 4


def test_records_behind_the_pages_that_arrived_are_not_asked_for():
    storage, fetch = Storage(*"abcd"), Fetch(0, 128, slots={0: 7})
    fetch_record(storage, fetch, list("abc"), restorable=[1, 4])
    assert storage.asked == [("a", PAGE, 7)] and fetch.usable(3) == 1


def test_a_resident_record_needs_no_slot():
    storage, fetch = Storage(*"abcd"), Fetch(0, 128, {3: "c"})
    fetch_record(storage, fetch, list("abcd"), restorable=[1, 2, 3])
    assert storage.asked == [] and fetch.arrived == {3: None}


def test_the_operation_of_a_prefetch_is_told_from_others():
    operation = PrefetchOperation(SimpleNamespace(rid="r"), [1] * PAGE)
    assert fetch_of(operation) is None
    transfer = FetchTransfer(Fetch(0, 128))
    operation.pool_transfers = [transfer]
    assert fetch_of(operation) is transfer
