"""Where engagement is decided: after resolution in the launching process, and in every rank."""

from __future__ import annotations

from typing import Any

from ... import engage
from ...config import load_settings
from ...hooking.series import EditError
from ..series import SERIES
from .arguments import FEATURE, facts_of

# Bookkeeping on the argument record: it survives pickling, so a rank knows what its launcher said.
_LAUNCHER_STATE = "_sglang_unified_kv_state"

SERIES.relies_on(
    "sglang.srt.beam_search.coordinator:BeamCoordinator.validate_and_init",
    feature=FEATURE,
    why="refuses beam search, a property of a request, with pages above 1 and with HiCache",
    params="self, req, recv_req",
    fingerprint="d5eeaff8a6e58c5c",
)


@SERIES.wrap(
    "sglang.srt.server_args:ServerArgs.check_server_args",
    feature=FEATURE,
    why="the arguments are final and no process or pool exists yet",
    params="self",
    fingerprint="15fe329cb907e589",
)
def decide_in_launcher(original: Any, server_args: Any) -> None:
    original(server_args)
    _audit()
    decision = engage.engage(load_settings(), facts_of(server_args))
    setattr(server_args, _LAUNCHER_STATE, decision.state.value)


@SERIES.wrap(
    "sglang.srt.managers.scheduler:Scheduler.__init__",
    feature=FEATURE,
    why="every rank decides for itself before it builds a pool, and checks the edits when built",
    params="self, server_args, port_args",
    fingerprint="93ad4787d25f76ee",
)
def decide_in_rank(original: Any, self: Any, server_args: Any, port_args: Any) -> None:
    launcher = vars(server_args).get(_LAUNCHER_STATE)
    settings = load_settings()
    decision = engage.engage(settings, facts_of(server_args), announce=launcher is None)
    if launcher not in (None, decision.state.value):
        engage.reset()
        raise engage.Refused(
            [
                f"this rank is {decision.state.value} but its launcher was {launcher}: "
                "give every process the same environment"
            ],
            engage.on(settings),
        )
    original(self, server_args, port_args)
    _audit()


def _audit() -> None:
    """A later plugin or import may have changed what was applied at load."""
    reasons = SERIES.audit()
    if reasons:
        raise EditError(reasons)
