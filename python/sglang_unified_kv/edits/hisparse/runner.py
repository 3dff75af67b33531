"""Where the coordinator is built, and where it learns who is being prefilled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...hisparse.rows import Prefill
from ..series import HISPARSE_SERIES
from .arguments import FEATURE
from .pool import promises_of

_COORDINATOR = "sglang.srt.managers.hisparse_coordinator:HiSparseCoordinator"
_OURS = "sglang_unified_kv.edits.hisparse.coordinator.UnifiedHiSparseCoordinator"


@HISPARSE_SERIES.wrap(
    "sglang.srt.model_executor.model_runner:ModelRunner.maybe_init_hisparse_coordinator",
    feature=FEATURE,
    why="the coordinator is built here, before CUDA graphs are captured",
    params="self",
    fingerprint="92c205c5a3791bc8",
)
def build_coordinator(original, self) -> None:
    if promises_of(self.token_to_kv_pool_allocator) is None:
        return original(self)
    from .coordinator import UnifiedHiSparseCoordinator

    self.hisparse_coordinator = UnifiedHiSparseCoordinator.of(self)


@HISPARSE_SERIES.wrap(
    "sglang.srt.managers.scheduler:Scheduler.init_hisparse_coordinator",
    feature=FEATURE,
    why="device rows are promised until a request has its hot buffer; the scheduler knows these requests",
    params="self",
    fingerprint="c341e03139870f9e",
)
def follow_scheduler(original, self) -> None:
    original(self)
    promises = promises_of(self.token_to_kv_pool_allocator)
    if promises is not None:
        promises.prefills = lambda: prefills_of(self)


def prefills_of(scheduler) -> Iterator[Prefill]:
    """Admitted requests without a hot buffer: in chunks, in flight, or on their way to the host."""
    coordinator = scheduler.hisparse_coordinator
    requests = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    for batch in scheduler._collect_inflight_batches():
        if batch is not None:
            requests += batch.reqs
    for req in {id(req): req for req in requests}.values():
        slot = req.kv.req_pool_idx
        if slot is not None and not coordinator.req_device_buffer_size[slot]:
            yield Prefill(len(req.full_untruncated_fill_ids), req.kv.kv_allocated_len)


class Saving(NamedTuple):
    """The requests on their way to the host, which SGLang has in no batch."""

    reqs: list


@HISPARSE_SERIES.wrap(
    "sglang.srt.managers.scheduler:Scheduler._collect_inflight_batches",
    feature=FEATURE,
    why="an abort or a timeout is lost on requests whose rows are on their way to the host",
    params="self",
    fingerprint="70fe3c9b36398700",
)
def inflight_batches(original, self) -> list:
    batches = original(self)
    if promises_of(self.token_to_kv_pool_allocator) is None:
        return batches
    return [*batches, Saving([act.req for act in self.hisparse_coordinator.ack_staging_queue])]


@HISPARSE_SERIES.wrap(
    "sglang.srt.managers.scheduler:Scheduler.pause_generation",
    feature=FEATURE,
    why="requests on their way to the host keep what old weights computed",
    params="self, recv_req",
    fingerprint="c6c55b22c6b4242b",
)
def pause_generation(original, self, recv_req) -> None:
    original(self, recv_req)
    if recv_req.mode != "retract" or promises_of(self.token_to_kv_pool_allocator) is None:
        return
    from sglang.srt.managers.schedule_batch import retract_all

    saving = [act.req for act in self.hisparse_coordinator.ack_staging_queue]
    retract_all(
        reqs=saving,
        req_to_token_pool=self.req_to_token_pool,
        token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
        tree_cache=self.tree_cache,
        hisparse_coordinator=self.hisparse_coordinator,
        offload_kv=False,
    )
    for req in saving:
        self._add_request_to_queue(req)


for _name, (_params, _fingerprint, _why) in {
    "__init__": (
        "self, req_to_token_pool, token_to_kv_pool_allocator, top_k, device_buffer_size, device, tp_group, "
        "host_to_device_ratio, swap_in_block_size, shared_index_layers, num_draft_tokens",
        "bfb5af391b61ccad",
        "host memory is checked as a whole first; the tables of rows are built behind it",
    ),
    "alloc_device_buffer": ("self, req", "7203e880ba0979f0", "what is hot of a new request"),
    "admit_request_into_staging": (
        "self, req",
        "5c43deb931826000",
        "rows are copied, not packed pages",
    ),
    "map_last_loc_to_buffer": (
        "self, seq_lens, out_cache_loc, req_pool_indices, seq_lens_cpu, req_pool_indices_cpu",
        "621e24c755213223",
        "asks the host, not the device, which requests complete a row",
    ),
    "_run_swap_in_kernel": (
        "self, req_pool_indices, compressed_seq_lens, top_k_result, layer_id, record_plan",
        "01e388506225372c",
        "H6: the copies fill the chip",
    ),
    "destroy": ("self", "322a9db695f1397a", "the rope halves have a host pool of their own"),
}.items():
    HISPARSE_SERIES.override(
        f"{_COORDINATOR}.{_name}",
        feature=FEATURE,
        why=_why,
        params=_params,
        fingerprint=_fingerprint,
        ours=f"{_OURS}.{_name}",
    )
