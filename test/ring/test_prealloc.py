"""G2: the decode node of a disaggregated deployment admits by request slots."""

import pytest
from ring_objects import Prealloc, allocator_of

STOCK_BLOCKS = [(6, 1), (12, 1), (24, 1)]


@pytest.mark.parametrize("radix", [False, True], ids=["plain", "radix"])
@pytest.mark.parametrize("slots, running", [*STOCK_BLOCKS, (24, 22), (24, 23), (1536, 1535)])
def test_g2_the_last_slot_is_usable(slots, running, radix):
    assert Prealloc(True, slots, running, radix=radix).admits()


@pytest.mark.parametrize("slots, running", STOCK_BLOCKS)
def test_g2_stock_charges_tokens(slots, running):
    assert not Prealloc(False, slots, running).admits()


@pytest.mark.parametrize("radix", [False, True], ids=["plain", "radix"])
@pytest.mark.parametrize("slots", [1, 6, 24])
def test_no_slot_no_admission(slots, radix):
    assert not Prealloc(True, slots, slots, radix=radix).admits()


def test_retracted_requests_come_first():
    assert Prealloc(True, 6, 3, retracted=2).admits()
    assert not Prealloc(True, 6, 3, retracted=3).admits()


@pytest.mark.parametrize("fixes", [False, True], ids=["stock", "fixed"])
def test_a_small_server_does_not_refuse_what_it_has_a_slot_for(fixes):
    """Stock compares a window tail and a reserve of 768 tokens with two slots' 512."""
    assert Prealloc(fixes, 2, 0, radix=True).refuses_for_good() is not fixes


def test_reclaiming_says_what_is_short():
    allocator, rows = allocator_of(True, 2, 4096)
    assert allocator.reclaim_for_prealloc(None, 4096, 768) is None
    rows.alloc_rows(2)
    assert allocator.reclaim_for_prealloc(None, 4096, 768) == "every request slot is taken"
