"""Storage of records beside HiCache's pages: names, transfers, verification, clearing."""

from . import threads, clear, folder  # noqa: F401, I001
