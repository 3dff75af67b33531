"""Checkpoints: what a request needs, beyond the compressed pages, to resume at a page boundary.

Nothing in this package imports sglang; ``sglang_unified_kv.edits`` translates.
"""
