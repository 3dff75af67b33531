"""The choice between upstream's kernels and the torch reference; what CUDA graphs need of the reference."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.moe import fused_moe_native
from sglang_unified_kv.reference import upstream_kernels
from sglang_unified_kv.reference.device import DEVICE_ENV
from sglang_unified_kv.reference.ops import attention, experts
from sglang_unified_kv.reference.ops.invariant_torch import RANGE, InvariantTorch, plain_torch
from test_selection import LOAD


@pytest.fixture
def chosen():
    yield upstream_kernels.choose
    upstream_kernels.choose(())


def test_each_kind_is_chosen_by_itself(chosen):
    def upstream():
        return "upstream"

    calls = {
        kind: upstream_kernels.either(kind, lambda: "reference") for kind in upstream_kernels.KINDS
    }
    assert {call(upstream) for call in calls.values()} == {"reference"}
    for kind in upstream_kernels.KINDS:
        chosen([kind])
        assert [k for k, call in calls.items() if call(upstream) == "upstream"] == [kind]


def test_an_unknown_kind_is_named(chosen):
    with pytest.raises(ValueError, match="cutlass: must be of triton, jit, top-k, tilelang"):
        chosen(["triton", "cutlass"])


def test_an_unknown_kind_in_the_environment_ends_the_start(forks):
    environment = {
        "SGLANG_UNIFIED_KV_REFERENCE_ENGINE": "1",
        upstream_kernels.ENV: "triton,cutlass",
    }
    result = forks.run(LOAD, environment)
    assert result.rc == 1
    assert f"{upstream_kernels.ENV}: cutlass: must be of" in result.stderr


@pytest.mark.parametrize(
    "code, device, message",
    [
        ("import sglang_unified_kv.reference.harness", "rocm", "'rocm': must be cpu or cuda"),
        (
            "import sglang.srt.utils.common; import sglang_unified_kv.reference.harness",
            "cuda",
            "before anything of sglang.srt",
        ),
    ],
)
def test_a_device_that_cannot_be_had_is_said(forks, code, device, message):
    result = forks.run(code, {DEVICE_ENV: device})
    assert result.rc == 1 and message in result.stderr


def test_reference_ops_are_named_in_a_profile():
    with torch.profiler.profile() as trace:
        plain_torch(torch.ones)(2)
    assert [e.count for e in trace.key_averages() if e.key == RANGE] == [1]


def test_every_expert_computes_what_the_chosen_ones_do():
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator).to(dtype)

    layer = SimpleNamespace(
        num_experts=4, w13_weight=drawn(4, 64, 32) / 4, w2_weight=drawn(4, 32, 32) / 4
    )
    config = SimpleNamespace(
        apply_router_weight_on_input=False, activation="silu", gemm1_alpha=None
    )
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(5)])
    routed = drawn(5, 2, dtype=torch.float32).softmax(-1), ids.int(), None
    x = drawn(5, 32)
    with InvariantTorch():
        ours = experts.every_expert(layer, x, routed, config)
        theirs = fused_moe_native.moe_forward_native(layer, x, routed, config)
    assert torch.equal(ours, theirs) and ours.any()
    config.activation = "gelu"
    with pytest.raises(NotImplementedError, match="plain silu only"):
        experts.every_expert(layer, x, routed, config)


def test_indexer_scores_do_not_depend_on_knowing_the_requests(monkeypatch):
    generator = torch.Generator().manual_seed(4)
    rows, heads, dim, pages = 6, 4, 128, 3
    queries = torch.randn(rows, 1, heads, dim, generator=generator).to(torch.float8_e4m3fn)
    keys = torch.randn(8, 64 * dim, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(8, 64, generator=generator).view(torch.uint8)
    cache = torch.cat([keys, scales], 1).view(8, 64, 1, dim + 4)
    tables = torch.tensor([[0, 1, 2]] * 4 + [[3, 4, -1]] * 2)
    lengths = torch.tensor([10, 70, 130, 192, 5, 128])
    weight = torch.rand(rows, heads, generator=generator)

    def scores():
        return attention.indexer_scores(queries, cache, weight, lengths, tables, None, pages * 64)

    grouped = scores()
    monkeypatch.setattr(attention, "_requests", lambda table: [(row, 1) for row in table])
    assert torch.equal(scores(), grouped) and grouped.any()
