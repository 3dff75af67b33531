"""Who wrote a stored object: everything that must agree before its bytes may be used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
import xxhash

from .layout import FORMAT_VERSION

_COLUMNS = 1024
_CHUNK_ROWS = 16384
"""Rows multiplied at a time, 128 MiB, which bounds the scratch memory."""
_SPREAD = 0x1E3779B97F4A7C15
"""2**61 divided by the golden ratio: multiples of it spread over the 64-bit integers."""


@dataclass(frozen=True)
class Identity:
    """The namespace of stored pages and records, field by field.

    Attributes:
        engine: SGLang's version.
        layout: fingerprint of the record layout (page size, window, layer set, row bytes, dtypes).
        ring_sizes: rows per request slot of every ring, in record order.
        pages: (pool, layers, bytes per layer and page) of every host pool of compressed pages; the fp8
            layout has other pools and sizes than bf16.
        model: architecture and configuration of the served model.
        weights: digests of the weights that all ranks loaded, not of a name or path; after an update on
            several ranks, its number in this start of the server.
        ranks: (tensor parallel, attention tensor parallel) sizes; sums over other numbers of ranks round
            differently.
        bigram: page hashes are over token pairs (speculative decoding).
        rank: of the attention group, where every rank stores for itself; None where rank 0 does for all.
    """

    engine: str
    layout: str
    ring_sizes: tuple[int, ...]
    pages: tuple[tuple[str, int, int], ...]
    model: str
    weights: str
    ranks: tuple[int, int]
    bigram: bool
    rank: int | None = None

    @property
    def namespace(self) -> bytes:
        """16 bytes, equal only where every field and the format version are."""
        text = json.dumps({"format": FORMAT_VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).digest()[:16]


def weights_digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hex digest over names, dtypes, shapes and values of tensors, computed where they live.

    The values enter as column sums of their bytes, read as rows of 1024 64-bit integers, each row times an
    odd number of its own: exact integer arithmetic, the same on every device, and one pass over the memory.
    """
    digest, sums = xxhash.xxh3_128(), []
    for name, tensor in sorted(named, key=lambda item: item[0]):
        shape = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0{tensor.stride()}\0"
        digest.update(shape.encode())
        sums.append(_column_sums(tensor.detach()))
    # One transfer, not one for every tensor.
    for device in sorted({str(part.device) for part in sums}):
        parts = [part for part in sums if str(part.device) == device]
        digest.update(torch.stack(parts).cpu().numpy().tobytes())
    return digest.hexdigest()


def _column_sums(tensor: torch.Tensor) -> torch.Tensor:
    """int64 ``[_COLUMNS]``, wrapping around, of the tensor's bytes."""
    # In memory order: a transposed weight is not copied.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    flat = tensor.permute(order).contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    row_bytes = 8 * _COLUMNS
    whole = flat.numel() // row_bytes * row_bytes
    rows = flat[:whole].view(torch.int64).view(-1, _COLUMNS)
    sums = torch.zeros(_COLUMNS, dtype=torch.int64, device=tensor.device)
    for first in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[first : first + _CHUNK_ROWS]
        index = torch.arange(first, first + len(chunk), device=tensor.device)
        # Odd multipliers lose no bit and differ between rows, so that rows cannot change places.
        sums += (chunk * (index * _SPREAD | 1)[:, None]).sum(0)
    rest = torch.zeros(row_bytes, dtype=torch.uint8, device=tensor.device)
    rest[: flat.numel() - whole] = flat[whole:]
    index = torch.tensor(len(rows), device=tensor.device)
    return sums + rest.view(torch.int64) * (index * _SPREAD | 1)
