"""KV pool sizing: device staging of checkpoints is reserved before the KV pool takes what is left."""

from __future__ import annotations

from ... import engage
from ...checkpoint.layout import CheckpointLayout, Kind, RingSpec
from ..series import SERIES


@SERIES.wrap(
    "sglang.srt.model_executor.pool_configurator:DSV4PoolConfigurator._fixed_swa_bytes",
    feature="bit-exact hicache",
    why="fixed device bytes per rank, subtracted before tokens are counted",
    params="self, max_running_requests",
    fingerprint="a42b547251141996",
)
def fixed_swa_bytes(original, self, max_running_requests):
    return original(self, max_running_requests) + staging_bytes(self)


def staging_bytes(configurator) -> int:
    """Device bytes of the staging ring that ``build_manager`` will allocate; 0 if not engaged."""
    if engage.current() is None or not configurator._unified:
        return 0
    from .build import device_slots

    settings = engage.engaged_settings()
    slots = device_slots(settings, configurator.page_size, configurator.context_len)
    return slots * layout_of(configurator).record_bytes


def layout_of(configurator) -> CheckpointLayout:
    """The layout of a checkpoint before the pools are there, from their sizes."""
    from .build import OVERLAP_ROWS

    c4_layers = range(configurator.num_layers(4))
    state_row = 4 * 4  # four parts of head_dim, float32
    rings = [
        RingSpec(Kind.WINDOW, i, configurator._unified_row_bytes, "")
        for i in range(configurator.num_layers_total)
    ]
    for kind, head_dim in (
        (Kind.ATTENTION_STATE, configurator.attn_head_dim),
        (Kind.INDEXER_STATE, configurator.indexer_head_dim),
    ):
        rings += [RingSpec(kind, i, state_row * head_dim, "") for i in c4_layers]
    if configurator.is_speculative:
        rings.append(RingSpec(Kind.DRAFT_WINDOW, 0, configurator._unified_row_bytes, ""))
    return CheckpointLayout.of(
        rings,
        page_size=configurator.page_size,
        window=configurator.sliding_window_size,
        overlap=OVERLAP_ROWS,
    )
