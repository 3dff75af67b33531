"""Data-parallel ranks that speculate under unequal load: what each computed, and who met whom."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple
from unittest import mock

from oracle import poison_rings
from rank_pair import engine_of
from sglang_unified_kv.reference.harness import prompt
from speculation_runs import EAGLE
from storage_folder import STORAGE, at

TOGETHER = {"SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION": "1"}
"""Has SGLang let one rank prefill while another decodes; off, the others wait for a prefill."""


class Arrival(NamedTuple):
    """``prompt(seed, length)``, which comes before a rank's ``step``-th step."""

    step: int
    seed: int
    length: int
    new_tokens: int = 12

    @property
    def asked(self) -> tuple[int, int, int]:
        """The same request whenever it comes."""
        return self[1:]


class Answer(NamedTuple):
    """What a request got; log-probabilities are those of its output tokens."""

    output_ids: list[int]
    logprobs: list[float]
    cached_tokens: int
    details: dict[str, int] | None

    @property
    def computed(self) -> tuple[list[int], list[float]]:
        return self[:2]


def options_of(ranks: int, overlap: bool, drafts: bool = True) -> dict:
    """Of ``ranks`` ranks with requests of their own, with ``drafts`` under EAGLE 3-1-4."""
    return dict(
        tp_size=ranks,
        dp_size=ranks,
        enable_dp_attention=True,
        # SGLang divides both by the ranks.
        chunked_prefill_size=256 * ranks,
        max_running_requests=4 * ranks,
        disable_overlap_schedule=not overlap,
        **STORAGE,
        **(EAGLE if drafts else {}),
    )


def traffic(engine, arrivals: list[Arrival]) -> tuple[list[tuple[Arrival, Answer]], list[str]]:
    """Serve this rank's ``arrivals``: their answers, and what the rank did in every step.

    A step is called ``decode 2`` after its mode and how many requests were in it.
    """
    due, rids, did, steps = deque(sorted(arrivals)), {}, [], 0
    scheduler, manager = engine.scheduler, engine.tree.checkpoints
    launch, plan = scheduler.run_batch, manager.plan

    def noted(batch, *args, **kwargs):
        did.append(f"{batch.forward_mode.name.lower()} {len(batch.reqs)}")
        return launch(batch, *args, **kwargs)

    def planned(rows):
        assert rows and all(row.slot != 0 for row in rows), "row 0 is where padding is written"
        return plan(rows)

    def done() -> bool:
        nonlocal steps
        did.extend(["nothing"] * (steps - len(did)))
        while due and due[0].step <= steps:
            request = due.popleft()
            ids = prompt(request.seed, request.length)
            rids[request] = engine.submit(ids, request.new_tokens, return_logprob=True)
        steps += 1
        return not due and all(map(engine.is_done, rids.values()))

    with (
        mock.patch.object(scheduler, "run_batch", noted),
        mock.patch.object(manager, "plan", planned),
    ):
        engine.step_until(done, 900.0, "the traffic of every rank")
    engine.drain()
    answers = []
    for request, rid in rids.items():
        out = engine.output(rid)
        answer = Answer(out.output_ids, out.output_logprobs, out.cached_tokens, out.details)
        answers.append((request, answer))
    return answers, did


def serve(rank, port, model, folder, rounds, options, env):
    """Serve ``rounds`` of ``(arrivals of every rank, forget)``, each on rings full of poison.

    With ``forget`` nothing is left before it but storage.
    """
    found = []
    with engine_of(
        rank, port, model, env=at(folder) | {"SGLANG_SWA_DBG_CHECKSUM": "1"} | env, **options
    ) as engine:
        for arrivals, forget in rounds:
            if forget:
                engine.flush()
            poison_rings(engine)
            found.append(traffic(engine, arrivals[rank]))
        engine.tree.checkpoints.check_idle()
    return found
