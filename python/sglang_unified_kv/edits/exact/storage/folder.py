"""SGLang's file backend: its folder is there before the ranks look for it."""

from __future__ import annotations

import os

from .... import engage
from ...series import SERIES

_VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


@SERIES.wrap(
    "sglang.srt.mem_cache.hicache_storage:HiCacheFile.__init__",
    feature="bit-exact hicache",
    why="every data-parallel rank creates a folder that it did not find, and ends where another was first; "
    "tensor-parallel ones go on without it",
    params="self, storage_config, file_path",
    fingerprint="9aae67d019a300e5",
)
def with_folder(original, self, storage_config, *args, **kwargs):
    if engage.current() is not None:
        create_folder(folder_of(storage_config, *args, **kwargs))
    return original(self, storage_config, *args, **kwargs)


def folder_of(storage_config, file_path: str = "/tmp/hicache") -> str:
    """Where the backend keeps its files, by the order in which it asks."""
    from sglang.srt.environ import envs

    extra = storage_config.extra_config or {}
    return (
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get()
        or extra.get("file_storage_path")
        or file_path
    )


def create_folder(path: str) -> None:
    """Create ``path`` and what is above it, unless it is there.

    Raises:
        ValueError: it cannot be created, or something else has its name.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{path}, the folder of --hicache-storage-backend file, cannot be created: {error.strerror}; "
            f"let {_VARIABLE} or --file-storage-path name a folder that this user may write"
        ) from error
