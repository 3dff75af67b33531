"""Swap-in: byte-exact over long random runs; the kernels do what their torch twin does."""

from pathlib import Path

import pytest
import torch
from programs import run_program
from sglang_unified_kv.hisparse.swap import Step, TorchSwap
from swap_steps import LAYERS, POSITIONS, ROW_BYTES, SLOTS, World


@pytest.mark.parametrize("parts", ROW_BYTES)
@pytest.mark.parametrize("steps", [400, pytest.param(4000, marks=pytest.mark.slow)])
def test_every_row_is_right_over_random_steps(parts, steps):
    world = World(steps, ROW_BYTES[parts], hot=128, top_k=64)
    swap = TorchSwap(world.buffer, world.parts)
    loaded, read, looked_up = [], 0, 0
    load = swap.load

    def noted(layer, host_rows, device_rows):
        loaded.extend(host_rows.tolist())
        load(layer, host_rows, device_rows)

    swap.load = noted
    for i in range(steps):
        step = world.step()
        for layer in range(LAYERS):
            world.check(layer, step, swap.swap_in(layer, step, world.at[layer], world.cold))
        read += LAYERS * int((step.top_k[: int(step.real)] >= 0).sum())
        looked_up += LAYERS * looked_up_by(step, hot=128)
        slot = i % SLOTS
        world.start(slot) if world.chance.random() < 0.02 else world.grow(slot)
    assert swap.tally.tolist() == [[looked_up, len(loaded)]] and len(loaded) < looked_up < read
    # Rows are evicted and come back; and what is hot is not loaded again.
    assert len(loaded) > 1.5 * len(set(loaded))
    assert len(loaded) < 0.7 * read


def looked_up_by(step, hot):
    """Rows of a step that may lie on the host: of sequences longer than the buffer, but for the newest."""
    real = slice(int(step.real))
    top_k, lengths = step.top_k[real], step.lengths[real, None]
    return int(((top_k >= 0) & (top_k < lengths - 1) & (lengths > hot)).sum())


def misses_of_an_exact_order(reads, hot):
    """Rows that a buffer misses which drops the row read least recently."""
    order, misses = list(range(hot)), 0
    for positions in reads:
        new = [position for position in positions if position not in order]
        misses += len(new)
        kept = [position for position in order if position not in positions]
        order = kept[len(new) :] + positions
    return misses


@pytest.mark.parametrize("drift", [0, 1, 4])
def test_few_more_misses_than_an_exact_order_has(drift):
    """Reads around some places of interest that drift, as decode steps read."""
    world = World(3, [1024], hot=128, top_k=32)
    world.lengths[0] = POSITIONS
    swap = TorchSwap(world.buffer, world.parts)
    loaded = []
    swap.load = lambda layer, host_rows, device_rows: loaded.extend(host_rows)
    reads = []
    for step in range(300):
        near = [int(world.chance.gauss(300 + drift * step / 4, 50)) for _ in range(200)]
        chosen = list(dict.fromkeys(p for p in near if 0 <= p < POSITIONS - 1))[:32]
        reads.append(chosen)
    for chosen in reads:
        top_k = torch.tensor([chosen + [-1] * (32 - len(chosen))], dtype=torch.int32)
        alone = Step(top_k, torch.tensor([POSITIONS]), torch.tensor([0]), torch.tensor([1]))
        swap.swap_in(0, alone, world.at[0], world.cold)
    assert len(loaded) < 1.1 * misses_of_an_exact_order(reads, 128)


def test_rows_that_are_read_stay():
    world = World(1, [1024], hot=64, top_k=4)
    world.lengths[0] = 100
    swap = TorchSwap(world.buffer, world.parts)
    at = world.at[0]

    def read(*positions):
        top_k = torch.tensor([positions], dtype=torch.int32)
        alone = Step(top_k, torch.tensor([100]), torch.tensor([0]), torch.tensor([1]))
        swap.swap_in(0, alone, at, world.cold)

    read(2, 70, 71, 72)
    # The places behind the hand, but the one that the step itself reads.
    assert at.tokens[0, :5].tolist() == [70, 71, 2, 72, 4]
    assert at.clocks[0].tolist() == [4, 0, 1]
    for position in range(4, 64):
        read(position, 70)
    # All were read in this lap: what comes takes the first place behind the hand that the step spares.
    read(73, 70)
    assert at.tokens[0, 4].item() == 73
    read(*range(5, 64), 70, 71, 2, 72, 74)
    assert at.tokens[0, 4].item() == 74, "73 came before and is not read"


def compare(where, steps):
    script = Path(__file__).with_name("swap_steps.py")
    assert f"{4 * steps} steps equal" in run_program(script, where, steps)


@pytest.mark.parametrize("steps", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_the_kernels_equal_torch_in_the_interpreter(steps):
    compare("interpret", steps)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_equal_torch_on_a_gpu():
    compare("gpu", 1000)
