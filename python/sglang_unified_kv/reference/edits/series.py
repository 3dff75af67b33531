"""The series that the modules of this package declare their edits in."""

from sglang_unified_kv.hooking.series import Series

SERIES = Series("sglang_unified_kv_reference")
FEATURE = "reference engine"
