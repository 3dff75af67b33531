"""The series that the area modules add their edits to."""

from ..hooking.series import Series

SERIES = Series("sglang_unified_kv")
"""Exact reuse."""
RING = Series("sglang_unified_kv_ring")
"""Accounting of the ring."""
HISPARSE_SERIES = Series("sglang_unified_kv_hisparse")
"""HiSparse on the unified pool; applied with the ring's accounting, which it needs."""
REPORT = Series("sglang_unified_kv_report")
"""Attestation and metrics; applied with any of the others.

No two series share a target, so that each is applied whether or not the others are."""

ALL = (SERIES, RING, HISPARSE_SERIES, REPORT)
"""Every series of the product."""
