"""Device of the in-process engines."""

from __future__ import annotations

import os
import sys

DEVICE_ENV = "SGLANG_UNIFIED_KV_REFERENCE_DEVICE"


def asked() -> str:
    """The device that the environment asks for.

    Raises:
        ValueError: neither cpu nor cuda.
    """
    name = os.environ.get(DEVICE_ENV, "cpu")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"{DEVICE_ENV}={name!r}: must be cpu or cuda")
    return name


def device() -> str:
    """Device of the engines; for a GPU, SGLang is told that there is no CUDA.

    It would ask for sgl_kernel and the kernels of CUDA attention backends otherwise; tensors, streams and
    pinned memory are torch's and do not ask.

    Raises:
        ValueError: neither cpu nor cuda is asked for.
        RuntimeError: SGLang has already looked for CUDA.
    """
    name = asked()
    if name == "cuda":
        if "sglang.srt.utils.common" in sys.modules:
            raise RuntimeError(
                f"{DEVICE_ENV}=cuda: import the harness before anything of sglang.srt"
            )
        import torch

        torch.version.cuda = None
    return name
