"""A second implementer of the extension points: what they promise is enough to capture and restore by.

In chunks of one page every boundary is the end of a forward, so the methods called behind a forward see all.
"""

import pytest
import torch
from oracle import (
    Recorder,
    assert_equal_runs,
    largest_difference,
    poison_rings,
    ring_buffers,
)
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang_unified_kv.checkpoint import manager as manager_module

PAGE = 256


class Toy:
    """Keeps rows of one text by boundary, through methods of the two base classes and nothing else."""

    def __init__(self, engine):
        self.rings = ring_buffers(engine)
        self.kept: dict[tuple[str, int], torch.Tensor] = {}
        self.wanted: list[int] = []
        self.calls: list[str] = []

    def capture(self, prefix: str, batch) -> None:
        self.calls.append(prefix)
        for slot, end in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True):
            for name, buffer, size, rows in self.rings:
                if end % PAGE == 0 and name.startswith(prefix):
                    index = slot * size + torch.arange(end - rows, end) % size
                    self.kept.setdefault((name, end), buffer[index].clone())

    def restore(self, batch) -> None:
        """At the start of the target forward, for the one request that asked."""
        for boundary in self.wanted:
            (slot,) = batch.req_pool_indices.tolist()
            for name, buffer, size, rows in self.rings:
                index = slot * size + torch.arange(boundary - rows, boundary) % size
                buffer[index] = self.kept[name, boundary]
        self.wanted.clear()


@pytest.fixture
def toy(make_engine, oracle, monkeypatch):
    """The engine with the toy in place of the product's captures and restores."""
    with make_engine(chunked_prefill_size=PAGE) as engine:
        toy, tree = Toy(engine), engine.tree
        backend = type(engine.model_runner.attn_backend)
        windows = backend.capture_swa_windows_decode
        states = backend.capture_compress_state_windows_decode
        prepare, request = backend.init_forward_metadata, tree.restore_swa_windows

        def capture_windows(self, batch):
            windows(self, batch)
            toy.capture("window", batch)

        def capture_states(self, batch):
            states(self, batch)
            toy.capture("attention state", batch)
            toy.capture("indexer state", batch)

        def restore_then_prepare(self, batch):
            toy.restore(batch)
            return prepare(self, batch)

        def restore_swa_windows(req):
            request(req)
            toy.wanted.append(req.prefix_len)

        monkeypatch.setattr(backend, "capture_swa_windows_decode", capture_windows)
        monkeypatch.setattr(backend, "capture_compress_state_windows_decode", capture_states)
        monkeypatch.setattr(backend, "init_forward_metadata", restore_then_prepare)
        monkeypatch.setattr(tree, "restore_swa_windows", restore_swa_windows)
        monkeypatch.setattr(manager_module, "restore", lambda *args: None)
        yield engine, toy


def test_another_backend_captures_and_restores_through_the_base_classes(toy, oracle):
    engine, kept = toy
    recorder = Recorder(engine)
    assert_equal_runs(recorder.run(oracle.text[:700]), oracle.run(700))
    assert {boundary for _, boundary in kept.kept} == {256, 512}
    poison_rings(engine)
    hit = recorder.run(oracle.text[:700])
    assert hit.cached_tokens == 512 and not kept.wanted
    assert_equal_runs(hit, oracle.run(700))
    # The product restored nothing: without the toy the hit is wrong.
    kept.restore = lambda batch: kept.wanted.clear()
    poison_rings(engine)
    assert largest_difference(recorder.run(oracle.text[:700]), oracle.run(700)) > 0


def test_windows_come_before_states_behind_a_forward(toy, oracle):
    engine, kept = toy
    engine.run(oracle.text[:300], 1)
    assert kept.calls == ["window", "attention state", "indexer state"]


def test_the_base_classes_do_nothing():
    for owner, name, arguments in (
        (AttentionBackend, "capture_swa_windows", dict(layer=None, kv=None, forward_batch=None)),
        (AttentionBackend, "capture_swa_windows_decode", dict(forward_batch=None)),
        (AttentionBackend, "capture_compress_state_windows_decode", dict(forward_batch=None)),
        (BasePrefixCache, "restore_swa_windows", dict(req=None)),
    ):
        assert getattr(owner, name)(None, **arguments) is None


def test_a_request_that_goes_on_in_its_own_slot_is_not_matched_again(make_engine, oracle):
    """B11: so it needs no rule that lets a request match what it computed itself."""
    with make_engine(chunked_prefill_size=PAGE) as engine:
        matched, forwards = [], []
        match = engine.tree.match_prefix

        def noted(params):
            matched.append((len(forwards), params.req is not None and params.req.rid))
            return match(params)

        engine.tree.match_prefix = noted
        with engine.tap(lambda batch, logits: forwards.append(batch)):
            rid = engine.submit(oracle.text[:1100], 3)
            (output,) = engine.run_many(rid)
        assert output.output_ids == oracle.run(1100).output_ids
        assert len(forwards) == 5 + 2
        assert {done for done, req in matched if req == rid} == {0}
