"""Entry point ``sglang_unified_kv`` of SGLang's plugin group.

Without a requested feature this module, the names of our variables and the standard library are all
that is loaded. With one, everything that stands in the way is printed to stderr and ends the process:
SGLang logs the errors of a plugin and goes on without it, which would be approximate reuse where exact
was asked for.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .names import (
    FEATURES,
    HISPARSE,
    RING_FIXES,
    STRIDE_FLAG,
    STRIDE_VARIABLE,
    SWITCHES,
    requested,
    unknown_variables,
)

if TYPE_CHECKING:
    from .hooking.series import Series

NAME = "sglang_unified_kv"
GROUP = "sglang.srt.plugins"
_OFF = f"{' and '.join(FEATURES)} are off"


def register() -> None:
    """Called by SGLang's plugin loader in every process that it starts.

    Raises:
        SystemExit: status 1, every reason is on stderr. Not an ``Exception``, which the loader
            would swallow.
    """
    asked = requested(os.environ)
    if not asked:
        _name_unknown()
    if not requested(os.environ, FEATURES):
        _ignore_stride()
    if not asked:
        return
    try:
        reasons = _load()
    except Exception:  # the loader swallows whatever escapes from here
        reasons = [*traceback.format_exc().splitlines(), "loading sglang-unified-kv failed"]
    if reasons:
        _end(reasons)


def _load() -> list[str]:
    """Check everything and apply the edits; every reason why that is impossible."""
    from .config import ConfigError, load_settings
    from .hooking.series import EditError, apply, preflight

    asked = requested_series(os.environ)
    reasons = duplicate_entries()
    try:
        load_settings()
    except ConfigError as error:
        reasons += error.reasons
    if reasons:
        return reasons + preflight(asked)
    try:
        apply(asked)
    except EditError as error:
        return error.reasons
    return []


def requested_series(environ: Mapping[str, str]) -> list[Series]:
    """The series of edits that the switches in ``environ`` ask for."""
    from .edits import HISPARSE_SERIES, REPORT, RING, SERIES

    needs = {
        SERIES: FEATURES,
        # A HiSparse allocator hides the ring from SGLang's accounting (G3).
        RING: (RING_FIXES, HISPARSE),
        HISPARSE_SERIES: (HISPARSE,),
        REPORT: SWITCHES,
    }
    return [series for series, switches in needs.items() if requested(environ, switches)]


def duplicate_entries() -> list[str]:
    """Other distributions that use our entry-point name; SGLang keeps only the last one."""
    from importlib.metadata import entry_points

    found = [e for e in entry_points(group=GROUP, name=NAME) if e.value != f"{__name__}:register"]
    return [
        f"entry point {NAME!r} of group {GROUP!r} is also provided by "
        f"{e.dist.name if e.dist else 'an unknown distribution'} ({e.value}); uninstall it"
        for e in found
    ]


def _end(reasons: list[str]) -> None:
    import sglang.srt.plugins as loader

    for reason in reasons:
        print(f"sglang-unified-kv: {reason}", file=sys.stderr)
    print(
        f"sglang-unified-kv: refusing to start. Unset {' and '.join(SWITCHES)} to run SGLang as "
        "released.",
        file=sys.stderr,
        flush=True,
    )
    # Otherwise a caller that catches SystemExit and tries again would run without us, silently.
    loader._plugins_loaded = False
    raise SystemExit(1)


def _name_unknown() -> None:
    """Nothing is asked for, perhaps because what asks for it is misspelt."""
    if _first_process():
        for reason in unknown_variables(os.environ):
            _warn(f"{reason}. SGLang runs as released: no switch is on")


def _first_process() -> bool:
    """Whether this process is the server's own and none of its children, which inherit what it was told."""
    import multiprocessing

    return multiprocessing.parent_process() is None


def _ignore_stride() -> None:
    """The stride was given while the feature is off: say so once, keep SGLang's parser quiet."""
    if not _first_process():
        return
    if os.environ.get(STRIDE_VARIABLE):
        _warn(f"{STRIDE_VARIABLE} is ignored: {_OFF}")
    if not _given(sys.argv):
        return
    main = getattr(sys.modules["__main__"], "__spec__", None)
    if main is not None and main.name == "sglang.launch_server":
        sys.argv[:] = _without_stride(sys.argv)
        _warn(f"{STRIDE_FLAG} is ignored: {_OFF}")
    else:
        # `sglang serve` has copied its arguments before it loads plugins.
        _warn(f"{STRIDE_FLAG} is unknown while {_OFF}; remove the flag")


def _given(argv: list[str]) -> bool:
    return any(arg == STRIDE_FLAG or arg.startswith(f"{STRIDE_FLAG}=") for arg in argv)


def _without_stride(argv: list[str]) -> list[str]:
    """``argv`` without the flag and its value, in both spellings."""
    kept = []
    arguments = iter(argv)
    for arg in arguments:
        if arg == STRIDE_FLAG:
            next(arguments, None)
        elif not arg.startswith(f"{STRIDE_FLAG}="):
            kept.append(arg)
    return kept


def _warn(text: str) -> None:
    print(f"sglang-unified-kv: warning: {text}", file=sys.stderr, flush=True)
