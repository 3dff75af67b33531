"""A token's bits are the same in any chunk, batch and phase: one cold run is the oracle of every other.

2700 tokens matter beside 700: above 2048 the indexer chooses 512 compressed rows out of more.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from sglang_unified_kv.reference.harness import InProcessEngine, prompt
from sglang_unified_kv.reference.ops import arithmetic
from sglang_unified_kv.reference.snapshot import differing, request_bytes

WHOLE = 4096
STEPS = 3


class Seen(NamedTuple):
    """A request right after the forward that made it this long."""

    logits: torch.Tensor
    held: dict[str, torch.Tensor]


def record(engine: InProcessEngine, *prompts: list[int], steps: int = STEPS):
    """Run ``prompts`` together; for each its tokens and what was seen at every length from its own."""
    seen: dict[str, dict[int, Seen]] = {str(i): {} for i in range(len(prompts))}

    def after_forward(batch, logits):
        rows = zip(
            batch.rids, batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True
        )
        for i, (rid, slot, length) in enumerate(rows):
            if length >= len(prompts[int(rid)]):
                seen[rid][length] = Seen(logits[i].clone(), request_bytes(engine, slot, length))

    with engine.tap(after_forward):
        rids = [engine.submit(ids, steps, rid=str(i)) for i, ids in enumerate(prompts)]
        outputs = engine.run_many(*rids)
    assert [o.cached_tokens for o in outputs] == [0] * len(prompts)
    return [(output.output_ids, seen[output.rid]) for output in outputs]


def assert_same(left, right):
    (left_ids, left_seen), (right_ids, right_seen) = left, right
    assert left_ids == right_ids
    assert left_seen.keys() == right_seen.keys() and left_seen
    for length in left_seen:
        assert differing(left_seen[length].held, right_seen[length].held) == []
        assert torch.equal(left_seen[length].logits, right_seen[length].logits)


@pytest.fixture(scope="module")
def record_cold(make_engine):
    """``record_cold(length, chunk)``: one prompt of that length in an engine of its own, once."""
    cache = {}

    def run(length, chunk):
        if (length, chunk) not in cache:
            with make_engine(stock=True, hicache=False, chunked_prefill_size=chunk) as engine:
                (cache[length, chunk],) = record(engine, prompt(0, length))
        return cache[length, chunk]

    return run


@pytest.mark.parametrize(
    ("length", "chunk"),
    [
        pytest.param(700, 256, marks=pytest.mark.slow),
        pytest.param(700, 512, marks=pytest.mark.slow),
        (2700, 2048),
        pytest.param(2700, 256, marks=pytest.mark.slow),
        pytest.param(2700, 512, marks=pytest.mark.slow),
    ],
)
def test_chunk_size_does_not_show(record_cold, length, chunk):
    assert_same(record_cold(length, chunk), record_cold(length, WHOLE))


@pytest.mark.parametrize("mixed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_batch_does_not_show(make_engine, monkeypatch, mixed):
    """Four requests of unequal length together and alone.

    Mixed: chunks start anywhere, as SGLang's exact chunk fill has them on gfx95, beside decode rows.
    """
    prompts = [prompt(seed, n) for seed, n in ((0, 520), (1, 333), (2, 600), (3, 257))]
    if mixed:
        monkeypatch.setattr(
            "sglang.srt.managers.schedule_policy._use_exact_chunk_fill", lambda: True
        )
    batches = []
    with make_engine(
        stock=True, hicache=False, chunked_prefill_size=512, enable_mixed_chunk=mixed
    ) as engine:
        with engine.tap(lambda batch, _: batches.append((batch.extend_prefix_lens, batch.rids))):
            together = record(engine, *prompts, steps=3)
        for ids, expected in zip(prompts, together, strict=True):
            engine.flush()
            (alone,) = record(engine, ids, steps=3)
            assert_same(alone, expected)
    starts = [start for extend, _ in batches if extend is not None for start in extend.tolist()]
    assert max(len(rids) for _, rids in batches) == 4
    assert any(start % 256 for start in starts) is mixed


@pytest.mark.parametrize(
    ("length", "steps"),
    # Across a page and a C128 block; across 2048, where the indexer starts to choose.
    [(760, 12), pytest.param(2040, 12, marks=pytest.mark.slow)],
)
def test_decode_computes_what_prefill_computes(make_engine, length, steps):
    with make_engine(stock=True, hicache=False, chunked_prefill_size=WHOLE) as engine:
        (decoded,) = record(engine, prompt(5, length), steps=steps)
        forced = prompt(5, length) + decoded[0][:-1]
        engine.flush()
        (prefilled,) = record(engine, forced, steps=1)
    assert prefilled[0] == decoded[0][-1:]
    end = len(forced)
    assert differing(decoded[1][end].held, prefilled[1][end].held) == []
    assert torch.equal(decoded[1][end].logits, prefilled[1][end].logits)


def test_plain_float32_does_depend_on_the_chunk(make_engine):
    """What the exact sums are for; and the comparisons above can fail."""
    logits = []
    arithmetic.set_chunk_invariant(False)
    try:
        for chunk in (256, WHOLE):
            with make_engine(stock=True, hicache=False, chunked_prefill_size=chunk) as engine:
                ((_, seen),) = record(engine, prompt(0, 300), steps=1)
                logits.append(seen[300].logits)
    finally:
        arithmetic.set_chunk_invariant(True)
    difference = (logits[0] - logits[1]).abs().max().item()
    assert 0.0 < difference < 0.5
