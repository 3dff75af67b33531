"""Decode reads C4 rows that may lie on the host: the rows it lacks are copied into its hot buffer first.

:class:`TorchSwap` says what is done, on any device; :class:`TritonSwap` does the same with kernels.

Per layer and request slot there are

``tokens``     int32 ``[slots, padded]``: the C4 position that each place of the hot buffer holds
``locations``  int32 ``[slots, padded]``: the device row of each place; place ``hot`` is the newest row's
``places``     int16 ``[slots, positions]``: the place that holds each position, -1 for none
``stamps``     int32 ``[slots, hot]``: the step that last read each place
``clocks``     int32 ``[slots, 3]``: the hand, the step in which it began its lap, the last step

and for all layers ``cold``, int64 ``[slots, positions]``: the host row of each position. A sequence of at
most ``hot`` rows lies in its buffer as a whole, position ``t`` in place ``t``.

A row that is missing takes a place that was not read in the hand's present lap, the first behind the hand, or
else one that this step does not read. This is the clock algorithm: its work does not grow with the buffer, as
that of keeping an exact order of reads would.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from .rows import HotBuffer


class Residency(NamedTuple):
    """What lies where in the hot buffers, of one layer or with a dimension of layers in front."""

    tokens: torch.Tensor
    locations: torch.Tensor
    places: torch.Tensor
    stamps: torch.Tensor
    clocks: torch.Tensor

    @classmethod
    def empty(
        cls, tokens: torch.Tensor, locations: torch.Tensor, hot: int, positions: int
    ) -> Residency:
        """With ``tokens`` and ``locations`` ``[layers, slots, padded]`` of the caller."""
        layers, slots, _ = tokens.shape
        device = tokens.device
        return cls(
            tokens,
            locations,
            torch.full((layers, slots, positions), -1, dtype=torch.int16, device=device),
            torch.zeros(layers, slots, hot, dtype=torch.int32, device=device),
            torch.zeros(layers, slots, 3, dtype=torch.int32, device=device),
        )

    def layer(self, layer: int) -> Residency:
        return Residency(*(tensor[layer] for tensor in self))

    def begin(self, slot: int) -> None:
        """A new request: position ``t`` is in place ``t``, in all layers. ``locations`` are the caller's."""
        hot = self.stamps.shape[-1]
        order = torch.arange(hot, dtype=torch.int32, device=self.tokens.device)
        self.tokens[:, slot, :hot] = order
        self.places[:, slot] = -1
        held = min(hot, self.places.shape[-1])
        self.places[:, slot, :held] = order[:held].to(torch.int16)
        self.stamps[:, slot] = 0
        self.clocks[:, slot] = 0


class Step(NamedTuple):
    """What one decode step reads in a layer.

    Attributes:
        top_k: int32 ``[requests, top_k]``, distinct positions per request, -1 behind the last.
        lengths: ``[requests]``, rows of each sequence with the newest.
        slots: int64 ``[requests]``, request slots.
        real: int32 ``[1]``, requests that are no padding of a graph.
    """

    top_k: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    real: torch.Tensor


class Rows(NamedTuple):
    """One kind of rows in all layers.

    Attributes:
        device: uint8 ``[rows, row bytes]`` of each layer.
        host: the same on the host.
        device_table: int64 ``[layers]`` on the device, where the device rows begin.
        host_table: the host rows' addresses, as the device sees them.
    """

    device: Sequence[torch.Tensor]
    host: Sequence[torch.Tensor]
    device_table: torch.Tensor
    host_table: torch.Tensor


class Swap(Protocol):
    """
    Attributes:
        tally: int64 ``[n, 2]``; its sums are the rows looked up in hot buffers that do not hold their whole
            sequence, and those of them that were copied, since start.
    """

    tally: torch.Tensor

    def swap_in(self, layer: int, step: Step, at: Residency, cold: torch.Tensor) -> torch.Tensor:
        """Bring the rows of ``step`` to the device.

        Returns:
            int32 ``[requests, top_k]``: the device row of each position, -1 for none.
        """

    def save(self, host_rows: torch.Tensor, device_rows: torch.Tensor) -> None:
        """Copy device rows of all layers to the host, in the order of the current stream."""


class TorchSwap:
    """In torch.

    Args:
        parts: the kinds of rows; all move together.
    """

    def __init__(self, buffer: HotBuffer, parts: Sequence[Rows]):
        self._buffer, self._parts = buffer, parts
        self.tally = torch.zeros(1, 2, dtype=torch.int64)

    def swap_in(self, layer, step, at, cold):
        out = torch.full_like(step.top_k, -1)
        for i in range(min(int(step.real), len(step.slots))):
            self._swap_request(
                layer, out[i], step.top_k[i], int(step.lengths[i]), step.slots[i], at, cold
            )
        return out

    def _swap_request(self, layer, out, top_k, length, slot, at, cold) -> None:
        hot, slot = self._buffer.rows, int(slot)
        tokens, locations, places, stamps, clocks = (whole[slot] for whole in at)
        hand, lap, now = clocks.tolist()
        now += 1
        clocks[2] = now
        valid = (top_k >= 0) & (top_k < length)
        if length <= hot:
            out[valid] = locations[top_k[valid].long()]
            return
        out[valid & (top_k == length - 1)] = locations[hot]
        wanted = valid & (top_k < length - 1)
        place = places[top_k.clamp(min=0).long()].long()
        hits, misses = wanted & (place >= 0), wanted & (place < 0)
        out[hits] = locations[place[hits]]
        stamps[place[hits]] = now
        count = int(misses.sum())
        self.tally += torch.tensor([int(wanted.sum()), count])
        if count == 0:
            return

        behind = (hand + torch.arange(min(2 * len(top_k), hot), device=top_k.device)) % hot
        read = stamps[behind]
        old, spare = (read < lap).nonzero()[:, 0], ((read >= lap) & (read < now)).nonzero()[:, 0]
        taken = torch.cat([old, spare])[:count]
        victims = behind[taken]
        stamps[victims] = now
        passed = hand + int(taken.max()) + 1
        clocks[0] = passed % hot
        if passed >= hot:
            clocks[1] = now

        places[tokens[victims].long()] = -1
        places[top_k[misses].long()] = victims.to(torch.int16)
        tokens[victims] = top_k[misses]
        out[misses] = locations[victims]
        self.load(layer, cold[slot][top_k[misses].long()], out[misses].long())

    def load(self, layer: int, host_rows: torch.Tensor, device_rows: torch.Tensor) -> None:
        """Copy rows of one layer from the host."""
        for rows in self._parts:
            host, device = rows.host[layer], rows.device[layer]
            device[device_rows] = host[host_rows.to(host.device)].to(device.device)

    def save(self, host_rows, device_rows):
        for rows in self._parts:
            for host, device in zip(rows.host, rows.device, strict=True):
                host[host_rows.to(host.device)] = device[device_rows].to(host.device)


class TritonSwap:
    """With one program per request for the plan, and as many as fill the chip for the copies.

    Args:
        parts: the kinds of rows; all move together, by the same plan.
        top_k: most rows that a step reads of a request.
        slots: most requests of a step, with what pads them.
        one_launch: plan in one launch; None: unless torch is built for ROCm.
    """

    ROWS = 4
    """Rows that a program copies at a time."""

    def __init__(
        self,
        buffer: HotBuffer,
        parts: Sequence[Rows],
        top_k: int,
        slots: int,
        one_launch: bool | None = None,
    ):
        self._buffer, self._parts = buffer, parts
        self._device = parts[0].device[0].device
        self._one_launch = torch.version.hip is None if one_launch is None else one_launch
        # Fixed addresses: a CUDA graph holds them. Layers take their turns.
        self._victims = torch.zeros(slots, top_k, dtype=torch.int32, device=self._device)
        self._out = torch.full((slots, top_k), -1, dtype=torch.int32, device=self._device)
        self._sources = torch.zeros(slots, top_k, dtype=torch.int64, device=self._device)
        self._targets = torch.zeros(slots, top_k, dtype=torch.int32, device=self._device)
        self._counts = torch.zeros(slots, dtype=torch.int32, device=self._device)
        self.tally = torch.zeros(slots, 2, dtype=torch.int64, device=self._device)

    @cached_property
    def _programs(self) -> int:
        """Programs that fill the chip with copies."""
        if self._device.type == "cpu":
            return 2
        return 2 * torch.cuda.get_device_properties(self._device).multi_processor_count

    def plan(self, step: Step, at: Residency, cold: torch.Tensor) -> torch.Tensor:
        """The plan alone: residency is what it will be, the copies wait in ``_sources`` and ``_targets``."""
        from ..kernels import swap

        n, k = step.top_k.shape
        out = self._out[:n, :k]
        for part in (swap.ALL,) if self._one_launch else (swap.LOOK_UP, swap.SWEEP, swap.PLACE):
            swap.plan_swap[(n,)](
                step.top_k,
                step.lengths,
                step.slots,
                step.real,
                *at,
                cold,
                self._victims,
                out,
                self._sources,
                self._targets,
                self._counts,
                self.tally,
                step.top_k.stride(0),
                at.tokens.stride(0),
                cold.stride(0),
                out.stride(0),
                self._sources.stride(0),
                K=k,
                HOT=self._buffer.rows,
                K_BLOCK=_power_of_two(k),
                STEP=part.value,
                num_warps=8,
            )
        return out

    def swap_in(self, layer, step, at, cold):
        n, k = step.top_k.shape
        if n > len(self._out):
            raise ValueError(f"{n} requests in a step, buffers are for {len(self._out)}")
        if n == 0:
            return self._out[:0, :k]
        out = self.plan(step, at, cold)
        splits = min(-(-self._programs // n), -(-k // self.ROWS))
        for rows in self._parts:
            self._copy(
                rows.host_table,
                rows.device_table,
                self._sources[:n],
                self._targets[:n],
                self._counts,
                _words(rows),
                (n, splits, 1),
                layer,
            )
        return out

    def save(self, host_rows, device_rows):
        count = torch.full((1,), len(host_rows), dtype=torch.int32, device=self._device)
        splits = min(self._programs, max(-(-len(host_rows) // self.ROWS), 1))
        for rows in self._parts:
            self._copy(
                rows.device_table,
                rows.host_table,
                device_rows[None],
                host_rows[None],
                count,
                _words(rows),
                (1, splits, len(rows.device)),
                0,
            )

    def _copy(self, sources, targets, source_rows, target_rows, counts, words, grid, layer) -> None:
        from ..kernels import swap

        swap.copy_rows[grid](
            sources,
            targets,
            source_rows,
            target_rows,
            counts,
            source_rows.stride(0),
            layer,
            words,
            BLOCK=_power_of_two(words),
            ROWS=self.ROWS,
            num_warps=4,
        )


def _words(rows: Rows) -> int:
    return rows.device[0].shape[1] // 8


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 1).bit_length()
