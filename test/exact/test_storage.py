"""Hits from storage against cold runs, byte for byte, and what must not be hit."""

import os
import resource
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from oracle import Recorder, assert_equal_runs, differing, poison_rings
from sglang.srt.managers import cache_controller
from sglang.srt.managers.io_struct import ClearHiCacheReqInput
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang_unified_kv.checkpoint.placement import Placement
from sglang_unified_kv.checkpoint.policy import Grid
from sglang_unified_kv.checkpoint.storage import Save
from sglang_unified_kv.edits.exact.storage.clear import clear_namespace
from storage_folder import (
    STORAGE,
    at,
    chain_of,
    file_of,
    flip,
    pages,
    records,
    storage_threads,
    unreadable,
)

PAGE = 256
CASES = {1: {512: 700, 2560: 2700}, 2: {512: 700, 2560: 2700}, 4: {1024: 1100, 2048: 2700}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def engine(make_engine, oracle, folder):
    with make_engine(chunked_prefill_size=512, env=at(folder), **STORAGE) as built:
        yield built


@pytest.fixture(scope="module")
def objects(engine, oracle, folder):
    """What storage holds once the whole text was computed."""
    engine.run(oracle.text, 3)
    engine.flush()
    return {path: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def manager(engine, folder, objects):
    found = engine.tree.checkpoints
    engine.flush()
    for path in folder.iterdir():
        path.unlink()
    yield found
    found.placement = Placement(Grid(PAGE, 1), found.store)
    settle(engine)
    found.check_idle()
    assert all(thread.is_alive() for thread in storage_threads(engine))


def settle(engine):
    """Step until no storage thread holds a slot."""
    engine.drain()
    traffic = engine.tree.checkpoints.storage
    while traffic.saving or traffic.fetching:
        engine.step()


@pytest.fixture
def stored(engine, manager, objects):
    """The whole text is in storage and nowhere else."""
    for path, data in objects.items():
        path.write_bytes(data)
    poison_rings(engine)
    return Recorder(engine)


def assert_hit(hit, oracle, boundary, length, tier="storage"):
    assert hit.cached_tokens == boundary
    tiers = {"device": 0, "host": 0, tier: boundary}
    assert hit.details is None if boundary == 0 else hit.details.items() >= tiers.items()
    if boundary:
        assert differing(hit.resumed, oracle.at(boundary)) == []
    assert_equal_runs(hit, oracle.run(length))


@pytest.mark.parametrize("stride", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_hit_from_storage_is_bit_equal_to_the_cold_run(engine, manager, oracle, stride):
    manager.placement = Placement(Grid(PAGE, stride), manager.store)
    recorder = Recorder(engine)
    recorder.run(oracle.text)
    engine.flush()
    poison_rings(engine)
    for boundary, length in CASES[stride].items():
        hit = recorder.run(oracle.text[:length])
        assert_hit(hit, oracle, boundary, length)
        assert hit.details["storage_backend"] == "HiCacheFile"
        engine.flush()
        poison_rings(engine)


def test_pages_and_records_have_their_sizes_and_one_namespace(engine, manager, oracle, folder):
    Recorder(engine).run(oracle.text[:700])
    assert len(records(folder)) == 2 and len(pages(folder)) == 6
    assert {p.stat().st_size for p in records(folder)} == {engine.tree.records.slot_bytes}
    assert len({p.name.partition("-")[0] for p in folder.iterdir()}) == 1
    assert manager.stats.save_failed == 0


# -- what a stored object may suffer


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1])


def halved(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path):
    path.write_bytes(b"")


def flipped(path):
    flip(path, path.stat().st_size // 2)


def header_flipped(path):
    flip(path, 70)


def grown_from_other_bytes(path):
    path.write_bytes(b"x" * (path.stat().st_size + 4096))


DAMAGES = [truncated, halved, emptied, flipped, header_flipped, grown_from_other_bytes]
OBJECTS = ["deepseek_v4_c4_state", "deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128"]
OBJECT_KINDS = [*OBJECTS[:2], *(pytest.param(pool, marks=pytest.mark.slow) for pool in OBJECTS[2:])]
"""A record and one kind of page by default; all kinds of pages take the same way."""


@pytest.mark.parametrize("pool", OBJECT_KINDS)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damaged_object_is_a_miss(engine, manager, stored, oracle, folder, damage, pool):
    damage(file_of(folder, engine, chain_of(engine, oracle.text), 768, pool))
    record = pool == OBJECTS[0]
    # The record below the deepest boundary is not read; a page below it is.
    assert_hit(stored.run(oracle.text[:1100]), oracle, 1024 if record else 512, 1100)
    if record:
        engine.flush()
        assert_hit(stored.run(oracle.text[:950]), oracle, 512, 950)


def test_a_refused_record_is_counted_and_said_once(engine, manager, stored, oracle, folder, caplog):
    flip(file_of(folder, engine, chain_of(engine, oracle.text), 512), 5000)
    before = manager.stats.fetch_rejected
    stored.run(oracle.text[:700])
    assert manager.stats.fetch_rejected == before + 1
    said = [r for r in caplog.records if "does not verify" in r.message]
    assert len(said) == 1 and "512 tokens" in said[0].message and "checksum" in said[0].message


def test_a_refused_page_is_counted_and_said_once(engine, manager, stored, oracle, folder, caplog):
    flip(file_of(folder, engine, chain_of(engine, oracle.text), 512, "deepseek_v4_c4"), 5000)
    before = manager.stats.pages_rejected
    stored.run(oracle.text[:700])
    assert manager.stats.pages_rejected == before + 1
    assert sum("do not verify" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("pool", OBJECT_KINDS)
def test_two_swapped_objects_are_misses(engine, manager, stored, oracle, folder, pool):
    chain = chain_of(engine, oracle.text)
    one, two = (file_of(folder, engine, chain, b, pool) for b in (512, 1024))
    left, right = one.read_bytes(), two.read_bytes()
    one.write_bytes(right)
    two.write_bytes(left)
    record = pool == OBJECTS[0]
    assert_hit(stored.run(oracle.text[:1100]), oracle, 768 if record else 256, 1100)


@pytest.mark.parametrize("pool", OBJECT_KINDS)
def test_a_missing_object_cuts_the_hit(engine, manager, stored, oracle, folder, pool):
    file_of(folder, engine, chain_of(engine, oracle.text), 1024, pool).unlink()
    assert_hit(stored.run(oracle.text[:1100]), oracle, 768, 1100)


@pytest.mark.parametrize("pool", OBJECTS[:2])
def test_an_unreadable_object_is_a_miss(engine, manager, stored, oracle, folder, pool):
    path = file_of(folder, engine, chain_of(engine, oracle.text), 1024, pool)
    with unreadable(path):
        assert_hit(stored.run(oracle.text[:1100]), oracle, 768, 1100)


def test_records_without_pages_and_pages_without_records_are_misses(
    engine, manager, stored, oracle, folder
):
    kept = {path: path.read_bytes() for path in records(folder)}
    for path in kept:
        path.unlink()
    assert_hit(stored.run(oracle.text[:700]), oracle, 0, 700)
    engine.flush()
    for path in folder.iterdir():
        path.unlink()
    for path, data in kept.items():
        path.write_bytes(data)
    assert_hit(stored.run(oracle.text[:700]), oracle, 0, 700)


# -- writing


def test_a_full_disk_loses_records_and_nothing_else(engine, manager, oracle, folder):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = manager.stats.save_failed
    # Room for pages, not for records: the write fails as it does on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    try:
        recorder = Recorder(engine)
        recorder.run(oracle.text[:700])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    engine.flush()
    assert manager.stats.save_failed == before + 2
    assert not records(folder) and len(pages(folder)) == 6
    assert_hit(recorder.run(oracle.text[:700]), oracle, 0, 700)


def test_writers_of_one_key_leave_one_whole_record(engine, stored, oracle, folder):
    path = file_of(folder, engine, chain_of(engine, oracle.text), 256)
    whole = path.read_bytes()
    storage = engine.tree.cache_controller.storage_backend
    key = chain_of(engine, oracle.text)[0]
    slot = engine.tree.records.slots[0]
    start = threading.Barrier(4)

    def write(number):
        start.wait()
        for _ in range(10):
            path.unlink(missing_ok=True)
            value = slot.clone()
            value[5000] = number
            storage._format.seal(value.numpy(), key, 256)
            storage.set(f"{key}.deepseek_v4_c4_state", value)

    writers = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    # Each writer's last act leaves the file there, its own or another's.
    slot.copy_(slot.new_tensor(list(path.read_bytes())))
    assert storage._format.verify(slot.numpy(), key, 256) is None
    assert path.stat().st_size == len(whole)


def test_a_record_attached_to_stored_pages_is_stored_too(engine, manager, oracle, folder):
    recorder = Recorder(engine)
    manager.placement = Placement(Grid(PAGE, 1000), manager.store)
    recorder.run(oracle.text[:700])
    assert not records(folder) and len(pages(folder)) == 6
    manager.placement = Placement(Grid(PAGE, 1), manager.store)
    recorder.run(oracle.text[:700])
    assert len(records(folder)) == 2
    engine.flush()
    assert_hit(recorder.run(oracle.text[:700]), oracle, 512, 700)


def test_a_record_is_given_to_storage_once(engine, manager, oracle, folder):
    recorder = Recorder(engine)
    before = manager.stats.saved
    for _ in range(3):
        recorder.run(oracle.text[:700])
    assert manager.stats.saved == before + 2


class Gate:
    """Holds a storage call until opened; the engine goes on meanwhile."""

    def __init__(self):
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, call):
        def held(*args, **kwargs):
            self.entered.set()
            assert self.open.wait(60)
            return call(*args, **kwargs)

        return held


def test_slow_storage_drops_writes_and_holds_up_nobody(engine, manager, oracle, monkeypatch):
    gate = Gate()
    backend = engine.tree.cache_controller.storage_backend._backend
    monkeypatch.setattr(backend, "batch_set_v2", gate(backend.batch_set_v2))
    monkeypatch.setattr(manager.storage, "most_saving", 4)
    before = manager.stats.save_dropped
    engine.run(oracle.text, 1)
    while manager.stats.save_dropped == before:
        engine.step()
    assert 0 < manager.storage.saving <= 4
    manager.check_integrity()
    assert engine.run(oracle.text, 1).details["device"] == 2560
    gate.open.set()


# -- policies, batches, records that are still in memory


def evict_all(engine):
    """Drop the pages of every tier in memory, but no record."""
    engine.drain()
    engine.tree.evict(EvictParams(num_tokens=10**9))
    engine.tree.evict_host(10**9)


def test_a_record_in_memory_serves_pages_in_storage(engine, manager, oracle, folder):
    recorder = Recorder(engine)
    recorder.run(oracle.text[:1100])
    evict_all(engine)
    for path in records(folder):
        path.unlink()
    poison_rings(engine)
    before = manager.stats.fetched
    assert_hit(recorder.run(oracle.text[:1100]), oracle, 1024, 1100)
    assert manager.stats.fetched == before


@pytest.fixture
def two_page_batches(monkeypatch):
    monkeypatch.setattr(cache_controller, "STORAGE_BATCH_SIZE", 2)


def test_every_batch_brings_its_deepest_record(engine, manager, stored, oracle, two_page_batches):
    before = manager.stats.fetched
    assert_hit(stored.run(oracle.text), oracle, 2560, 2700)
    assert manager.stats.fetched == before + 5


@pytest.mark.parametrize("policy", ["best_effort", "timeout"])
def test_a_prefetch_cut_short_keeps_its_whole_batches(
    engine, manager, stored, oracle, two_page_batches, monkeypatch, policy
):
    tree = engine.tree
    monkeypatch.setattr(tree, "prefetch_stop_policy", policy)
    monkeypatch.setattr(tree, "prefetch_timeout_base", 0)
    monkeypatch.setattr(tree, "prefetch_timeout_per_page", 0)
    storage, gate, reads = tree.cache_controller.storage_backend, Gate(), []
    real = storage.batch_get_v2

    def third_batch_waits(transfers, extra_info=None):
        reads.append([t.name for t in transfers])
        # A batch reads its pages and its record.
        return (gate(real) if len(reads) == 5 else real)(transfers, extra_info)

    monkeypatch.setattr(storage, "batch_get_v2", third_batch_waits)
    # Held back until two batches are told, as by a request that is running.
    monkeypatch.setattr(tree, "check_prefetch_progress", lambda request: False)
    rid = engine.submit(oracle.text, 3)
    while not gate.entered.is_set() or tree_progress(tree) < 1024:
        engine.step()
    monkeypatch.delattr(tree, "check_prefetch_progress")
    (cut,) = stored.finish({rid: 2700})
    gate.open.set()
    settle(engine)
    assert_hit(cut, oracle, 1024, 2700)
    assert len(tree.ongoing_prefetch) == 0


def tree_progress(tree) -> int:
    return max((i.operation.completed_tokens for i in tree.ongoing_prefetch.values()), default=0)


@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait_complete"])
def test_every_policy_is_exact(engine, manager, stored, oracle, monkeypatch, policy):
    monkeypatch.setattr(engine.tree, "prefetch_stop_policy", policy)
    hit = stored.run(oracle.text[:1100])
    assert_equal_runs(hit, oracle.run(1100))
    if policy == "wait_complete":
        assert hit.cached_tokens == 1024


def test_an_aborted_prefetch_gives_its_slots_back(engine, manager, stored, oracle, monkeypatch):
    storage, gate = engine.tree.cache_controller.storage_backend, Gate()
    monkeypatch.setattr(storage, "batch_get_v2", gate(storage.batch_get_v2))
    rid = engine.submit(oracle.text, 3)
    while not gate.entered.is_set():
        engine.step()
    assert manager.storage.fetching == 1
    engine.abort(rid)
    engine.step()
    manager.check_integrity()
    assert manager.storage.fetching == 1
    gate.open.set()
    settle(engine)


def test_a_full_store_makes_room_for_a_record_from_storage(engine, manager, stored, oracle):
    slots = [manager.store.reserve() for _ in range(manager.store.capacity)]
    for number, slot in enumerate(slots):
        manager.store.publish(f"{number:064x}", 256, slot, replace=False, mixed=False)
    assert_hit(stored.run(oracle.text[:700]), oracle, 512, 700)


def test_without_a_free_slot_nothing_is_fetched(engine, manager, stored, oracle):
    store = manager.store
    slots = [store.reserve() for _ in range(store.capacity)]
    for number, slot in enumerate(slots):
        store.publish(f"{number:064x}", 256, slot, replace=False, mixed=False)
    pinned = [store.pin(f"{number:064x}") for number in range(len(slots))]
    run = stored.run(oracle.text[:700])
    assert run.cached_tokens == 0
    assert_equal_runs(run, oracle.run(700))
    for record in pinned:
        store.unpin(record)


def test_emptied_storage_is_given_the_records_again(engine, manager, oracle, folder):
    recorder = Recorder(engine)
    recorder.run(oracle.text[:700])
    assert engine.tree.clear_storage_backend() and not list(folder.iterdir())
    assert not any(record.stored for record in manager.store._records.values())


def foreign_files(folder):
    """Files that clearing must leave: each is like one of ours but for one thing."""
    page, record = pages(folder)[0], records(folder)[0]
    anchor = next(p for p in folder.iterdir() if not p.stat().st_size)
    own = page.name.partition("-")[0]
    names = [name.replace(own, own[::-1]) for name in (page.name, record.name, anchor.name)]
    names.append(page.name.replace(".deepseek_v4_", ".deepseek_v5_"))
    names += [name.removeprefix(f"{own}-") for name in (page.name, anchor.name)]
    for name in (page.name, record.name, anchor.name):
        names += [name.replace(".bin", "-other.bin"), name.replace(".bin", ".bin.bak")]
    # Served as "x_" and our name: both end alike.
    hash_ = anchor.name.partition("-")[2].partition("_")[0]
    names += [anchor.name.replace(f"{hash_}_", f"{hash_}_x_"), "notes.txt", f".{own}.tmp"]
    for name in names:
        (folder / name).write_bytes(b"keep")
    (folder / "folder").mkdir()
    (folder / "folder" / page.name).write_bytes(b"keep")
    return {folder / name for name in (*names, "folder")}


def test_clearing_deletes_this_namespace_alone(engine, manager, oracle, folder, caplog):
    recorder = Recorder(engine)
    recorder.run(oracle.text[:700])
    settle(engine)
    ours = set(folder.iterdir())
    kept = foreign_files(folder)
    caplog.set_level("INFO")
    try:
        assert engine.scheduler.clear_hicache_storage_wrapped(ClearHiCacheReqInput()).success
        assert set(folder.iterdir()) == kept and not ours & kept
        assert len(list((folder / "folder").iterdir())) == 1
        said = f"HiCache storage: {len(ours)} objects of {engine.tree._record_format().namespace.hex()}-"
        assert any(said in r.getMessage() for r in caplog.records)
        engine.flush()
        assert recorder.run(oracle.text[:700]).cached_tokens == 0
        engine.flush()
        poison_rings(engine)
        assert_hit(recorder.run(oracle.text[:700]), oracle, 512, 700)
    finally:
        shutil.rmtree(folder / "folder")


def test_a_file_that_cannot_be_deleted_does_not_keep_the_others(
    engine, manager, oracle, folder, monkeypatch, caplog
):
    Recorder(engine).run(oracle.text[:700])
    settle(engine)
    # The first to be deleted, and another.
    stuck, gone, *_ = (folder / name for name in os.listdir(folder))
    real = Path.unlink

    def unlink(path):
        if path == gone:
            real(path)  # another rank was faster
        if path == stuck:
            raise PermissionError(f"{path} stays")
        real(path)

    monkeypatch.setattr(Path, "unlink", unlink)
    assert not engine.scheduler.clear_hicache_storage_wrapped(ClearHiCacheReqInput()).success
    assert list(folder.iterdir()) == [stuck]
    assert any(f"{stuck} stays" in r.getMessage() for r in caplog.records)


def test_what_was_cleared_is_not_accounted_for_any_more(
    engine, manager, oracle, folder, monkeypatch
):
    delete = Path.unlink

    def fail(path):
        raise PermissionError(path)

    Recorder(engine).run(oracle.text[:700])
    settle(engine)
    storage = engine.tree.cache_controller.storage_backend
    limits = {"max_size": "1Gi", "enable_metadata_cache": True, "metadata_ttl": 1e9}
    config = replace(engine.tree.cache_controller.storage_config, extra_config=limits)
    other = f"{'0' * 64}{storage._backend.config_suffix}"
    (folder / f"{other}.bin").write_bytes(b"12345")
    backend = HiCacheFile(config)
    backend.registered_pools = storage._backend.registered_pools
    key = storage._prefix + chain_of(engine, oracle.text[:700])[0]
    evictor = backend._evictor
    assert backend.exists(key) and evictor._total_bytes > 5
    known = list(evictor._lru)
    stuck, written = [name for name in known if name != other][:2]
    with monkeypatch.context() as patch:
        patch.setattr(
            Path, "unlink", lambda path: fail(path) if path.stem == stuck else delete(path)
        )
        patch.setattr(evictor, "_pending_writes", {written})
        with pytest.raises(PermissionError):
            clear_namespace(backend, storage._prefix)
    assert set(evictor._lru) == {stuck, written, other}, "what stays is counted"
    # Another rank deletes them first.
    assert clear_namespace(storage._backend, storage._prefix) == 1
    assert clear_namespace(backend, storage._prefix) == 0
    assert not backend.exists(key)
    assert (list(evictor._lru), evictor._total_bytes) == ([other], 5)
    backend.file_path = str(folder / "is not there")
    with pytest.raises(FileNotFoundError):
        clear_namespace(backend, storage._prefix)


@pytest.fixture
def update(engine, model_path):
    """Load the weights again, as ``/update_weights_from_disk`` does."""

    def load():
        updater = engine.model_runner.weight_updater
        done, message = updater.update_weights_from_disk(str(model_path), "auto")
        assert done, message

    return load


def test_new_weights_are_another_namespace(engine, manager, stored, oracle, update):
    weight = next(iter(engine.model_runner.model.parameters()))
    kept = weight.detach().clone()
    update()
    weight.data.view(-1)[0] += 1
    engine.flush()
    assert stored.run(oracle.text[:700]).cached_tokens == 0
    update()
    weight.data.copy_(kept)
    engine.flush()
    assert_hit(stored.run(oracle.text[:700]), oracle, 512, 700)


def test_between_an_update_and_a_flush_nothing_is_reused_or_stored(
    engine, manager, stored, oracle, update, folder, caplog
):
    stored.run(oracle.text[:700])
    update()
    before = {path.name for path in folder.iterdir()}
    for _ in range(2):
        run = stored.run(oracle.text[:950])
        assert run.cached_tokens == 0
        assert_equal_runs(run, oracle.run(950))
    assert {path.name for path in folder.iterdir()} == before
    assert sum("The weights were updated" in r.getMessage() for r in caplog.records) == 1
    engine.flush()
    assert_hit(stored.run(oracle.text[:700]), oracle, 512, 700)


def test_reuse_comes_back_when_nothing_of_the_old_weights_is_left(engine, manager, stored, oracle):
    tree = engine.tree
    stored.run(oracle.text[:700])
    manager.suspend()
    tree.resume_if_empty()
    assert manager.suspended, "the tree has pages"
    settle(engine)
    tree.evict(EvictParams(num_tokens=10**9))
    tree.evict_host(10**9)
    record = next(iter(manager.store._records.values()))
    record.stored = False
    save = manager.storage.save([record.key])
    tree.resume_if_empty()
    assert manager.suspended, "a storage thread has a record"
    manager.storage.saved(save)
    tree.resume_if_empty()
    assert not manager.suspended and not len(manager.store)
    assert_hit(stored.run(oracle.text[:700]), oracle, 512, 700)


# -- backends that misbehave


@pytest.fixture
def backend(engine, monkeypatch):
    """``backend(name, function)`` replaces a call of the real backend."""
    found = engine.tree.cache_controller.storage_backend._backend
    return lambda name, function: monkeypatch.setattr(found, name, function)


def test_a_backend_that_is_down_is_asked_twice_a_batch(
    engine, manager, stored, oracle, backend, caplog
):
    calls = []

    def down(transfers, extra_info=None):
        calls.append(transfers[0].name)
        raise OSError("no route to host")

    backend("batch_get_v2", down)
    assert_hit(stored.run(oracle.text[:1100]), oracle, 0, 1100)
    assert all(calls.count(name) == 2 for name in set(calls))
    assert sum("no route to host" in r.getMessage() for r in caplog.records) == len(set(calls))


@pytest.mark.parametrize("answer", [{}, {name: [True] for name in OBJECTS}], ids=["none", "short"])
def test_a_backend_that_answers_nonsense_is_a_miss(
    engine, manager, stored, oracle, backend, answer
):
    backend("batch_get_v2", lambda transfers, extra_info=None: answer)
    before = manager.stats.storage_errors
    assert_hit(stored.run(oracle.text[:1100]), oracle, 0, 1100)
    assert manager.stats.storage_errors > before


def test_a_backend_that_reads_nothing_and_says_it_did_is_a_miss(
    engine, manager, stored, oracle, backend
):
    real = engine.tree.cache_controller.storage_backend._backend.batch_get_v2

    def pretend(transfers, extra_info=None):
        if transfers[0].name == OBJECTS[0]:
            return {OBJECTS[0]: [True]}
        return real(transfers, extra_info)

    # The slot still holds the record of the same prefix.
    assert_hit(stored.run(oracle.text[:444]), oracle, 256, 444)
    engine.flush()
    backend("batch_get_v2", pretend)
    assert_hit(stored.run(oracle.text[:444]), oracle, 0, 444)


def test_bytes_are_touched_after_the_copies_that_use_them(engine, manager, stored, oracle):
    """Events of the CPU are always done; these are not until somebody waits for them."""
    waited, mover = [], manager.mover

    class Event:
        def __init__(self, name):
            self.name = name

        def synchronize(self):
            waited.append(self.name)

    storage = engine.tree.cache_controller.storage_backend
    stored.run(oracle.text[:444])
    (record,) = manager.store._records.values()
    mover._host_written[record.slot] = Event("captured")
    mover._host_read[record.slot] = Event("restored")
    assert storage.get_record(record.key, record.boundary, record.slot)
    assert waited == ["captured", "restored"]
    del waited[:]
    storage._seal(Save([record]))
    assert waited == ["captured"]
    del mover._host_written[record.slot], mover._host_read[record.slot]


def test_a_restore_is_noted_as_a_reader_of_its_slot(engine, manager, stored, oracle):
    stored.run(oracle.text[:444])
    (record,) = manager.store._records.values()
    assert record.slot in manager.mover._host_read
