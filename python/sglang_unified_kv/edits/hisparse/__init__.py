"""HiSparse on the unified pool: a series of its own, and the subclasses that SGLang is handed."""

from . import arguments, pool, sizing, allocator, runner  # noqa: F401, I001
