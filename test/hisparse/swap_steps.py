"""Random decode steps through a swap-in, checked against what each position's row is.

As a program: ``swap_steps.py interpret|gpu STEPS`` runs the kernels against their torch twin, which must
leave the same residency, and prints the number of steps.
"""

from __future__ import annotations

import os
import random
import sys

if __name__ == "__main__" and sys.argv[1] == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from sglang_unified_kv.hisparse.rows import HotBuffer
from sglang_unified_kv.hisparse.swap import Residency, Rows, Step, TorchSwap, TritonSwap
from sglang_unified_kv.hisparse.tally import Tally

PAGE, LAYERS, SLOTS, POSITIONS = 64, 2, 4, 700
ROW_BYTES = {"bf16": [1024], "fp8": [512, 128]}


class World:
    """Hot buffers and cold rows of ``SLOTS`` request slots; all bytes random.

    Args:
        parts: bytes of a row, per kind of rows.
    """

    def __init__(self, seed: int, parts: list[int], hot: int, top_k: int, device="cpu"):
        self.chance, self.device = random.Random(seed), torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)
        self.buffer, self.top_k = HotBuffer(hot, PAGE), top_k
        padded = self.buffer.padded
        region = PAGE + SLOTS * padded
        self.parts = [self._rows(width, region, SLOTS * POSITIONS) for width in parts]
        shuffled = torch.randperm(SLOTS * padded, generator=self.generator) + PAGE
        locations = shuffled.view(SLOTS, padded).to(torch.int32)
        locations = locations.repeat(LAYERS, 1, 1).to(self.device)
        tokens = torch.full_like(locations, -1)
        self.residency = Residency.empty(tokens, locations, hot, POSITIONS)
        self.at = [self.residency.layer(layer) for layer in range(LAYERS)]
        cold = torch.randperm(SLOTS * POSITIONS, generator=self.generator)
        self.cold = cold.view(SLOTS, POSITIONS).to(self.device)
        self.lengths = [0] * SLOTS
        for slot in range(SLOTS):
            self.start(slot)

    def _rows(self, width: int, region: int, total: int) -> Rows:
        def random_bytes(rows):
            return torch.randint(0, 256, (rows, width), dtype=torch.uint8, generator=self.generator)

        host = [random_bytes(total) for _ in range(LAYERS)]
        if self.device.type != "cpu":
            host = [layer.pin_memory() for layer in host]
        device = [random_bytes(region).to(self.device) for _ in range(LAYERS)]

        def table(layers):
            return torch.tensor([x.data_ptr() for x in layers], device=self.device)

        return Rows(device, host, table(device), table(host))

    def start(self, slot: int) -> None:
        """A new request: its first rows are hot, the newest has its place."""
        self.lengths[slot] = self.chance.randrange(1, POSITIONS)
        hot, length = self.buffer.rows, self.lengths[slot]
        self.residency.begin(slot)
        for layer in range(LAYERS):
            for position in range(min(length, hot)):
                self._place(layer, slot, position, position)
            self._place(layer, slot, hot, length - 1)

    def grow(self, slot: int) -> None:
        """The row that the next step completes."""
        if self.lengths[slot] < POSITIONS:
            position = self.lengths[slot]
            self.lengths[slot] += 1
            for layer in range(LAYERS):
                self._place(layer, slot, min(position, self.buffer.rows), position)

    def _place(self, layer: int, slot: int, place: int, position: int) -> None:
        row = self.at[layer].locations[slot, place]
        for rows in self.parts:
            cold = rows.host[layer][self.cold[slot, position].cpu()]
            rows.device[layer][row.long()] = cold.to(self.device)

    def step(self) -> Step:
        """A batch of some requests, with a row of padding behind them."""
        slots = self.chance.sample(range(SLOTS), self.chance.randrange(1, SLOTS))
        top_k = torch.full((len(slots) + 1, self.top_k), -1)
        for i, slot in enumerate(slots):
            length = self.lengths[slot]
            count = min(length, self.top_k)
            # Mostly what was read lately, so that some rows are hit.
            near = torch.randperm(min(length, 2 * self.top_k), generator=self.generator)[:count]
            anywhere = torch.randperm(length, generator=self.generator)[:count]
            top_k[i, :count] = near if self.chance.random() < 0.7 else anywhere
        lengths = [self.lengths[slot] for slot in slots] + [1]
        return Step(
            top_k.to(self.device, torch.int32),
            torch.tensor(lengths, dtype=torch.int32, device=self.device),
            torch.tensor([*slots, slots[0]], device=self.device),
            torch.tensor([len(slots)], dtype=torch.int32, device=self.device),
        )

    def check(self, layer: int, step: Step, out: torch.Tensor) -> None:
        """Every position's row is its row; what is held is what it should be."""
        valid = (step.top_k >= 0).clone()
        valid[int(step.real) :] = False
        assert (out[~valid] == -1).all()
        i, k = valid.nonzero(as_tuple=True)
        source = self.cold[step.slots[i], step.top_k[i, k].long()].cpu()
        for rows in self.parts:
            assert torch.equal(rows.device[layer][out[i, k].long()].cpu(), rows.host[layer][source])
        at, hot = self.at[layer], self.buffer.rows
        for slot in step.slots[: int(step.real)].tolist():
            if self.lengths[slot] <= hot:
                continue
            # Who holds what, told from both sides.
            order = torch.arange(hot, device=self.device)
            assert torch.equal(at.places[slot, at.tokens[slot, :hot].long()].long(), order)
            assert int((at.places[slot] >= 0).sum()) == hot
            held = self.cold[slot, at.tokens[slot, :hot].long()].cpu()
            for rows in self.parts:
                found = rows.device[layer][at.locations[slot, :hot].long()].cpu()
                assert torch.equal(found, rows.host[layer][held])


def kernels_of(world: World, one_launch: bool) -> TritonSwap:
    return TritonSwap(world.buffer, world.parts, world.top_k, SLOTS, one_launch=one_launch)


def tally_of(swap) -> list[int]:
    """Its sums, once the first copy of them has arrived."""
    tally = Tally(swap.tally)
    while not any(sums := tally.latest()):
        pass
    return sums


def main(where: str, steps: int) -> None:
    device = "cpu" if where == "interpret" else "cuda"
    done = 0
    for seed, (parts, hot, top_k) in enumerate(
        [(ROW_BYTES["bf16"], 128, 64), (ROW_BYTES["fp8"], 192, 128)]
    ):
        for one_launch in (True, False):
            ours = World(seed, parts, hot, top_k, device)
            twin = World(seed, parts, hot, top_k)
            swap, torch_swap = kernels_of(ours, one_launch), TorchSwap(twin.buffer, twin.parts)
            for _ in range(steps):
                step = ours.step()
                twin.step()
                on_cpu = Step(*(t.cpu() for t in step))
                for layer in range(LAYERS):
                    out = swap.swap_in(layer, step, ours.at[layer], ours.cold)
                    ours.check(layer, step, out)
                    expected = torch_swap.swap_in(layer, on_cpu, twin.at[layer], twin.cold)
                    assert torch.equal(out.cpu(), expected)
                    for mine, theirs in zip(ours.at[layer], twin.at[layer], strict=True):
                        assert torch.equal(mine.cpu(), theirs)
                slot = ours.chance.randrange(SLOTS)
                restart = ours.chance.random() < 0.1
                assert (twin.chance.randrange(SLOTS), twin.chance.random() < 0.1) == (slot, restart)
                for world in (ours, twin):
                    world.start(slot) if restart else world.grow(slot)
                done += 1
            looked_up, copied = torch_swap.tally.sum(0).tolist()
            assert tally_of(swap) == [looked_up, copied] and 0 < copied < looked_up
            rows = torch.randperm(len(ours.parts[0].device[0]))[:37].to(device)
            target = torch.randperm(SLOTS * POSITIONS)[:37].to(device)
            swap.save(target, rows)
            torch_swap.save(target.cpu(), rows.cpu())
            if device == "cuda":
                torch.cuda.synchronize()
            for mine, theirs in zip(ours.parts, twin.parts, strict=True):
                for layer in range(LAYERS):
                    assert torch.equal(mine.host[layer], theirs.host[layer])
    print(f"{done} steps equal")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
