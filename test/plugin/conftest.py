"""Fake distributions for SGLang to find, and a configuration that it can resolve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang_unified_kv.reference.model import CONFIG


@pytest.fixture
def plugin_dist(tmp_path):
    """``plugin_dist(name, body, entry=...)``: a folder with a distribution that has one plugin."""

    def make(name: str, body: str, entry: str | None = None) -> Path:
        root = tmp_path / name
        info = root / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[sglang.srt.plugins]\n{entry or name} = {name}:register\n"
        )
        (root / f"{name}.py").write_text(body)
        return root

    return make


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """Configuration of a tiny DeepSeek-V4: enough for SGLang to resolve its arguments."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
