"""What the engine's stored objects are filed under, from what the engine holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import sglang
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool
from sglang.srt.runtime_context import get_parallel

from .... import engage
from ....checkpoint.identity import Identity
from ....checkpoint.record_format import RecordFormat

if TYPE_CHECKING:
    from ..cache import StrictUnifiedRadixCache


def record_format_of(cache: StrictUnifiedRadixCache, config: Any, weights: str) -> RecordFormat:
    """What the engine's stored objects are filed under.

    Args:
        config: the model's ``transformers`` configuration.
        weights: :meth:`.weights_name.WeightsName.now`.
    """
    layout = cache.checkpoints.mover.layout
    namespace = identity_of(cache, config, weights).namespace
    return RecordFormat(namespace, bytes.fromhex(layout.fingerprint), layout.record_bytes)


def identity_of(cache: StrictUnifiedRadixCache, config: Any, weights: str) -> Identity:
    """The identity behind :func:`record_format_of`; arguments as there."""
    parallel = get_parallel()
    settings = {k: v for k, v in config.to_dict().items() if k not in _CONFIG_OF_A_HOST}
    return Identity(
        engine=sglang.__version__,
        layout=cache.checkpoints.mover.layout.fingerprint,
        ring_sizes=tuple(ring.size for ring in cache.checkpoints.rings),
        # Not the host layout: a stored page has the same bytes in each (storage_transfers relies on it).
        pages=tuple(
            (str(entry.name), entry.host_pool.layer_num, entry.host_pool.item_bytes)
            for entry in cache.cache_controller.mem_pool_host.entries
            if isinstance(entry.host_pool, DeepSeekV4PagedHostPool)
        ),
        model=json.dumps(settings, sort_keys=True, default=str),
        weights=weights,
        ranks=(parallel.tp_size, parallel.attn_tp_size),
        bigram=cache.tree_core.is_eagle,
        rank=parallel.attn_tp_rank if engage.engaged_settings().storage_per_rank else None,
    )


_CONFIG_OF_A_HOST = ("_name_or_path", "transformers_version")
