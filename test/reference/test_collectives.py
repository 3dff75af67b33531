"""Sums over ranks: a row's bits do not depend on the rows beside it."""

import datetime
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from sglang_unified_kv.reference.edits.parallel import (
    all_reduce_in_rank_order,
    reduce_scatter_in_rank_order,
)

RANKS, ROWS, WIDTH = 4, 96, 512


def part(rank):
    source = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS, WIDTH, generator=source).bfloat16()


def never(*_):
    raise AssertionError("Gloo's own sum")


def reduced(rank, store, results):
    """What this rank got of one row, of some and of all."""
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timeout
    )
    group = SimpleNamespace(world_size=RANKS, rank_in_group=rank, device_group=dist.group.WORLD)
    found = []
    for rows in (1, 37, ROWS):
        mine = part(rank)[:rows].clone()
        assert all_reduce_in_rank_order(never, group, mine) is mine
        found.append(mine)
    share = torch.empty(ROWS // RANKS, WIDTH, dtype=torch.bfloat16)
    reduce_scatter_in_rank_order(never, group, share, part(rank))
    # A slice of a wider tensor.
    sliced = part(rank)[:, : WIDTH // 2]
    all_reduce_in_rank_order(never, group, sliced)
    torch.save((found, share, sliced), f"{results}/{rank}")


def test_a_rows_sum_over_ranks_is_the_same_in_every_batch(tmp_path):
    torch.multiprocessing.spawn(reduced, (tmp_path / "store", tmp_path), nprocs=RANKS)
    whole = part(0)
    for rank in range(1, RANKS):
        whole += part(rank)
    for rank in range(RANKS):
        found, share, sliced = torch.load(tmp_path / str(rank))
        for sums in found:
            assert torch.equal(sums, whole[: len(sums)])
        assert torch.equal(share, whole.chunk(RANKS)[rank])
        assert torch.equal(sliced, whole[:, : WIDTH // 2])


@pytest.mark.parametrize("ranks", [1, 2])
def test_few_ranks_are_left_to_sglang(ranks):
    group, row = SimpleNamespace(world_size=ranks), torch.ones(1)
    assert all_reduce_in_rank_order(lambda *a: a, group, row) == (group, row)
    assert reduce_scatter_in_rank_order(lambda *a: a, group, row, row) == (group, row, row)
