"""Names of our variables and of our flag: what the entry point knows while nothing else is loaded.

They are here, and not in ``config.py``, because a misspelt one is named even where no feature is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

PREFIX: Final = "SGLANG_UNIFIED_KV_"
BIT_EXACT_HICACHE: Final = "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"
BIT_EXACT_RADIX: Final = "SGLANG_UNIFIED_KV_BIT_EXACT_RADIX"
CHECKPOINT_POLICY: Final = "SGLANG_UNIFIED_KV_CHECKPOINT_POLICY"
CHECKPOINT_HOST_GB: Final = "SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB"
PROVENANCE: Final = "SGLANG_UNIFIED_KV_PROVENANCE"
STORAGE_PER_RANK: Final = "SGLANG_UNIFIED_KV_STORAGE_PER_RANK"
RING_FIXES: Final = "SGLANG_UNIFIED_KV_RING_FIXES"
HISPARSE: Final = "SGLANG_UNIFIED_KV_HISPARSE"
FEATURES: Final = (BIT_EXACT_HICACHE, BIT_EXACT_RADIX)
SWITCHES: Final = (*FEATURES, RING_FIXES, HISPARSE)
SETTINGS: Final = (*SWITCHES, CHECKPOINT_POLICY, CHECKPOINT_HOST_GB, PROVENANCE, STORAGE_PER_RANK)
"""Every setting whose name begins with the prefix."""
NOT_SETTINGS: Final = re.compile(
    "REFERENCE_(ENGINE|CHUNK_INVARIANT|DEVICE|UPSTREAM_KERNELS)|NIGHTLY_MODEL|ENV_ROOT|PYTHON"
    # What Kubernetes sets for a Service that is named like us.
    "|(.*_)?SERVICE_(HOST|PORT)(_.*)?|(.*_)?PORT(_[0-9]+_(TCP|UDP|SCTP).*)?"
)
"""What follows the prefix in names that are no settings: reference engine, jobs and scripts read them."""
STRIDE_FLAG = "--hicache-swa-offload-page-stride"
STRIDE_VARIABLE: Final = "SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE"


def is_on(value: str) -> bool:
    """Whether the value of a switch asks for it. A misspelt value does: it is refused later."""
    return value.strip().lower() not in ("", "0", "false", "no", "n")


def requested(environ: Mapping[str, str], switches: Iterable[str] = SWITCHES) -> bool:
    """Whether any of these features is asked for."""
    return any(is_on(environ.get(name, "")) for name in switches)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A line for every variable in ``environ`` that begins like ours and is none."""
    ours = [name.removeprefix(PREFIX) for name in SETTINGS]
    reasons = []
    for name in sorted(environ):
        rest = name.removeprefix(PREFIX)
        if rest == name or not environ[name] or rest in ours or NOT_SETTINGS.fullmatch(rest):
            continue
        import difflib

        near = difflib.get_close_matches(rest, ours, 1)
        meant = f"did you mean {PREFIX}{near[0]}? Correct it or unset it" if near else "unset it"
        reasons.append(f"{name}={environ[name]!r}: there is no such variable; {meant}")
    return reasons
