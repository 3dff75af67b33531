"""Everything that the pools hold for one request, by logical position and independent of its slots."""

from __future__ import annotations

import torch

from sglang_unified_kv.reference.harness import InProcessEngine
from sglang_unified_kv.reference.model import COMPRESS_RATIOS

WINDOW = 128
INDEX_PAGE, INDEX_DIM = 64, 128


def request_bytes(engine: InProcessEngine, slot: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Copies of what request row ``slot`` holds after ``seq_len`` tokens.

    ``window L`` (the last 128 rows), ``compressed L`` (one row per finished block), ``indexer keys L``
    and ``indexer scales L`` of layer ``L``; ``attention state L`` and ``indexer state L``: the last four
    rows for C4, the rows of the unfinished block for C128.
    """
    pool = engine.pool
    locations = engine.req_to_token_pool.req_to_token[slot, :seq_len].long().cpu()
    window = torch.arange(max(0, seq_len - WINDOW), seq_len)
    ring = slot * pool.unified_swa_ring_size + window % pool.unified_swa_ring_size
    held: dict[str, torch.Tensor] = {}
    for layer, ratio in enumerate(COMPRESS_RATIOS):
        rows = pool.unified_kv_pool.kv_buffer[layer]
        held[f"window {layer}"] = rows[ring]
        if not ratio:
            continue
        blocks = locations[ratio - 1 :: ratio] // ratio
        held[f"compressed {layer}"] = rows[pool.unified_swa_pages + blocks]
        attention = pool.get_attention_compress_states(layer)
        held[f"attention state {layer}"] = _state_rows(attention, slot, seq_len)
        if ratio == 4:
            indexer = pool.get_indexer_compress_states(layer)
            held[f"indexer state {layer}"] = _state_rows(indexer, slot, seq_len)
            keys, scales = _indexer_rows(pool.get_index_k_with_scale_buffer(layer), blocks)
            held[f"indexer keys {layer}"], held[f"indexer scales {layer}"] = keys, scales
    return held


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bytes differ, with the number of differing rows."""
    if left.keys() != right.keys():
        raise ValueError(f"not the same buffers: {sorted(left.keys() ^ right.keys())}")
    found = []
    for name, a in left.items():
        b = right[name]
        if a.shape != b.shape:
            found.append(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}")
        elif rows := int((a.view(torch.uint8) != b.view(torch.uint8)).any(-1).sum()):
            found.append(f"{name}: {rows} of {a.shape[0]} rows")
    return found


def _state_rows(state, slot: int, seq_len: int) -> torch.Tensor:
    count = min(4, seq_len) if state.ratio == 4 else seq_len % state.ratio
    positions = torch.arange(seq_len - count, seq_len)
    return state.kv_score_buffer.kv_score[slot * state.ring_size + positions % state.ring_size]


def _indexer_rows(buffer: torch.Tensor, blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 keys as bytes ``[n, 128]`` and float32 scales ``[n, 1]`` of an indexer pool's rows."""
    pages = buffer.view(torch.uint8).view(buffer.shape[0], -1)
    page, slot = (blocks // INDEX_PAGE)[:, None], (blocks % INDEX_PAGE)[:, None]
    keys = pages[page, slot * INDEX_DIM + torch.arange(INDEX_DIM)]
    scales = pages.view(torch.float32)[page, INDEX_PAGE * INDEX_DIM // 4 + slot]
    return keys, scales
