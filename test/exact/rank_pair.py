"""Ranks of one server, two unless asked for more: real engines in processes of their own, called in step."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

import torch
from sglang_unified_kv.reference import harness  # noqa: F401  (before SGLang, for a GPU)

RANKS = 2
ANSWER_S = 400.0
"""A rank that waits this long waits for a collective that another never joins."""
FAILURE_S = 10.0
"""How long the others may take to say that they failed too, which may be why the first did."""

PRELOAD = [
    # The harness comes before SGLang, for a GPU.
    "sglang_unified_kv.reference.harness",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.deepseek_v4",
    "sglang.srt.layers.attention.deepseek_v4_backend_hip_radix",
]

OPTIONS = dict(
    hicache=True,
    tp_size=RANKS,
    max_total_tokens=12288,
    chunked_prefill_size=512,
)


class Ranks:
    """``ranks(function, *arguments)`` calls ``function(rank, port, *arguments)`` on all, returns all results.

    Raises:
        AssertionError: a rank raised, or did not answer.
    """

    def __init__(self, pipes, processes):
        self._pipes, self._processes = pipes, processes

    def __call__(self, function: Callable, *arguments: Any) -> list[Any]:
        self.start(function, *arguments)
        answers: dict[int, Any] = {}
        failed: list[str] = []
        while len(answers) < len(self._pipes):
            # Whichever comes first: a rank that failed leaves the others in a collective.
            waiting = [p for rank, p in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, FAILURE_S if failed else ANSWER_S)
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)
                # A GPU's tensors: the ranks are compared with each other here.
                answer = io.BytesIO(pipe.recv_bytes())
                ok, answers[rank] = torch.load(answer, map_location="cpu", weights_only=False)
                if not ok:
                    failed.append(f"rank {rank}: {function.__name__}:\n{answers[rank]}")
        if len(answers) < len(self._pipes) or failed:
            self.kill()
            # The last one to answer lost its connection, as a rule; the first may have as well.
            raise AssertionError("\n".join(failed) or f"only ranks {list(answers)} answered")
        return [answers[rank] for rank in range(len(self._pipes))]

    def start(self, function: Callable, *arguments: Any) -> None:
        """Call it without waiting for an answer: the ranks are about to be killed."""
        port = _free_port()
        for pipe in self._pipes:
            pipe.send((function, port, arguments))

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def rank_pair(count: int = RANKS) -> Iterator[Ranks]:
    """The processes, started and idle."""
    context = multiprocessing.get_context("forkserver")
    # The ranks share what is imported, in time and in memory.
    context.set_forkserver_preload(PRELOAD)
    pipes, processes = [], []
    for rank in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    ranks = Ranks(pipes, processes)
    try:
        yield ranks
    finally:
        ranks.kill()


@contextlib.contextmanager
def engine_of(rank: int, port: int, model: str, *, env: dict[str, str] | None = None, **options):
    """This rank's engine; all ranks must enter and leave together."""
    from sglang_unified_kv.reference.harness import InProcessEngine

    kept = dict(os.environ)
    os.environ.update(env or {})
    try:
        defaults = {} if "flags" in options else OPTIONS
        with InProcessEngine(model, rank=rank, nccl_port=port, **defaults | options) as engine:
            yield engine
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _serve(rank: int, pipe) -> None:
    os.environ["SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"] = "1"
    from sglang.srt.plugins import load_plugins

    load_plugins()
    while True:
        try:
            function, port, arguments = pipe.recv()
        except EOFError:
            return
        answer = io.BytesIO()
        try:
            torch.save((True, function(rank, port, *arguments)), answer)
        except BaseException:
            answer = io.BytesIO()
            torch.save((False, traceback.format_exc()), answer)
        pipe.send_bytes(answer.getvalue())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
