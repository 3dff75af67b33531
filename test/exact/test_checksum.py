"""SGLANG_SWA_DBG_CHECKSUM: each line comes from a comparison, and a changed byte is a MISMATCH."""

import re

import pytest
from oracle import Recorder, assert_equal_runs
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang_unified_kv.checkpoint import manager as manager_module
from sglang_unified_kv.checkpoint.layout import Kind
from sglang_unified_kv.checkpoint.restore import restore
from sglang_unified_kv.checkpoint.verify import Mismatch
from storage_folder import STORAGE, at

LINES = (
    "[LB-DEV] device landing byte-exact",
    "[SWA-DBG] restore verified",
    "[C4-STATE-DBG] state ride bit-exact",
)


@pytest.fixture
def engine(make_engine, oracle, tmp_path):
    # One for each test: a mismatch leaves a batch half done, as it ends a server's process.
    env = at(tmp_path) | {"SGLANG_SWA_DBG_CHECKSUM": "1"}
    with make_engine(chunked_prefill_size=512, env=env, **STORAGE) as built:
        yield built


@pytest.fixture
def recorder(engine, oracle, caplog):
    recorder = Recorder(engine)
    recorder.run(oracle.text[:700])
    caplog.set_level("INFO", logger="sglang_unified_kv")
    caplog.clear()
    return recorder


def said(caplog, tag):
    return [r.getMessage() for r in caplog.records if tag in r.getMessage()]


@pytest.mark.parametrize("tier", ["device", "host", "storage"])
def test_every_restore_is_verified_three_times(engine, recorder, oracle, caplog, tier):
    if tier == "host":
        engine.tree.evict(EvictParams(num_tokens=10**9))
    elif tier == "storage":
        engine.flush()
    hit = recorder.run(oracle.text[:700])
    assert hit.details[tier] == 512
    for line in LINES:
        (found,) = said(caplog, line)
        assert re.search(r"rid=\S+ boundary=512 request_slot=\d+$", found)
    assert not said(caplog, "MISMATCH") and not said(caplog, "reuse_reject")
    assert_equal_runs(hit, oracle.run(700))


def section_of(engine, kind):
    sections = engine.tree.checkpoints.mover.layout.sections
    return next(s for s in sections if s.spec.kind is kind)


@pytest.mark.parametrize(
    "kind", [Kind.WINDOW, Kind.ATTENTION_STATE, Kind.INDEXER_STATE], ids=lambda k: k.value
)
def test_a_byte_changed_on_the_host_is_a_mismatch(engine, recorder, oracle, caplog, kind):
    engine.tree.checkpoints.mover.host[:, section_of(engine, kind).offset + 5] ^= 1
    with pytest.raises(Mismatch, match=r"\[LB-DEV\] MISMATCH rid=\S+ boundary=512"):
        recorder.run(oracle.text[:700])
    assert len(said(caplog, "[LB-DEV] MISMATCH")) == 1


@pytest.mark.parametrize(
    "kind, tag",
    [
        (Kind.WINDOW, "SWA-DBG"),
        (Kind.ATTENTION_STATE, "C4-STATE-DBG"),
        (Kind.INDEXER_STATE, "C4-STATE-DBG"),
    ],
    ids=lambda value: getattr(value, "value", value),
)
def test_a_row_that_did_not_reach_the_ring_is_a_mismatch(
    engine, recorder, oracle, caplog, monkeypatch, kind, tag
):
    def restore_badly(restores, rows, mover, landed):
        restore(restores, rows, mover, landed)
        ring = next(r for r in rows.rings if r.spec.kind is kind)
        ring.words[restores[0].slot * ring.size + 511 % ring.size, 0] += 1

    monkeypatch.setattr(manager_module, "restore", restore_badly)
    with pytest.raises(Mismatch, match=rf"\[{tag}\] MISMATCH"):
        recorder.run(oracle.text[:700])
    assert said(caplog, f"[{tag}] MISMATCH")


def test_a_cut_match_says_reuse_reject(engine, recorder, oracle, caplog):
    recorder.run(oracle.text[:1100])
    store = engine.tree.checkpoints.store
    # Pages up to 512, records at 256, 768 and 1,024.
    engine.tree.evict(EvictParams(num_tokens=10**9))
    engine.tree.evict_host(512)
    store.remove(next(r.key for r in store._records.values() if r.boundary == 512))
    engine.tree.clear_storage_backend()
    assert recorder.run(oracle.text[:1100]).cached_tokens == 256
    assert any("tree=512 used=256" in line for line in said(caplog, "reuse_reject"))


def test_captures_that_an_insert_did_not_bind_say_bind_miss(
    engine, recorder, oracle, caplog, monkeypatch
):
    manager = engine.tree.checkpoints
    with monkeypatch.context() as patch:
        patch.setattr(manager, "commit", lambda *_: [])
        rid = engine.submit(oracle.text[1000:1700], 3)
        engine.run_many(rid)
    (line,) = said(caplog, "BIND-MISS")
    assert line.startswith(f"BIND-MISS rid={rid}#") and line.endswith("captures=2")
    assert manager.stats.discarded == 2


def test_captures_of_a_request_that_gives_nothing_to_the_tree_are_no_bind_miss(
    engine, recorder, oracle, caplog
):
    manager = engine.tree.checkpoints
    rid = engine.submit(oracle.text[1000:2200], 3)
    while not manager._pending:
        engine.step()
    (key,) = manager._pending._requests
    # Its row is given back without an insert, as a retraction does it.
    manager.release(key)
    assert manager.stats.discarded == 2 and not said(caplog, "BIND-MISS")
    engine.abort(rid)
    engine.run_many(rid)


def test_off_by_default(make_engine):
    with make_engine() as plain:
        assert plain.tree.checkpoints.verifier is None
