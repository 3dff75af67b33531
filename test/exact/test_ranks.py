"""Two tensor-parallel ranks, and two data-parallel ones: real processes, real collectives."""

import pytest
import speculation_runs
import torch
from oracle import (
    Recorder,
    assert_equal_runs,
    bytes_of,
    differing,
    poison_rings,
)
from rank_pair import engine_of, rank_pair
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.runtime_context import get_parallel
from sglang_unified_kv.edits.exact.storage.weights_name import WeightsName
from sglang_unified_kv.edits.report.samples import samples_of
from sglang_unified_kv.reference.harness import prompt
from storage_folder import STORAGE, at, records

LENGTH, BOUNDARY = 700, 512
DP = dict(enable_dp_attention=True, dp_size=2)


@pytest.fixture(scope="module")
def pair():
    with rank_pair() as pair:
        yield pair


def hits(rank, port, model, text):
    """A cold run, then hits from the device and the host, on one rank."""
    with engine_of(rank, port, model, max_total_tokens=1536) as engine:
        recorder = Recorder(engine)
        cold = recorder.cold(text)
        found = {}
        for source in ("device", "host"):
            if source == "host":
                for seed in (1, 2):
                    recorder.run(prompt(seed, 700), 1)
            poison_rings(engine)
            hit = recorder.run(text)
            assert hit.cached_tokens == BOUNDARY, (source, hit.details)
            assert differing(hit.resumed, cold.at_boundary[BOUNDARY]) == []
            assert_equal_runs(hit, cold)
            found[source] = hit.details
        engine.tree.checkpoints.check_idle()
        rows = engine.model_runner.model.state_dict()["model.layers.1.self_attn.wq_b.weight"]
        return cold.output_ids, cold.logits, bytes_of(cold.ended), found, len(rows)


def test_hits_of_two_tensor_parallel_ranks_equal_their_cold_run(pair, model_path, oracle):
    first, second = pair(hits, str(model_path), oracle.text[:LENGTH])
    tokens, logits, rings, found, rows = first
    assert rows == second[4] == 4 * 512 // 2, "the weights are not sharded"
    assert found == second[3]
    assert found["device"] == {"device": BOUNDARY, "host": 0}
    assert found["host"]["host"] > 0
    assert tokens == second[0] and rings == second[2], "SGLang takes KV of the ranks for replicas"
    alone = oracle.run(LENGTH).logits[0].cpu()
    for ours, other in zip(logits, second[1], strict=True):
        assert torch.equal(ours, other)
    # Sums over two shards round differently.
    assert (logits[0] - alone).abs().max() < 0.2
    assert not torch.equal(logits[0], alone)


def through_storage(rank, port, model, text, folder, lost=(), env=None):
    """Serve a prompt, or hit what another engine stored; with ``lost`` this rank gets no such record."""
    with engine_of(rank, port, model, env=at(folder) | (env or {}), **STORAGE) as engine:
        storage = engine.tree.cache_controller.storage_backend
        fetch = storage.get_record
        if rank == 1:
            storage.get_record = lambda key, boundary, slot: (
                boundary not in lost and fetch(key, boundary, slot)
            )
        poison_rings(engine)
        run = Recorder(engine).run(text)
        manager = engine.tree.checkpoints
        manager.check_idle()
        return run, storage._format.namespace, manager.stats.saved


def test_a_restart_of_two_ranks_hits_what_rank_0_stored(pair, model_path, oracle, tmp_path):
    def serve(lost=()):
        text = oracle.text[:LENGTH]
        return pair(through_storage, str(model_path), text, tmp_path, lost)

    (cold, name, saved), (other, other_name, other_saved) = serve()
    assert cold.cached_tokens == other.cached_tokens == 0
    assert name == other_name, "rank 1 would look for what rank 0 stores under another name"
    assert saved == len(records(tmp_path)) == 2 and other_saved == 0
    for hit, *_ in serve():
        assert hit.cached_tokens == hit.details["storage"] == BOUNDARY
        assert differing(hit.resumed, cold.at_boundary[BOUNDARY]) == []
        assert_equal_runs(hit, cold)
    # One rank misses what the other got: both compute it again, and nobody waits for the other.
    for hit, *_ in serve(lost=(BOUNDARY,)):
        assert hit.cached_tokens == 0
        assert_equal_runs(hit, cold)


def test_every_rank_may_store_for_itself(pair, model_path, oracle, tmp_path):
    env = {"SGLANG_UNIFIED_KV_STORAGE_PER_RANK": "1"}

    def serve():
        arguments = str(model_path), oracle.text[:LENGTH], tmp_path, (), env
        return pair(through_storage, *arguments)

    (cold, name, saved), (other, other_name, other_saved) = serve()
    assert cold.cached_tokens == other.cached_tokens == 0
    assert name != other_name and saved == other_saved == 2
    assert len(records(tmp_path)) == 4
    for hit, *_ in serve():
        assert hit.cached_tokens == hit.details["storage"] == BOUNDARY
        assert differing(hit.resumed, cold.at_boundary[BOUNDARY]) == []
        assert_equal_runs(hit, cold)


def jittered(rank, port, model):
    """More prompts than either rank's store holds, in a store that is smaller on rank 1."""
    budget = {"SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB": ("0.004", "0.0026")[rank]}
    with engine_of(rank, port, model, env=budget) as engine:
        recorder, found = Recorder(engine), []
        prompts = [prompt(seed, 300 + 256 * (seed % 3)) for seed in range(4)]
        for ids in [*prompts, *reversed(prompts), *prompts]:
            found.append(recorder.run(ids, 1).cached_tokens)
        manager = engine.tree.checkpoints
        manager.check_idle()
        samples = [s for s in samples_of(engine.scheduler) if not s.name.endswith("waits_total")]
        return (
            found,
            manager.store.capacity,
            manager.store.evictions,
            manager.store.order(),
            samples,
        )


def test_ranks_with_other_budgets_agree_on_every_match(pair, model_path):
    first, second = pair(jittered, str(model_path))
    assert first == second
    found, capacity, evictions, _, samples = first
    assert capacity == 4 and evictions > 0
    exported = {(s.name.removeprefix("sglang:unified_kv_"), *s.labels): s.value for s in samples}
    assert exported[("gate_reused_tokens_total",)] == sum(found) > 0
    assert exported[("evicted_records_total",)] == evictions
    assert 0 in found[4:] and any(found[4:])


def updated(rank, port, model, folder):
    """What the storage of each rank is called after updates; the cache of rank 1 is not always flushed."""
    with engine_of(rank, port, model, env=at(folder), **STORAGE) as engine:
        tree, updater, names = engine.tree, engine.model_runner.weight_updater, []
        storage = tree.cache_controller.storage_backend

        def update(path, *, flushed):
            updater.update_weights_from_disk(path, "auto")
            if flushed:
                # Not through the engine, whose ranks wait for each other.
                tree.reset()
            assert tree.checkpoints.suspended != flushed
            names.append(storage._format.namespace)

        names.append(storage._format.namespace)
        update(model, flushed=rank == 0)
        update(model, flushed=True)
        # Not loaded by rank 1.
        update(model if rank == 0 else "nowhere", flushed=True)
        update(model, flushed=True)
        return names


def test_updated_weights_are_named_without_the_other_ranks(pair, model_path, tmp_path):
    first, second = pair(updated, str(model_path), tmp_path)
    assert first[0] == second[0]
    assert second[1] == second[0] != first[1], "suspended: nothing goes by its name"
    assert first[2] == second[2], "the same weights"
    assert first[2] not in first[:2], "rank 1 would find what rank 0 stored of the weights before"
    assert len({*first, *second}) == 7, "ranks that do not hold the same share no name"
    again, _ = pair(updated, str(model_path), tmp_path)
    assert again[0] == first[0], "a restart finds what was stored"
    assert again[1] != first[1], "after an update only this start of the server knows the weights"


def test_a_failed_update_leaves_no_two_ranks_with_one_name():
    """It may have changed other tensors on each of them."""
    ranks = [WeightsName.__new__(WeightsName) for _ in range(2)]
    for done, alike in ((True, True), (False, False), (True, False)):
        for rank in ranks:
            rank._history = getattr(rank, "_history", "")
            rank.updated(done)
        assert (ranks[0]._history == ranks[1]._history) == alike


def attached(rank, port, model, folder):
    """Storage is attached to rank 0, which serves a prompt, and then to rank 1, which asks for the same."""
    with engine_of(rank, port, model, env=at(folder), **DP) as engine:
        tree, group = engine.tree, get_parallel().tp_group.cpu_group
        for turn in (0, 1):
            if turn == rank:
                ok, message = tree.attach_storage_backend(
                    "file", hicache_storage_prefetch_policy="wait_complete"
                )
                assert ok, message
                engine.scheduler.enable_hicache_storage = True
            torch.distributed.barrier(group)
        return tree.cache_controller.storage_backend._format.namespace


def test_storage_is_attached_without_the_other_ranks(pair, model_path, tmp_path):
    first, second = pair(attached, str(model_path), tmp_path)
    assert first == second
    assert pair(attached, str(model_path), tmp_path)[0] != first, "a name of this start"


def data_parallel(rank, port, model, texts, folder):
    """Other prompts on each rank; what it generates, and hits its own cache with."""
    text = texts[rank]
    with engine_of(rank, port, model, env=at(folder), **STORAGE, **DP) as engine:
        recorder = Recorder(engine)
        poison_rings(engine)
        first = recorder.run(text)
        poison_rings(engine)
        again = recorder.run(text)
        engine.tree.evict(EvictParams(num_tokens=10**9))
        poison_rings(engine)
        third = recorder.run(text)
        engine.tree.checkpoints.check_idle()
        name = engine.tree.cache_controller.storage_backend._format.namespace
        return first, again, third, name


@pytest.mark.slow  # By default test_uneven_ranks.py has such ranks.
def test_ranks_of_data_parallel_attention_reuse_on_their_own(pair, model_path, oracle, tmp_path):
    texts = [oracle.text[:LENGTH], oracle.text[:950]]

    def serve(texts):
        return pair(data_parallel, str(model_path), texts, tmp_path)

    colds = serve(texts)
    for (cold, again, third, _), boundary in zip(colds, (512, 768), strict=True):
        assert cold.cached_tokens == 0 and again.details["device"] == boundary
        assert third.details["host"] == boundary
        for hit in (again, third):
            assert differing(hit.resumed, cold.at_boundary[boundary]) == []
            assert_equal_runs(hit, cold)
    assert colds[0][-1] == colds[1][-1], "the ranks would not share what they store"
    # After a restart each rank gets the other's prompt.
    for (hit, *_), (cold, *_), boundary in zip(
        serve(texts[::-1]), colds[::-1], (768, 512), strict=True
    ):
        assert hit.cached_tokens == hit.details["storage"] == boundary
        assert_equal_runs(hit, cold)


def speculated(rank, port, model, texts, folder, options):
    """With drafts: a cold run, a hit from every tier, and one behind a boundary that was generated."""
    text, hits = texts[rank], {}
    with engine_of(
        rank, port, model, env=at(folder), **STORAGE, **speculation_runs.EAGLE, **options
    ) as engine:
        first = speculation_runs.cold(engine, text)
        for tier in ("device", "host", "storage"):
            if tier == "host":
                engine.tree.evict(EvictParams(num_tokens=10**9))
            elif tier == "storage":
                engine.flush()
            poison_rings(engine)
            hit = speculation_runs.run(engine, text)
            assert hit.details[tier] == hit.cached_tokens, hit.details
            speculation_runs.assert_equal_runs(hit, first)
            hits[tier] = hit.cached_tokens
        longer = text + first.output_ids + prompt(9, 20)
        poison_rings(engine)
        hit = speculation_runs.run(engine, longer)
        hits["next turn"] = hit.cached_tokens
        # Storage has what was just computed.
        engine.flush()
        engine.tree.clear_storage_backend()
        speculation_runs.assert_equal_runs(hit, speculation_runs.cold(engine, longer))
        engine.drain()
        engine.tree.checkpoints.check_idle()
    return first.output_ids, first.accepted, hits


@pytest.mark.slow  # By default test_uneven_ranks.py has ranks that speculate.
@pytest.mark.parametrize("options", [{}, DP], ids=["tp2", "dp attention"])
def test_ranks_that_speculate_hit_alike(pair, next_n_path, tmp_path, options):
    texts = [prompt(0, 765), prompt(0, 509)] if options else [prompt(0, 765)] * 2
    first, second = pair(speculated, str(next_n_path), texts, tmp_path, options)
    assert first[2] == {"device": 512, "host": 512, "storage": 512, "next turn": 768}
    if options:
        assert second[2] == {"device": 256, "host": 256, "storage": 256, "next turn": 512}
    else:
        assert first == second
    assert sum(first[1]) / len(first[1]) > 1.5
