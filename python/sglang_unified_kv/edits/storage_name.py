"""What the engine's stored objects are filed under, from what the engine holds."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import sglang
import torch
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool
from sglang.srt.runtime_context import get_parallel

from .. import engage
from ..checkpoint.identity import Identity, weights_digest
from ..checkpoint.record_format import RecordFormat

if TYPE_CHECKING:
    from .strict_cache import StrictUnifiedRadixCache

logger = logging.getLogger(__name__)


def record_format_of(cache: StrictUnifiedRadixCache, config: Any, weights: str) -> RecordFormat:
    """What the engine's stored objects are filed under.

    Args:
        config: the model's ``transformers`` configuration.
        weights: :attr:`WeightsName.current`.
    """
    layout = cache.checkpoints.mover.layout
    namespace = identity_of(cache, config, weights).namespace
    return RecordFormat(namespace, bytes.fromhex(layout.fingerprint), layout.record_bytes)


class WeightsName:
    """What the loaded weights are called in the namespace: the same on every rank, whatever its shards.

    Args:
        models: the target, and the draft model if there is one.

    At start, which is collective, the digests of all ranks. After an update no rank can count on the
    others to be here (updates fail, and data-parallel ranks are flushed, one by one), so several ranks
    then count updates of this start of the server, and what they store serves no other.
    """

    def __init__(self, models: list[torch.nn.Module]):
        self._models = models
        self._start, self._updates = "", 0
        parallel = get_parallel()
        self._alone = parallel.tp_size == 1
        self.current = self._digest()
        if not self._alone:
            told: list[Any] = [None] * parallel.tp_size
            own = (self.current, secrets.token_hex(16))
            torch.distributed.all_gather_object(told, own, parallel.tp_group.cpu_group)
            self.current = " ".join(digest for digest, _ in told)
            self._start = told[0][1]

    def _digest(self) -> str:
        return weights_digest(self.named_weights())

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors; the draft's names say so."""
        for prefix, model in zip(("", "draft."), self._models, strict=False):
            for name, tensor in model.state_dict().items():
                yield prefix + name, tensor

    def updated(self) -> None:
        """The weights are others now."""
        if self._alone:
            self.current = self._digest()
            return
        self._updates += 1
        self.current = f"update {self._updates} of start {self._start}"
        logger.warning(
            "The weights were updated on several ranks: what is stored from now on is not found after "
            "the next start."
        )


def identity_of(cache: StrictUnifiedRadixCache, config: Any, weights: str) -> Identity:
    """The identity behind :func:`record_format_of`; arguments as there."""
    parallel = get_parallel()
    settings = {k: v for k, v in config.to_dict().items() if k not in _CONFIG_OF_A_HOST}
    return Identity(
        engine=sglang.__version__,
        layout=cache.checkpoints.mover.layout.fingerprint,
        ring_sizes=tuple(ring.size for ring in cache.checkpoints.rings),
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
