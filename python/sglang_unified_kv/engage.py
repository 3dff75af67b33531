"""Engagement: settings and facts -> engaged, inert or refused. The conjunction, in one place.

Plugins load before arguments are parsed. At load the environment alone decides whether edits are
checked and applied; they stay inert until :func:`engage` has decided, once the arguments are
resolved, in the launching process and again in every rank's scheduler.

The rules are two tables. A *condition* that does not hold makes us inert, with one warning. With
all conditions there, an *obstacle* refuses the start. Each table has an environment half, which
``sglang-unified-kv doctor`` can check without launch flags, and a launch half.

Imports no sglang; ``edits/launch/arguments.py`` gathers the facts.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from .config import BIT_EXACT_HICACHE, BIT_EXACT_RADIX, PROVENANCE, Settings
from .metrics import TAKEN_LABELS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnvironmentFacts:
    """What the machine and the environment variables say.

    Attributes:
        is_hip: torch is a ROCm build.
        reference_engine: ``SGLANG_UNIFIED_KV_REFERENCE_ENGINE`` is on.
        flashmla_backend: ``SGLANG_HACK_FLASHMLA_BACKEND``.
        unified_kv_gate: what SGLang's own ``is_unified_kv_triton`` answers.
        compress_state_dtype: ``SGLANG_DSV4_COMPRESS_STATE_DTYPE``.
    """

    is_hip: bool
    reference_engine: bool
    flashmla_backend: str
    unified_kv_gate: bool
    compress_state_dtype: str


@dataclass(frozen=True)
class Facts(EnvironmentFacts):
    """Everything the decision needs: the environment, and SGLang's arguments after resolution.

    The fields below carry SGLang's names; ``architecture`` and ``model_type`` are those of the
    model's configuration. ``hicache_host_memory_fraction`` is None where a ratio or a size was given: only
    without both SGLang sizes HiCache by it. ``taken_labels``: of ``--extra-metric-labels``, those that our
    metrics have for their own; none without ``--enable-metrics``. ``storage_config_error`` and
    ``hisparse_config_error``: why SGLang or we could not build from these settings; empty if we can.
    """

    architecture: str
    model_type: str
    enable_hierarchical_cache: bool
    hicache_write_policy: str
    hicache_host_memory_mode: str
    hicache_host_memory_fraction: float | None
    hicache_ratio: float | None
    hicache_size: int
    hicache_io_backend: str
    hicache_mem_layout: str
    hicache_storage_backend: str | None
    storage_config_error: str
    hisparse_config_error: str
    disable_radix_cache: bool
    radix_cache_backend: str | None
    enable_lmcache: bool
    enable_flexkv: bool
    enable_unified_cache_external_linker: bool
    page_size: int | None
    attention_backends: tuple[str | None, str | None]
    cuda_graph_backend_prefill: str
    dsv4_attn_backend: str
    enable_unified_memory: bool
    enable_hisparse: bool
    pp_size: int
    attn_cp_size: int
    dcp_size: int
    enable_prefill_cp: bool
    enable_two_batch_overlap: bool
    enable_pdmux: bool
    disaggregation_mode: str
    speculative_algorithm: str | None
    speculative_eagle_topk: int | None
    speculative_adaptive: bool
    enable_multi_layer_eagle: bool
    enable_mixed_chunk: bool
    enable_lora: bool
    dllm_algorithm: str | None
    enable_streaming_session: bool
    enable_session_radix_cache: bool
    enable_encoder_swa_bounded_replay: bool
    enable_decoder_swa_bounded_replay: bool
    encoder_only: bool
    use_ray: bool
    taken_labels: str


@dataclass(frozen=True)
class Rule:
    """``ok`` tells whether the facts satisfy the rule; ``otherwise`` is the line shown if not.

    ``otherwise`` is a ``str.format`` template over the fields of the facts, or a function of them. The
    line names the flag or variable, the value found and what to change.
    """

    ok: Callable[[Any], bool]
    otherwise: str | Callable[[Any], str]

    def line(self, facts: EnvironmentFacts) -> str:
        if callable(self.otherwise):
            return self.otherwise(facts)
        return self.otherwise.format(**asdict(facts))


def _platform(f: EnvironmentFacts) -> bool:
    return f.is_hip or f.reference_engine


def _backend(f: EnvironmentFacts) -> bool:
    return f.flashmla_backend == "unified_kv_triton"


ENVIRONMENT_CONDITIONS = (
    Rule(
        _platform,
        "ROCm (torch is not a HIP build), or the reference engine "
        "(SGLANG_UNIFIED_KV_REFERENCE_ENGINE=1, for tests and demos)",
    ),
    Rule(
        _backend,
        "the unified_kv backend (SGLANG_HACK_FLASHMLA_BACKEND is {flashmla_backend!r}; "
        "set it to unified_kv_triton)",
    ),
)

LAUNCH_CONDITIONS = (
    Rule(
        lambda f: f.architecture == "DeepseekV4ForCausalLM" and f.model_type != "deepseek_v41",
        "a DeepSeek-V4 model (the architecture is {architecture!r}, "
        "model type {model_type!r}; DeepseekV4ForCausalLM is needed, not V4.1)",
    ),
)

TIER_CONDITIONS = {
    BIT_EXACT_HICACHE: Rule(
        lambda f: f.enable_hierarchical_cache,
        f"--enable-hierarchical-cache ({BIT_EXACT_RADIX}=1 is for serving without it)",
    ),
    BIT_EXACT_RADIX: Rule(
        lambda f: not f.enable_hierarchical_cache,
        f"no --enable-hierarchical-cache ({BIT_EXACT_HICACHE}=1 is for serving with it)",
    ),
}
"""What each switch needs beyond the conditions of both: one of them engages, never both."""

GATE = Rule(
    lambda f: f.unified_kv_gate or not (_platform(f) and _backend(f)),
    "SGLang's own unified_kv gate is off although SGLANG_HACK_FLASHMLA_BACKEND="
    "{flashmla_backend}: with the reference engine, SGLANG_PLUGINS must not leave out "
    "sglang_unified_kv_reference",
)

ENVIRONMENT_OBSTACLES = (
    GATE,
    Rule(
        lambda f: f.compress_state_dtype in ("float32", "fp32"),
        "SGLANG_DSV4_COMPRESS_STATE_DTYPE={compress_state_dtype}: set it to float32",
    ),
)

STORAGE_BACKENDS = ("file", "nixl", "mooncake", "dynamic")
_NO_V2 = "it has no batch_exists_v2, batch_get_v2 and batch_set_v2, which records travel with"
_UNTRIED = "its transfers were never tried with records"
_STORAGE_REASONS = {
    "simm": _NO_V2,
    "eic": _NO_V2,
    "aibrix": _NO_V2,
    "sim": "it simulates hits without bytes",
}


def storage_obstacle(backend: str | None) -> str | None:
    """Why records cannot be kept in a storage backend; None if they can, or if there is none."""
    if backend is None or backend in STORAGE_BACKENDS:
        return None
    return (
        f"--hicache-storage-backend {backend}: not supported, {_STORAGE_REASONS.get(backend, _UNTRIED)}; "
        f"use one of {', '.join(STORAGE_BACKENDS)}"
    )


STRICT_PROVENANCE_WITH_STORAGE = (
    f"{PROVENANCE}=strict with a storage backend: storage may pair pages and records of different "
    "runs; unset one of them"
)

LORA_WITH_STORAGE = (
    "--enable-lora (--lora-paths sets it) with a storage backend: an adapter is known by its name and path "
    "alone, so one that was trained anew would be served what the old one stored; remove one of them"
)

HOST_COPIES = (
    ("direct", "page_first_direct"),
    ("direct", "layer_first"),
    ("kernel", "page_first"),
    ("kernel", "layer_first"),
)
"""I/O backend and host layout between which SGLang copies pages of DeepSeek-V4 on a GPU."""


def _hicache(ok: Callable[[Any], bool], otherwise: str) -> Rule:
    """A rule that only HiCache asks for."""
    return Rule(lambda f: not f.enable_hierarchical_cache or ok(f), otherwise)


HICACHE_OBSTACLES = (
    # A captured state is usable once it is on the host, so every page has to be written through.
    _hicache(
        lambda f: f.hicache_write_policy == "write_through",
        "--hicache-write-policy {hicache_write_policy}: set it to write_through",
    ),
    _hicache(
        lambda f: f.hicache_host_memory_mode == "cache",
        "--hicache-host-memory-mode {hicache_host_memory_mode}: set it to cache",
    ),
    # SGLang refuses the next two itself, in every rank and after the weights are loaded.
    _hicache(
        lambda f: f.hicache_size <= 0,
        "--hicache-size {hicache_size}: SGLang does not size HiCache of DeepSeek-V4 in GB; remove the flag "
        "and give --hicache-ratio (sglang-unified-kv plan says which fits)",
    ),
    _hicache(
        lambda f: f.hicache_host_memory_fraction is None,
        "--hicache-ratio is not given: SGLang then sizes HiCache by --hicache-host-memory-fraction "
        "{hicache_host_memory_fraction}, which it cannot for DeepSeek-V4; give --hicache-ratio "
        "(sglang-unified-kv plan says which fits)",
    ),
    _hicache(
        lambda f: f.hicache_ratio is None or f.hicache_ratio > 0,
        "--hicache-ratio {hicache_ratio}: leaves no host page; give one above 0 (sglang-unified-kv plan says "
        "which fits)",
    ),
    # Some pairs fail when the pool is built, others at the first page that is copied.
    _hicache(
        lambda f: (f.hicache_io_backend, f.hicache_mem_layout) in HOST_COPIES,
        "--hicache-io-backend {hicache_io_backend} with --hicache-mem-layout {hicache_mem_layout}: SGLang "
        "has no such copies of DeepSeek-V4's pages on a GPU; set them to direct and page_first_direct",
    ),
)
"""What exact reuse and SGLang's own pools of DeepSeek-V4 need of HiCache."""

SHARED_OBSTACLES = (
    Rule(lambda f: f.page_size == 256, "--page-size {page_size}: set it to 256"),
    # A replayed graph runs no Python, and nobody says where the rows of a chunk are.
    Rule(
        lambda f: f.cuda_graph_backend_prefill == "disabled",
        "--cuda-graph-backend-prefill {cuda_graph_backend_prefill}: set it to disabled",
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
        "--enable-encoder-swa-bounded-replay: replay is approximate; remove the flag",
    ),
    Rule(
        lambda f: not f.enable_decoder_swa_bounded_replay,
        "--enable-decoder-swa-bounded-replay: replay is approximate; "
        "use --no-enable-decoder-swa-bounded-replay",
    ),
    Rule(
        lambda f: not f.use_ray,
        "--use-ray: SGLang loads no plugins in its Ray actors; remove the flag",
    ),
    Rule(lambda f: not f.taken_labels, TAKEN_LABELS),
)
"""What neither exact reuse nor HiSparse on the unified pool supports."""

LAUNCH_OBSTACLES = (
    *HICACHE_OBSTACLES,
    Rule(
        lambda f: storage_obstacle(f.hicache_storage_backend) is None,
        lambda f: storage_obstacle(f.hicache_storage_backend) or "",
    ),
    Rule(lambda f: not f.enable_lora or f.hicache_storage_backend is None, LORA_WITH_STORAGE),
    Rule(
        lambda f: not f.storage_config_error,
        "--hicache-storage-backend-extra-config: {storage_config_error}; correct it",
    ),
    *SHARED_OBSTACLES,
    Rule(lambda f: not f.disable_radix_cache, "--disable-radix-cache: remove the flag"),
    Rule(
        lambda f: f.radix_cache_backend is None,
        "--radix-cache-backend {radix_cache_backend}: only SGLang's default cache is supported; "
        "remove the flag",
    ),
    Rule(
        lambda f: not f.enable_lmcache,
        "--enable-lmcache: external caches are not supported; remove the flag",
    ),
    Rule(
        lambda f: not f.enable_flexkv,
        "--enable-flexkv: external caches are not supported; remove the flag",
    ),
    Rule(
        lambda f: not f.enable_unified_cache_external_linker,
        "--enable-unified-cache-external-linker: external caches are not supported; "
        "remove the flag",
    ),
    Rule(
        lambda f: f.attention_backends == ("dsv4", "dsv4"),
        "--attention-backend resolves to {attention_backends} for prefill and decode: "
        "both must be dsv4",
    ),
    Rule(
        lambda f: not f.enable_hisparse,
        "--enable-hisparse: not supported together with exact reuse yet; remove the flag",
    ),
    Rule(
        lambda f: f.disaggregation_mode == "null",
        "--disaggregation-mode {disaggregation_mode}: only aggregated serving is supported; "
        "remove the flag",
    ),
    Rule(
        lambda f: f.speculative_algorithm in (None, "EAGLE"),
        "--speculative-algorithm {speculative_algorithm}: only EAGLE (with the model's next-n layer) is "
        "supported; set it to EAGLE or remove it",
    ),
    Rule(
        lambda f: f.speculative_eagle_topk in (None, 1),
        "--speculative-eagle-topk {speculative_eagle_topk}: accepted drafts of a tree are moved behind the "
        "verify step; set it to 1",
    ),
    # A decode row among prefill chunks starts where a verify step in flight will end.
    Rule(
        lambda f: f.speculative_algorithm is None or not f.enable_mixed_chunk,
        "--enable-mixed-chunk with --speculative-algorithm {speculative_algorithm}: not supported; remove "
        "one of them",
    ),
    # The window ring holds the drafts of one step width, and another would need another plan.
    Rule(
        lambda f: not f.speculative_adaptive,
        "--speculative-adaptive: not supported; remove the flag",
    ),
    Rule(
        lambda f: not f.enable_multi_layer_eagle,
        "--enable-multi-layer-eagle: not supported; remove the flag",
    ),
    Rule(
        lambda f: f.dllm_algorithm is None,
        "--dllm-algorithm {dllm_algorithm}: diffusion decoding is not supported; remove the flag",
    ),
    Rule(lambda f: not f.encoder_only, "--encoder-only: has no cache; remove the flag"),
)


class State(str, Enum):
    ENGAGED = "engaged"
    INERT = "inert"
    REFUSED = "refused"


@dataclass(frozen=True)
class Decision:
    """Outcome. ``missing`` is filled only when inert, ``obstacles`` only when refused."""

    state: State
    missing: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Engagement:
    """Exact reuse is on in this process, with these settings."""

    settings: Settings
    decision: Decision


class Refused(ValueError):
    """The feature was asked for, its conditions hold, and something stands in the way.

    ``reasons`` holds every obstacle, one line each; ``switches`` what asked for it.
    """

    def __init__(self, reasons: Iterable[str], switches: Iterable[str]):
        self.reasons = tuple(reasons)
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(f"{_named(switches)} cannot be honoured:{lines}")


def _named(switches: Iterable[str]) -> str:
    return " and ".join(f"{name}=1" for name in switches)


def violations(rules: Iterable[Rule], facts: EnvironmentFacts) -> tuple[str, ...]:
    """The lines of every rule that ``facts`` does not satisfy."""
    return tuple(rule.line(facts) for rule in rules if not rule.ok(facts))


def on(settings: Settings) -> tuple[str, ...]:
    """The switches that are on."""
    values = {
        BIT_EXACT_HICACHE: settings.bit_exact_hicache,
        BIT_EXACT_RADIX: settings.bit_exact_radix,
    }
    return tuple(name for name, value in values.items() if value)


def missing_conditions(settings: Settings, facts: Facts) -> tuple[str, ...]:
    """Conditions that do not hold; of those of the single switches only if none of them holds."""
    missing = violations(ENVIRONMENT_CONDITIONS + LAUNCH_CONDITIONS, facts)
    switches = on(settings)
    tiers = violations([TIER_CONDITIONS[name] for name in switches], facts)
    return missing + (tiers if len(tiers) == len(switches) else ())


def decide(settings: Settings, facts: Facts) -> Decision:
    """Pure decision: off -> inert; a condition missing -> inert; an obstacle -> refused."""
    switches = on(settings)
    if not switches:
        return Decision(State.INERT)
    missing = missing_conditions(settings, facts)
    if missing:
        return Decision(State.INERT, missing=missing)
    obstacles = violations(ENVIRONMENT_OBSTACLES + LAUNCH_OBSTACLES, facts)
    if settings.provenance == "strict" and facts.hicache_storage_backend is not None:
        obstacles += (STRICT_PROVENANCE_WITH_STORAGE,)
    if obstacles:
        return Decision(State.REFUSED, obstacles=obstacles)
    return Decision(State.ENGAGED)


_current: Engagement | None = None


def current() -> Engagement | None:
    """The engagement of this process, ``None`` unless engaged.

    Objects that outlive a decision read it when they are built: a second engine in this process is
    decided anew and replaces it.
    """
    return _current


def engaged_settings() -> Settings:
    """The settings of what is engaged in this process; for code that runs only then."""
    assert _current is not None, "nothing is engaged"
    return _current.settings


def reset() -> None:
    """Forget the decision."""
    global _current
    _current = None


def engage(settings: Settings, facts: Facts, *, announce: bool = True) -> Decision:
    """Decide for this process, record the outcome, and tell the operator.

    Args:
        announce: tell the outcome; the ranks of a server whose launching process has told it already
            pass ``False``.

    Raises:
        Refused: with every obstacle.
    """
    global _current
    _current = None
    decision = decide(settings, facts)
    if decision.state is State.REFUSED:
        raise Refused(decision.obstacles, on(settings))
    if decision.state is State.ENGAGED:
        _current = Engagement(settings, decision)
        if announce:
            tier = "HiCache" if facts.enable_hierarchical_cache else "radix cache"
            asked = settings.model_dump(by_alias=True, exclude_defaults=True)
            said = " ".join(f"{name}={value}" for name, value in asked.items())
            logger.info("Bit-exact %s is engaged: %s", tier, said)
    elif decision.missing and announce:
        warn_inert(on(settings), decision.missing)
    return decision


def warn_inert(switches: Iterable[str], missing: Iterable[str]) -> None:
    """Tell the operator that what was asked for has no effect."""
    # Not the logger: Engine(...) silences it below errors unless told otherwise.
    warnings.warn(
        f"{_named(switches)} has no effect, SGLang runs as released. Missing: {'; '.join(missing)}",
        RuntimeWarning,
        stacklevel=3,
    )
