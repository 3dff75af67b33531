"""The host pool of records, as one entry of SGLang's host pool group: a page is one record."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.common import (
    ALLOC_MEMORY_FUNCS,
    _cuda_host_unregister,
    get_allocator_from_storage,
)
from sglang.srt.mem_cache.pool_host.group import PoolEntry

from ....checkpoint.record_format import HEADER_BYTES

if TYPE_CHECKING:
    from ....checkpoint.staging import RecordMover

RECORD_POOL = PoolName.DEEPSEEK_V4_C4_STATE
"""A name that SGLang's storage and rank agreement know and that unified_kv leaves unused."""


class RecordHostPool:
    """Pinned host memory of all records, uint8 ``[records, HEADER_BYTES + record_bytes]``.

    SGLang sees the surface of a host pool, so that backends register and move its bytes. Which slot holds
    what is decided by the checkpoint store alone: nothing here allocates.
    """

    shared_allocation_domain = None
    stores_page_envelope = False
    storage_format_tag = None
    # Neutral where SGLang asks whether all pools of the group can.
    can_use_write_back_jit = True
    page_size = 1
    device = "cpu"
    dtype = torch.uint8

    def __init__(self, records: int, record_bytes: int, device: torch.device, layout: str):
        self.size = self.logical_size = records
        self.slot_bytes = HEADER_BYTES + record_bytes
        self.layout = layout
        self.lock = threading.RLock()
        self.pin_memory = device.type != "cpu"
        self.slots = ALLOC_MEMORY_FUNCS[device.type](
            (records, self.slot_bytes),
            dtype=torch.uint8,
            device="cpu",
            pin_memory=self.pin_memory,
            allocator=get_allocator_from_storage("default"),
            registration_granularity_bytes=self.slot_bytes,
        )
        self._mover: RecordMover | None = None

    @property
    def payload(self) -> torch.Tensor:
        """uint8 ``[records, record_bytes]``, a view."""
        return self.slots[:, HEADER_BYTES:]

    def serve(self, mover: RecordMover) -> None:
        """The copies that use this memory; :meth:`destroy` waits for them."""
        self._mover = mover

    def entry(self) -> PoolEntry:
        """What SGLang's host pool group holds."""
        return PoolEntry(
            name=RECORD_POOL, host_pool=self, device_pool=None, layer_mapper=lambda layer: None
        )

    def clear(self) -> None:
        """The store forgets; bytes need not be cleared."""

    def destroy(self) -> None:
        """Wait for copies in flight and unpin (B4: never under a running copy)."""
        if self._mover is not None:
            self._mover.synchronize()
        if self.pin_memory:
            _cuda_host_unregister(self.slots)

    def available_size(self) -> int:
        return 0

    # Flat pages, for backends that copy.

    def get_data_page(self, index, flat: bool = True) -> torch.Tensor:
        return self.slots[int(index)]

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.empty(self.slot_bytes, dtype=torch.uint8)

    def set_from_flat_data_page(self, index, data_page: torch.Tensor) -> None:
        self.slots[int(index)].copy_(data_page.view(torch.uint8).view(-1))

    # Addresses, for backends that do not.

    @property
    def kv_buffer(self) -> torch.Tensor:
        return self.slots

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return [self.slots]

    def get_page_buffer_meta(self, indices) -> tuple[list[int], list[int]]:
        base = self.slots.data_ptr()
        pointers = [base + int(slot) * self.slot_bytes for slot in indices]
        return pointers, [self.slot_bytes] * len(pointers)

    def get_page_buffer_element_size(self, split_factor: int = 1) -> int:
        return self.slot_bytes // split_factor

    def get_size_per_token(self) -> int:
        return self.slot_bytes

    get_ksize_per_token = get_size_per_token

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        return (
            self.slots.data_ptr() % page_size_bytes == 0 and self.slot_bytes % page_size_bytes == 0
        )
