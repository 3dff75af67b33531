"""``--enable-hisparse``: SGLang's refusal on unified KV is lifted where it is supported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ... import engage
from ...config import HISPARSE, load_settings
from ..launch.arguments import facts_of
from ..series import HISPARSE_SERIES

FEATURE = "hisparse"


def hisparse_on() -> bool:
    """Whether HiSparse of this process is ours: the switch and SGLang's flag are on, the pool is unified."""
    if not load_settings().hisparse:
        return False
    from sglang.srt.layers.attention.dsv4.unified_kv_gate import is_unified_kv_triton
    from sglang.srt.runtime_context import get_memory

    return get_memory().enable_hisparse and is_unified_kv_triton()


@HISPARSE_SERIES.wrap(
    "sglang.srt.arg_groups.hisparse_hook:validate_hisparse",
    feature=FEATURE,
    why="H1: refuses unified KV; all its other checks stay",
    params="server_args",
    fingerprint="08430f403dc18e4d",
)
def validate(original, server_args) -> None:
    from ...hisparse.support import decide

    settings = load_settings()
    if not settings.hisparse:
        return original(server_args)
    if reasons := HISPARSE_SERIES.audit():
        from ...hooking.series import EditError

        raise EditError(reasons)
    decision = decide(settings, facts_of(server_args))
    if decision.state is engage.State.INERT:
        engage.warn_inert((HISPARSE,), decision.missing)
        return original(server_args)
    if decision.state is engage.State.REFUSED:
        try:
            original(server_args)
        except (AssertionError, ValueError) as upstream:
            raise engage.Refused((str(upstream), *decision.obstacles), (HISPARSE,)) from upstream
        raise engage.Refused(decision.obstacles, (HISPARSE,))
    with _gate_closed():
        original(server_args)


@contextmanager
def _gate_closed() -> Iterator[None]:
    """SGLang's validation sees no unified KV meanwhile; it asks the gate for nothing but its refusal."""
    from sglang.srt.layers.attention.dsv4 import unified_kv_gate

    gate = unified_kv_gate.is_unified_kv_triton
    unified_kv_gate.is_unified_kv_triton = lambda: False
    try:
        yield
    finally:
        unified_kv_gate.is_unified_kv_triton = gate
