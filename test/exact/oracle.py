"""Cold runs of the stock engine, tapped from its own buffers: the oracle of every hit.

The reference engine is chunk-invariant, so one cold run holds for every chunk size and batch, and a run
in chunks of one page passes through the state at every boundary.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

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
    return rings


def rows_before(engine, slot: int, boundary: int) -> dict[str, torch.Tensor]:
    """What a resume at ``boundary`` reads, out of the live rings of ``slot``."""
    return {
        name: buffer[slot * size + torch.arange(boundary - rows, boundary) % size].clone()
        for name, buffer, size, rows in ring_buffers(engine)
    }


def poison_rings(engine) -> None:
    """Overwrite every slot's rows: a hit must not read what the previous owner left."""
    for _, buffer, size, _ in ring_buffers(engine):
        # Behind the rings lie the compressed rows, which a hit does reuse.
        buffer[: engine.pool.num_req_slots * size] = POISON


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names of the rings whose bytes differ."""
    assert left.keys() == right.keys()
    return [n for n in left if not torch.equal(left[n].view(torch.uint8), right[n].view(torch.uint8))]


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
    """

    output_ids: list[int] = field(default_factory=list)
    cached_tokens: int = -1
    details: dict | None = None
    logits: list[torch.Tensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    resumed: dict | None = None
    ended: dict | None = None


@contextmanager
def before_layers(engine, callback):
    """Call ``callback(forward_batch)`` inside each target forward, after restores and before any layer."""
    runner = engine.model_runner
    inner = runner._forward_raw

    def tapped(forward_batch, *args, **kwargs):
        callback(forward_batch)
        return inner(forward_batch, *args, **kwargs)

    runner._forward_raw = tapped
    try:
        yield
    finally:
        del runner._forward_raw


def rows_of(forward_batch):
    """(row, slot, start, end, decode) of every request of a forward."""
    slots = forward_batch.req_pool_indices.tolist()
    ends = forward_batch.seq_lens.tolist()
    decode = not forward_batch.forward_mode.is_extend()
    starts = [e - 1 for e in ends] if decode else forward_batch.extend_prefix_lens.tolist()
    return [(i, s, a, b, decode) for i, (s, a, b) in enumerate(zip(slots, starts, ends, strict=True))]


class Recorder:
    """Runs requests, alone or together, and records each as a :class:`Run`."""

    def __init__(self, engine: InProcessEngine):
        self.engine = engine
        self.at_boundary: dict[int, dict] = {}

    def run(self, ids: list[int], new_tokens: int = 3, **request) -> Run:
        return self.run_many([ids], new_tokens, **request)[0]

    def run_many(self, prompts: list[list[int]], new_tokens: int = 3, **request) -> list[Run]:
        engine = self.engine
        rids = [engine.submit(ids, new_tokens, **request) for ids in prompts]
        runs = {rid: Run() for rid in rids}
        lengths = dict(zip(rids, map(len, prompts), strict=True))

        def request_in(slot):
            return next(
                (
                    r.rid
                    for r in engine.scheduler.running_batch.reqs + self._launched
                    if r.kv is not None and r.kv.holds_kv and r.kv.req_pool_idx == slot
                ),
                None,
            )

        def before(batch):
            for _, slot, start, _, decode in rows_of(batch):
                run = runs.get(request_in(slot))
                if run is not None and not decode and not run.starts and start:
                    run.resumed = rows_before(engine, slot, start)

        def after(batch, logits):
            for row, slot, start, end, _ in rows_of(batch):
                rid = request_in(slot)
                if rid not in runs:
                    continue
                if start < lengths[rid]:
                    runs[rid].starts.append(start)
                if end % PAGE == 0 and len(rids) == 1:
                    self.at_boundary[end] = rows_before(engine, slot, end)
                if end >= lengths[rid]:
                    runs[rid].logits.append(logits[row].clone())
                if end == lengths[rid] and end >= WINDOW:
                    runs[rid].ended = rows_before(engine, slot, end)

        inner = engine.scheduler.run_batch

        def launch(batch, *args, **kwargs):
            self._launched = list(batch.reqs)
            return inner(batch, *args, **kwargs)

        engine.scheduler.run_batch = launch
        try:
            with engine.tap(after), before_layers(engine, before):
                outputs = engine.run_many(*rids)
        finally:
            del engine.scheduler.run_batch
        for rid, output in zip(rids, outputs, strict=True):
            run = runs[rid]
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
        return self._recorder.at_boundary[boundary]


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
