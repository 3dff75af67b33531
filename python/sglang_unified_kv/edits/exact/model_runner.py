"""Model runner: restores before the target forward, captures at ends of spans behind the step's last forward.

With speculation that is the draft model's, which extends its ring by what the target computed or verified.
It may be the replay of a graph that no runner's ``forward`` sees, so the worker's methods are wrapped; what
the draft model does ahead of the target's forward finds the manager not armed.
"""

from __future__ import annotations

from ..series import SERIES
from .active import Active, current, manager_of

_FEATURE = "bit-exact hicache"


@SERIES.wrap(
    "sglang.srt.model_executor.model_runner:ModelRunner.forward",
    feature=_FEATURE,
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
    active = current()
    assert active is not None
    active.waiting = forward_batch
    if not manager.drafts:
        capture_ends(active)
    return output


def capture_ends(active: Active) -> None:
    """The step's last forward has run: take the captures at its ends."""
    manager, batch = active.manager, active.waiting
    active.waiting = None
    backends = [r.attn_backend for r in (active.target, active.draft) if r is not None]
    for _ in manager.end_waves():
        for backend in backends:
            backend.capture_swa_windows_decode(batch)
            backend.capture_compress_state_windows_decode(batch)


def behind_draft_extend(original, self, *args, **kwargs):
    output = original(self, *args, **kwargs)
    active = current()
    if active is not None and active.manager.armed:
        capture_ends(active)
    return output


for _name, (_params, _fingerprint) in {
    "_draft_extend_for_prefill": (
        "self, batch, target_hidden_states, next_token_ids, mm_input_embeds, kv_loc_plan",
        "e40d5d998c164b16",
    ),
    "_draft_extend_for_decode": ("self, batch, batch_result, *, kv_loc_plan", "d7858851c429dd62"),
}.items():
    SERIES.wrap(
        f"sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker.{_name}",
        feature=_FEATURE,
        why="the step's last forward, eager or the replay of a graph",
        params=_params,
        fingerprint=_fingerprint,
    )(behind_draft_extend)
