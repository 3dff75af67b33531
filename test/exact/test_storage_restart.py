"""Storage across engines: restarts, what must not be shared, attaching at run time, SGLang's injectors."""

import json
import shutil
from collections import Counter

import pytest
from oracle import Recorder, assert_equal_runs, differing, poison_rings
from sglang.srt.managers.io_struct import ClearHiCacheReqInput
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorage
from sglang.srt.runtime_context import get_lora
from sglang_unified_kv import engage
from sglang_unified_kv.checkpoint import identity, record_format
from sglang_unified_kv.checkpoint.identity import weights_digest
from sglang_unified_kv.edits.exact.storage import weights_name
from sglang_unified_kv.edits.exact.storage.namespace import identity_of
from sglang_unified_kv.edits.exact.storage.sealed_pages import seals_pages
from sglang_unified_kv.engage import Refused
from storage_folder import STORAGE, at, flip, pages, records, storage_threads

LENGTH, BOUNDARY = 700, 512


@pytest.fixture
def make(make_engine, tmp_path):
    """Engines on one folder."""
    return lambda **options: make_engine(
        chunked_prefill_size=512, env=at(tmp_path) | options.pop("env", {}), **STORAGE | options
    )


@pytest.fixture
def filled(make, oracle, tmp_path):
    """The folder after an engine served the prompt and was closed."""
    with make() as engine:
        assert Recorder(engine).run(oracle.text[:LENGTH]).cached_tokens == 0
    assert records(tmp_path)
    return tmp_path


def test_the_first_request_after_a_restart_hits(make, filled, oracle, caplog):
    caplog.set_level("INFO")
    with make() as engine:
        poison_rings(engine)
        hit = Recorder(engine).run(oracle.text[:LENGTH])
        engine.tree.checkpoints.check_idle()
    assert hit.cached_tokens == hit.details["storage"] == BOUNDARY
    assert differing(hit.resumed, oracle.at(BOUNDARY)) == []
    assert_equal_runs(hit, oracle.run(LENGTH))
    assert any(f"matched=0 loaded={BOUNDARY}" in r.getMessage() for r in caplog.records)
    assert not [r for r in caplog.records if "MISMATCH" in r.getMessage()]


def test_an_older_format_is_a_miss(make, filled, oracle, monkeypatch):
    for module in (identity, record_format):
        monkeypatch.setattr(module, "FORMAT_VERSION", module.FORMAT_VERSION + 1)
    with make() as engine:
        assert Recorder(engine).run(oracle.text[:LENGTH]).cached_tokens == 0


def test_other_weights_under_the_same_name_are_a_miss(
    make, filled, oracle, tmp_path_factory, model_path
):
    other = tmp_path_factory.mktemp("other") / "tiny"
    shutil.copytree(model_path, other)
    # One bit of one weight; name, configuration and file sizes stay.
    flip(other / "model.safetensors", -2)
    prompt = oracle.text[:LENGTH]
    with make(served_model_name="the-model") as engine:
        assert Recorder(engine).run(prompt).cached_tokens == 0
        assert Recorder(engine).run(prompt).cached_tokens == BOUNDARY
    with make(served_model_name="the-model", model=other) as engine:
        assert Recorder(engine).run(prompt).cached_tokens == 0
    with make(served_model_name="the-model") as engine:
        assert Recorder(engine).run(prompt).details["storage"] == BOUNDARY


def test_the_same_weights_in_another_folder_share(make, oracle, tmp_path_factory, model_path):
    other = tmp_path_factory.mktemp("host") / "elsewhere"
    shutil.copytree(model_path, other)
    with make(served_model_name="the-model") as engine:
        Recorder(engine).run(oracle.text[:LENGTH])
    with make(served_model_name="the-model", model=other) as engine:
        hit = Recorder(engine).run(oracle.text[:LENGTH])
    assert hit.details["storage"] == BOUNDARY
    assert_equal_runs(hit, oracle.run(LENGTH))


def test_the_namespace_is_filled_from_the_engine(make):
    with make() as engine:
        tree = engine.tree
        digest = weights_digest(tree._weights.named_weights())
        found = identity_of(tree, tree._model_config.hf_config, digest)
        assert found.namespace == tree._record_format().namespace
        pool = engine.pool
    assert found.layout == tree.checkpoints.mover.layout.fingerprint
    assert set(found.ring_sizes) == {pool.unified_swa_ring_size, 8}
    assert [name for name, *_ in found.pages] == [
        "deepseek_v4_c4",
        "deepseek_v4_c4_indexer",
        "deepseek_v4_c128",
    ]
    assert all(layers and size for _, layers, size in found.pages)
    assert found.ranks == (1, 1) and found.bigram is False
    assert '"sliding_window": 128' in found.model and "_name_or_path" not in found.model
    assert len(found.weights) == 32 and found.engine == "0.5.23"


class DynamicFile(HiCacheFile):
    """A backend of somebody else's, as SGLang loads it from its configuration."""

    def __init__(self, storage_config, options):
        super().__init__(storage_config)


class WithoutRecords(DynamicFile):
    batch_get_v2 = HiCacheStorage.batch_get_v2


def dynamic(name):
    config = {"backend_name": "mine", "module_path": __name__, "class_name": name}
    return dict(
        hicache_storage_backend="dynamic", hicache_storage_backend_extra_config=json.dumps(config)
    )


def test_a_dynamic_backend_carries_records(make, oracle, tmp_path):
    prompt = oracle.text[:LENGTH]
    with make(**dynamic("DynamicFile")) as engine:
        recorder = Recorder(engine)
        recorder.run(prompt)
        engine.flush()
        poison_rings(engine)
        hit = recorder.run(prompt)
        assert hit.details["storage"] == BOUNDARY
        assert hit.details["storage_backend"] == "DynamicFile"
        assert_equal_runs(hit, oracle.run(LENGTH))
        flip(next(iter(pages(tmp_path, "deepseek_v4_c4"))), 100)
        engine.flush()
        assert_equal_runs(recorder.run(prompt), oracle.run(LENGTH))


def test_a_backend_that_does_not_tell_whose_objects_it_has_is_not_cleared(
    make, oracle, tmp_path, caplog
):
    with make(**dynamic("DynamicFile")) as engine:
        Recorder(engine).run(oracle.text[:LENGTH])
        engine.drain()
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        assert before
        assert not engine.scheduler.clear_hicache_storage_wrapped(ClearHiCacheReqInput()).success
        assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}
        prefix = f"{engine.tree._record_format().namespace.hex()}-"
    (said,) = [r.getMessage() for r in caplog.records if "nothing was deleted" in r.getMessage()]
    assert "DynamicFile does not tell which objects are this server's" in said
    assert f"Delete the objects whose keys begin with {prefix}" in said


def test_without_the_plugin_clearing_is_sglangs_own(make, filled, oracle, tmp_path, monkeypatch):
    with make(stock=True) as engine:
        with monkeypatch.context() as patch:
            # SGLang answers that it was done, whatever came of it.
            patch.setattr(engine.tree, "clear_storage_backend", lambda: False)
            assert engine.scheduler.clear_hicache_storage_wrapped(ClearHiCacheReqInput()).success
        assert engine.scheduler.clear_hicache_storage_wrapped(ClearHiCacheReqInput()).success
    assert not list(tmp_path.iterdir())


def test_a_dynamic_backend_that_cannot_move_records_is_refused(make):
    with pytest.raises(ValueError, match="WithoutRecords has no batch_get_v2"):
        make(**dynamic("WithoutRecords")).__enter__()


def test_zero_copy_backends_get_the_pools_themselves():
    assert seals_pages("file", {}) and seals_pages("nixl", {}) and seals_pages("dynamic", {})
    assert not seals_pages("mooncake", {}) and not seals_pages("dynamic", {"interface_v1": 1})


def test_strict_provenance_and_storage_exclude_each_other(make):
    strict = {"SGLANG_UNIFIED_KV_PROVENANCE": "strict"}
    with pytest.raises(Refused, match="PROVENANCE=strict with a storage backend"):
        make(env=strict).__enter__()
    with make(env=strict, hicache_storage_backend=None) as engine:
        attached, message = engine.tree.attach_storage_backend("file")
        assert not attached and "PROVENANCE=strict" in message


def test_stock_and_exact_do_not_share(make, filled, oracle, tmp_path):
    before = set(tmp_path.iterdir())
    with make(stock=True) as engine:
        assert Recorder(engine).run(oracle.text[:LENGTH]).cached_tokens == 0
    assert before < set(tmp_path.iterdir())


def test_storage_can_be_attached_and_detached(make, oracle, tmp_path):
    prompt = oracle.text[:LENGTH]
    with make(hicache_storage_backend=None) as engine:
        recorder, tree = Recorder(engine), engine.tree
        for _ in range(2):
            attached, message = tree.attach_storage_backend(
                "file", hicache_storage_prefetch_policy="wait_complete"
            )
            assert attached, message
            engine.scheduler.enable_hicache_storage = True
            hit = recorder.run(prompt)
            assert_equal_runs(hit, oracle.run(LENGTH))
            engine.drain()
            detached, message = tree.detach_storage_backend()
            assert detached, message
            engine.scheduler.enable_hicache_storage = False
            tree.checkpoints.check_idle()
            engine.flush()
        assert hit.details["storage"] == BOUNDARY
        assert recorder.run(prompt).cached_tokens == 0


def test_weights_are_digested_for_storage_alone(make, oracle, model_path, monkeypatch):
    digested = []

    def digest(named):
        digested.append(len(list(named)))
        return weights_digest(named)

    monkeypatch.setattr(weights_name, "weights_digest", digest)
    with make(hicache_storage_backend=None) as engine:
        updater = engine.model_runner.weight_updater
        assert updater.update_weights_from_disk(str(model_path), "auto")[0]
        engine.flush()
        assert not digested and not engine.tree.checkpoints.suspended
        assert updater.update_weights_from_disk(str(model_path), "auto")[0]
        attached, message = engine.tree.attach_storage_backend("file")
        assert not attached and message == "the weights were updated: flush the cache, then attach"
        assert not digested
        engine.flush()
        attached, message = engine.tree.attach_storage_backend("file")
        assert attached and len(digested) == 1, message
        engine.scheduler.enable_hicache_storage = True
        engine.flush()
        assert len(digested) == 1, "the weights are those that were digested"
        assert engine.run(oracle.text[:LENGTH], 1).cached_tokens == 0
        engine.flush()
        assert engine.run(oracle.text[:LENGTH], 1).details["storage"] == BOUNDARY


def test_attaching_refuses_what_start_refuses(make, tmp_path):
    with make(hicache_storage_backend=None) as engine:
        attach = engine.tree.attach_storage_backend
        attached, message = attach("hf3fs")
        assert not attached and "--hicache-storage-backend hf3fs: not supported" in message
        attached, message = attach("file", hicache_write_policy="write_back")
        assert not attached and "write_back: leave it write_through" in message
        with get_lora().override(enable_lora=True):
            attached, message = attach("file")
            assert not attached and message == engage.LORA_WITH_STORAGE
            attached, message = attach("hf3fs")
            assert not attached and message.endswith(f"; {engage.LORA_WITH_STORAGE}")
            assert "hf3fs: not supported" in message
        assert engine.tree.cache_controller.storage_backend is None


@pytest.mark.parametrize("backend", ["simm", "hf3fs"])
def test_a_backend_that_cannot_carry_records_is_refused_by_name(make, backend):
    with pytest.raises(Refused, match=f"--hicache-storage-backend {backend}: not supported"):
        make(hicache_storage_backend=backend).__enter__()


def test_injected_delays_and_failures_cost_hits_only(make, oracle, tmp_path, monkeypatch):
    injected = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.01",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.1",
    }
    calls, failures, hits = Counter(), [], []

    def every_ninth_call(self, name):
        """Each name is called by one storage thread, so this does not depend on their timing."""
        assert self._failure_prob == 0.1
        calls[name] += 1
        failed = calls[name] % 9 == 0
        failures.extend([name] * failed)
        return failed

    injector = hicache_storage.HiCacheStorageFailureInjector
    monkeypatch.setattr(injector, "_inject_failure", every_ninth_call)
    with make(env=injected) as engine:
        recorder = Recorder(engine)
        for length in (444, 700) * 5:
            run = recorder.run(oracle.text[:length])
            assert_equal_runs(run, oracle.run(length))
            hits.append(run.cached_tokens)
            engine.flush()
        assert all(thread.is_alive() for thread in storage_threads(engine))
    assert any(hits) and not all(hits[2:]), hits
    assert {"batch_get_v2", "batch_set_v2", "batch_exists_v2"} <= set(failures), failures
