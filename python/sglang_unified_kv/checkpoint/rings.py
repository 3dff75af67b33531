"""The engine's per-request rings as rows of bytes, whatever their dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .layout import CheckpointLayout, RingSpec

WORD = torch.int64
"""Rows are moved as 8-byte words: byte-exact for every dtype, NaN payloads included."""


def as_words(rows: torch.Tensor) -> torch.Tensor:
    """View ``[n, width]`` of any dtype as int64 ``[n, row_bytes / 8]``; the row must be contiguous."""
    return rows.view(WORD)


def upload(indices: np.ndarray | Sequence[Any], device: torch.device) -> torch.Tensor:
    """int64 indices on the device, without making the host wait for its stream."""
    tensor = torch.as_tensor(indices, dtype=torch.int64)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Ring:
    """One request-addressed ring buffer of the engine.

    Attributes:
        spec: what it holds.
        buffer: ``[rows, width]``, the engine's own tensor; row ``slot * size + position % size``.
        size: rows per request slot.
    """

    spec: RingSpec
    buffer: torch.Tensor
    size: int

    @classmethod
    def of(cls, kind, layer: int, buffer: torch.Tensor, size: int) -> Ring:
        """Describe ``buffer``.

        Raises:
            ValueError: it is not contiguous, or its rows are not a whole number of 8-byte words.
        """
        row_bytes = buffer.shape[1] * buffer.element_size()
        if buffer.dim() != 2 or not buffer.is_contiguous() or row_bytes % 8:
            raise ValueError(
                f"{kind.value} ring of layer {layer}: cannot move rows of shape "
                f"{tuple(buffer.shape)}, stride {buffer.stride()}, {row_bytes} bytes"
            )
        dtype = str(buffer.dtype).removeprefix("torch.")
        return cls(RingSpec(kind, layer, row_bytes, dtype), buffer, size)

    @property
    def words(self) -> torch.Tensor:
        return as_words(self.buffer)


def check_layout(layout: CheckpointLayout, rings: list[Ring]) -> None:
    """Raise ValueError unless ``rings`` are the layout's sections, in order, and can hold their rows."""
    if [s.spec for s in layout.sections] != [r.spec for r in rings]:
        raise ValueError("the checkpoint layout does not describe these rings")
    for section, ring in zip(layout.sections, rings, strict=True):
        if ring.size < section.rows:
            raise ValueError(
                f"{ring.spec.kind.value} ring of layer {ring.spec.layer} holds {ring.size} rows per "
                f"request, a checkpoint needs {section.rows}"
            )
