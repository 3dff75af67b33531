"""HiCache copies between device and host pools: the calls of sgl_kernel's kvcacheio.

An index addresses one row of a layer's buffer (``page_size`` is 1 for DeepSeek-V4's paged pools); host rows
may have another dtype or shape of the same size. The ``direct`` calls get tensors. The ``kernel`` calls get
addresses, or tensors of which they use the address alone: row ``i`` is ``item_size`` bytes, ``i`` strides on.
"""

from __future__ import annotations

import ctypes

import torch

from sglang_unified_kv.reference.upstream_kernels import ENV


def _copy_rows(source, destination, source_rows, destination_rows) -> None:
    if source.device != destination.device:
        # After the work of the caller's stream, without waiting for it.
        for theirs, ours in zip(source_rows.tolist(), destination_rows.tolist(), strict=True):
            row = source[theirs].view(destination.dtype).view(destination.shape[1:])
            destination[ours].copy_(row, non_blocking=True)
        return
    rows = source[source_rows.to(source.device).long()]
    flat = rows.view(destination.dtype).view(rows.shape[0], *destination.shape[1:])
    destination[destination_rows.to(destination.device).long()] = flat.to(destination.device)


# io backend "direct"


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


# io backend "kernel"


def kernel_copy_layers(
    src_layers, dst_layers, src_indices, dst_indices, item_size, num_layers
) -> None:
    """``transfer_kv_all_layer_mla``: tables of addresses, one per layer, on both sides."""
    _require_layers(src_layers, num_layers)
    for source, destination in zip(_table(src_layers), _table(dst_layers), strict=True):
        _copy_at(source, destination, src_indices, dst_indices, item_size, item_size, item_size)


def kernel_copy_layer(src, dst, src_indices, dst_indices, item_size) -> None:
    """``transfer_kv_per_layer_mla``: one layer, layer-first on both sides."""
    source, destination = _address(src), _address(dst)
    _copy_at(source, destination, src_indices, dst_indices, item_size, item_size, item_size)


def kernel_layers_to_pages(
    src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
) -> None:
    """``transfer_kv_all_layer_mla_lf_pf``: a table of layers into pages of ``dst_layout_dim`` bytes."""
    _require_layers(src_layers, num_layers)
    for layer, source in enumerate(_table(src_layers)):
        destination = _address(dst) + layer * item_size
        _copy_at(
            source, destination, src_indices, dst_indices, item_size, item_size, dst_layout_dim
        )


def kernel_pages_to_layer(
    src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim
) -> None:
    """``transfer_kv_per_layer_mla_pf_lf``: one layer of pages of ``src_layout_dim`` bytes to a device."""
    source = _address(src) + layer_id * item_size
    _copy_at(source, _address(dst), src_indices, dst_indices, item_size, src_layout_dim, item_size)


def _copy_at(
    source: int, destination: int, src_indices, dst_indices, item_size, src_stride, dst_stride
) -> None:
    if item_size % 8:
        raise ValueError(f"rows of {item_size} bytes: the kernels copy words of 8 bytes")
    for indices in (src_indices, dst_indices):
        if indices.dtype != torch.int64:
            raise TypeError(f"indices are {indices.dtype}: the kernels read int64")
    if src_indices.numel() != dst_indices.numel():
        raise ValueError(f"{src_indices.numel()} rows to {dst_indices.numel()} places")
    copied = (src_indices >= 0) & (dst_indices >= 0)
    src_indices, dst_indices = src_indices[copied], dst_indices[copied]
    if not src_indices.numel():
        return
    _copy_rows(
        _rows_at(source, int(src_indices.max()) + 1, item_size, src_stride),
        _rows_at(destination, int(dst_indices.max()) + 1, item_size, dst_stride),
        src_indices,
        dst_indices,
    )


def _rows_at(address: int, rows: int, item_size: int, stride: int) -> torch.Tensor:
    """uint8 ``[rows, item_size]`` at an address of this process, not a copy."""
    memory = (ctypes.c_uint8 * ((rows - 1) * stride + item_size)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).as_strided((rows, item_size), (stride, 1))


def _require_layers(table: torch.Tensor, num_layers: int) -> None:
    if len(table) != num_layers:
        raise ValueError(f"a table of {len(table)} layers: num_layers is {num_layers}")


def _table(addresses: torch.Tensor) -> list[int]:
    _require_cpu(addresses)
    return addresses.tolist()


def _address(buffer: torch.Tensor) -> int:
    _require_cpu(buffer)
    return buffer.data_ptr()


def _require_cpu(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise NotImplementedError(
            "--hicache-io-backend kernel: the reference engine copies by address on the CPU alone; on a GPU "
            f"use direct, or sgl_kernel's copies ({ENV}=sgl-kernel)"
        )
