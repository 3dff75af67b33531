"""Captures and restores in any order keep every byte, on each device that is here."""

import mover_steps
import pytest
import torch

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(6))
def test_random_steps_keep_every_byte(device, seed):
    mover_steps.run(torch.device(device), seed, 25)
