"""Tools on the folder of SGLang's file backend."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sglang_unified_kv.edits.exact.storage.record_pool import RECORD_POOL

STORAGE = dict(hicache_storage_backend="file", hicache_storage_prefetch_policy="wait_complete")


def at(folder: Path) -> dict[str, str]:
    """Environment that keeps the file backend's objects in ``folder``."""
    return {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}


def records(folder: Path) -> list[Path]:
    """Files of records."""
    return sorted(folder.glob(f"*.{RECORD_POOL}_*.bin"))


def pages(folder: Path, pool: str = "*") -> list[Path]:
    """Files of compressed pages, without the empty files that stand for logical KV pages."""
    found = set(folder.glob(f"*.{pool}_*.bin")) - set(records(folder))
    return sorted(path for path in found if path.stat().st_size)


def file_of(folder: Path, engine, chain: list[str], boundary: int, pool: str = RECORD_POOL) -> Path:
    """The file of the page, or record, that ends at ``boundary``."""
    storage = engine.tree.cache_controller.storage_backend
    key = storage._prefix + chain[boundary // engine.tree.page_size - 1]
    path = folder / f"{storage._backend._get_component_key(key, pool)}.bin"
    assert path.exists(), path
    return path


def chain_of(engine, ids: list[int]) -> list[str]:
    """Page hashes of a prompt."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return engine.tree._chain(None, RadixKey(ids))


def flip(path: Path, at: int) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


@contextlib.contextmanager
def unreadable(path: Path):
    """Replace a file by a folder of its name, which no user can read as a file, root included."""
    aside = path.with_suffix(".aside")
    path.rename(aside)
    path.mkdir()
    try:
        yield
    finally:
        path.rmdir()
        aside.rename(path)


def storage_threads(engine) -> list:
    """SGLang's storage threads; a dead one is a bug."""
    controller = engine.tree.cache_controller
    return [
        controller.prefetch_thread,
        controller.backup_thread,
        controller.prefetch_io_aux_thread,
        controller.prefetch_sync_thread,
    ]
