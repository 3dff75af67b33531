"""HiSparse on the unified pool: C4 rows hot on the device, all of them on the host. Imports no sglang."""
