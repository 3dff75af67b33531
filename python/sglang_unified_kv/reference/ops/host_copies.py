"""HiCache copies between device and host pools: the ``direct`` calls of sgl_kernel's kvcacheio.

An index addresses one row of a layer's buffer (``page_size`` is 1 for DeepSeek-V4's paged pools);
host rows may have another dtype or shape of the same size.
"""

from __future__ import annotations


def _copy_rows(source, destination, source_rows, destination_rows) -> None:
    if source.device != destination.device:
        # Behind the work of the caller's stream, without waiting for it.
        for theirs, ours in zip(source_rows.tolist(), destination_rows.tolist(), strict=True):
            row = source[theirs].view(destination.dtype).view(destination.shape[1:])
            destination[ours].copy_(row, non_blocking=True)
        return
    rows = source[source_rows.to(source.device).long()]
    flat = rows.view(destination.dtype).view(rows.shape[0], *destination.shape[1:])
    destination[destination_rows.to(destination.device).long()] = flat.to(destination.device)


def _require_single_rows(page_size: int) -> None:
    if page_size != 1:
        raise NotImplementedError(f"the reference engine copies rows, not pages of {page_size}")


def copy_layers(src_layers, dst_layers, src_indices, dst_indices, page_size) -> None:
    """``transfer_kv_direct``: the same rows of every layer, layer-first on both sides."""
    _require_single_rows(page_size)
    for source, destination in zip(src_layers, dst_layers, strict=True):
        _copy_rows(source, destination, src_indices, dst_indices)


def layers_to_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size) -> None:
    """``transfer_kv_all_layer_direct_lf_pf``: layer-first rows into one page-first host buffer."""
    _require_single_rows(page_size)
    (pages,) = dst_ptrs
    for layer, source in enumerate(src_ptrs):
        _copy_rows(source, pages[:, layer], src_indices, dst_indices)


def pages_to_layer(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size) -> None:
    """``transfer_kv_per_layer_direct_pf_lf``: one layer of a page-first host buffer to a device."""
    _require_single_rows(page_size)
    (pages,), (destination,) = src_ptrs, dst_ptrs
    _copy_rows(pages[:, layer_id], destination, src_indices, dst_indices)
