"""The folder of SGLang's file backend, when several ranks look for it at once."""

import os
from pathlib import Path

import pytest
from sglang.srt.mem_cache import hicache_storage
from sglang_unified_kv.edits.exact.storage.folder import create_folder, folder_of
from storage_folder import STORAGE, at


class Config:
    """What SGLang tells a backend, as far as its folder goes."""

    def __init__(self, extra_config):
        self.extra_config = extra_config


def test_a_rank_that_looked_before_another_created_the_folder_starts(
    make_engine, monkeypatch, tmp_path
):
    folder, exists, created = tmp_path / "not yet" / "there", os.path.exists, []

    def other_rank_is_faster(path):
        found = exists(path)
        if Path(path) == folder and not found:
            # Between the look and what SGLang does then.
            folder.mkdir(parents=True)
            created.append(path)
        return found

    monkeypatch.setattr(hicache_storage.os.path, "exists", other_rank_is_faster)
    with make_engine(env=at(folder), **STORAGE) as engine:
        assert engine.run(list(range(100, 800)), 1).cached_tokens == 0
        engine.drain()
    assert not created, "the folder was there when SGLang looked"
    assert any(folder.iterdir())


def test_the_folder_is_the_one_that_sglang_takes(monkeypatch):
    variable = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
    monkeypatch.setenv(variable, "/by/variable")
    assert folder_of(Config({"file_storage_path": "/by/flag"})) == "/by/variable"
    monkeypatch.delenv(variable)
    assert folder_of(Config({"file_storage_path": "/by/flag"})) == "/by/flag"
    assert folder_of(Config(None)) == "/tmp/hicache"
    assert folder_of(Config({}), "/given") == "/given"


def test_what_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=rf"{path}.*STORAGE_DIR or --file-storage-path"):
            create_folder(str(path))
