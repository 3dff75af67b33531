"""G1, G3, G5: an allocator with a ring per request, and all others, which must not change."""

import pytest
import torch
from ring_objects import PAGE, RING, Cached, allocator_of, extend
from sglang.srt.mem_cache.allocator.hisparse import DeepSeekV4HiSparseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import is_swa_req_ring
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.prefill_budget import SWAPrefillBudget

CORES = ("python", "rust")


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("fixes", [False, True], ids=["stock", "fixed"])
def test_g1_taken_slots_cost_no_prefixes(core, fixes):
    cached = Cached(fixes, core, prompts=16)
    everything = cached.matched()
    assert everything == 16 * Cached.LENGTH
    cached.slots.alloc_rows(8)
    for _ in range(64):
        assert cached.allocator.check_decode_capacity(num_tokens=PAGE, tree_cache=cached.tree)
    evict_from_tree_cache(cached.tree, 8192)
    assert (cached.matched() == everything) is fixes


@pytest.mark.parametrize("core", CORES)
def test_a_real_shortage_of_tokens_still_evicts(core):
    cached = Cached(True, core, prompts=4, tokens=5 * Cached.LENGTH)
    assert cached.allocator.full_available_size() == Cached.LENGTH
    assert cached.allocator.check_decode_capacity(
        num_tokens=Cached.LENGTH + PAGE, tree_cache=cached.tree
    )
    assert cached.allocator.full_available_size() >= Cached.LENGTH + PAGE
    assert 0 < cached.matched() < 4 * Cached.LENGTH


def test_eviction_without_a_tree_is_nothing():
    allocator, _ = allocator_of(True, 4, 4096)
    allocator.evict_to_free_tokens(None, 1 << 20)


@pytest.mark.parametrize("fixes", [False, True], ids=["stock", "fixed"])
def test_g3_a_chunk_under_hisparse_is_not_cut(fixes):
    inner, _ = allocator_of(fixes, 24, 64 * 1024)
    outer = object.__new__(DeepSeekV4HiSparseTokenToKVPoolAllocator)
    outer.logical_attn_allocator, outer.page_size = inner, PAGE
    tree = type("Tree", (), {"sliding_window_size": 128, "swa_evictable_size": lambda _: 0})()
    budget = SWAPrefillBudget(outer, tree)
    charged = budget.swa_tokens(8192, 512, chunk_limit=8192)
    assert is_swa_req_ring(outer) is budget.req_ring is fixes
    assert (charged == inner.swa_ring_cost_tokens == PAGE) if fixes else charged > 8192


def test_g3_asks_nothing_of_other_allocators():
    class Other:
        pass

    paged, _ = allocator_of(True, 4, 4096, ring=None)
    outer = object.__new__(DeepSeekV4HiSparseTokenToKVPoolAllocator)
    outer.logical_attn_allocator = paged
    assert (
        not is_swa_req_ring(Other()) and not is_swa_req_ring(paged) and not is_swa_req_ring(outer)
    )


def test_g5_the_map_is_gone():
    stock, _ = allocator_of(False, 4, 64 * 1024)
    fixed, _ = allocator_of(True, 4, 64 * 1024)
    assert stock.full_to_swa_index_mapping.nbytes > 8 * 64 * 1024
    assert fixed.full_to_swa_index_mapping.nbytes == 16
    assert fixed._kvcache.full_to_swa_index_mapping is fixed.full_to_swa_index_mapping


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_g5_every_answer_is_the_maps(dtype):
    stock, _ = allocator_of(False, 4, 4096)
    fixed, _ = allocator_of(True, 4, 4096)
    slots = torch.tensor([[0, 1, 4095], [-1, 256, -1]], dtype=dtype)
    for allocator in (stock, fixed):
        theirs = allocator.translate_loc_from_full_to_swa(slots)
        assert theirs.tolist() == [[0, 0, 0], [-1, 0, -1]] and theirs.dtype == torch.int64
        assert torch.equal(allocator._kvcache.translate_loc_from_full_to_swa(slots), theirs)


def test_g5_the_tree_may_still_pair_slots():
    """A load-back brings full rows without windows; the next insert over them maps window slots."""
    fixed, _ = allocator_of(True, 4, 4096)
    slots = torch.tensor([700, 4095])
    fixed.set_full_to_swa_mapping(slots, slots)
    fixed.clear_full_to_swa_mapping(slots)
    assert fixed.translate_loc_from_full_to_swa(slots).tolist() == [0, 0]
    paged, _ = allocator_of(True, 4, 4096, ring=None)
    paged.set_full_to_swa_mapping(slots, slots)
    assert paged.translate_loc_from_full_to_swa(slots).tolist() == [700, 4095]
    paged.clear_full_to_swa_mapping(slots)
    assert paged.translate_loc_from_full_to_swa(slots).tolist() == [0, 0]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("fixes", [False, True], ids=["stock", "fixed"])
def test_g5_a_window_is_recovered_over_locked_rows(core, fixes):
    """A tree that lost the window of a prompt in use is given the prompt again."""
    cached = Cached(fixes, core, prompts=1)
    key = cached.key(0)
    tree, allocator = cached.tree, cached.allocator
    matched = tree.match_prefix(MatchPrefixParams(key=key))
    rows = tree.path_device_indices(matched.last_device_node)
    windows, free = tree.swa_evictable_size(), allocator.full_available_size()
    assert windows == Cached.LENGTH
    tree.evict(EvictParams(swa_num_tokens=1))
    assert tree.swa_evictable_size() == PAGE and allocator.full_available_size() == free
    lock = tree.lock(matched.last_device_node)
    again = extend(allocator, Cached.LENGTH).to(torch.int64)
    tree.insert(InsertParams(key=key, value=again))
    assert tree.swa_evictable_size() + tree.swa_protected_size() == windows
    assert allocator.full_available_size() == free, "the new rows are given back"
    matched = tree.match_prefix(MatchPrefixParams(key=key))
    assert torch.equal(tree.path_device_indices(matched.last_device_node), rows)
    tree.unlock(lock)
    tree.sanity_check()
    tree.evict(EvictParams(num_tokens=Cached.LENGTH))
    assert allocator.full_available_size() == free + Cached.LENGTH


@pytest.mark.parametrize("ring", [RING, None], ids=["ring", "paged"])
def test_no_slot_is_lost_or_doubled(ring):
    """Random extends, frees and clears: both allocators hand out the same slots."""
    stock, _ = allocator_of(False, 4, 16 * PAGE, ring)
    fixed, _ = allocator_of(True, 4, 16 * PAGE, ring)
    generator = torch.Generator().manual_seed(1)
    held, served = [], {True: 0, False: 0}
    for step in range(200):
        choice = int(torch.randint(5, (1,), generator=generator))
        if step % 40 == 39:
            held.clear()
            stock.clear()
            fixed.clear()
        elif choice < 3 or not held:
            tokens = int(torch.randint(1, 1200, (1,), generator=generator))
            ours, theirs = extend(fixed, tokens), extend(stock, tokens)
            assert (ours is None) is (theirs is None)
            served[ours is not None] += 1
            if ours is not None:
                assert torch.equal(ours, theirs)
                held.append(ours)
        else:
            index = held.pop(int(torch.randint(len(held), (1,), generator=generator)))
            for allocator in (stock, fixed):
                if choice == 3:
                    allocator.free(index)
                else:
                    allocator.free_segment(index, start_pos=0)
        assert fixed.available_size() == stock.available_size()
        assert fixed.full_available_size() == stock.full_available_size()
    assert min(served.values()) > 10, served


def test_freeing_the_full_side_alone():
    for fixes in (False, True):
        allocator, _ = allocator_of(fixes, 4, 16 * PAGE)
        before = allocator.full_available_size()
        for free in (
            allocator.free_full,
            lambda index, a=allocator: a.free_full_segment(index, start_pos=0),
        ):
            free(torch.empty(0, dtype=torch.int64))
            index = extend(allocator, 700)
            assert allocator.full_available_size() < before
            free(index)
            assert allocator.full_available_size() == before


@pytest.mark.parametrize("fixes", [False, True], ids=["off", "on"])
def test_paged_layouts_are_not_touched(fixes):
    """The packed fp8 path: eviction and map as released, whatever the switch says."""
    cached = Cached(fixes, "python", prompts=4, tokens=5 * Cached.LENGTH, ring=None)
    assert cached.allocator.full_to_swa_index_mapping.numel() == 5 * Cached.LENGTH + PAGE + 1
    evict_from_tree_cache(cached.tree, Cached.LENGTH + PAGE)
    assert cached.matched() == 4 * Cached.LENGTH - 256 * 1
