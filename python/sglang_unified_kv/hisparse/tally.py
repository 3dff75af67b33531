"""Counts that kernels keep on the device, read without waiting for it."""

from __future__ import annotations

import torch


class Tally:
    """Sums over a table of counts.

    Args:
        counts: int64 ``[n, columns]``; never fall.
    """

    def __init__(self, counts: torch.Tensor):
        self._counts = counts
        self._copy = torch.zeros_like(counts, device="cpu", pin_memory=counts.is_cuda)
        self._sums = [0] * counts.shape[1]
        self._module = torch.get_device_module(counts.device)
        self._stream = self._module.Stream()
        self._copied: torch.Event | None = None

    def latest(self) -> list[int]:
        """The sums as of the last copy that has arrived; starts another one."""
        self._collect()
        if self._copied is None:
            with self._module.stream(self._stream):
                self._copy.copy_(self._counts, non_blocking=True)
                self._copied = self._module.Event()
                self._copied.record(self._stream)
            self._collect()
        return self._sums

    def _collect(self) -> None:
        if self._copied is not None and self._copied.query():
            self._sums = self._copy.sum(0).tolist()
            self._copied = None
