"""Requests under EAGLE 3-1-4: what target and draft computed, and what the rings of both held."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from unittest import mock

import torch
from oracle import PAGE, WINDOW, differing, rows_before
from sglang.srt.speculative import eagle_worker_v2
from sglang_unified_kv.reference.harness import InProcessEngine

NEW_TOKENS = 16
DRAFT_TOKENS = 4
EAGLE = dict(
    speculative_algorithm="EAGLE",
    speculative_num_steps=3,
    speculative_eagle_topk=1,
    speculative_num_draft_tokens=DRAFT_TOKENS,
)


@dataclass
class SpecRun:
    """One request, alone in the engine.

    Attributes:
        output_ids: the generated tokens.
        logprobs: of the prompt's continuation, one per generated token.
        cached_tokens: reused prompt tokens.
        details: the same by tier.
        accepted: tokens committed by each verify step.
        draft_logits: of every draft forward from the one behind the last chunk of the prompt on.
        resumed: rings before the first layer of the first extend, at its first position.
        ended: rings behind the last chunk and the draft's, at the end of the prompt.
        at_boundary: rings behind each step that committed a page boundary, there.
        turn: the prompt continues what another run generated.
    """

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = -1
    details: dict | None = None
    accepted: list[int] = field(default_factory=list)
    draft_logits: list[torch.Tensor] = field(default_factory=list)
    resumed: dict | None = None
    ended: dict | None = None
    at_boundary: dict[int, dict] = field(default_factory=dict)
    turn: bool = False

    @property
    def accept_length(self) -> float:
        """Tokens per verify step."""
        return sum(self.accepted) / len(self.accepted)


def run(engine: InProcessEngine, ids: list[int], new_tokens: int = NEW_TOKENS) -> SpecRun:
    """Run one request to its end, watched."""
    found = SpecRun()
    scheduler, target, draft = engine.scheduler, engine.model_runner, engine.draft_runner
    launch, raw, drafted = scheduler.run_batch, target._forward_raw, draft.forward
    verify = eagle_worker_v2.run_eagle_verify

    def before_target(batch, *args, **kwargs):
        if batch.forward_mode.is_extend_without_speculative() and found.resumed is None:
            start = int(batch.extend_prefix_lens[0])
            found.resumed = (
                rows_before(engine, int(batch.req_pool_indices[0]), start) if start else {}
            )
        return raw(batch, *args, **kwargs)

    def behind_draft(batch, *args, **kwargs):
        result = drafted(batch, *args, **kwargs)
        if batch.forward_mode.is_idle():
            return result
        if batch.forward_mode.is_extend_without_speculative():
            found.draft_logits.clear()
        found.draft_logits.append(result.logits_output.next_token_logits.clone())
        return result

    def behind_verify(batch, *args, **kwargs):
        result = verify(batch, *args, **kwargs)
        found.accepted += result.accept_lens.tolist()
        return result

    def behind_step(batch, *args, **kwargs):
        if not batch.reqs:
            # Other data-parallel ranks have work.
            return launch(batch, *args, **kwargs)
        slot, extend = batch.reqs[0].kv.req_pool_idx, batch.forward_mode.is_extend()
        span = (
            (batch.prefix_lens[0], batch.prefix_lens[0] + batch.extend_lens[0]) if extend else None
        )
        result = launch(batch, *args, **kwargs)
        if not extend:
            end = int(result.new_seq_lens[0])
            span = end - found.accepted[-1], end
        for boundary in range(span[0] // PAGE * PAGE + PAGE, span[1] + 1, PAGE):
            if not extend or boundary == span[1]:
                found.at_boundary[boundary] = rows_before(engine, slot, boundary)
        if extend and span[1] == len(ids) >= WINDOW:
            found.ended = rows_before(engine, slot, span[1])
        return result

    with contextlib.ExitStack() as patches:
        for owner, name, ours in (
            (scheduler, "run_batch", behind_step),
            (target, "_forward_raw", before_target),
            (draft, "forward", behind_draft),
            (eagle_worker_v2, "run_eagle_verify", behind_verify),
        ):
            patches.enter_context(mock.patch.object(owner, name, ours))
        output = engine.run(ids, new_tokens, return_logprob=True)
    engine.drain()
    found.output_ids, found.logprobs = output.output_ids, output.output_logprobs
    found.cached_tokens, found.details = output.cached_tokens, output.details
    return found


def cold(engine: InProcessEngine, ids: list[int], new_tokens: int = NEW_TOKENS) -> SpecRun:
    """Run on emptied caches; fails unless it really was cold."""
    engine.flush()
    found = run(engine, ids, new_tokens)
    assert found.cached_tokens == 0, "the cold run hit a cache"
    return found


def assert_equal_runs(hit: SpecRun, other: SpecRun) -> None:
    """Tokens, log-probabilities, accepted lengths, draft logits and rings are equal, to the bit.

    One of the runs may have made a step more behind the last token, under the overlap schedule.
    """
    assert hit.output_ids == other.output_ids
    assert hit.logprobs == other.logprobs
    steps = min(len(hit.accepted), len(other.accepted))
    assert abs(len(hit.accepted) - len(other.accepted)) <= 1
    assert hit.accepted[:steps] == other.accepted[:steps]
    # A prefill's, then two drafts and the extend of every step.
    for index in range(1 + 3 * steps):
        ours, theirs = hit.draft_logits[index], other.draft_logits[index]
        assert torch.equal(ours, theirs), f"draft forward {index}"
    assert differing(hit.ended, other.ended) == []
