"""Accounting of the per-request sliding-window ring. Imports no sglang and no torch."""
