"""Host layouts and io backends of HiCache: every pair that SGLang has for DeepSeek-V4, in every tier.

An engine computes and stores a prompt; a second one in the same pair starts on its storage, then one of every
other layout. Each hit is compared with the stock engine's cold run, and the pages that it reads with those
that the first computed. What another layout stores is the same files.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import speculation_runs
import torch
from oracle import PAGE, Recorder, Run, assert_equal_runs, differing, poison_rings
from rank_pair import engine_of, rank_pair
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool
from sglang.srt.server_args import ServerArgs
from sglang_unified_kv import launches
from sglang_unified_kv.engage import HOST_COPIES as PAIRS
from sglang_unified_kv.reference.harness import prompt
from speculation_runs import EAGLE
from storage_folder import STORAGE, at, chain_of

LENGTH, BOUNDARY = 1100, 1024
# Of 512 tokens: two pages in four pools, one of them empty, and two records.
OBJECTS = 10
DIRECT = launches.HOST_LAYOUT[1::2]
TIERS = ("device", "host", "storage")


def named(pairs, backend):
    return {(*pair, backend): "-".join((*pair, backend)) for pair in pairs}


SETTINGS = named(PAIRS, "file") | named((DIRECT, ("kernel", "page_first")), "nixl")


def slow_but_one(settings):
    """The pair of the published recipes always, the others in the sweep."""
    return [
        pytest.param(
            setting, id=name, marks=() if setting == (*DIRECT, "file") else pytest.mark.slow
        )
        for setting, name in settings.items()
    ]


def options(io_backend, layout):
    return dict(chunked_prefill_size=512, hicache_io_backend=io_backend, hicache_mem_layout=layout)


def storage(backend, folder):
    if backend == "file":
        return STORAGE | dict(env=at(folder))
    pytest.importorskip("nixl._api", exc_type=ImportError)
    config = {"plugin": {"posix": {"active": True}}, "l3_cleaner_enabled": False}
    return STORAGE | dict(
        hicache_storage_backend="nixl",
        hicache_storage_backend_extra_config=json.dumps(config | {"use_direct_io": False}),
        env={"SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": str(folder)},
    )


def page_pools(engine):
    """SGLang's host pools of compressed pages."""
    entries = engine.tree.cache_controller.mem_pool_host.entries
    return {
        str(e.name): e.host_pool
        for e in entries
        if isinstance(e.host_pool, DeepSeekV4PagedHostPool)
    }


def run_with_pages(engine, ids):
    """A run, and the device's bytes of every page before :data:`BOUNDARY` that its last step read."""
    seen = {}

    def note(batch, logits):
        row = engine.req_to_token_pool.req_to_token[int(batch.req_pool_indices[0])]
        rows = (row[:BOUNDARY:PAGE] // PAGE).long()
        for name, pool in page_pools(engine).items():
            for layer, buffer in enumerate(pool.device_buffers):
                seen[f"{name} {layer}"] = buffer[rows].clone()

    with engine.tap(note):
        run = Recorder(engine).run(ids)
    return run, seen


def spoil_device(engine):
    """Overwrite what a request or the tree may have left on the device; nothing of it may be in use."""
    poison_rings(engine)
    for pool in page_pools(engine).values():
        for buffer in pool.device_buffers:
            buffer.fill_(0x3C)


def settle(engine):
    engine.drain()
    while engine.tree.checkpoints.storage.saving or engine.tree.checkpoints.storage.fetching:
        engine.step()


def leave_in(tier, engine, ids):
    """Have the prompt's prefix in ``tier`` and in none before it, at other pages than it came from."""
    settle(engine)
    engine.flush()
    spoil_device(engine)
    if tier != "storage":
        engine.run(ids, 1)
        settle(engine)
    if tier == "host":
        engine.tree.evict(EvictParams(num_tokens=10**9))
        spoil_device(engine)
    # Takes the pages that would be free first.
    engine.run(prompt(31, 300), 1)
    poison_rings(engine)


@pytest.fixture(scope="module", params=slow_but_one(SETTINGS))
def setting(request):
    return request.param


class Hit(NamedTuple):
    """A run, the pages that it read, the layouts of SGLang's host pools and ours, another prompt's files."""

    run: Run
    pages: dict[str, torch.Tensor]
    layouts: set[str]
    stored: dict[Path, bytes]


def files_of(ids, folder, engine):
    """What storage has of a prompt: contents by path within the folder."""
    names = chain_of(engine, ids)
    found = [p for p in folder.rglob("*") if p.is_file() and any(name in p.name for name in names)]
    return {path.relative_to(folder): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def hits(make_engine, setting, tmp_path_factory, oracle):
    """The run of an engine, "cold", then those of engines on its storage.

    "restart" is the first of an engine in the same pair, which the tiers follow. Every pair of another layout
    names the first of an engine of its own, after that has stored a prompt which its storage lacks.
    """
    io_backend, layout, backend = setting
    folder = tmp_path_factory.mktemp("-".join(setting))
    text, again, found = oracle.text[:LENGTH], prompt(30, 700), {}

    def note(name, engine, folder):
        run, pages = run_with_pages(engine, text)
        settle(engine)
        engine.tree.checkpoints.check_idle()
        layouts = {pool.layout for pool in page_pools(engine).values()}
        layouts.add(engine.tree.records.layout)
        found[name] = Hit(run, pages, layouts, files_of(again, folder, engine))

    with make_engine(**options(io_backend, layout), **storage(backend, folder)) as engine:
        assert engine.tree.cache_controller.l2_transfer_engine.io_backend == io_backend
        # Puts the prompt's pages elsewhere than at the pool's beginning.
        engine.run(again, 1)
        note("cold", engine, folder)
        assert engine.tree.checkpoints.stats.save_failed == 0
    with make_engine(**options(io_backend, layout), **storage(backend, folder)) as engine:
        spoil_device(engine)
        note("restart", engine, folder)
        for tier in TIERS:
            leave_in(tier, engine, text)
            note(tier, engine, folder)
    for other in others(layout):
        copy = tmp_path_factory.mktemp("-".join(other))
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        for path in found["cold"].stored:
            (copy / path).unlink()
        with make_engine(**options(*other), **storage(backend, copy)) as engine:
            spoil_device(engine)
            assert engine.run(again, 1).cached_tokens == 0
            note(other, engine, copy)
    return found


def others(layout):
    """The pairs of other layouts."""
    return [pair for pair in PAIRS if pair[1] != layout]


def assert_hit(hits, name, tier, oracle):
    run, pages, *_ = hits[name]
    assert run.cached_tokens == run.details[tier] == BOUNDARY
    assert differing(pages, hits["cold"].pages) == []
    assert differing(run.resumed, oracle.at(BOUNDARY)) == []
    assert_equal_runs(run, oracle.run(LENGTH))


def test_the_first_run_is_cold_and_in_the_layout(hits, setting, oracle):
    cold = hits["cold"]
    assert cold.run.cached_tokens == 0
    assert_equal_runs(cold.run, oracle.run(LENGTH))
    assert cold.layouts == {setting[1]}


@pytest.mark.parametrize("tier", TIERS)
def test_a_hit_of_every_tier_equals_the_cold_run(hits, oracle, tier):
    assert_hit(hits, tier, tier, oracle)


def test_a_restart_hits_what_was_stored(hits, oracle):
    assert_hit(hits, "restart", "storage", oracle)


def test_other_layouts_hit_what_this_one_stored(hits, setting, oracle):
    """A stored page has its layers one after the other in every layout, and its name leaves layouts out."""
    for pair in others(setting[1]):
        assert hits[pair].layouts == {pair[1]}
        assert_hit(hits, pair, "storage", oracle)


def test_other_layouts_store_the_same_files(hits, setting):
    first = hits["cold"].stored
    assert len(first) == OBJECTS
    for pair in others(setting[1]):
        assert differing_files(hits[pair].stored, first) == []


def differing_files(ours, theirs):
    return sorted(str(p) for p in ours.keys() | theirs.keys() if ours.get(p) != theirs.get(p))


@pytest.mark.parametrize("pair", slow_but_one(named(PAIRS, "file")))
def test_the_draft_of_a_hit_equals_the_cold_runs(make_engine, next_n_path, tmp_path, pair):
    text = prompt(0, 700)
    arguments = options(*pair[:2]) | EAGLE | storage("file", tmp_path) | dict(model=next_n_path)
    with make_engine(**arguments) as engine:
        cold = speculation_runs.cold(engine, text)
        settle(engine)
    with make_engine(**arguments) as engine:
        for tier in ("storage", "host"):
            if tier == "host":
                engine.tree.evict(EvictParams(num_tokens=10**9))
            spoil_device(engine)
            hit = speculation_runs.run(engine, text)
            assert hit.cached_tokens == hit.details[tier] == 512
            assert differing(hit.resumed, cold.at_boundary[512]) == []
            speculation_runs.assert_equal_runs(hit, cold)
            settle(engine)


def of_a_rank(rank, port, model, text, folder, pair):
    """A run of one rank, then a hit from its host; a run on a filled folder is a hit itself."""
    arguments = options(*pair) | STORAGE
    with engine_of(rank, port, model, env=at(folder), **arguments) as engine:
        spoil_device(engine)
        runs = [Recorder(engine).run(text)]
        settle(engine)
        engine.tree.evict(EvictParams(num_tokens=10**9))
        spoil_device(engine)
        runs.append(Recorder(engine).run(text))
        settle(engine)
        engine.tree.checkpoints.check_idle()
        return runs


@pytest.mark.slow
def test_two_ranks_hit_host_and_storage(model_path, oracle, tmp_path):
    with rank_pair() as ranks:
        arguments = str(model_path), oracle.text[:LENGTH], tmp_path, DIRECT
        colds = [runs[0] for runs in ranks(of_a_rank, *arguments)]
        assert [run.cached_tokens for run in colds] == [0, 0]
        for cold, hits in zip(colds, ranks(of_a_rank, *arguments), strict=True):
            for hit, tier in zip(hits, ("storage", "host"), strict=True):
                assert hit.cached_tokens == hit.details[tier] == BOUNDARY
                assert differing(hit.resumed, cold.at_boundary[BOUNDARY]) == []
                assert_equal_runs(hit, cold)


@pytest.mark.parametrize(
    ("asked", "backend", "made"),
    [
        ((None, None), None, ("kernel", "page_first")),
        ((None, "page_first_direct"), None, DIRECT),
        (("kernel", "page_first_direct"), None, DIRECT),
        (("direct", None), None, DIRECT),
        (("direct", "page_first"), None, DIRECT),
        (("direct", "layer_first"), "mooncake", DIRECT),
        (("kernel", "layer_first"), "mooncake", ("kernel", "page_first")),
        *((pair, backend, pair) for pair in PAIRS for backend in (None, "file", "nixl")),
    ],
)
def test_what_sglang_makes_of_the_flags(model_path, asked, backend, made):
    """The table of docs/storage.md."""
    fields = dict(zip(("hicache_io_backend", "hicache_mem_layout"), asked, strict=True))
    args = ServerArgs(
        model_path=str(model_path),
        device="cpu",
        enable_hierarchical_cache=True,
        hicache_ratio=2,
        hicache_storage_backend=backend,
        **{name: value for name, value in fields.items() if value},
    )
    args.resolve_once()
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(args)
    assert (view.hicache_io_backend, view.hicache_mem_layout) == made


def test_the_accepted_pairs_are_those_that_sglang_copies():
    """Of all io backends and layouts of its flags; kernel_ascend is an NPU's."""
    parser, copied = argparse.ArgumentParser(), set()
    ServerArgs.add_cli_args(parser)
    choices = {action.dest: action.choices for action in parser._actions}
    for io_backend in set(choices["hicache_io_backend"]) - {"kernel_ascend"}:
        for layout in choices["hicache_mem_layout"]:
            try:
                copies_a_page(io_backend, layout)
            except ValueError as error:
                assert "Unsupported" in str(error)
            else:
                copied.add((io_backend, layout))
    assert copied == set(PAIRS)


def copies_a_page(io_backend, layout):
    layers = [torch.full((4, 8), n, dtype=torch.uint8) for n in range(2)]
    pool = DeepSeekV4PagedHostPool("probe", layers, 8, 4, 1, layout)
    there, back = torch.tensor([1]), torch.tensor([3])
    pool.backup_from_device_all_layer(None, there, there, io_backend)
    for n, layer in enumerate(layers):
        layer[3] = 9
        pool.load_to_device_per_layer(None, there, back, n, io_backend)
        assert torch.equal(layer[3], layer[1])
