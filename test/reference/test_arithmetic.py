"""The exact sums: neither order nor company of a row shows in its bits."""

import pytest
import torch
import torch.nn.functional as F
from sglang_unified_kv.reference.ops import arithmetic
from sglang_unified_kv.reference.ops.invariant_torch import InvariantTorch, plain_torch


def bf16(*shape):
    return torch.randn(*shape).to(torch.bfloat16)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64, 255])
def test_product_of_a_row_does_not_depend_on_the_other_rows(rows):
    a, b = bf16(255, 512), bf16(512, 96)
    whole = arithmetic.matmul(a, b)
    for start in (0, 255 - rows):
        assert torch.equal(
            arithmetic.matmul(a[start : start + rows], b), whole[start : start + rows]
        )


def test_product_does_not_depend_on_the_order_of_its_terms():
    a, b = bf16(33, 2048), bf16(2048, 40)
    order = torch.randperm(2048)
    assert torch.equal(arithmetic.matmul(a[:, order], b[order]), arithmetic.matmul(a, b))
    # Float32 sums do depend on it, so the equality above says something.
    assert not torch.equal(a[:, order].float() @ b[order].float(), a.float() @ b.float())


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 128, 512])
def test_fold_sum(n):
    x = torch.randn(5, n, 6)
    assert torch.allclose(arithmetic.fold_sum(x, 1), x.sum(1), atol=1e-4)
    assert torch.equal(arithmetic.fold_sum(x, 1)[3:], arithmetic.fold_sum(x[3:], 1))
    assert torch.equal(
        arithmetic.fold_sum(x.movedim(1, 2).contiguous(), -1), arithmetic.fold_sum(x, 1)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mean_square(dtype):
    x = torch.randn(300, 256).to(dtype)
    whole = arithmetic.mean_square(x)
    assert torch.allclose(whole, x.float().square().mean(-1, keepdim=True), rtol=1e-5)
    assert torch.equal(arithmetic.mean_square(x[299:]), whole[299:])
    if dtype is torch.bfloat16:
        assert torch.equal(arithmetic.mean_square(x.flip(1)), whole)


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (arithmetic.exp, torch.exp),
        (arithmetic.sigmoid, torch.sigmoid),
        (arithmetic.silu, F.silu),
        (arithmetic.softplus, F.softplus),
        (lambda x: arithmetic.softmax(x.view(-1, 1), 1).flatten(), torch.ones_like),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_functions_do_not_depend_on_the_place_in_the_array(ours, torchs, threads):
    """Vectorised code and its scalar tail must agree; torch's own sigmoid, for one, does not."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(70001) * 5
        whole = ours(x)
        for size in (1, 3, 7, 15, 31, 33, 1000, 40000):
            for start in (0, 1, 5, 70001 - size):
                assert torch.equal(ours(x[start : start + size]), whole[start : start + size])
        assert torch.equal(ours(x[::3]), whole[::3])
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(whole, torchs(x), rtol=1e-5, atol=1e-6)


def test_softmax():
    x = torch.randn(40, 128, 8) * 4
    whole = arithmetic.softmax(x, 1)
    assert torch.allclose(whole, x.softmax(1), atol=1e-6)
    e = arithmetic.exp(x - x.amax(1, keepdim=True))
    assert torch.equal(whole, e / arithmetic.fold_sum(e, 1).unsqueeze(1))
    assert torch.equal(arithmetic.softmax(x[39:], 1), whole[39:])


def upstream_calls(x, weight, groups, group_weight):
    """The calls of upstream's model whose bits could depend on rows or on the order of a sum."""
    return {
        "linear": F.linear(x, weight),
        "mm": torch.mm(x.float(), weight.float().t()),
        "matmul": torch.matmul(x, weight.t()),
        "einsum": torch.einsum("tgd,grd->tgr", groups.float(), group_weight.float()),
        "mean": x.float().pow(2).mean(-1, keepdim=True),
        "silu": F.silu(x),
        "softplus": F.softplus(x[:, :33].float()),
        "sum": groups.float().sum(dim=2),
        "sum kept": groups.float().sum(dim=2, keepdim=True),
    }


def test_upstream_calls_are_made_by_the_exact_sums():
    x, weight = bf16(1700, 512), bf16(64, 512)
    groups, group_weight = bf16(1700, 2, 256), bf16(2, 32, 256)
    with InvariantTorch():
        together = upstream_calls(x, weight, groups, group_weight)
        alone = upstream_calls(x[1699:], weight, groups[1699:], group_weight)
        turned = upstream_calls(x.flip(1), weight.flip(1), groups.flip(2), group_weight.flip(2))
    plain = upstream_calls(x, weight, groups, group_weight)
    for name, theirs in plain.items():
        assert together[name].dtype == theirs.dtype
        assert torch.equal(together[name][1699:], alone[name]), name
        assert torch.allclose(together[name].float(), theirs.float(), rtol=2e-2, atol=2e-2), name
    for name in ("linear", "mm", "matmul", "einsum", "mean"):
        assert torch.equal(together[name], turned[name]), name
    assert torch.equal(together["sum"], arithmetic.fold_sum(groups.float(), 2))
    assert torch.equal(together["sum kept"].squeeze(2), together["sum"])


def test_ops_step_out_of_the_mode():
    x = torch.randn(999, 33)

    def call():
        return F.silu(x)

    with InvariantTorch():
        inside = call()
        outside = plain_torch(call)()
    assert torch.equal(outside, call())
    assert torch.equal(inside, arithmetic.silu(x))
    assert not torch.equal(inside, outside)


def test_switched_off_it_is_plain_torch():
    x, w = bf16(5, 64), bf16(64, 8)
    arithmetic.set_chunk_invariant(False)
    try:
        assert torch.equal(arithmetic.matmul(x, w), x.float() @ w.float())
        assert torch.equal(arithmetic.silu(x), F.silu(x.float()))
        assert torch.equal(arithmetic.softmax(x, 1), x.float().softmax(1))
    finally:
        arithmetic.set_chunk_invariant(True)
