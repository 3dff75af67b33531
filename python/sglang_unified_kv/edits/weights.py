"""Weight updates: what other weights computed is neither reused nor stored under their name."""

from __future__ import annotations

from .active import current_manager
from .series import SERIES

_FEATURE = "bit-exact hicache"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater"
_WHY = "the weights may change here, whether or not the update succeeds or a flush follows"


def suspend(original, self, *args, **kwargs):
    manager = current_manager()
    if manager is not None:
        manager.suspend()
    return original(self, *args, **kwargs)


for _name, (_params, _fingerprint) in {
    "update_weights_from_disk": (
        "self, model_path, load_format, weight_name_filter, recapture_cuda_graph",
        "d022aee8472721b2",
    ),
    "load_weights_from_distributed": ("self, named_tensors", "96b5dd21e8781c9c"),
    "update_weights_from_tensor": ("self, named_tensors, load_format", "7917dc32f144a81e"),
    "update_weights_from_ipc": ("self, recv_req", "ce5eafc3f70715e6"),
    "begin_weight_update": ("self", "d54befd3f076364c"),
    "end_weight_update": ("self, *, run_post_load", "0d9108c9899c9cca"),
}.items():
    SERIES.wrap(
        f"{_UPDATER}.{_name}",
        feature=_FEATURE,
        why=_WHY,
        params=_params,
        fingerprint=_fingerprint,
    )(suspend)


@SERIES.wrap(
    "sglang.srt.managers.scheduler_components.weight_updater:"
    "SchedulerWeightUpdaterManager.end_weight_update",
    feature=_FEATURE,
    why="ends a session whose updates have flushed the cache, so nothing else would",
    params="self, recv_req",
    fingerprint="7cd4623a8689f548",
)
def end_weight_update(original, self, recv_req):
    output = original(self, recv_req)
    if current_manager() is not None:
        self.scheduler.tree_cache.resume_if_empty()
    return output
