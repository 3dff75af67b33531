"""Sizes of the KV pools: the tables of HiSparse are reserved before tokens are counted."""

from __future__ import annotations

from ...hisparse.rows import RATIO, HotBuffer
from ...hisparse.tables import MAP_BYTES, slot_tables
from ..series import HISPARSE_SERIES
from .arguments import FEATURE, hisparse_on

_CONFIGURATOR = "sglang.srt.model_executor.pool_configurator:DSV4PoolConfigurator"


@HISPARSE_SERIES.wrap(
    f"{_CONFIGURATOR}._fixed_c4_state_bytes",
    feature=FEATURE,
    why="fixed device bytes per request slot of C4 layers; the coordinator allocates its tables behind the "
    "pools, and nobody counts them",
    params="self, max_running_requests",
    fingerprint="3b0461d162d3abb4",
)
def fixed_bytes(original, self, max_running_requests) -> int:
    return original(self, max_running_requests) + table_bytes(self, max_running_requests)


@HISPARSE_SERIES.wrap(
    f"{_CONFIGURATOR}._get_bytes_per_full_token",
    feature=FEATURE,
    why="the map from logical C4 rows to device rows grows with the tokens",
    params="self",
    fingerprint="152c02d760c27013",
)
def bytes_per_full_token(original, self) -> float:
    return original(self) + (MAP_BYTES if _counted(self) else 0)


def _counted(configurator) -> bool:
    return configurator._unified and configurator.num_layers(RATIO) > 0 and hisparse_on()


def hot_buffer(configurator) -> HotBuffer:
    """The buffer that ``--hisparse-config`` asks for.

    Raises:
        ValueError: no such buffer is possible.
    """
    from sglang.srt.mem_cache.sparsity import parse_hisparse_config

    buffer = HotBuffer(parse_hisparse_config().device_buffer_size, configurator.page_size // RATIO)
    buffer.require(_top_k())
    return buffer


def table_bytes(configurator, max_running_requests: int) -> int:
    """Device bytes of ``UnifiedHiSparseCoordinator``'s tables, the map apart; 0 without HiSparse of ours."""
    if not _counted(configurator):
        return 0
    from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len

    tables = slot_tables(
        configurator._get_num_req_slots(max_running_requests),
        configurator.num_layers(RATIO),
        configurator.context_len + get_req_to_token_extra_context_len(),
        _top_k(),
        hot_buffer(configurator),
    )
    return sum(tables.values())


def _top_k() -> int:
    from sglang.srt.runtime_context import process_model_config

    return process_model_config().hf_text_config.index_topk


HISPARSE_SERIES.relies_on(
    "sglang.srt.mem_cache.allocation_sizing:get_req_to_token_extra_context_len",
    feature=FEATURE,
    why="the tables have a place for every position of a request's row",
    params="",
    fingerprint="a42a90b1f0031c05",
)
