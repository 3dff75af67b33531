"""The series that the area modules add their edits to."""

from ..edit import Series

SERIES = Series("sglang_unified_kv")
"""Exact reuse."""
RING = Series("sglang_unified_kv_ring")
"""Accounting of the ring; it shares no target with the other, and each is applied without it."""
