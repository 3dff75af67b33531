"""Sizes of the KV pools: what the rings take, no more and no less.

As with the allocator, a sizer is counted anew if the switch is on, on unified KV, when it is built.
"""

from __future__ import annotations

import logging

from ...ring.accounting import SlotBytes
from ..exact.pool_sizing import staging_bytes
from ..series import RING
from .allocator import FEATURE, asked

logger = logging.getLogger(__name__)

_CONFIGURATOR = "sglang.srt.model_executor.pool_configurator:DSV4PoolConfigurator"


_MARK = "_unified_kv_ring_fixes"


def _counted(configurator) -> bool:
    return getattr(configurator, _MARK, False)


@RING.wrap(
    f"{_CONFIGURATOR}.__init__",
    feature=FEATURE,
    why="G4: each token pays for a draft layer that has a ring and nothing per token",
    params="self, kvc",
    fingerprint="0c1f7f0a59208813",
)
def draft_layer_has_no_tokens(original, self, kvc) -> None:
    original(self, kvc)
    setattr(self, _MARK, self._unified and asked())
    from sglang.srt.model_executor import pool_configurator

    # The next-n layer of EAGLE has compress ratio 0, and its ring is counted by _fixed_swa_bytes. Draft
    # models of other algorithms may have rows per token.
    next_n = pool_configurator.get_spec().speculative_algorithm == "EAGLE"
    if _counted(self) and next_n and hasattr(self, "_spec_infl"):
        self.bytes_per_full_token /= self._spec_infl


@RING.wrap(
    f"{_CONFIGURATOR}._get_num_req_slots",
    feature=FEATURE,
    why="G7: a prefill node that may become a decode node has the decode node's slots from the start",
    params="self, max_running_requests",
    fingerprint="71614a33456f7d3f",
)
def request_slots(original, self, max_running_requests) -> int:
    slots = original(self, max_running_requests)
    if not _counted(self) or self.disaggregation_mode == "decode":
        return slots
    from sglang.srt.runtime_context import get_disagg

    disagg = get_disagg()
    if disagg.enable_pd_role_switch:
        slots += disagg.disaggregation_decode_extra_slots or 0
    return slots


@RING.wrap(
    f"{_CONFIGURATOR}.calculate_pool_sizes",
    feature=FEATURE,
    why="G6: thousands of slots that nobody asked for can take a large part of the memory, silently",
    params="self, available_bytes, page_size",
    fingerprint="6647a296cc50228e",
)
def warn_of_slots(original, self, available_bytes, page_size):
    if _counted(self) and self.requested_max_running_requests_per_worker is None:
        running = self._resolve_max_running_requests_per_worker(available_bytes)
        cost = SlotBytes(
            slots=self._get_num_req_slots(running),
            # Staging is fixed too, and no slot's.
            fixed=self._fixed_swa_bytes(running)
            - staging_bytes(self)
            + self._fixed_c4_state_bytes(running)
            + self._get_c128_state_fixed_bytes(running),
            available=available_bytes,
            per_token=self.bytes_per_full_token,
        )
        if cost.dominant:
            logger.warning("%s", cost.warning())
    return original(self, available_bytes, page_size)
