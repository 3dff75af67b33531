"""Swap-in: byte-exact over long random runs; the kernels do what their torch twin does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sglang_unified_kv.hisparse.swap import TorchSwap
from swap_steps import LAYERS, ROW_BYTES, SLOTS, World


@pytest.mark.parametrize("parts", ROW_BYTES)
@pytest.mark.parametrize("steps", [400, pytest.param(4000, marks=pytest.mark.slow)])
def test_every_row_is_right_over_random_steps(parts, steps):
    world = World(steps, ROW_BYTES[parts], hot=128, top_k=64)
    swap = TorchSwap(world.buffer, world.parts)
    loaded = []
    load = swap.load
    swap.load = lambda layer, host, device: (
        loaded.append(host.tolist()),
        load(layer, host, device),
    )
    for i in range(steps):
        step = world.step()
        for layer in range(LAYERS):
            world.check(layer, step, swap.swap_in(layer, step, world.at[layer], world.cold))
        slot = i % SLOTS
        world.start(slot) if world.chance.random() < 0.02 else world.grow(slot)
    rows = [row for rows in loaded for row in rows]
    # Rows are evicted and come back; and what is hot is not loaded again.
    assert len(rows) > 1.5 * len(set(rows))
    assert sum(not rows for rows in loaded) > 10


def test_the_least_recently_read_rows_leave_first():
    world = World(1, [1024], hot=64, top_k=4)
    world.lengths[0] = 100
    swap = TorchSwap(world.buffer, world.parts)
    at = world.at[0]

    def read(*positions):
        step = world.step()
        top_k = torch.tensor([positions], dtype=torch.int32)
        swap.swap_in(
            0,
            step._replace(
                top_k=top_k,
                lengths=torch.tensor([100]),
                slots=torch.tensor([0]),
                real=torch.tensor([1]),
            ),
            at,
            world.cold,
        )

    read(0, 1, 2, 3)
    assert at.order[0, -4:].tolist() == [0, 1, 2, 3]
    read(70, 71, 1, 72)
    # Places 4, 5 and 6 are the oldest now; what was loaded is younger than them, the hit is the youngest.
    assert at.tokens[0, 4:7].tolist() == [70, 71, 72]
    assert at.order[0, -7:].tolist() == [0, 2, 3, 4, 5, 6, 1]
    assert set(at.tokens[0, :4].tolist()) == {0, 1, 2, 3}


def run_program(where, steps):
    script = Path(__file__).with_name("swap_steps.py")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), where, str(steps)],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert f"{4 * steps} steps equal" in result.stdout


@pytest.mark.parametrize("steps", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_the_kernels_equal_torch_in_the_interpreter(steps):
    run_program("interpret", steps)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_equal_torch_on_a_gpu():
    run_program("gpu", 1000)
