"""Model runner: restores before the target forward, captures at ends of spans behind it."""

from __future__ import annotations

from .active import manager_of
from .series import SERIES


@SERIES.wrap(
    "sglang.srt.model_executor.model_runner:ModelRunner.forward",
    feature="bit-exact hicache",
    why="first point on the forward's own stream after the slot was reset, and last one before sampling",
    params="self, forward_batch, skip_attn_backend_init, pp_proxy_tensors, "
    "reinit_attn_backend, split_forward_count",
    fingerprint="26fbd69d337720a4",
)
def forward(original, self, forward_batch, *args, **kwargs):
    manager = None if self.is_draft_worker else manager_of(self.token_to_kv_pool)
    if manager is None or not manager.planned:
        return original(self, forward_batch, *args, **kwargs)
    manager.begin_forward()
    output = original(self, forward_batch, *args, **kwargs)
    for _ in manager.end_waves():
        self.attn_backend.capture_swa_windows_decode(forward_batch)
        self.attn_backend.capture_compress_state_windows_decode(forward_batch)
    return output
