"""A stand-in for DeepSeek-V4-Pro's ``config.json``, for a plan without the model."""

from __future__ import annotations

import json
from pathlib import Path


def write_config(folder: Path) -> Path:
    """Write ``config.json`` into ``folder``.

    With Pro's layer pattern and cache widths and a million tokens of context; all that sizes no cache is the
    tiny reference model's.

    Raises:
        FileExistsError: there is one already, which may be the model's own.
    """
    from ..reference.model import CONFIG

    layers = [128, 128] + [4, 128] * 29 + [4]
    config = CONFIG | {"num_hidden_layers": len(layers), "compress_ratios": layers}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "config.json").open("x") as file:
        json.dump(config | {"max_position_embeddings": 1 << 20}, file)
    return folder
