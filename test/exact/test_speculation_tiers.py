"""EAGLE without the overlap schedule: hits from storage after a restart, and without HiCache."""

from functools import partial

import pytest
from oracle import differing, poison_rings
from sglang_unified_kv.checkpoint.manager import CheckpointError
from sglang_unified_kv.edits.exact import model_runner, registry
from sglang_unified_kv.reference.harness import prompt
from speculation_runs import EAGLE, assert_equal_runs, cold, run
from storage_folder import STORAGE, at, records

TEXT = prompt(0, 700)
# Its generated tokens cross 512.
SHORT = TEXT[:509]
RADIX = {"SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "0", "SGLANG_UNIFIED_KV_BIT_EXACT_RADIX": "1"}


@pytest.fixture
def make(make_engine, next_n_path):
    return partial(make_engine, model=next_n_path, chunked_prefill_size=512)


def test_a_restart_hits_what_was_stored(make, tmp_path):
    stored = partial(make, env=at(tmp_path), **STORAGE)
    with stored(**EAGLE) as engine:
        reference = cold(engine, TEXT)
    assert records(tmp_path)
    with stored(**EAGLE) as engine:
        poison_rings(engine)
        hit = run(engine, TEXT)
        assert hit.details["storage"] == hit.cached_tokens == 512
        assert differing(hit.resumed, reference.at_boundary[512]) == []
        assert_equal_runs(hit, reference)
    with stored() as engine:
        assert engine.run(TEXT).cached_tokens == 0, "pages without a draft's window were used"


def test_device_hits_without_hicache(make):
    with make(env=RADIX, hicache=False, **EAGLE) as engine:
        assert not engine.scheduler.enable_overlap
        first = cold(engine, SHORT)
        longer = SHORT + first.output_ids + prompt(9, 20)
        poison_rings(engine)
        hit = run(engine, longer)
        assert hit.cached_tokens == 512
        assert differing(hit.resumed, first.at_boundary[512]) == []
        assert_equal_runs(hit, cold(engine, longer))
        engine.drain()
        engine.tree.checkpoints.check_idle()


def test_a_step_whose_captures_nobody_took_ends_the_process(make, monkeypatch):
    with make(**EAGLE) as engine:
        monkeypatch.setattr(model_runner, "capture_ends", lambda active: None)
        with pytest.raises(CheckpointError, match="without the forward that its captures follow"):
            engine.run(TEXT)


def test_a_draft_model_that_is_not_known_is_refused(make, monkeypatch):
    monkeypatch.setattr(registry, "draft_runner", lambda target: None)
    with pytest.raises(ValueError, match="the draft model is not known"):
        make(**EAGLE).__enter__()
