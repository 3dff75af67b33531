"""Pages on their way to storage: their bytes are tied to their keys."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ....checkpoint.record_format import TRAILER_BYTES, page_trailer

DIRECT_IO_BYTES = 4096
"""What addresses, offsets and lengths of direct I/O are multiples of, on every file system."""


class SealedPool:
    """A host pool of pages whose flat pages end in a trailer that ties them to their key.

    Offers flat pages only, so that no backend can move the bytes past it. Zeros fill them up to whole
    units of direct I/O (nixl's default), which a page and its trailer are not.
    """

    def __init__(self, pool, name: str):
        self._pool = pool
        self._name = name
        self._namespace = b""
        self._keys: dict[int, str] = {}
        self._rejected: set[int] = set()
        self._page_bytes = pool.get_dummy_flat_data_page().nbytes
        units = -(-(self._page_bytes + TRAILER_BYTES) // DIRECT_IO_BYTES)
        self._sealed_bytes = units * DIRECT_IO_BYTES
        self.page_size = pool.page_size
        self.layout = pool.layout
        self.pin_memory = getattr(pool, "pin_memory", False)

    def expect(self, namespace: bytes, keys: dict[int, str]) -> None:
        """Name the pages about to be moved: first index -> key."""
        self._namespace = namespace
        self._keys.update(keys)

    def rejected(self, indices: Iterable[int]) -> set[int]:
        """Forget these pages; returns those whose bytes were refused."""
        bad = {i for i in indices if i in self._rejected}
        self._rejected -= bad
        for index in indices:
            self._keys.pop(index, None)
        return bad

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.empty(self._sealed_bytes, dtype=torch.uint8)

    def get_data_page(self, index, flat: bool = True) -> torch.Tensor:
        index = int(index)
        page = self._pool.get_data_page(index, flat=True).view(torch.uint8)
        sealed = torch.zeros(self._sealed_bytes, dtype=torch.uint8)
        sealed[: self._page_bytes] = page
        trailer = bytearray(self._trailer(index, sealed))
        sealed[-TRAILER_BYTES:] = torch.frombuffer(trailer, dtype=torch.uint8)
        return sealed

    def set_from_flat_data_page(self, index, data_page: torch.Tensor) -> None:
        index = int(index)
        sealed = data_page.view(torch.uint8).view(-1)
        if sealed[-TRAILER_BYTES:].numpy().tobytes() != self._trailer(index, sealed):
            self._rejected.add(index)
        else:
            self._pool.set_from_flat_data_page(index, sealed[: self._page_bytes])

    def _trailer(self, index: int, sealed: torch.Tensor) -> bytes:
        body = sealed[:-TRAILER_BYTES].numpy()
        return page_trailer(self._namespace, self._name, self._keys[index], body)


def seals_pages(backend_name: str, extra_config: dict) -> bool:
    """Whether a backend moves flat pages rather than the pools' own memory."""
    if backend_name == "dynamic":
        return not extra_config.get("interface_v1", 0)
    return backend_name in ("file", "nixl")
