"""Whether HiSparse engages on the unified pool: settings and facts in, a decision out.

The tables are read like those of ``engage``; SGLang's own checks of ``--enable-hisparse`` run besides.
"""

from __future__ import annotations

from ..config import Settings
from ..engage import (
    ENVIRONMENT_CONDITIONS,
    GATE,
    LAUNCH_CONDITIONS,
    SHARED_OBSTACLES,
    Decision,
    Facts,
    Rule,
    State,
    violations,
)

CONDITIONS = (
    *ENVIRONMENT_CONDITIONS,
    *LAUNCH_CONDITIONS,
    Rule(lambda f: f.enable_hisparse, "--enable-hisparse"),
)

OBSTACLES = (
    GATE,
    *SHARED_OBSTACLES,
    Rule(
        lambda f: f.disable_radix_cache,
        "the radix cache is on: HiSparse keeps no prefixes; add --disable-radix-cache",
    ),
    # A verify step reads the rows of several positions at once; the plan is of one.
    Rule(
        lambda f: f.speculative_algorithm is None,
        "--speculative-algorithm {speculative_algorithm}: the swap-in has no plan for several positions of a "
        "request; remove the flag",
    ),
    Rule(
        lambda f: f.disaggregation_mode == "null",
        "--disaggregation-mode {disaggregation_mode}: transfers into the host pool of unified rows were "
        "never tried; remove the flag",
    ),
)


def decide(settings: Settings, facts: Facts) -> Decision:
    """Off or a condition missing -> inert; an obstacle -> refused; engaged otherwise."""
    if not settings.hisparse:
        return Decision(State.INERT)
    missing = violations(CONDITIONS, facts)
    if missing:
        return Decision(State.INERT, missing=missing)
    obstacles = violations(OBSTACLES, facts)
    return Decision(State.REFUSED, obstacles=obstacles) if obstacles else Decision(State.ENGAGED)
