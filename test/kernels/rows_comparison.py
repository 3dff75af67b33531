"""The row kernels against their torch twins on random inputs; ``interpret`` or ``gpu`` is the argument.

Prints the number of cases. Every byte that a move may not touch is random as well and must stay.
"""

import os
import random
import sys

if sys.argv[1] == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from sglang_unified_kv.checkpoint.capture import Capture  # noqa: E402
from sglang_unified_kv.checkpoint.layout import CheckpointLayout, Kind  # noqa: E402
from sglang_unified_kv.checkpoint.rings import Ring  # noqa: E402
from sglang_unified_kv.checkpoint.rows import (  # noqa: E402
    ChunkPlaces,
    Places,
    TorchRows,
    TritonRows,
)

DEVICE = torch.device("cpu" if sys.argv[1] == "interpret" else "cuda")
PAGE, SLOTS = 256, 4
# Elements of a row, dtype, rows per request; the fp8 layout's rope rows, and ring sizes with drafts.
RINGS = {
    "bf16": [
        (Kind.WINDOW, 512, torch.bfloat16, 128),
        (Kind.ATTENTION_STATE, 2048, torch.float32, 8),
        (Kind.INDEXER_STATE, 512, torch.float32, 8),
    ],
    "fp8 and drafts": [
        (Kind.WINDOW, 512, torch.float8_e4m3fn, 131),
        (Kind.WINDOW_ROPE, 64, torch.bfloat16, 131),
        (Kind.ATTENTION_STATE, 2048, torch.float32, 16),
        (Kind.INDEXER_STATE, 512, torch.float32, 16),
        (Kind.DRAFT_WINDOW, 512, torch.float8_e4m3fn, 131),
        (Kind.DRAFT_WINDOW_ROPE, 64, torch.bfloat16, 131),
    ],
}


def random_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


def build(kind, chance, twin=None):
    """Rings and staging of random bytes, or copies of ``twin``'s, and the moves on them."""
    layers = 1 if DEVICE.type == "cpu" else chance.randrange(1, 4)
    if twin is not None:
        rings = [Ring(r.spec, r.buffer.clone(), r.size) for r in twin.rings]
        return kind(twin.layout, rings, twin.staging.clone())
    rings = []
    for what, width, dtype, size in RINGS[chance.choice(list(RINGS))]:
        for layer in range(layers):
            buffer = random_bytes(SLOTS * size + 5, width * dtype.itemsize).view(dtype)
            rings.append(Ring.of(what, layer, buffer, size))
    layout = CheckpointLayout.of([r.spec for r in rings], page_size=PAGE, window=128, overlap=4)
    return kind(layout, rings, random_bytes(3, layout.record_bytes))


def same(left, right):
    assert torch.equal(left.staging, right.staging), "staging"
    for a, b in zip(left.rings, right.rings, strict=True):
        assert torch.equal(a.buffer.view(torch.uint8), b.buffer.view(torch.uint8)), a.spec


def places(chance):
    count = chance.randrange(1, 4)
    slots = chance.sample(range(SLOTS), count)
    pairs = [(slot, PAGE * chance.randrange(1, 9)) for slot in slots]
    return Places(pairs, chance.sample(range(3), count), DEVICE)


def rings_case(chance):
    ours = build(TorchRows, chance)
    theirs = build(TritonRows, chance, ours)
    where = places(chance)
    kinds = frozenset(chance.sample(list(Kind), chance.randrange(1, len(Kind) + 1)))
    for moves in (ours, theirs):
        moves.gather_rings(kinds, where)
    same(ours, theirs)
    for moves in (ours, theirs):
        moves.scatter_rings(where)
    same(ours, theirs)


def chunk_case(chance):
    ours = build(TorchRows, chance)
    theirs = build(TritonRows, chance, ours)
    captures, offset = [], 0
    for slot in range(chance.randrange(1, 4)):
        boundary = PAGE * chance.randrange(1, 5)
        # The chunk starts up to a window before the boundary, or far ahead of it.
        start = max(0, boundary - chance.choice((1, 3, 100, 128, 200)))
        captures.append(Capture("r", slot, boundary, start, offset, 0))
        offset += boundary - start + chance.randrange(1, 60)
    where = ChunkPlaces(captures, chance.sample(range(3), len(captures)), DEVICE)
    for section, ring in enumerate(ours.rings):
        width, dtype = ring.buffer.shape[1], ring.buffer.dtype
        if dtype == torch.float32 and chance.random() < 0.5:
            # The engine converts it. No NaN: a conversion may change its payload.
            chunk = torch.randn(offset, width, device=DEVICE).bfloat16()
        else:
            chunk = random_bytes(offset, width * dtype.itemsize).view(dtype)
        if chance.random() < 0.5:
            # Rows of a wider tensor.
            chunk = torch.cat([chunk.view(torch.uint8), random_bytes(offset, 64)], 1).view(
                chunk.dtype
            )
            chunk = chunk[:, :width]
        for moves in (ours, theirs):
            moves.gather_chunk(section, chunk, where)
    same(ours, theirs)


cases = int(sys.argv[2])
for seed in range(cases):
    torch.manual_seed(seed)
    for case in (rings_case, chunk_case):
        case(random.Random(seed))
print(f"{2 * cases} cases equal")
