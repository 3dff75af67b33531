"""SGLang's nixl backend and the POSIX plugin of the real nixl: a second engine on the folder of a first.

The backend reads a batch of pages in one transfer, which a file cut short fails as a whole, and reports
no record but the deepest: an object that is refused costs its batch.
"""

import json
import os

import pytest
from oracle import Recorder, assert_equal_runs, differing, poison_rings
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang_unified_kv.edits.exact.storage.record_pool import RECORD_POOL

pytest.importorskip("nixl._api", exc_type=ImportError)

PAGES = ("deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128")


@pytest.fixture(
    scope="module",
    params=[True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["direct", "buffered"],
)
def direct_io(request, tmp_path_factory):
    """nixl's default, where the file system has it, and the other way."""
    if not request.param:
        return False
    path = tmp_path_factory.mktemp("probe") / "file"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory, direct_io):
    return tmp_path_factory.mktemp("nixl")


@pytest.fixture(scope="module")
def stored(folder):
    """path -> bytes of what the first engine wrote; filled by ``engine``."""
    return {}


@pytest.fixture(scope="module")
def engine(make_engine, oracle, folder, stored, direct_io):
    """The second engine on the folder; the first computed and stored 700 tokens."""
    config = {
        "plugin": {"posix": {"active": True}},
        "use_direct_io": direct_io,
        "l3_cleaner_enabled": False,
    }
    options = dict(
        chunked_prefill_size=512,
        hicache_storage_backend="nixl",
        hicache_storage_backend_extra_config=json.dumps(config),
        hicache_storage_prefetch_policy="wait_complete",
        env={"SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": folder},
    )
    with make_engine(**options) as first:
        Recorder(first).run(oracle.text[:700])
        settle(first)
        assert first.tree.checkpoints.stats.save_failed == 0
    stored.update((path, path.read_bytes()) for path in files(folder))
    with make_engine(**options) as second:
        yield second


@pytest.fixture
def recorder(engine, folder, stored):
    """Memory empty, storage as the first engine left it."""
    empty_memory(engine)
    for path in files(folder):
        path.unlink()
    for path, data in stored.items():
        path.write_bytes(data)
    errors = engine.tree.checkpoints.stats.storage_errors
    yield Recorder(engine)
    settle(engine)
    engine.tree.checkpoints.check_idle()
    assert engine.tree.checkpoints.stats.storage_errors == errors
    controller = engine.tree.cache_controller
    assert controller.prefetch_thread.is_alive() and controller.backup_thread.is_alive()


def files(folder):
    return [path for path in folder.glob("*/*") if path.is_file()]


def settle(engine):
    engine.drain()
    while engine.tree.checkpoints.storage.saving or engine.tree.checkpoints.storage.fetching:
        engine.step()


def empty_memory(engine):
    settle(engine)
    engine.flush()
    poison_rings(engine)


def file_of(engine, folder, oracle, boundary, pool):
    """The file of the page, or record, that ends at ``boundary``; pool "" is the logical KV page's."""
    key = engine.tree._chain(None, RadixKey(oracle.text))[boundary // 256 - 1]
    ending = f"_{pool}" if pool else engine.server_args.model_path.replace(os.sep, "-")
    (path,) = (p for p in folder.glob(f"*/*-{key}_*") if p.name.endswith(ending))
    return path


@pytest.fixture
def one_page_batches(monkeypatch):
    monkeypatch.setattr(cache_controller, "STORAGE_BATCH_SIZE", 1)


def assert_hit(run, oracle, boundary):
    assert run.cached_tokens == boundary
    if boundary:
        assert run.details["storage"] == boundary
        assert differing(run.resumed, oracle.at(boundary)) == []
    assert_equal_runs(run, oracle.run(700))


def test_a_second_engine_hits_what_the_first_stored(recorder, oracle):
    run = recorder.run(oracle.text[:700])
    assert run.details["storage_backend"] == "HiCacheNixl"
    assert_hit(run, oracle, 512)


def test_an_engine_hits_what_it_stored_itself(engine, recorder, oracle, folder):
    for path in files(folder):
        path.unlink()
    assert_hit(recorder.run(oracle.text[:700]), oracle, 0)
    empty_memory(engine)
    assert_hit(recorder.run(oracle.text[:700]), oracle, 512)


def test_clearing_deletes_this_namespace_alone(engine, recorder, oracle, folder):
    ours = files(folder)
    kept = {ours[0].parent / "notes.txt"}
    for path in ours:
        own, _, rest = path.name.partition("-")
        kept |= {path.with_name(f"{own[::-1]}-{rest}"), path.with_name(f"{path.name}_other")}
        kept.add(path.with_name(rest))
    for path in kept:
        path.write_bytes(b"keep")
    assert engine.tree.clear_storage_backend()
    assert set(files(folder)) == kept
    assert_hit(recorder.run(oracle.text[:700]), oracle, 0)
    empty_memory(engine)
    assert_hit(recorder.run(oracle.text[:700]), oracle, 512)


def test_an_object_store_is_not_cleared(engine, recorder, folder, monkeypatch, caplog):
    backend = engine.tree.cache_controller.storage_backend._backend
    ours = files(folder)
    with monkeypatch.context() as patch:
        # As with nixl's plugins for object stores.
        patch.setattr(backend, "file_manager", None)
        assert not engine.tree.clear_storage_backend()
    assert files(folder) == ours
    assert "HiCacheNixl does not tell which objects are this server's" in caplog.text


def test_objects_are_whole_units_of_direct_io(engine, stored, direct_io):
    sizes = [len(data) for data in stored.values()]
    assert sizes.count(engine.tree.records.slot_bytes) == 2
    # Without direct I/O a logical KV page is one byte.
    assert {size for size in sizes if size % 4096} == (set() if direct_io else {1})


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def one_byte_short(data):
    return data[:-1]


def half(data):
    return data[: len(data) // 2]


def empty(data):
    return b""


@pytest.mark.parametrize("damage", [flipped, one_byte_short, half, empty])
def test_a_damaged_record_is_not_used(engine, recorder, oracle, folder, damage, one_page_batches):
    path = file_of(engine, folder, oracle, 512, RECORD_POOL)
    path.write_bytes(damage(path.read_bytes()))
    assert_hit(recorder.run(oracle.text[:700]), oracle, 256)


@pytest.mark.parametrize("pool", PAGES)
def test_a_page_with_a_flipped_byte_is_not_used(
    engine, recorder, oracle, folder, pool, one_page_batches
):
    path = file_of(engine, folder, oracle, 512, pool)
    path.write_bytes(flipped(path.read_bytes()))
    before = engine.tree.checkpoints.stats.pages_rejected
    assert_hit(recorder.run(oracle.text[:700]), oracle, 256)
    assert engine.tree.checkpoints.stats.pages_rejected == before + 1


@pytest.mark.parametrize("pool", [PAGES[0], ""])
@pytest.mark.parametrize("damage", [one_byte_short, empty])
def test_a_page_cut_short_is_not_used(
    engine, recorder, oracle, folder, pool, damage, one_page_batches
):
    path = file_of(engine, folder, oracle, 512, pool)
    path.write_bytes(damage(path.read_bytes()))
    assert_hit(recorder.run(oracle.text[:700]), oracle, 256)


@pytest.mark.parametrize("pool", [RECORD_POOL, PAGES[0]])
def test_a_damaged_object_costs_its_batch(engine, recorder, oracle, folder, pool):
    path = file_of(engine, folder, oracle, 512, pool)
    path.write_bytes(one_byte_short(path.read_bytes()))
    assert_hit(recorder.run(oracle.text[:700]), oracle, 0)


@pytest.mark.parametrize("pool", [RECORD_POOL, PAGES[0], ""])
def test_a_missing_file_cuts_the_hit(engine, recorder, oracle, folder, pool):
    file_of(engine, folder, oracle, 512, pool).unlink()
    assert_hit(recorder.run(oracle.text[:700]), oracle, 256)


@pytest.mark.parametrize("pool", [RECORD_POOL, PAGES[0]])
def test_two_swapped_files_are_not_used(engine, recorder, oracle, folder, pool, one_page_batches):
    one, two = (file_of(engine, folder, oracle, boundary, pool) for boundary in (256, 512))
    left, right = one.read_bytes(), two.read_bytes()
    one.write_bytes(right)
    two.write_bytes(left)
    assert_hit(recorder.run(oracle.text[:700]), oracle, 0)


@pytest.mark.parametrize("pool", [RECORD_POOL, PAGES[0]])
def test_a_refused_object_is_written_anew(
    engine, recorder, oracle, folder, stored, pool, one_page_batches
):
    path = file_of(engine, folder, oracle, 512, pool)
    path.write_bytes(flipped(path.read_bytes()))
    assert_hit(recorder.run(oracle.text[:700]), oracle, 256)
    empty_memory(engine)
    assert path.read_bytes() == stored[path]
    assert_hit(recorder.run(oracle.text[:700]), oracle, 512)


def test_a_record_that_can_be_neither_written_nor_read_is_counted(
    engine, recorder, oracle, folder, one_page_batches
):
    path = file_of(engine, folder, oracle, 512, RECORD_POOL)
    for other in files(folder):
        other.unlink()
    # No user can open a folder as a file, root included.
    path.mkdir()
    before = engine.tree.checkpoints.stats.save_failed
    try:
        assert_hit(recorder.run(oracle.text[:700]), oracle, 0)
        empty_memory(engine)
        assert engine.tree.checkpoints.stats.save_failed == before + 1
        assert_hit(recorder.run(oracle.text[:700]), oracle, 256)
    finally:
        path.rmdir()
