"""Model runner: restores before the target forward, captures at ends of spans behind the last forward.

With speculation the last forward of a step is the draft model's, which extends its ring by what the target
computed or verified; its draft steps run ahead of the target's forward, where the manager is not armed.
"""

from __future__ import annotations

from .active import current, manager_of
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
    manager = manager_of(self.token_to_kv_pool)
    if manager is None:
        return original(self, forward_batch, *args, **kwargs)
    if not self.is_draft_worker:
        if not manager.planned:
            return original(self, forward_batch, *args, **kwargs)
        manager.begin_forward()
    output = original(self, forward_batch, *args, **kwargs)
    if manager.armed and self.is_draft_worker == manager.drafts:
        _capture_ends(manager, forward_batch)
    return output


def _capture_ends(manager, forward_batch) -> None:
    active = current()
    backends = [
        runner.attn_backend for runner in (active.target, active.draft) if runner is not None
    ]
    for _ in manager.end_waves():
        for backend in backends:
            backend.capture_swa_windows_decode(forward_batch)
            backend.capture_compress_state_windows_decode(forward_batch)
