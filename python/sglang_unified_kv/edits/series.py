"""The series that every area module adds its edits to."""

from ..edit import Series

SERIES = Series("sglang_unified_kv")
