"""SGLang's real scheduler in this process, stepped by the caller, every buffer in reach.

    with InProcessEngine(write_tiny_model(path), chunked_prefill_size=512, hicache=True) as engine:
        cold = engine.run(prompt(0, 700))
        assert engine.run(prompt(0, 700)).cached_tokens == 512

No server, no tokenizer and no other process; a test decides when the scheduler takes a step.
Engines may follow one another in a process, two at a time cannot be.

``SGLANG_UNIFIED_KV_REFERENCE_DEVICE=cuda`` puts every engine of the process on the current NVIDIA GPU. This
module must then be imported before SGLang.
"""

from __future__ import annotations

import argparse
import array
import atexit
import gc
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from sglang_unified_kv.launches import HOST_LAYOUT
from sglang_unified_kv.reference.device import device
from sglang_unified_kv.reference.plugin import ENV

# Read when torch is loaded. OpenMP threads that spin at barriers run 20 times slower as soon as two
# processes share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

HICACHE = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 4,
    "hicache_write_policy": "write_through",
    **dict(zip(("hicache_io_backend", "hicache_mem_layout"), HOST_LAYOUT[1::2], strict=True)),
}

DEFAULTS = {
    "device": device(),
    "page_size": 256,
    "skip_tokenizer_init": True,
    # On the CPU there are none.
    "disable_cuda_graph": device() == "cuda",
    "disable_overlap_schedule": True,
    "max_running_requests": 4,
    # Without it the pool takes most of the machine's memory.
    "max_total_tokens": 4096,
    # SGLang derives it from a GPU's memory and the chunk size: below zero here for large chunks.
    "mem_fraction_static": 0.5,
    "context_length": 8192,
    "random_seed": 1,
    "enable_fp32_lm_head": True,
    "log_level": "warning",
}


class Output(NamedTuple):
    """What the scheduler sent for one request.

    ``details`` splits ``cached_tokens`` by tier (device, host, storage), None when nothing was
    cached. Log-probabilities are those of the chosen (output) and of the given (input) tokens,
    empty unless ``return_logprob`` was asked for.
    """

    rid: str
    output_ids: list[int]
    cached_tokens: int
    details: dict[str, int] | None
    finish_reason: dict[str, Any]
    output_logprobs: list[float]
    input_logprobs: list[float | None]


def prompt(seed: int, length: int, vocab: int = 1024) -> list[int]:
    """``length`` ordinary token ids, the same for the same ``seed``.

    A longer prompt of a seed starts with the shorter one.
    """
    source = random.Random(seed)
    return [source.randrange(6, vocab) for _ in range(length)]


class InProcessEngine:
    """One rank of SGLang without its processes.

    Args:
        model_path: model directory, normally :func:`~.model.write_tiny_model`'s.
        hicache: the HiCache options :data:`HICACHE`, unless given otherwise.
        rank: of ``tp_size``. Each rank is an engine in a process of its own, and all take the same
            calls in the same order.
        nccl_port: where the ranks meet.
        flags: as for ``python -m sglang.launch_server``, in place of the defaults of this module.
        server_args: fields of SGLang's ``ServerArgs`` over :data:`DEFAULTS`, or over ``flags``.

    Raises:
        RuntimeError: the reference engine is switched off, or another engine is alive.
        SystemExit: the plugin refused to start (see its messages on stderr).
    """

    _alive: InProcessEngine | None = None

    def __init__(
        self,
        model_path: str | Path,
        *,
        flags: Sequence[str] | None = None,
        hicache: bool = False,
        rank: int = 0,
        nccl_port: int | None = None,
        **server_args: Any,
    ):
        if InProcessEngine._alive is not None:
            raise RuntimeError("another InProcessEngine is alive: close it first")
        self._taps: list[Callable[[Any, Any], None]] = []
        self._outputs: dict[str, dict[str, Any]] = {}
        self._submitted = 0
        _load_plugins()

        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        defaults = (
            DEFAULTS if flags is None else _fields_of(["--model-path", str(model_path), *flags])
        )
        options = {**defaults, **(HICACHE if hicache else {}), **server_args}
        self.server_args = ServerArgs(**options | {"model_path": str(model_path)})
        self.server_args.resolve_once()
        self.server_args.check_server_args()
        ranks = SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank)
        publish(self.server_args, role="scheduler", ranks=ranks)
        self._ports = PortArgs.init_new(self.server_args)
        if nccl_port is not None:
            # Not as an argument: SGLang waits for a port of its user's to be free, and rank 0 has it.
            self._ports.nccl_port = nccl_port
        self._sockets: list[Any] = []
        try:
            with _endable_scheduler(self._sockets):
                self.scheduler = Scheduler(self.server_args, self._ports)
        except BaseException:
            self._release_process_state()
            raise
        InProcessEngine._alive = self
        channels = self.scheduler.ipc_channels
        channels.send_to_detokenizer.send_output = self._receive
        channels.send_to_tokenizer.send_output = self._receive_abort
        self._start_loop()
        self._install_tap()

    # What a test looks at.

    @property
    def model_runner(self):
        return self.scheduler.tp_worker.model_runner

    @property
    def pool(self):
        return self.model_runner.token_to_kv_pool

    @property
    def draft_runner(self):
        """The draft model's runner; None without speculation."""
        worker = self.scheduler.draft_worker
        return worker.draft_worker.draft_runner if worker is not None else None

    @property
    def req_to_token_pool(self):
        return self.scheduler.req_to_token_pool

    @property
    def tree(self):
        return self.scheduler.tree_cache

    @contextmanager
    def tap(self, callback: Callable[[Any, Any], None]) -> Iterator[None]:
        """Call ``callback(forward_batch, next_token_logits)`` after each target forward.

        The logits ``[requests, vocab]`` are a copy; the buffers are as the forward left them.
        """
        self._taps.append(callback)
        try:
            yield
        finally:
            self._taps.remove(callback)

    # Driving it.

    def submit(
        self,
        ids: Sequence[int],
        max_new_tokens: int = 8,
        *,
        rid: str | None = None,
        sampling: dict[str, Any] | None = None,
        **request: Any,
    ) -> str:
        """Queue a request, greedy and of fixed length unless ``sampling`` says otherwise.

        ``request`` sets fields of ``TokenizedGenerateReqInput``: ``return_logprob``,
        ``logprob_start_len``, ``extra_key``, ``cache_salt``, ``priority``, and so on.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._submitted += 1
        rid = rid or f"request-{self._submitted}"
        parameters = {"temperature": 0, "ignore_eos": True, **(sampling or {})}
        sampling_params = SamplingParams(max_new_tokens=max_new_tokens, **parameters)
        sampling_params.normalize(None)
        sampling_params.verify(self.scheduler.model_config.vocab_size)
        fields = {
            "return_logprob": False,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "token_ids_logprob": None,
            "stream": False,
            **request,
        }
        item = TokenizedGenerateReqInput(
            rid=rid,
            input_text=None,
            input_ids=array.array("q", ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling_params,
            **fields,
        )
        self._outputs[rid] = {"output_ids": [], "output_logprobs": [], "input_logprobs": []}
        self.scheduler.process_input_requests([item])
        return rid

    def step(self):
        """One iteration of the scheduler's loop; the batch it launched, None if there was none."""
        import torch

        scheduler = self.scheduler
        with torch.no_grad(), scheduler.device_module.StreamContext(scheduler.schedule_stream):
            scheduler.ingest_requests()
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch = plan.running_batch
            batch = plan.batch_to_run
            if scheduler.enable_overlap:
                self._launch_overlapped(batch)
            elif batch:
                scheduler.process_batch_result(batch, scheduler.run_batch(batch))
            else:
                scheduler.on_idle()
            scheduler.last_batch = batch
        return batch

    def _launch_overlapped(self, batch) -> None:
        """Launch ``batch``, then process the results of the one before."""
        scheduler = self.scheduler
        previous = scheduler.last_batch
        at_once = scheduler.is_disable_overlap_for_batch(batch, last_batch=previous)
        if at_once:
            self._process_oldest_result()
        result = None
        if batch:
            result = scheduler.run_batch(batch)
            scheduler._apply_war_barrier()
            scheduler.result_queue.append((batch.copy(), result))
        if previous and not at_once:
            self._process_oldest_result()
        elif not previous and batch is None:
            scheduler.on_idle()
        scheduler.launch_batch_sample_if_needed(result, batch)

    def _process_oldest_result(self) -> None:
        self.scheduler.process_batch_result(*self.scheduler.result_queue.popleft())

    def is_done(self, rid: str) -> bool:
        return "finish_reason" in self._outputs[rid]

    def output(self, rid: str) -> Output:
        """The finished request ``rid``; it is forgotten."""
        return Output(rid=rid, **self._outputs.pop(rid))

    def run_many(self, *rids: str, timeout_s: float = 600.0) -> list[Output]:
        """Step until every request in ``rids`` is done.

        Raises:
            TimeoutError: not within ``timeout_s``.
        """
        self.step_until(lambda: all(map(self.is_done, rids)), timeout_s, f"requests {rids}")
        return [self.output(rid) for rid in rids]

    def run(self, ids: Sequence[int], max_new_tokens: int = 8, **request: Any) -> Output:
        """Submit one request (arguments of :meth:`submit`) and step until it is done."""
        (output,) = self.run_many(self.submit(ids, max_new_tokens, **request))
        self.step()
        return output

    def abort(self, rid: str) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.process_input_requests([AbortReq(rid=rid)])

    def drain(self, timeout_s: float = 600.0) -> None:
        """Step until nothing is queued, running or under way between the cache tiers."""

        def idle() -> bool:
            tree = self.tree
            pending = (
                tree.ongoing_write_through,
                tree.ongoing_load_back,
                tree.ongoing_backup,
                tree.ongoing_prefetch,
            )
            return self.scheduler.is_fully_idle() and not any(pending)

        self.step()
        self.step_until(idle, timeout_s, "the engine to become idle")

    def flush(self, attempts: int = 10) -> None:
        """Empty every cache tier but storage.

        Raises:
            RuntimeError: SGLang refused every time, so what runs next would not be a cold run.
        """
        for _ in range(attempts):
            self.drain()
            if self.scheduler.flush_cache():
                return
        raise RuntimeError(f"flush_cache refused {attempts} times: requests are still pending")

    def step_until(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Step until ``done()``, which is asked before every step, is true on every rank.

        Raises:
            TimeoutError: not within ``timeout_s``; ``what`` was waited for.
        """
        deadline = time.monotonic() + timeout_s
        while not self._all_ranks(done()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s} s for {what}")
            if self.step() is None:
                # Storage threads need the interpreter lock.
                time.sleep(0.001)

    def _all_ranks(self, done: bool) -> bool:
        """Whether every rank is done: a rank that stops early would leave the others' collectives alone."""
        from sglang.srt.runtime_context import get_parallel

        if get_parallel().tp_size == 1:
            return done
        import torch

        flag = torch.tensor(int(done))
        group = get_parallel().tp_group.cpu_group
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group)
        return bool(flag)

    # Wiring.

    def _start_loop(self) -> None:
        """What SGLang's event loops set before their first iteration."""
        scheduler = self.scheduler
        scheduler._war_barrier_enabled = scheduler.device == "cuda"
        if scheduler.enable_overlap:
            scheduler.enable_skip_finishing_decode = True
            scheduler.result_queue = deque()

    def _install_tap(self) -> None:
        forward = self.model_runner.forward

        def tapped(forward_batch, *args, **kwargs):
            result = forward(forward_batch, *args, **kwargs)
            if self._taps:
                logits = result.logits_output.next_token_logits.clone()
                for callback in list(self._taps):
                    callback(forward_batch, logits)
            return result

        self.model_runner.forward = tapped

    def _receive(self, payload, *_: Any) -> None:
        from sglang.srt.managers.io_struct import BatchTokenIDOutput

        if not isinstance(payload, BatchTokenIDOutput):
            return
        details = payload.cached_tokens_details
        for i, rid in enumerate(payload.rids):
            state = self._outputs.get(rid)
            if state is None:
                continue
            state["output_ids"] += payload.output_ids[i]
            state["cached_tokens"] = payload.cached_tokens[i]
            state["details"] = details[i] if details else None
            for name in ("output", "input"):
                values = getattr(payload, f"{name}_token_logprobs_val")
                if values:
                    state[f"{name}_logprobs"] += values[i] or []
            if payload.finished_reasons[i] is not None:
                state["finish_reason"] = payload.finished_reasons[i]

    def _receive_abort(self, payload, *_: Any) -> None:
        """A request aborted in the queue is answered to the tokenizer, without a result."""
        from sglang.srt.managers.io_struct import AbortReq

        state = self._outputs.get(payload.rid) if isinstance(payload, AbortReq) else None
        if state is not None:
            reason = payload.finished_reason or {"type": "abort"}
            state.update(cached_tokens=0, details=None, finish_reason=reason)

    def close(self) -> None:
        """Tear the engine down so that another can be built in this process."""
        if InProcessEngine._alive is not self:
            return
        self.tree.shutdown()
        # SGLang means it for the end of the process, and the cache would stay with its pools till then.
        atexit.unregister(self.tree.shutdown)
        self._release_host_memory()
        self._release_process_state()
        InProcessEngine._alive = None
        del self.scheduler
        gc.collect()

    def _release_host_memory(self) -> None:
        """Unpin the host pools: the next engine may get the same pages, which CUDA pins only once."""
        self.scheduler.device_module.synchronize()
        group = getattr(self.tree, "host_pool_group", None)
        pools = [entry.host_pool for entry in (group.entries if group else ())]
        coordinator = self.scheduler.hisparse_coordinator
        if coordinator is not None:
            pools += coordinator.host_pools
        pinned = [
            buffer
            for pool in pools
            if getattr(pool, "pin_memory", False)
            for buffer in _tensors(getattr(pool, "kv_buffer", None))
        ]
        self.tree.release_host_resources()
        if coordinator is not None:
            coordinator.destroy()
        from sglang.srt.mem_cache.pool_host.common import _cuda_host_unregister

        for buffer in pinned:
            # SGLang does it where it sees CUDA or ROCm.
            _cuda_host_unregister(buffer)

    def _release_process_state(self) -> None:
        """Process groups, parallel state, sockets and metrics, which outlive the scheduler object."""
        from sglang.srt.distributed import parallel_state
        from sglang.srt.runtime_context import get_resources

        if self.server_args.enable_metrics:
            _forget_metrics()
        for context in self._sockets:
            # Left to the garbage collector, it would wait for messages that nobody reads.
            context.destroy(linger=0)
        get_resources().expert_location_metadata = None
        # Its memory went with the graphs that were in it.
        get_resources().graph_memory_pool = None
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        for value in vars(self._ports).values():
            if isinstance(value, str) and value.startswith("ipc://"):
                Path(value.removeprefix("ipc://")).unlink(missing_ok=True)

    def __enter__(self) -> InProcessEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _fields_of(flags: Sequence[str]) -> dict[str, Any]:
    """Every field of ``ServerArgs`` as SGLang's own parser reads ``flags``."""
    from sglang.srt.arg_groups.arg_utils import field_names
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang.launch_server")
    ServerArgs.add_cli_args(parser)
    given = vars(parser.parse_args(list(flags)))
    return {name: given[name] for name in field_names(ServerArgs) if name in given}


def _forget_metrics() -> None:
    """Unregister SGLang's metrics: the next engine has others of the same names."""
    from prometheus_client import REGISTRY

    for collector, names in list(REGISTRY._collector_to_names.items()):
        if any(name.startswith("sglang:") for name in names):
            REGISTRY.unregister(collector)


def _tensors(buffers: Any) -> list[Any]:
    """A host pool's buffers: it has one, a list of them, or none."""
    found = buffers if isinstance(buffers, (list, tuple)) else [buffers]
    return [buffer for buffer in found if buffer is not None]


@contextmanager
def _endable_scheduler(sockets: list[Any]) -> Iterator[None]:
    """What SGLang leaves to the end of the process, where schedulers follow one another in one.

    The watchdog's thread would keep each of them, with its pools, alive for good. ``sockets``
    receives the ZeroMQ contexts that are made.
    """
    import zmq
    from sglang.srt.managers import scheduler

    def context(*args: Any, **kwargs: Any) -> Any:
        sockets.append(made(*args, **kwargs))
        return sockets[-1]

    made = zmq.Context
    with (
        mock.patch.object(zmq, "Context", context),
        mock.patch.object(scheduler, "create_scheduler_watchdog", lambda *_, **__: None),
    ):
        yield


def _load_plugins() -> None:
    """Load SGLang's plugins with the reference engine selected, and make sure that it is there."""
    os.environ.setdefault(ENV, "1")
    if os.environ[ENV] != "1":
        raise RuntimeError(f"{ENV}={os.environ[ENV]!r}: InProcessEngine needs 1; unset it")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_unified_kv.reference.edits import SERIES

    reasons = SERIES.audit()
    if reasons:
        raise RuntimeError(
            f"the reference engine is not active; set {ENV}=1 before SGLang loads its plugins and "
            "see SGLANG_PLUGINS:\n" + "\n".join(reasons)
        )
