"""Weight updates: what other weights computed is neither reused nor stored under their name."""

from __future__ import annotations

from ..series import SERIES
from .active import current

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


_SESSION = "a session of weight updates is open"
_RELEASED = "the memory of the weights is released"


@SERIES.wrap(
    f"{_MANAGER}.begin_weight_update",
    feature=_FEATURE,
    why="until the session ends weights may change without a call, from a peer's memory",
    params="self, recv_req",
    fingerprint="6ee0a8bc31d8de78",
)
def begin_weight_update(original, self, recv_req):
    try:
        return original(self, recv_req)
    finally:
        _note_session(self)


@SERIES.wrap(
    f"{_MANAGER}.end_weight_update",
    feature=_FEATURE,
    why="ends a session whose updates have flushed the cache, so nothing else would",
    params="self, recv_req",
    fingerprint="7cd4623a8689f548",
)
def end_weight_update(original, self, recv_req):
    try:
        output = original(self, recv_req)
    finally:
        _note_session(self)
    _resume_if_empty(self)
    return output


@SERIES.wrap(
    f"{_MANAGER}.release_memory_occupation",
    feature=_FEATURE,
    why="weights whose memory is released come back as others, or are read from nowhere",
    params="self, recv_req",
    fingerprint="ca8fd1908a792450",
)
def release_memory_occupation(original, self, recv_req):
    active = current()
    if active is not None and _of_weights(recv_req.tags):
        active.manager.suspend()
        active.manager.unsettled(_RELEASED, True)
    return original(self, recv_req)


@SERIES.wrap(
    f"{_MANAGER}.resume_memory_occupation",
    feature=_FEATURE,
    why="the weights are there again, and may be others",
    params="self, recv_req",
    fingerprint="363929aa4d9ef3a4",
)
def resume_memory_occupation(original, self, recv_req):
    output = original(self, recv_req)
    active = current()
    if active is not None and _of_weights(recv_req.tags):
        active.manager.unsettled(_RELEASED, False)
        if active.weights is not None:
            active.weights.updated(True)
        _resume_if_empty(self)
    return output


def _of_weights(tags: list[str] | None) -> bool:
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    # Without tags, everything.
    return not tags or GPU_MEMORY_TYPE_WEIGHTS in tags


def _note_session(updater) -> None:
    active = current()
    if active is not None:
        active.manager.unsettled(_SESSION, updater._session is not None)


def _resume_if_empty(updater) -> None:
    if current() is not None:
        updater.scheduler.tree_cache.resume_if_empty()
