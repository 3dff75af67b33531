"""SGLang's own preallocation queue of a decode node, with its own requests, allocator, slots and tree.

Stubs: what talks to the prefill node, and the collective over ranks.
"""

from __future__ import annotations

import contextlib
from array import array
from types import SimpleNamespace
from unittest import mock

from ring_objects import PAGE, WINDOW, Cached
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import ReqToMetadataIdxAllocator
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.base_prefix_cache import EvictResult
from sglang.srt.sampling.sampling_params import SamplingParams

RESERVED = 512
"""``--num-reserved-decode-tokens``, SGLang's default."""


class Receiver:
    """A prefill node that has everything ready."""

    conclude_state = None
    supports_host_destination = False

    def __init__(self):
        self.sent = 0

    def poll(self):
        return KVPoll.WaitingForInput

    def send_metadata(self, *_, **__):
        self.sent += 1

    def clear(self):
        pass


class DecodeNode:
    """A decode node with ``slots`` request slots and ``tokens`` full tokens, and no request yet.

    Args:
        cached: prompts of 4,096 tokens in the tree, with ``radix``.
    """

    def __init__(self, fixes, slots, *, tokens=256 * 1024, radix=False, cached=0, core="python"):
        objects = Cached(fixes, core, cached, slots, tokens, disable=not radix)
        self.allocator, self.rows, self.tree = objects.allocator, objects.slots, objects.tree
        self.aborted: list[Req] = []
        self.running: list[Req] = []
        self._radix, self._made = radix, 0
        queue = self.queue = object.__new__(decode.DecodePreallocQueue)
        queue.req_to_token_pool = self.rows
        queue.token_to_kv_pool_allocator = self.allocator
        queue.token_to_kv_pool = self.allocator._kvcache
        queue.draft_token_to_kv_pool = None
        queue.req_to_metadata_buffer_idx_allocator = ReqToMetadataIdxAllocator(1024)
        queue.tree_cache = self.tree
        queue.gloo_group = None
        queue.tp_rank, queue.pp_size = 0, 1
        queue._num_published_destinations = 0
        queue.max_total_num_tokens = tokens
        queue.num_reserved_decode_tokens = RESERVED
        queue.queue, queue.retracted_queue, queue.pending_reqs = [], [], []
        queue._prefill_dp_rank_queries = {}
        queue.kv_manager = SimpleNamespace(kv_args=SimpleNamespace(state_types=[]))
        queue.transfer_queue = SimpleNamespace(queue=[], enable_staging=False)
        queue.scheduler = SimpleNamespace(
            running_batch=SimpleNamespace(reqs=self.running),
            waiting_queue=[],
            sliding_window_size=WINDOW,
            last_batch=None,
            enable_hisparse=False,
            enable_priority_scheduling=False,
            enable_lora=False,
            enable_overlap=False,
            enable_decode_hicache=False,
            tp_worker=SimpleNamespace(is_hybrid_swa=True),
            output_streamer=SimpleNamespace(
                stream_output=lambda reqs, _: self.aborted.extend(reqs)
            ),
        )

    def request(self, length: int = 3000, new: int = 4096, start: int | None = None) -> Req:
        """A request of its own tokens, or of those from ``start``."""
        self._made += 1
        start = 10**9 + 1_000_000 * self._made if start is None else start
        sampling = SamplingParams(max_new_tokens=new)
        return Req(f"r{self._made}", "", array("q", range(start, start + length)), sampling)

    def enqueue(self, count: int, **request) -> list[decode.DecodeRequest]:
        """Requests whose prefill nodes wait for a destination."""
        made = [decode.DecodeRequest(self.request(**request), Receiver()) for _ in range(count)]
        self.queue.queue += made
        return made

    def retract(self, count: int, **request) -> list[Req]:
        """Requests that gave their slot back and wait to be resumed."""
        made = [self.request(**request) for _ in range(count)]
        for each in made:
            each.output_ids.extend(range(10))
            each.is_retracted = True
        self.queue.retracted_queue += made
        return made

    @contextlib.contextmanager
    def _arguments(self):
        disagg = SimpleNamespace(
            disaggregation_decode_enable_radix_cache=self._radix,
            disaggregation_decode_host_receive_threshold=1,
            disaggregation_decode_allocation_policy="early",
            disaggregation_decode_retraction_backup="cpu_tensor",
        )
        serving = SimpleNamespace(strip_thinking_cache=False)
        memory = SimpleNamespace(disable_radix_cache=not self._radix)
        with (
            mock.patch.object(decode, "get_disagg", lambda: disagg),
            mock.patch.object(decode, "get_memory", lambda: memory),
            mock.patch.object(
                decode, "poll_and_all_reduce", lambda pollers, _: [p.poll() for p in pollers]
            ),
            # The pool has no bytes to restore.
            mock.patch.object(decode, "restore_kv_cache", lambda *_: None),
            mock.patch.object(
                common, "get_spec", lambda: SimpleNamespace(speculative_algorithm=None)
            ),
            mock.patch.object(common, "get_serving", lambda: serving),
            mock.patch.object(schedule_batch, "get_serving", lambda: serving),
        ):
            yield

    def pop(self) -> list[Req]:
        """One ``pop_preallocated``; what is admitted runs from now on."""
        with self._arguments():
            admitted, _ = self.queue.pop_preallocated()
        found = [entry.req for entry in admitted]
        self.running += found
        return found

    def resume(self) -> list[Req]:
        """One ``resume_retracted_reqs``."""
        with self._arguments():
            found = self.queue.resume_retracted_reqs()
        self.running += found
        return found

    def stage(self, entry: decode.DecodeRequest) -> bool:
        """One ``allocate_host_staged``: a request whose KV waits in host memory."""
        with self._arguments():
            return self.queue.allocate_host_staged(entry)

    def refuses_for_good(self, request: Req) -> bool:
        with self._arguments():
            return self.queue._check_if_req_exceed_kv_capacity(request)

    def finish(self, request: Req) -> None:
        """The request's slot and pages are given back."""
        request.finished_reason = FINISH_LENGTH(0)
        if request in self.running:
            self.running.remove(request)
        with self._arguments():
            common.release_kv_cache(request, self.tree, checkpoint=False)

    @contextlib.contextmanager
    def nothing_can_be_evicted(self):
        """As a write-back cache whose host pool is full: pages count as evictable, and none goes."""
        with mock.patch.object(self.tree, "evict_for_alloc", lambda _: EvictResult()):
            yield

    def hold(self, entries: list[decode.DecodeRequest]) -> None:
        """These wait for their transfer."""
        self.queue.transfer_queue.queue = entries

    def free(self) -> tuple[int, int]:
        """Free request slots and free pages."""
        return self.rows.available_size(), self.allocator.full_available_size() // PAGE
