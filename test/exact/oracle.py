"""Cold runs of the stock engine, tapped from its own buffers: the oracle of every hit.

The reference engine is chunk-invariant, so one cold run holds for every chunk size and batch, and a run
in chunks of one page passes through the state at every boundary.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from sglang.srt.managers import scheduler
from sglang_unified_kv.reference.harness import InProcessEngine, prompt

PAGE, WINDOW = 256, 128
POISON = 3.0


def ring_buffers(engine: InProcessEngine) -> list[tuple[str, torch.Tensor, int, int]]:
    """(name, buffer, rows per slot, rows a checkpoint needs) of every ring, from the engine's own pool."""
    pool = engine.pool
    rings = [
        (f"window {i}", buffer, pool.unified_swa_ring_size, WINDOW)
        for i, buffer in enumerate(pool.unified_kv_pool.kv_buffer)
    ]
    for name, states in (
        ("attention state", pool.compress_state_pools),
        ("indexer state", pool.indexer_compress_state_pools),
    ):
        rings += [
            (f"{name} {i}", s.kv_score_buffer.kv_score, s.ring_size, 4)
            for i, s in enumerate(states)
            if s is not None and s.ratio == 4
        ]
    if engine.draft_runner is not None:
        draft = engine.draft_runner.token_to_kv_pool
        rings += [
            (f"draft window {i}", buffer, draft.unified_swa_ring_size, WINDOW)
            for i, buffer in enumerate(draft.unified_kv_pool.kv_buffer)
        ]
    return rings


def rows_before(engine, slot: int, boundary: int) -> dict[str, torch.Tensor]:
    """What a resume at ``boundary`` reads, out of the live rings of ``slot``."""
    return {
        name: buffer[slot * size + torch.arange(boundary - rows, boundary) % size].clone()
        for name, buffer, size, rows in ring_buffers(engine)
    }


def whole_slot(engine, slot: int) -> dict[str, torch.Tensor]:
    """Every row of ``slot`` in every ring, those that no resume reads included."""
    return {
        name: buffer[slot * size : (slot + 1) * size].clone()
        for name, buffer, size, _ in ring_buffers(engine)
    }


def bytes_of(rows: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """The same rows to send between processes."""
    return {name: tensor.view(torch.uint8).cpu().numpy().tobytes() for name, tensor in rows.items()}


def poison_rings(engine, value: float = POISON) -> None:
    """Overwrite every slot's rows: a hit must not read what the previous owner left."""
    engine.scheduler.device_module.synchronize()
    for _, buffer, size, _ in ring_buffers(engine):
        # Behind the rings lie the compressed rows, which a hit does reuse.
        buffer[: engine.pool.num_req_slots * size] = value
    # No stream of the engine waits for this one.
    engine.scheduler.device_module.synchronize()


def retract_often(engine, monkeypatch) -> list[bool]:
    """Have SGLang retract every other step; the list gets False for each row given back unfinished."""
    released, on_release = [], engine.tree.on_release

    def spy(req, *, checkpointed):
        released.append(checkpointed)
        on_release(req, checkpointed=checkpointed)

    monkeypatch.setattr(engine.tree, "on_release", spy)
    monkeypatch.setattr(scheduler, "TEST_RETRACT", True)
    monkeypatch.setattr(scheduler, "TEST_RETRACT_INTERVAL", 2)
    return released


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names of the rings whose bytes differ."""
    assert left.keys() == right.keys()
    return [
        n for n in left if not torch.equal(left[n].view(torch.uint8), right[n].view(torch.uint8))
    ]


@dataclass
class Run:
    """One request as the engine computed it.

    Attributes:
        output_ids: the generated tokens.
        cached_tokens: reused prompt tokens.
        details: the same by tier.
        logits: fp32 ``[vocab]`` per generated token.
        starts: first position computed by each extend of the request.
        resumed: rings just before the first layer of the first extend, at its first position.
        ended: rings after the last extend, at the end of the prompt.
        slot: the whole slot then.
        at_boundary: rings after each forward that ended at a page boundary.
    """

    output_ids: list[int] = field(default_factory=list)
    cached_tokens: int = -1
    details: dict | None = None
    logits: list[torch.Tensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    resumed: dict | None = None
    ended: dict | None = None
    slot: dict | None = None
    at_boundary: dict[int, dict] = field(default_factory=dict)

    def first(self, tokens: int) -> Run:
        """The same run, had it generated no more than ``tokens``."""
        return replace(self, output_ids=self.output_ids[:tokens], logits=self.logits[:tokens])


class Row(NamedTuple):
    """One request in one target forward: ``[start, end)`` is computed in request slot ``slot``."""

    rid: str
    slot: int
    start: int
    end: int
    decode: bool


@contextmanager
def watch(engine: InProcessEngine, before=None, after=None):
    """Call ``before(row)`` and ``after(row, logits)`` for every row of every target forward.

    ``before`` runs inside the forward, behind restores and before any layer; ``logits`` is ``[vocab]``.
    """
    scheduler, runner = engine.scheduler, engine.model_runner
    launch, forward = scheduler.run_batch, runner._forward_raw
    rids: list[str] = []

    def launched(batch, *args, **kwargs):
        rids[:] = [req.rid for req in batch.reqs]
        return launch(batch, *args, **kwargs)

    def rows(batch):
        ends, decode = batch.seq_lens.tolist(), not batch.forward_mode.is_extend()
        starts = [e - 1 for e in ends] if decode else batch.extend_prefix_lens.tolist()
        slots = batch.req_pool_indices.tolist()
        return [Row(*row, decode) for row in zip(rids, slots, starts, ends, strict=True)]

    def inner(batch, *args, **kwargs):
        for row in rows(batch) if before else ():
            before(row)
        return forward(batch, *args, **kwargs)

    def behind(batch, logits):
        for index, row in enumerate(rows(batch) if after else ()):
            after(row, logits[index])

    scheduler.run_batch, runner._forward_raw = launched, inner
    try:
        with engine.tap(behind):
            yield
    finally:
        del scheduler.run_batch, runner._forward_raw


class Recorder:
    """Runs requests, alone or together, and records each as a :class:`Run`."""

    def __init__(self, engine: InProcessEngine):
        self.engine = engine

    def run(self, ids: list[int], new_tokens: int = 3, **request) -> Run:
        return self.run_many([ids], new_tokens, **request)[0]

    def run_many(self, prompts: list[list[int]], new_tokens: int = 3, **request) -> list[Run]:
        rids = [self.engine.submit(ids, new_tokens, **request) for ids in prompts]
        return self.finish(dict(zip(rids, map(len, prompts), strict=True)))

    def finish(self, lengths: dict[str, int]) -> list[Run]:
        """Run submitted requests, by id with the length of their prompts, to their end."""
        engine, rids = self.engine, list(lengths)
        runs = {rid: Run() for rid in rids}

        def before(row):
            if row.start < lengths[row.rid] and not runs[row.rid].starts and row.start:
                runs[row.rid].resumed = rows_before(engine, row.slot, row.start)

        def after(row, logits):
            run, length = runs[row.rid], lengths[row.rid]
            if row.start < length:
                run.starts.append(row.start)
            if row.end % PAGE == 0:
                run.at_boundary[row.end] = rows_before(engine, row.slot, row.end)
            if row.end >= length:
                run.logits.append(logits.clone())
            if row.end == length >= WINDOW:
                run.ended = rows_before(engine, row.slot, row.end)
                run.slot = whole_slot(engine, row.slot)

        with watch(engine, before, after):
            outputs = engine.run_many(*rids)
        for run, output in zip(runs.values(), outputs, strict=True):
            run.output_ids, run.cached_tokens = output.output_ids, output.cached_tokens
            run.details = output.details
        engine.drain()
        return list(runs.values())

    def cold(self, ids: list[int], new_tokens: int = 3) -> Run:
        """Run on emptied caches; fails unless it really was cold."""
        self.engine.flush()
        run = self.run(ids, new_tokens)
        assert run.cached_tokens == 0, "the cold run hit a cache"
        return run


class Oracle:
    """Cold runs of prefixes of one 2,700-token text, and the rings at each of its page boundaries."""

    def __init__(self, engine: InProcessEngine, seed: int = 0, length: int = 2700):
        self._recorder = Recorder(engine)
        self.text = prompt(seed, length)
        self._runs: dict[int, Run] = {}

    def prepare(self, *lengths: int) -> None:
        """Make the cold runs of these prefixes; the engine must still be alive."""
        for length in lengths:
            self._runs[length] = self._recorder.cold(self.text[:length])

    def run(self, length: int) -> Run:
        return self._runs[length]

    def at(self, boundary: int) -> dict[str, torch.Tensor]:
        return next(
            r.at_boundary[boundary] for r in self._runs.values() if boundary in r.at_boundary
        )


def assert_equal_runs(hit: Run, cold: Run) -> None:
    """Tokens, logits and rings of a hit equal the cold run's, to the bit."""
    assert hit.output_ids == cold.output_ids
    assert len(hit.logits) == len(cold.logits)
    for step, (ours, theirs) in enumerate(zip(hit.logits, cold.logits, strict=True)):
        assert torch.equal(ours, theirs), (
            f"logits of output token {step} differ by {(ours - theirs).abs().max():.3g}"
        )
    assert differing(hit.ended, cold.ended) == []


def largest_difference(hit: Run, cold: Run) -> float:
    """Largest absolute difference of the first output token's logits."""
    return (hit.logits[0] - cold.logits[0]).abs().max().item()
