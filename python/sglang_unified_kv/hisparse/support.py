"""Whether HiSparse engages on the unified pool: settings and facts in, a decision out.

The table is read like those of ``engage``; SGLang's own checks of ``--enable-hisparse`` run besides.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import Settings
from ..engage import (
    ENVIRONMENT_CONDITIONS,
    GATE,
    LAUNCH_CONDITIONS,
    Decision,
    EnvironmentFacts,
    Rule,
    State,
    violations,
)


@dataclass(frozen=True)
class HiSparseFacts(EnvironmentFacts):
    """The environment, and what SGLang's arguments are when it validates ``--enable-hisparse``."""

    architecture: str
    model_type: str
    enable_hisparse: bool
    disable_radix_cache: bool
    page_size: int | None
    speculative_algorithm: str | None
    disaggregation_mode: str
    dsv4_attn_backend: str
    enable_unified_memory: bool
    pp_size: int
    attn_cp_size: int
    dcp_size: int
    enable_two_batch_overlap: bool
    enable_pdmux: bool
    enable_prefill_cp: bool
    enable_streaming_session: bool
    enable_session_radix_cache: bool
    enable_encoder_swa_bounded_replay: bool
    enable_decoder_swa_bounded_replay: bool | None
    cuda_graph_backend_prefill: str
    use_ray: bool


CONDITIONS = (
    *ENVIRONMENT_CONDITIONS,
    *LAUNCH_CONDITIONS,
    Rule(lambda f: f.enable_hisparse, "--enable-hisparse"),
)

OBSTACLES = (
    GATE,
    Rule(
        lambda f: f.disable_radix_cache,
        "the radix cache is on: HiSparse keeps no prefixes; add --disable-radix-cache",
    ),
    Rule(lambda f: f.page_size == 256, "--page-size {page_size}: set it to 256"),
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
    Rule(
        lambda f: f.dsv4_attn_backend != "trtllm",
        "--dsv4-attn-backend trtllm: the uniform fp8 layout is not supported; remove the flag",
    ),
    Rule(
        lambda f: not f.enable_unified_memory,
        "--enable-unified-memory: its pool layout is not supported; remove the flag",
    ),
    Rule(
        lambda f: f.pp_size == 1,
        "--pp-size {pp_size}: pipeline parallelism is not supported; set it to 1",
    ),
    Rule(
        lambda f: f.attn_cp_size == 1,
        "--attn-cp-size {attn_cp_size}: context parallelism is not supported; set it to 1",
    ),
    Rule(
        lambda f: f.dcp_size == 1,
        "--dcp-size {dcp_size}: context parallelism is not supported; set it to 1",
    ),
    Rule(
        lambda f: not f.enable_prefill_cp,
        "--enable-prefill-cp: context parallelism is not supported; remove the flag",
    ),
    Rule(
        lambda f: not f.enable_two_batch_overlap,
        "--enable-two-batch-overlap: not supported; remove the flag",
    ),
    Rule(lambda f: not f.enable_pdmux, "--enable-pdmux: not supported; remove the flag"),
    # A session keeps logical pages of a turn whose rows are given back.
    Rule(
        lambda f: not f.enable_streaming_session,
        "--enable-streaming-session: not supported; remove the flag",
    ),
    Rule(
        lambda f: not f.enable_session_radix_cache,
        "--enable-session-radix-cache: not supported; remove the flag",
    ),
    Rule(
        lambda f: not f.enable_encoder_swa_bounded_replay,
        "--enable-encoder-swa-bounded-replay: never tried with it; remove the flag",
    ),
    Rule(
        lambda f: not f.enable_decoder_swa_bounded_replay,
        "--enable-decoder-swa-bounded-replay: never tried with it; use "
        "--no-enable-decoder-swa-bounded-replay",
    ),
    # Where a chunk's rows are changes with every replay.
    Rule(
        lambda f: f.cuda_graph_backend_prefill == "disabled",
        "--cuda-graph-backend-prefill {cuda_graph_backend_prefill}: set it to disabled",
    ),
    Rule(
        lambda f: not f.use_ray,
        "--use-ray: SGLang loads no plugins in its Ray actors; remove the flag",
    ),
)


def decide(settings: Settings, facts: HiSparseFacts) -> Decision:
    """Off or a condition missing -> inert; an obstacle -> refused; engaged otherwise."""
    if not settings.hisparse:
        return Decision(State.INERT)
    missing = violations(CONDITIONS, facts)
    if missing:
        return Decision(State.INERT, missing=missing)
    obstacles = violations(OBSTACLES, facts)
    return Decision(State.REFUSED, obstacles=obstacles) if obstacles else Decision(State.ENGAGED)
