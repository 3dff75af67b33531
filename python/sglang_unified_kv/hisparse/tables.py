"""Bytes of the tables that HiSparse keeps on the device, before there are any. No torch."""

from __future__ import annotations

from .rows import RATIO, HotBuffer

MAP_BYTES = 8 // RATIO
"""Bytes per logical token of the map from its C4 row to a device row."""


def step_rows(slots: int) -> int:
    """Most rows of a decode step: data-parallel attention pads a batch to a multiple of its ranks."""
    return -(-slots // 64) * 64


def slot_tables(
    slots: int, layers: int, context: int, top_k: int, buffer: HotBuffer
) -> dict[str, int]:
    """Bytes of each table that does not grow with the logical tokens.

    SGLang's coordinator and ours share the work: its own tables, those of ``swap.Residency``, and the
    fixed addresses of ``swap.TritonSwap``.

    Args:
        slots: request slots, with the one for padding.
        layers: C4 layers of the rank.
        context: tokens of a slot's row in ``req_to_token``.
        top_k: rows that a decode step reads, ``index_topk`` of the model.

    >>> from .rows import HotBuffer
    >>> tables = slot_tables(129, 30, (1 << 20) + 4, 1024, HotBuffer(4096, 64))
    >>> max(tables, key=tables.get), tables["places"], sum(tables.values())
    ('places', 2029497660, 2501642680)
    """
    positions = -(-context // RATIO) + buffer.page
    per_slot = {
        "req_to_host_pool": 8 * positions,
        "req_to_device_buffer": 8 * buffer.padded,
        "top_k_device_locs_buffer": 4 * top_k,
        "raw_indices_buffer": 4 * top_k,
    }
    per_step_row = {
        "victims": 4 * top_k,
        "out": 4 * top_k,
        "sources": 8 * top_k,
        "targets": 4 * top_k,
        "counts": 4,
    }
    per_layer_and_slot = {
        "req_device_buffer_tokens": 4 * buffer.padded,
        "req_device_buffer_token_locs": 4 * buffer.padded,
        "places": 2 * positions,
        "stamps": 4 * buffer.rows,
        "clocks": 4 * 3,
    }
    return {
        **{name: slots * size for name, size in per_slot.items()},
        **{name: step_rows(slots) * size for name, size in per_step_row.items()},
        **{name: layers * slots * size for name, size in per_layer_and_slot.items()},
        "_device_buffer_arange_i32": 4 * buffer.rows,
        "num_real_reqs": 4,
        # The map's last entry, of no token.
        "unmapped": 8,
    }
