"""Accounting of the window ring by request slots: a series of its own."""

from . import allocator, prealloc, sizing  # noqa: F401
