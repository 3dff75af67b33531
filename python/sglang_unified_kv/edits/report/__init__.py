"""Attestation and metrics: a series of its own, applied with any of the others."""

from . import export  # noqa: F401
