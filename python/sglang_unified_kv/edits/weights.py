"""Weight updates: what other weights computed is neither reused nor stored under their name."""

from __future__ import annotations

from .active import current
from .series import SERIES

_FEATURE = "bit-exact hicache"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater"
_WHY = "the weights may change here, whether or not the update succeeds or a flush follows"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"


def update(original, self, *args, **kwargs):
    active = current()
    if active is None:
        return original(self, *args, **kwargs)
    active.manager.suspend()
    done = False
    try:
        answer = original(self, *args, **kwargs)
        done = answer is None or answer[0]
        return answer
    finally:
        if active.weights is not None:
            active.weights.updated(done)


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
    )(update)


@SERIES.wrap(
    f"{_MANAGER}.begin_weight_update",
    feature=_FEATURE,
    why="until the session ends weights may change without a call, from a peer's memory",
    params="self, recv_req",
    fingerprint="6ee0a8bc31d8de78",
)
def begin_weight_update(original, self, recv_req):
    output = original(self, recv_req)
    _note_session(self)
    return output


@SERIES.wrap(
    f"{_MANAGER}.end_weight_update",
    feature=_FEATURE,
    why="ends a session whose updates have flushed the cache, so nothing else would",
    params="self, recv_req",
    fingerprint="7cd4623a8689f548",
)
def end_weight_update(original, self, recv_req):
    output = original(self, recv_req)
    if _note_session(self):
        self.scheduler.tree_cache.resume_if_empty()
    return output


def _note_session(updater) -> bool:
    """Tell the manager whether a session is open; False if nothing is engaged."""
    active = current()
    if active is None:
        return False
    active.manager.in_session = updater._session is not None
    return True
