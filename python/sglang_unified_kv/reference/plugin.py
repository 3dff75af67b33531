"""Entry point of the reference engine: standard library only until its variable is on."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

ENV = "SGLANG_UNIFIED_KV_REFERENCE_ENGINE"
CHUNK_INVARIANT_ENV = "SGLANG_UNIFIED_KV_REFERENCE_CHUNK_INVARIANT"

REQUIRED_ENVIRONMENT = {
    # The layout under test, then the torch branch of every op that has one.
    "SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton",
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_POST": "0",
    "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0",
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1",
    "SGLANG_OPT_USE_TOPK_V2": "0",
    "SGLANG_OPT_USE_FUSED_HASH_TOPK": "0",
}


def switch(name: str, default: bool) -> bool:
    """Value of a 0/1 variable.

    Raises:
        ValueError: it is set to anything but 0 or 1.
    """
    value = os.environ.get(name)
    if value is None:
        return default
    if value not in ("0", "1"):
        raise ValueError(f"{name}={value!r}: must be 0 or 1 (or unset)")
    return value == "1"


def _prepare_environment() -> list[str]:
    """Set what the engine needs; a variable that the user set otherwise is a reason to stop."""
    reasons = [
        f"{name}={os.environ[name]!r}: the reference engine needs {value!r}; unset it or {ENV}"
        for name, value in REQUIRED_ENVIRONMENT.items()
        if os.environ.get(name, value) != value
    ]
    if not reasons:
        os.environ.update(REQUIRED_ENVIRONMENT)
    return reasons


def _activate() -> list[str]:
    """Apply the edits; the reasons why that is impossible, empty on success."""
    try:
        if not switch(ENV, default=False):
            return []
        chunk_invariant = switch(CHUNK_INVARIANT_ENV, default=True)
    except ValueError as error:
        return [str(error)]
    reasons = _prepare_environment()
    if reasons:
        return reasons

    from sglang_unified_kv.hooking.series import EditError
    from sglang_unified_kv.reference import upstream_kernels
    from sglang_unified_kv.reference.edits import SERIES
    from sglang_unified_kv.reference.ops import arithmetic

    arithmetic.set_chunk_invariant(chunk_invariant)
    try:
        upstream_kernels.choose(upstream_kernels.from_environment())
        SERIES.apply()
    except ValueError as error:
        return [str(error)]
    except EditError as error:
        return error.reasons
    return []


def register() -> None:
    """Called by SGLang in every process that loads plugins.

    Raises:
        SystemExit: the engine was asked for and cannot be had. SGLang logs and swallows every
            ``Exception`` of a plugin and would serve without it.
    """
    try:
        reasons = _activate()
    except Exception:  # the loader swallows whatever escapes from here
        reasons = traceback.format_exc().splitlines()
    if not reasons:
        return
    print(f"{ENV}: the reference engine cannot start:", file=sys.stderr)
    for reason in reasons:
        print(f"  {reason}", file=sys.stderr)
    plugins: Any = sys.modules.get("sglang.srt.plugins")
    if plugins is not None:
        # Set before plugins run: a caller that retries would otherwise go on without us.
        plugins._plugins_loaded = False
    raise SystemExit(1)
