"""The real Mooncake over TCP: one master, one client that owns the memory, and engines that own none.

Mooncake moves the pools' own memory, so its pages carry no trailer; records are verified all the same.
"""

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
from oracle import Recorder, assert_equal_runs, differing, poison_rings
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang_unified_kv.edits.exact.storage.record_pool import RECORD_POOL

mooncake = pytest.importorskip("mooncake.store", exc_type=ImportError)

HOST = "127.0.0.1"
PAGES = ("deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def listening(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    """Address of a Mooncake master."""
    address = f"{HOST}:{free_port()}"
    command = [
        Path(mooncake.__file__).with_name("mooncake_master"),
        f"--rpc_port={address.rpartition(':')[2]}",
        f"--rpc_address={HOST}",
        f"--metrics_host={HOST}",
        f"--metrics_port={free_port()}",
    ]
    log = tmp_path_factory.mktemp("mooncake") / "master.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as server,
    ):
        try:
            while not listening(address):
                assert server.poll() is None, log.read_text()
            yield address
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def owner(master):
    """A client that holds what the engines store, and outlives them."""
    client = mooncake.MooncakeDistributedStore()
    size, buffer = 64 << 20, 16 << 20
    assert client.setup(HOST, "P2PHANDSHAKE", size, buffer, "tcp", "", master) == 0
    yield client
    client.close()


@pytest.fixture(scope="module")
def engine(make_engine, oracle, master, owner):
    """The second engine on the store; the first computed and stored 700 tokens."""
    config = {
        "master_server_address": master,
        "local_hostname": HOST,
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "global_segment_size": 0,
    }
    options = dict(
        chunked_prefill_size=512,
        hicache_storage_backend="mooncake",
        hicache_storage_backend_extra_config=json.dumps(config),
        hicache_storage_prefetch_policy="wait_complete",
    )
    with make_engine(**options) as first:
        Recorder(first).run(oracle.text[:700])
        settle(first)
        assert first.tree.checkpoints.stats.saved == 2
    with make_engine(**options) as second:
        yield second


@pytest.fixture(scope="module")
def stored(engine, owner, oracle):
    """key -> bytes of what the first engine wrote."""
    keys = [key_of(engine, oracle, b, pool) for b in (256, 512) for pool in (RECORD_POOL, *PAGES)]
    return {key: owner.get(key) for key in keys}


@pytest.fixture
def recorder(engine, owner, stored):
    """Memory empty, storage as the first engine left it."""
    empty_memory(engine)
    owner.remove_all(True)
    for key, data in stored.items():
        assert owner.put(key, data) == 0
    errors = engine.tree.checkpoints.stats.storage_errors
    yield Recorder(engine)
    settle(engine)
    engine.tree.checkpoints.check_idle()
    assert engine.tree.checkpoints.stats.storage_errors == errors
    controller = engine.tree.cache_controller
    assert controller.prefetch_thread.is_alive() and controller.backup_thread.is_alive()


def settle(engine):
    engine.drain()
    while engine.tree.checkpoints.storage.saving or engine.tree.checkpoints.storage.fetching:
        engine.step()


def empty_memory(engine):
    settle(engine)
    engine.flush()
    poison_rings(engine)


def key_of(engine, oracle, boundary, pool):
    """Key of the page, or record, that ends at ``boundary``."""
    page_hash = engine.tree._chain(None, RadixKey(oracle.text))[boundary // 256 - 1]
    model = engine.server_args.model_path.replace(os.sep, "-")
    return f"{model}_{engine.tree._record_format().namespace.hex()}-{page_hash}__{pool}"


def replace(owner, key, data):
    assert owner.remove(key, True) == 0
    assert owner.put(key, data) == 0


def assert_hit(run, oracle, boundary):
    assert run.cached_tokens == boundary
    if boundary:
        assert run.details["storage"] == boundary
        assert differing(run.resumed, oracle.at(boundary)) == []
    assert_equal_runs(run, oracle.run(700))


def test_a_second_engine_hits_what_the_first_stored(recorder, oracle):
    run = recorder.run(oracle.text[:700])
    assert run.details["storage_backend"] == "MooncakeStore"
    assert_hit(run, oracle, 512)


def test_an_engine_hits_what_it_stored_itself(engine, recorder, owner, oracle):
    owner.remove_all(True)
    assert_hit(recorder.run(oracle.text[:700]), oracle, 0)
    empty_memory(engine)
    assert_hit(recorder.run(oracle.text[:700]), oracle, 512)


def test_an_object_is_one_page_of_one_pool_as_it_lies_in_memory(engine, stored):
    sizes = {key.rpartition("__")[2]: len(data) for key, data in stored.items()}
    pools = engine.tree.cache_controller.storage_backend.registered_pools
    assert sizes == {name: pools[name].get_dummy_flat_data_page().nbytes for name in pools}
    assert engine.tree.records.layout == "page_first_direct"


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def half(data):
    return data[: len(data) // 2]


def garbage(data):
    return b"\xa5" * len(data)


def too_long(data):
    return data + bytes(4096)


@pytest.mark.parametrize("damage", [flipped, half, garbage, too_long])
def test_a_damaged_record_is_not_used(engine, recorder, owner, oracle, stored, damage):
    key = key_of(engine, oracle, 512, RECORD_POOL)
    replace(owner, key, damage(stored[key]))
    assert_hit(recorder.run(oracle.text[:700]), oracle, 256)


def test_a_refused_record_is_counted(engine, recorder, owner, oracle, stored):
    key = key_of(engine, oracle, 512, RECORD_POOL)
    replace(owner, key, flipped(stored[key]))
    before = engine.tree.checkpoints.stats.fetch_rejected
    recorder.run(oracle.text[:700])
    assert engine.tree.checkpoints.stats.fetch_rejected == before + 1


def test_two_swapped_records_are_not_used(engine, recorder, owner, oracle, stored):
    one, two = (key_of(engine, oracle, boundary, RECORD_POOL) for boundary in (256, 512))
    replace(owner, one, stored[two])
    replace(owner, two, stored[one])
    assert_hit(recorder.run(oracle.text[:700]), oracle, 0)


@pytest.mark.parametrize("pool", [RECORD_POOL, *PAGES])
def test_a_missing_object_cuts_the_hit(engine, recorder, owner, oracle, pool):
    assert owner.remove(key_of(engine, oracle, 512, pool), True) == 0
    assert_hit(recorder.run(oracle.text[:700]), oracle, 256)


def test_an_empty_store_is_a_miss(engine, recorder, owner, oracle):
    owner.remove_all(True)
    assert_hit(recorder.run(oracle.text[:700]), oracle, 0)
