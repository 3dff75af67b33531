"""SGLang's arguments: our flag, and the facts that engagement is decided on."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from ...config import OFFLOAD_PAGE_STRIDE
from ...engage import EnvironmentFacts, Facts
from ...metrics import taken_labels
from ...names import STRIDE_FLAG
from ..series import SERIES

FEATURE = "bit-exact hicache"
REFERENCE_ENGINE = "SGLANG_UNIFIED_KV_REFERENCE_ENGINE"


class _StrideAction(argparse.Action):
    """Carries the flag in the environment: SGLang's record drops it, children inherit."""

    # The value that an earlier parse of this process put there; that one is no conflict.
    _carried: str | None = None

    def __call__(self, parser, namespace, values, option_string=None):
        value = str(values)
        found = os.environ.get(OFFLOAD_PAGE_STRIDE, "")
        if found not in ("", value, _StrideAction._carried):
            parser.error(
                f"argument {option_string}: {value} contradicts {OFFLOAD_PAGE_STRIDE}={found}; "
                "give one of them, or the same value"
            )
        os.environ[OFFLOAD_PAGE_STRIDE] = _StrideAction._carried = value


def _stride(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1 (pages)")
    return int(text)


@SERIES.wrap(
    "sglang.srt.arg_groups.arg_utils:add_cli_args_from_dataclass",
    feature=FEATURE,
    why=f"registers {STRIDE_FLAG} on SGLang's own parser; ServerArgs.add_cli_args, which calls it, "
    "is hooked by a plugin that SGLang's own dependencies install (smg-grpc-servicer)",
    params="parser, cls, *, fields",
    fingerprint="1316b7a3624c6d59",
)
def add_stride_flag(
    original: Any, parser: argparse.ArgumentParser, cls: type, **selection: Any
) -> None:
    original(parser, cls, **selection)
    parser.add_argument(
        STRIDE_FLAG,
        action=_StrideAction,
        type=_stride,
        metavar="N",
        default=argparse.SUPPRESS,
        help="Take a checkpoint of the sliding window and the compressor states at every Nth page "
        f"boundary. Same as {OFFLOAD_PAGE_STRIDE}.",
    )


def environment_facts() -> EnvironmentFacts:
    """The facts that need no launch arguments."""
    return EnvironmentFacts(**_environment())


def facts_of(server_args: Any) -> Facts:
    """The facts of a *resolved* ``ServerArgs``.

    Cheap: resolution has already built the model configuration and keeps it on the record.
    """
    from sglang.srt.arg_groups.overrides import (
        attention_backends_of,
        model_config_of,
        resolving_view,
    )

    cfg = resolving_view(server_args)
    model = model_config_of(server_args)
    config = model.hf_config
    algorithm = cfg.speculative_algorithm
    return Facts(
        **_environment(),
        architecture=(config.architectures or [""])[0],
        model_type=config.model_type,
        attention_backends=attention_backends_of(cfg),
        cuda_graph_backend_prefill=cfg.cuda_graph_config.prefill.backend,
        speculative_algorithm=None if algorithm in (None, "NONE") else algorithm,
        storage_config_error=_storage_config_error(cfg),
        hisparse_config_error=_hisparse_config_error(cfg, model.hf_text_config),
        enable_decoder_swa_bounded_replay=bool(cfg.enable_decoder_swa_bounded_replay),
        taken_labels=taken_labels(cfg.extra_metric_labels or ()) if cfg.enable_metrics else "",
        **{name: getattr(cfg, name) for name in _COPIED},
    )


SERIES.relies_on(
    "sglang.srt.arg_groups.hicache_hook:handle_hicache_ratio_default",
    feature=FEATURE,
    why="leaves the host memory fraction set only where neither a ratio nor a size was given: HiCache then "
    "sizes itself, which it cannot for this model",
    params="server_args",
    fingerprint="a18bc87768ad5121",
)


def _storage_config_error(cfg: Any) -> str:
    """Why SGLang's storage could not be set up from its extra config, which it reads after the weights."""
    backend, text = cfg.hicache_storage_backend, cfg.hicache_storage_backend_extra_config
    if not cfg.enable_hierarchical_cache or backend is None:
        return ""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    try:
        found, *_ = HybridCacheController.parse_storage_backend_extra_config(text)
    except (OSError, ValueError) as error:
        return f"{text}: {error}"
    needed = ("backend_name", "module_path", "class_name") if backend == "dynamic" else ()
    missing = [name for name in needed if name not in found]
    return f"{text}: a dynamic backend needs {', '.join(missing)}" if missing else ""


def _hisparse_config_error(cfg: Any, text_config: Any) -> str:
    if not cfg.enable_hisparse:
        return ""
    from ...hisparse.support import config_error

    topk = getattr(text_config, "index_topk", None)
    # Other models' HiSparse is not ours.
    error = config_error(cfg.hisparse_config, topk, cfg.page_size) if topk else ""
    return error.removeprefix("--hisparse-config ")


def replaced_flags(server_args: Any, launch_flags: Sequence[str]) -> list[str]:
    """A line for each flag that was given one value and runs with another, of a *resolved* ``ServerArgs``."""
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg, given = resolving_view(server_args), server_args._raw_input
    named = {word.partition("=")[0] for word in launch_flags}
    found = []
    for name in (field.name for field in record_fields(type(server_args))):
        flag, asked, runs = f"--{name.replace('_', '-')}", given[name], getattr(cfg, name)
        if flag in named and asked != runs:
            found.append(f"{flag} {asked}: SGLang runs with {runs} instead")
    return found


_GATHERED = {
    "architecture",
    "model_type",
    "attention_backends",
    "cuda_graph_backend_prefill",
    "speculative_algorithm",
    "storage_config_error",
    "hisparse_config_error",
    "enable_decoder_swa_bounded_replay",
    "taken_labels",
}
_COPIED = tuple(
    name
    for name in Facts.__dataclass_fields__
    if name not in _GATHERED and name not in EnvironmentFacts.__dataclass_fields__
)


def _environment() -> dict[str, Any]:
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention.dsv4 import unified_kv_gate
    from sglang.srt.utils import is_hip

    return {
        "is_hip": is_hip(),
        "reference_engine": os.environ.get(REFERENCE_ENGINE) == "1",
        "flashmla_backend": envs.SGLANG_HACK_FLASHMLA_BACKEND.get(),
        "unified_kv_gate": unified_kv_gate.is_unified_kv_triton(),
        "compress_state_dtype": envs.SGLANG_DSV4_COMPRESS_STATE_DTYPE.get().strip().lower(),
    }
