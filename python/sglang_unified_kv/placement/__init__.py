"""Placement policies tried on traces: the engine's policy, store and publisher without an engine."""
