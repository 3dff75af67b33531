"""Reference ops without a Triton counterpart: against plain formulas, upstream's torch and each other."""

import pytest
import torch
import torch.nn.functional as F
from sglang_unified_kv.reference.ops import (
    attention,
    compress,
    host_copies,
    hyper_connections,
    indices,
    norm_rope,
)

RING = {4: 8, 128: 128}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Compressor:
    """One compressor's state ring, fed chunk by chunk or token by token."""

    def __init__(self, ratio: int, dim: int = 128, slots: int = 3):
        self.ratio, self.dim = ratio, dim
        width = 2 * dim * (2 if ratio == 4 else 1)
        self.width = width
        self.ape = torch.randn(ratio * (2 if ratio == 4 else 1), dim)
        self.state = torch.full((slots * RING[ratio] // ratio, ratio, width), torch.nan)

    def prefill(self, rows, start: int, slot: int = 1):
        plan = compress.plan_prefill(
            self.ratio,
            torch.tensor([slot]),
            torch.tensor([start + len(rows)]),
            torch.tensor([len(rows)]),
            torch.zeros(4, 4096, dtype=torch.int32),
            None,
            128,
            RING[self.ratio],
            len(rows),
            use_req_ring=self.ratio == 4,
        )
        return self._forward(rows, plan)

    def decode(self, row, position: int, slot: int = 1):
        plan = compress.plan_decode(
            self.ratio,
            torch.tensor([slot]),
            None,
            None,
            torch.tensor([position + 1]),
            128,
            RING[self.ratio],
            use_req_ring=self.ratio == 4,
        )
        out = self._forward(row.unsqueeze(0), plan)
        return out if (position + 1) % self.ratio == 0 else out[:0]

    def _forward(self, rows, plan):
        return compress.compress_forward(
            self.state,
            rows,
            self.ape,
            plan,
            head_dim=self.dim,
            compress_ratio=self.ratio,
        )

    def expected(self, rows, block: int):
        """The pooled row of ``block`` by its definition, float64."""
        d, ratio = self.dim, self.ratio
        rows = rows.double()
        if ratio == 128:
            kv, score = rows[block * 128 : (block + 1) * 128].split(d, -1)
        else:
            before = rows[max(block - 1, 0) * 4 : block * 4]
            now = rows[block * 4 : block * 4 + 4]
            kv = torch.cat([before[:, :d], now[:, d : 2 * d]])
            score = torch.cat([before[:, 2 * d : 3 * d], now[:, 3 * d :]])
        weight = (score + self.ape.double()[-len(score) :]).softmax(0)
        return (kv * weight).sum(0)


@pytest.mark.parametrize(
    ("ratio", "length", "cuts"),
    [(4, 37, [16, 18, 31]), (4, 24, [24]), (128, 400, [100, 128, 300]), (128, 300, [300])],
)
def test_compressor_gives_the_same_rows_and_state_in_any_split(ratio, length, cuts):
    whole, split, stepped = Compressor(ratio), Compressor(ratio), Compressor(ratio)
    rows = torch.randn(length, whole.width)
    pooled = whole.prefill(rows, 0)
    assert pooled.shape[0] == length // ratio
    for block in range(length // ratio):
        assert torch.allclose(pooled[block].double(), whole.expected(rows, block), atol=1e-5)

    split.ape = stepped.ape = whole.ape
    bounds = [0, *cuts, length]
    parts = [split.prefill(rows[a:b], a) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]
    assert torch.equal(torch.cat(parts), pooled)
    steps = [stepped.decode(row, position) for position, row in enumerate(rows)]
    assert torch.equal(torch.cat(steps), pooled)

    ring = RING[ratio]
    needed = length % ratio if ratio == 128 else 4
    live = ring + torch.arange(length - needed, length) % ring
    states = [c.state.view(-1, c.width)[live] for c in (whole, split, stepped)]
    assert torch.equal(states[0], rows[length - needed :])
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])


def test_compressor_store_of_prefill_and_decode():
    """bf16 latents and fp8 indexer keys, at their locations and rotated by their block's first token."""
    freqs = torch.polar(torch.ones(64, 32), torch.rand(64, 32) * 6)
    weight = torch.rand(128)
    seen = []
    for how in ("prefill", "decode"):
        latent = torch.full((64, 128), torch.nan, dtype=torch.bfloat16)
        indexer = torch.full((2, 64 * 132), 255, dtype=torch.uint8)
        compressor = Compressor(4)
        torch.manual_seed(1)
        compressor.ape = torch.randn(8, 128)
        rows = torch.randn(24, compressor.width)
        # Inside a block there is no location; upstream's metadata says 0.
        locations = torch.where(torch.arange(24) % 4 == 3, torch.arange(24) // 4 + 7, 0)
        spans = [(0, 24)] if how == "prefill" else [(p, p + 1) for p in range(24)]
        for a, b in spans:
            plan = (
                compress.plan_prefill(
                    4,
                    torch.tensor([1]),
                    torch.tensor([b]),
                    torch.tensor([b - a]),
                    torch.zeros(2, 64, dtype=torch.int32),
                    None,
                    128,
                    8,
                    b - a,
                    use_req_ring=True,
                )
                if how == "prefill"
                else compress.plan_decode(
                    4, torch.tensor([1]), None, None, torch.tensor([b]), 128, 8, use_req_ring=True
                )
            )
            pooled = compressor._forward(rows[a:b], plan)
            for cache, bf16, page in ((latent, True, 1), (indexer, False, 64)):
                compress.compress_norm_rope_store(
                    pooled,
                    plan,
                    norm_weight=weight,
                    norm_eps=1e-6,
                    freq_cis=freqs,
                    out_loc=locations[a:b],
                    kvcache=cache.view(torch.uint8),
                    page_size=page,
                    bf16_store=bf16,
                )
        seen.append((latent, indexer))
        expected = norm_rope.rms_norm(compressor.expected(rows, 5), weight, 1e-6)
        expected = norm_rope.rotate_tail(expected, freqs[20].real, freqs[20].imag)
        assert torch.allclose(latent[12].float(), expected.float(), atol=0.03)
        assert latent[:7].isnan().all() and latent[13:].isnan().all()
        keys = indexer[0, : 64 * 128].view(64, 128).view(norm_rope.FP8).float()
        scales = indexer[0, 64 * 128 :].view(torch.float32)
        restored = norm_rope.hadamard(keys * scales[:, None])[12]
        assert torch.allclose(restored, expected.float(), atol=0.15)
        assert scales[:7].isnan().all() and scales[13:].isnan().all()
    assert torch.equal(seen[0][0].view(torch.uint8), seen[1][0].view(torch.uint8))
    assert torch.equal(seen[0][1], seen[1][1])


def test_prefill_plan_refuses_more_tokens_than_it_can_address():
    with pytest.raises(ValueError, match="chunked-prefill-size"):
        compress.plan_prefill(
            128, torch.tensor([0]), None, None, None, None, 128, 128, (1 << 16) + 1
        )


def test_attention_is_softmax_with_a_sink():
    rows, queries = torch.randn(60, 64).bfloat16(), torch.randn(3, 2, 64).bfloat16()
    sink = torch.randn(2)
    lists = [[5, 1, 59], [7, -1], []]
    flat = torch.tensor([i for part in lists for i in part], dtype=torch.int32)
    indptr = torch.tensor([0, 3, 5, 5], dtype=torch.int32)
    out = attention.decode(
        q=queries,
        unified_kv=rows,
        kv_indices=flat,
        kv_indptr=indptr,
        attn_sink=sink,
        softmax_scale=0.125,
    )
    for t, part in enumerate(lists):
        keys = rows[[i for i in part if i >= 0]].double()
        scores = queries[t].double() @ keys.t() * 0.125
        weight = torch.cat([scores, sink.double()[:, None]], 1).softmax(1)[:, :-1]
        assert torch.allclose(out[t].double(), weight @ keys, atol=0.02)


def test_attention_order_split_and_company_do_not_show():
    rows, sink = torch.randn(900, 512).bfloat16(), torch.randn(4)
    # float32, so that the output shows every bit.
    queries = torch.randn(130, 4, 512).bfloat16().float()
    picked = [torch.randperm(900)[: 40 + t] for t in range(130)]

    def attend(lists, queries, extend=0):
        """The last ``extend`` keys of each list come from a second source."""
        prefix = [p[: len(p) - extend] for p in lists]
        suffix = [p[len(p) - extend :] for p in lists]
        streams = [
            (
                torch.cat(part).int(),
                F.pad(torch.tensor([len(p) for p in part]).cumsum(0), (1, 0)).int(),
            )
            for part in (prefix, suffix)
        ]
        return attention.prefill(
            q=queries,
            unified_kv=rows,
            kv_indices_prefix=streams[0][0],
            kv_indptr_prefix=streams[0][1],
            kv_extend=rows,
            kv_indices_extend=streams[1][0],
            kv_indptr_extend=streams[1][1],
            attn_sink=sink,
            softmax_scale=512**-0.5,
        )

    together = attend(picked, queries)
    assert torch.equal(attend([p.flip(0) for p in picked], queries), together)
    assert torch.equal(attend(picked, queries, extend=25), together)
    for t in (0, 63, 64, 129):
        assert torch.equal(attend(picked[t : t + 1], queries[t : t + 1])[0], together[t])


def test_queries_without_a_stream_get_zeros_and_change_nothing():
    """The draft's streams are made before SGLang pads its batch to the other ranks' size."""
    q, rows, sink = torch.randn(70, 2, 64), torch.randn(9, 64), torch.zeros(2)
    known = 3
    indices = torch.tensor([0, 1, 4, 2, 8], dtype=torch.int32)
    indptr = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    alone = attention.decode(
        q=q[:known],
        unified_kv=rows,
        kv_indices=indices,
        kv_indptr=indptr,
        attn_sink=sink,
        softmax_scale=0.1,
    )
    padded = attention.decode(
        q=q,
        unified_kv=rows,
        kv_indices=indices,
        kv_indptr=indptr,
        attn_sink=sink,
        softmax_scale=0.1,
    )
    assert torch.equal(padded[:known], alone) and alone[[0, 2]].abs().min() > 0
    assert not padded[known:].any() and not alone[1].any()


def test_positions_that_pad_a_chunk_get_no_stream():
    def streams(positions):
        return indices.prefill_indices(
            compress_ratio=0,
            state_slot=torch.tensor([2, 2]),
            positions=torch.tensor(positions),
            chunk_start=torch.tensor([5, 5]),
            cu_q=torch.tensor([0, 0]),
            win=4,
            ring_stride=4,
            swa_pages=12,
            c128_page_indices=None,
            c4_sparse_page_indices=None,
        )

    for ours, padded in zip(streams([5, 6]), streams([5, 6, 0, 0, 0]), strict=True):
        assert torch.equal(ours, padded)


def test_attention_sums_are_exact_where_large_values_cancel():
    """Float64 alone would keep a small weight to other bits before the cancellation than after it."""
    large, small = torch.zeros(64), torch.zeros(64)
    large[0], small[0], small[1] = 2.0**20, 1.0, -7.0
    query = torch.zeros(1, 1, 64)
    query[0, 0, 1] = 1.0
    results = [
        attention.decode(
            q=query,
            unified_kv=torch.stack(rows),
            kv_indices=torch.arange(3, dtype=torch.int32),
            kv_indptr=torch.tensor([0, 3], dtype=torch.int32),
            attn_sink=torch.zeros(1),
            softmax_scale=1.0,
        )
        for rows in ((large, small, -large), (large, -large, small))
    ]
    assert torch.equal(*results)
    assert results[0][0, 0, 0] > 0


def indexer_case(lengths, requests):
    """Two requests of different pages; fp8 queries, paged keys with scales, weights."""
    n = len(lengths)
    # Dimensions of unequal size: a float32 sum over them would not be exact.
    size = 2.0 ** torch.randint(-5, 6, (128,))
    pages = torch.zeros(8, 64 * 132, dtype=torch.uint8)
    pages[:, : 64 * 128] = (
        (torch.randn(8, 64, 128) * size).to(norm_rope.FP8).view(torch.uint8).view(8, -1)
    )
    pages[:, 64 * 128 :] = (torch.rand(8, 64) + 0.5).view(torch.uint8)
    tables = torch.tensor([[1, 3, 5], [2, 4, 6]], dtype=torch.int32)[requests]
    return dict(
        q_fp8=(torch.randn(n, 1, 4, 128) * size).to(norm_rope.FP8),
        kvcache_fp8=pages.view(8, 64, 1, 132).view(norm_rope.FP8),
        weight=torch.randn(n, 4),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        page_table=tables,
        deep_gemm_metadata=None,
        max_seq_len=192,
        clean_logits=False,
    )


def test_indexer_scores_are_those_of_upstreams_torch():
    from sglang.srt.layers.attention.dsv4.indexer import fp8_paged_mqa_logits_torch

    upstream = getattr(fp8_paged_mqa_logits_torch, "__wrapped__", fp8_paged_mqa_logits_torch)
    case = indexer_case([190, 5, 64, 130, 1], [0, 0, 1, 1, 0])
    ours = attention.indexer_scores(**case)
    # Upstream rounds each head's dot product to bfloat16.
    assert torch.allclose(ours, upstream(**case), rtol=0.02, atol=1.0)
    assert ours[1, 5:].eq(0).all()
    one = {
        k: v[3:4] if k in ("q_fp8", "weight", "seq_lens", "page_table") else v
        for k, v in case.items()
    }
    assert torch.equal(attention.indexer_scores(**one)[0], ours[3])


def test_indexer_scores_do_not_depend_on_the_order_of_the_dimensions():
    case = indexer_case([190, 130], [0, 1])
    order = torch.randperm(128)
    turned = {**case, "q_fp8": case["q_fp8"][..., order]}
    pages = case["kvcache_fp8"].view(torch.uint8).view(8, -1).clone()
    keys = pages[:, : 64 * 128].view(8, 64, 128)
    pages[:, : 64 * 128] = keys[..., order].reshape(8, -1)
    turned["kvcache_fp8"] = pages.view(8, 64, 1, 132).view(norm_rope.FP8)
    assert torch.equal(attention.indexer_scores(**turned), attention.indexer_scores(**case))


def test_topk_takes_the_highest_and_of_equals_the_first():
    scores = torch.zeros(3, 700)
    scores[0, 690] = scores[0, 3] = 2.0
    scores[1] = torch.randn(700)
    lengths = torch.tensor([700, 650, 100], dtype=torch.int32)
    tables = torch.randperm(16)[:11].int().expand(3, 11)
    slots, raw = torch.empty(3, 512, dtype=torch.int32), torch.empty(3, 512, dtype=torch.int32)
    attention.topk_transform(scores, lengths, tables, slots, 64, raw)

    # 690 pushes out the last of the zeros, not one of them at random.
    assert raw[0].tolist() == [*range(511), 690]
    assert set(raw[1].tolist()) == set(scores[1, :650].topk(512).indices.tolist())
    assert raw[2].tolist() == [*range(100), *[-1] * 412]
    real = raw >= 0
    assert torch.equal(slots[real], (tables[0][raw // 64] * 64 + raw % 64)[real].int())
    assert slots[~real].eq(-1).all()

    narrow, narrow_raw = torch.empty_like(slots), torch.empty_like(raw)
    attention.topk_transform(scores[:, :120], lengths[2:].expand(3), tables, narrow, 64, narrow_raw)
    assert torch.equal(narrow_raw[2], raw[2])


def test_hadamard_is_sylvesters():
    matrix = norm_rope.hadamard(torch.eye(128)) * 128**0.5
    signs = [[(-1) ** (i & j).bit_count() for j in range(128)] for i in range(128)]
    assert torch.allclose(matrix, torch.tensor(signs).float())


def test_indexer_query():
    freqs = torch.polar(torch.ones(9, 32), torch.rand(9, 32) * 6)
    q, weight = torch.randn(9, 4, 128).bfloat16(), torch.randn(9, 4).bfloat16()
    q8, scaled = norm_rope.q_indexer_rope_hadamard_quant(q, weight, 0.3, freqs, torch.arange(9))
    scale = scaled.squeeze(-1) / (weight.float() * 0.3)
    back = norm_rope.hadamard(q8.float() * scale.unsqueeze(-1))
    expected = norm_rope.rotate_tail(q.float(), freqs.real[:, None], freqs.imag[:, None])
    assert q8.dtype == norm_rope.FP8 and scaled.dtype == torch.float32
    assert torch.allclose(back, expected, atol=0.3)


@pytest.mark.parametrize("inverse", [False, True])
def test_rotation_is_complex_multiplication(inverse):
    angle = torch.rand(6, 32) * 6
    x = torch.randn(6, 64)
    turned = torch.view_as_complex(x.view(6, 32, 2)) * torch.polar(torch.ones(6, 32), angle)
    got = norm_rope.rotate(torch.view_as_real(turned).flatten(1), angle.cos(), angle.sin(), True)
    assert torch.allclose(got, x, atol=1e-5)
    forward = norm_rope.rotate(x, angle.cos(), angle.sin())
    assert torch.allclose(forward, torch.view_as_real(turned).flatten(1), atol=1e-5)


def test_decode_and_prefill_share_their_norm_and_rope():
    """The decode kernel does in one call what prefill does in two; the bytes agree."""
    freqs = torch.polar(torch.ones(40, 32), torch.rand(40, 32) * 6)
    q, kv = torch.randn(5, 4 * 512).bfloat16(), torch.randn(5, 512).bfloat16()
    weight, positions = torch.rand(512).bfloat16(), torch.arange(20, 25)
    query, key = torch.empty(5, 4, 512).bfloat16(), kv.clone()
    norm_rope.q_norm_rope(q.view(5, 4, 512), query, 1e-6, freqs, positions)
    norm_rope.norm_rope_inplace(key, weight, 1e-6, freqs, positions)
    pool, stored = torch.zeros(9, 512).bfloat16(), kv.clone()
    decoded = norm_rope.qk_norm_rope_swa_store(
        q,
        stored,
        None,
        weight,
        1e-6,
        1e-6,
        64,
        freqs.real[:, None, None],
        freqs.imag[:, None, None],
        positions,
        swa_cache=pool,
        swa_loc=torch.tensor([8, 1, 2, 3, 4]),
        bf16_store=True,
    )
    assert torch.equal(decoded, query) and torch.equal(stored, key)
    assert torch.equal(pool[[8, 1, 2, 3, 4]], key) and not pool[0].any()


def test_clamped_swiglu():
    x, out = torch.randn(6, 32) * 9, torch.empty(6, 16)
    hyper_connections.silu_and_mul_clamp(x, out, 5.0)
    expected = F.silu(x[:, :16].clamp(max=5.0)) * x[:, 16:].clamp(-5.0, 5.0)
    assert torch.allclose(out, expected, atol=1e-5)


def test_host_copies_bring_the_same_rows_back():
    layers = [torch.randint(0, 255, (20, 24), dtype=torch.uint8) for _ in range(3)]
    device_rows, host_rows = torch.tensor([3, 19, 7]), torch.tensor([0, 5, 2])
    host = [torch.zeros(6, 24, dtype=torch.uint8) for _ in range(3)]
    host_copies.copy_layers(layers, host, device_rows, host_rows, 1)
    pages = torch.zeros(6, 3, 1, 24, dtype=torch.uint8)
    host_copies.layers_to_pages(layers, [pages], device_rows, host_rows, 1)
    for layer, rows in enumerate(layers):
        assert torch.equal(host[layer][host_rows], rows[device_rows])
        assert torch.equal(pages[host_rows, layer, 0], rows[device_rows])
        back = torch.zeros_like(rows)
        host_copies.pages_to_layer([pages], [back], host_rows, device_rows, layer, 1)
        assert torch.equal(back[device_rows], rows[device_rows])
        assert not back[[i for i in range(20) if i not in device_rows.tolist()]].any()
    with pytest.raises(NotImplementedError, match="pages of 256"):
        host_copies.copy_layers(layers, host, device_rows, host_rows, 256)


def test_window_store_keeps_the_last_positions_only():
    pool, positions = torch.zeros(3 * 8, 4), torch.arange(9, -1, -1)
    indices.store_window(
        kv=(positions[:, None].expand(10, 4) + 1.0).contiguous(),
        state_slot=torch.full((10,), 2),
        positions=positions,
        unified_kv=pool,
        win=8,
        ring_stride=8,
        final_pos=torch.full((10,), 9),
    )
    assert pool[16:, 0].tolist() == [9, 10, 3, 4, 5, 6, 7, 8] and not pool[:16].any()
