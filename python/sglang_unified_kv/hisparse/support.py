"""Whether HiSparse engages on the unified pool: settings and facts in, a decision out.

The tables are read like those of ``engage``; SGLang's own checks of ``--enable-hisparse`` run besides.
"""

from __future__ import annotations

import json

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
from .rows import RATIO, HotBuffer, region_rows


def config_error(text: str | None, index_topk: int, page_size: int) -> str:
    """Why HiSparse cannot be built from ``--hisparse-config``, empty if it can.

    SGLang's pools and ours ask the same after the weights are loaded.

    Args:
        text: the flag's value.
        index_topk: C4 rows that the model reads in a step.
        page_size: tokens of a page.

    >>> config_error('{"device_buffer_size": 100}', 512, 256)
    '--hisparse-config device_buffer_size=100: it is below top_k=2048; raise it or lower top_k'
    """
    try:
        found = json.loads(text) if text is not None else {}
    except json.JSONDecodeError as error:
        return f"--hisparse-config {text}: it is no JSON ({error}); correct it"
    if not isinstance(found, dict):
        return f"--hisparse-config {text}: it is no JSON object; correct it"
    # SGLang's own defaults.
    sizes = {"top_k": 2048} | found
    for name in ("top_k", "device_buffer_size"):
        if name in sizes and type(sizes[name]) is not int:
            return f"--hisparse-config {name}={json.dumps(sizes[name])}: it must be an integer; correct it"
    top_k = sizes["top_k"]
    buffer = sizes.get("device_buffer_size", 2 * top_k)
    if buffer < top_k:
        return (
            f"--hisparse-config device_buffer_size={buffer}: it is below top_k={top_k}; "
            "raise it or lower top_k"
        )
    try:
        HotBuffer(buffer, page_size // RATIO).require(index_topk)
        region_rows(0, found.get("host_to_device_ratio", 2), page_size // RATIO)
    except ValueError as error:
        return str(error)
    return ""


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
        lambda f: not f.hisparse_config_error,
        "--hisparse-config {hisparse_config_error}",
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
