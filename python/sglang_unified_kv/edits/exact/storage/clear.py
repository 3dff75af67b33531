"""Clearing storage: what this server stored and could find again, and nothing of any other.

SGLang's backends empty their whole folder, or store, whoever put the objects there.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...series import SERIES
from ..active import current_manager

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorage

_FEATURE = "bit-exact hicache"
_NIXL = "sglang.srt.mem_cache.storage.nixl.hicache_nixl"


@SERIES.wrap(
    "sglang.srt.managers.scheduler:Scheduler.clear_hicache_storage_wrapped",
    feature=_FEATURE,
    why="SGLang answers that storage was cleared, whatever the backend did",
    params="self, recv_req",
    fingerprint="3b6f82af52fd1a09",
)
def answer_what_was_cleared(original: Any, self: Any, recv_req: Any) -> Any:
    if current_manager() is None:
        return original(self, recv_req)
    from sglang.srt.managers.io_struct import ClearHiCacheReqOutput

    return ClearHiCacheReqOutput(success=self.tree_cache.clear_storage_backend())


for _target, _params, _fingerprint, _why in (
    (
        "hicache_storage:HiCacheFile._get_component_key",
        "self, key, component_name",
        "5a0f11821931cbdc",
        "how the file of an object is named",
    ),
    (
        "hicache_storage:HiCacheFile.clear",
        "self",
        "03d390e96ddaa32b",
        "what it forgets besides the files is forgotten of the files that we delete",
    ),
    (
        "storage.file.lru_file_evictor:LRUFileEvictor.abort",
        "self, suffixed_key",
        "e5c1fea1e3e32343",
        "forgets one object and its size",
    ),
):
    SERIES.relies_on(
        f"sglang.srt.mem_cache.{_target}",
        feature=_FEATURE,
        why=_why,
        params=_params,
        fingerprint=_fingerprint,
    )


def clear_namespace(backend: HiCacheStorage, prefix: str) -> int:
    """Delete every object of ``backend`` whose key begins with ``prefix``; how many there were.

    Objects that are being written may stay. What ranks delete at the same time is counted by one of them.

    Raises:
        ValueError: the backend does not tell which objects it has; nothing was deleted.
        OSError: of the first file that could not be deleted; all others were.
    """
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    # A subclass may keep its objects elsewhere, under other names.
    if type(backend) is HiCacheFile:
        pools, served = _words(backend)
        name = re.compile(rf"{prefix}[0-9a-f]+(\.({pools}))?{served}\.bin")
        try:
            return _delete(_files(backend.file_path, name, deep=False))
        finally:
            _forget(backend, name)
    nixl = sys.modules.get(_NIXL)
    if nixl is not None and type(backend) is nixl.HiCacheNixl and backend.file_manager is not None:
        pools, served = _words(backend)
        name = re.compile(rf"{prefix}[0-9a-f]+{served}(_({pools}))?")
        bases = backend.file_manager.iter_all_base_dirs()
        return _delete(path for base in bases for path in _files(base, name, deep=True))
    raise ValueError(
        f"{type(backend).__name__} does not tell which objects are this server's, and to clear it would "
        "delete those of every other model and server; nothing was deleted. Delete the objects whose keys "
        f"begin with {prefix} with the store's own tools, or leave them: they are served to nobody else"
    )


def _files(base: str, name: re.Pattern[str], deep: bool) -> Iterator[Path]:
    """Files in ``base``, and in the folders within it if ``deep``, that are called so."""

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(base, onerror=fail):
        yield from (Path(folder, file) for file in files if name.fullmatch(file))
        if not deep:
            folders.clear()


def _forget(backend: HiCacheFile, name: re.Pattern[str]) -> None:
    """What the backend knows of files called so that are gone; another rank may have deleted them.

    Those that stay, or are being written, go on counting against the folder's limit.
    """
    if backend.metadata_cache is not None:
        backend.metadata_cache.clear()  # what was seen lately, no more
    evictor = backend._evictor
    with evictor._lock:
        known = [key for key in evictor._lru if name.fullmatch(f"{key}.bin")]
        known = [key for key in known if key not in evictor._pending_writes]
    for key in known:
        if not os.path.exists(os.path.join(backend.file_path, f"{key}.bin")):
            evictor.abort(key)


def _words(backend: Any) -> tuple[str, str]:
    """Patterns of the pool and of the served model in the names of objects."""
    pools = "|".join(f"{pool}" for pool in backend.registered_pools)
    return pools, re.escape(backend.config_suffix)


def _delete(paths: Iterator[Path]) -> int:
    deleted, failures = 0, []
    for path in paths:
        try:
            path.unlink()
            deleted += 1
        except FileNotFoundError:
            pass  # another rank was there
        except OSError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return deleted
