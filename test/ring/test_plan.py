"""The operator's calculator: its bytes are those of pools that exist, its sums those of the publication."""

import doctest
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_runs import device_bytes
from ring_objects import PAGE, sizer
from sglang_unified_kv import engage
from sglang_unified_kv.checkpoint.placement import Placement
from sglang_unified_kv.checkpoint.policy import policy_of
from sglang_unified_kv.config import RING_FIXES, load_settings
from sglang_unified_kv.plan import capacity, conversation
from sglang_unified_kv.plan.capacity import (
    HOST_RESERVE,
    Machine,
    Sizes,
    checkpoints,
    device_refusals,
    first_limits,
    fitted_budget,
    host_refusals,
    prompts,
    warnings,
)
from sglang_unified_kv.plan.choice import most_running
from sglang_unified_kv.plan.conversation import Conversation, running_pages, stored_pages
from sglang_unified_kv.plan.planner import Planner
from sglang_unified_kv.reference.harness import prompt

EAGLE = dict(
    speculative_algorithm="EAGLE",
    speculative_num_steps=3,
    speculative_eagle_topk=1,
    speculative_num_draft_tokens=4,
)


def host_bytes(host_pool) -> int:
    buffers = getattr(host_pool, "kv_buffer", None)
    buffers = buffers if isinstance(buffers, (list, tuple)) else [buffers]
    return sum(b.nbytes for b in buffers if b is not None)


def left_behind(engine, length: int, new: int) -> tuple[int, int, int, int]:
    """Pages of a request at its fullest, then what it leaves: pages on device and host, checkpoints."""
    allocator = engine.scheduler.token_to_kv_pool_allocator
    everything = allocator.full_available_size()
    low = [everything]
    with engine.tap(lambda *_: low.append(allocator.full_available_size())):
        engine.run(prompt(length, length), new)
    engine.drain()
    host = engine.tree.cache_controller.mem_pool_host
    found = (
        (everything - min(low)) // PAGE,
        (everything - allocator.full_available_size()) // PAGE,
        (host.size - host.available_size()) // PAGE,
        len(engine.tree.checkpoints.store),
    )
    engine.flush()
    return found


def check_prompts(engine, sizes, lengths):
    """The formulas against the engine: what speculation accepts beyond the last token may be stored too."""
    for length, new in lengths:
        peak, device, host, records = left_behind(engine, length, new)
        # The step behind the last token is allocated under the overlap schedule alone.
        lowest = running_pages(length, new - 1, 0)
        assert lowest <= peak <= running_pages(length, new, sizes.ahead), (length, new)
        most = new + max(sizes.ahead // 2 - 1, 0)
        low, high = (stored_pages(length, n, sizes.pairs) for n in (new, most))
        assert low <= device == host <= high, (length, new)
        low, high = (checkpoints(sizes, Conversation(length, n)) for n in (new, most))
        assert low <= records <= high, (length, new)


def check_conversation(engine, sizes, talk):
    """The turns of one conversation leave its pages and checkpoints, with every policy."""
    host, manager = engine.tree.cache_controller.mem_pool_host, engine.tree.checkpoints
    before, weighed = manager.placement, manager.store.weighed
    for name in ("grid", "tails", "sparse"):
        policy = policy_of(name, page_size=PAGE, spare=1 + sizes.pairs)
        manager.placement, manager.store.weighed = Placement(policy, manager.store), policy.weighed
        said = prompt(7, talk.prompt)
        for turn in range(1, talk.turns + 1):
            assert len(said) == talk.prompt_of(turn)
            said = said + engine.run(said, talk.new).output_ids + prompt(1000 + turn, talk.added)
        engine.drain()
        found = (host.size - host.available_size()) // PAGE
        assert found == talk.pages(sizes.pairs), name
        found = len(manager.store)
        assert found == checkpoints(replace(sizes, policy=name), talk), name
        engine.flush()
    manager.placement, manager.store.weighed = before, weighed


@pytest.mark.parametrize(
    "speculation, lengths",
    [
        pytest.param({}, [(300, 10), (512, 1), (513, 2)], id="plain", marks=pytest.mark.slow),
        pytest.param(EAGLE, [(512, 1), (507, 5)], id="eagle"),
    ],
)
def test_figures_are_the_bytes_of_real_pools(
    make_engine, next_n_path, model_path, speculation, lengths
):
    model = next_n_path if speculation else model_path
    with make_engine(model=model, env={RING_FIXES: "1"}, **speculation) as engine:
        planner = Planner(engine.server_args)
        cap = engine.server_args.max_total_tokens
        sizes = planner.sizes(1 << 32, Machine(4, 0, 100), load_settings(), most=cap)
        assert sizes.tokens == cap == engine.scheduler.max_total_num_tokens < sizes.tokens_fitting
        assert sizes.tokens_scaled == cap
        pools = [engine.pool]
        if speculation:
            pools.append(engine.draft_runner.token_to_kv_pool)
        assert sum(map(device_bytes, pools)) == sizes.fixed + sizes.pools
        assert sizes.slots == engine.pool.num_req_slots

        cache = engine.tree
        entries = {e.name: e.host_pool for e in cache.host_pool_group.entries}
        records = entries.pop("deepseek_v4_c4_state")
        bytes_by_pool = dict(sizes.host_bytes)
        assert records.slots.nbytes == bytes_by_pool.pop("checkpoints")
        assert sum(map(host_bytes, entries.values())) == sum(bytes_by_pool.values())
        assert cache.checkpoints.mover.staging.nbytes == sizes.staging > 0
        assert sizes.layers == (0, len(engine.pool.unified_kv_pool.kv_buffer))

        whole = planner.sizes(1 << 32, Machine(4, 0, 100), load_settings())
        left = (1 << 32) - whole.fixed - whole.staging - whole.tokens * whole.per_token
        assert 0 <= left < PAGE * whole.per_token, "the budget is not spent to the last page"
        # Neither figure has the bytes of staging.
        plain = planner.sizes((1 << 32) - whole.staging, Machine(4, 0, 100), load_settings())
        engage.reset()
        released = planner.sizes((1 << 32) - whole.staging, Machine(4, 0, 100), load_settings())
        assert released.staging == 0 and plain.tokens < whole.tokens == released.tokens
        assert plain.tokens_scaled < whole.tokens_scaled == released.tokens_scaled
        check_prompts(engine, sizes, lengths)
        fewer = planner.sizes(
            (1 << 32) - whole.staging, Machine(4, 0, 100), load_settings(), running=8
        )
        assert fewer.tokens < released.tokens


def test_a_budget_is_spent_to_the_last_page(make_engine):
    with make_engine(env={RING_FIXES: "1"}) as engine:
        planner = Planner(engine.server_args)
        budget = 1 << 30
        sizes = planner.sizes(budget, Machine(4, 0, 100), load_settings())
        left = budget - sizes.fixed - sizes.staging - sizes.tokens * sizes.per_token
        assert 0 <= left < PAGE * sizes.per_token
        assert (
            planner.sizes(budget, Machine(4, 0, 100), load_settings(), running=8).tokens
            < sizes.tokens
        )
        check_prompts(engine, sizes, [(255, 2), (256, 1), (257, 10)])
        check_conversation(engine, sizes, Conversation(700, 20, turns=3, added=200))


@pytest.mark.slow
@pytest.mark.parametrize("stride, lengths", [("1", [(300, 730)]), ("2", [(600, 168), (600, 169)])])
def test_the_last_two_checkpoints_of_an_output_stay(make_engine, stride, lengths):
    env = {RING_FIXES: "1", "SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE": stride}
    with make_engine(env=env) as engine:
        sizes = Planner(engine.server_args).sizes(1 << 30, Machine(4, 0, 100), load_settings())
        check_prompts(engine, sizes, lengths)


def test_examples():
    for module, least in ((capacity, 1), (conversation, 10)):
        result = doctest.testmod(module)
        assert result.attempted >= least and result.failed == 0


lengths = st.integers(1, 1 << 20)


@given(length=lengths, new=lengths, ahead=st.integers(0, 64), pairs=st.booleans())
def test_pages_of_a_request(length, new, ahead, pairs):
    running, stored = running_pages(length, new, ahead), stored_pages(length, new, pairs)
    assert running * PAGE >= length + new + ahead > (running - 1) * PAGE
    assert stored * PAGE <= length + new - 1 - pairs < (stored + 1) * PAGE
    assert running_pages(length, new + 1, ahead) - running in (0, 1)
    assert stored <= running


@given(length=lengths, new=lengths, pairs=st.booleans(), stride=st.integers(1, 16))
def test_checkpoints_of_a_request(length, new, pairs, stride):
    policy = policy_of("grid", page_size=PAGE, stride=stride)
    kept = Conversation(length, new).checkpoints(pairs, policy)
    boundaries = range(stride, stored_pages(length, new, pairs) + 1, stride)
    prompt_part = [b for b in boundaries if b * PAGE <= length]
    output_part = [b for b in boundaries if b * PAGE > length]
    assert kept == len(prompt_part) + len(output_part[-2:])


PUBLISHED_SCALED, PUBLISHED_RING = 6_848_000, 12_569_600


@pytest.mark.parametrize("running, error", [(1024, 0.027), (2048, 0.012), (4096, -0.017)])
def test_the_publications_capacity(running, error):
    """6,848,000 full tokens became 12,569,600. What it leaves open is the bytes for KV pools: fitted on the
    first number alone, they predict the second within these errors, by max running requests at DP 8."""
    with sizer(False, running=running) as configurator:
        workers = configurator._resolve_max_running_requests_per_worker(0)
        budget = fitted_budget(
            lambda size: Planner.tokens_scaled(configurator, size, workers), PUBLISHED_SCALED
        )
        ring = configurator.calculate_pool_sizes(budget, PAGE).max_total_num_tokens
    assert ring / PUBLISHED_RING - 1 == pytest.approx(error, abs=0.002)


def sizes_of(**changes) -> Sizes:
    base = dict(
        layers=(0, 61),
        per_token=9000.0,
        per_slot=45e6,
        per_checkpoint=10**7,
        staging=0,
        fixed=10**9,
        pools=0,
        tokens=1000 * PAGE,
        tokens_fitting=1000 * PAGE,
        tokens_scaled=0,
        slots=9,
        host_pages=2000,
        host_page={"rows": 10**6},
        exact=True,
        records=500,
        stride=1,
        policy="grid",
        pairs=False,
        ahead=0,
    )
    return Sizes(**base | changes)


REQUEST = Conversation(49 * PAGE, PAGE + 1)
"""50 pages and a token while it runs, 50 pages and checkpoints cached."""


def test_what_runs_out_first():
    held = prompts(sizes_of(), REQUEST)
    assert held == {
        "device tokens": 1000 // 51,
        "request slots": 8,
        "host pages": 40,
        "checkpoints": 10,
    }
    assert first_limits(held) == ("request slots", "checkpoints")
    assert prompts(sizes_of(stride=4), REQUEST)["checkpoints"] == 500 // 12
    # The prompt's tail, a checkpoint 64 pages before it, and the output's last.
    assert checkpoints(sizes_of(policy="combined"), Conversation(70 * PAGE + 1, 1)) == 2
    assert (
        prompts(sizes_of(policy="combined"), Conversation(70 * PAGE + 1, 1))["checkpoints"] == 250
    )
    assert first_limits(prompts(sizes_of(exact=False, records=0, host_pages=0), REQUEST)) == (
        "request slots",
        None,
    )


HOST = Machine(288, 100, 100 + HOST_RESERVE / 1e9)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"fixed": 11 * 10**9}, "9 request slots take 11.0 GB, 11% of the KV memory"),
        ({"slots": 101}, "100 requests may run, but the device holds 19 of 12,544 tokens"),
        ({"tokens_fitting": 2000 * PAGE}, "--max-total-tokens leaves 2.3 GB of the KV memory"),
        (
            {},
            "checkpoints run out before pages: 10 times 12,544 + 257 tokens against 40, which need",
        ),
    ],
)
def test_warnings(changes, text):
    found = warnings(sizes_of(**changes), HOST, 100 * 10**9, REQUEST)
    assert any(text in line for line in found), found


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"host_shortfall": 1}, "the host pools need 7.0 GB of the rank's 100.0 GB"),
        ({"records": 0}, "no checkpoint of 10.0 MB fits"),
    ],
)
def test_what_the_host_refuses(changes, text):
    sizes = sizes_of(**changes)
    (found,) = host_refusals(sizes, HOST)
    assert text in found and host_refusals(sizes_of(), HOST) == []


def test_what_the_device_refuses():
    assert device_refusals(sizes_of(), REQUEST) == []
    (found,) = device_refusals(sizes_of(tokens=50 * PAGE), REQUEST)
    assert "the device holds 12,800 tokens, and no request of 12,544 + 257" in found


def test_no_warning_without_a_cause():
    sizes = sizes_of(records=2000)
    assert warnings(sizes, HOST, 100 * 10**9, REQUEST) == []


def test_every_rank_has_an_equal_share_of_what_sglang_leaves(monkeypatch):
    """SGLang's own answer, for eight ranks on two hosts."""
    from sglang.srt.mem_cache.pool_host import base

    assert base.HICACHE_HOST_MEMORY_RESERVE_BYTES == HOST_RESERVE
    monkeypatch.setattr(base, "available_host_memory_bytes", lambda **_: 500 * 10**9)
    monkeypatch.setattr(base, "ranks_per_host", lambda: 4)
    assert Machine(288, 100, 500, 4).host_bytes == base.host_memory_budget_bytes()
    assert Machine(288, 100, 5, 4).host_bytes == 0


@given(capacity=st.integers(0, 10_000), slot=st.integers(0, 100), pages=st.integers(1, 50))
def test_as_many_run_as_fit_with_their_slots(capacity, slot, pages):
    """Of ``capacity`` pages each request takes its own, and its slot the bytes of some."""
    talk = Conversation(pages * PAGE - 1, 1)

    def sizes(*, running, **_):
        left = max(capacity - running * slot, 0)
        return sizes_of(tokens=left * PAGE, slots=running + 1)

    assert most_running(sizes, talk) == capacity // (pages + slot)


@pytest.mark.parametrize("pairs", [False, True])
def test_the_pages_example_of_a_conversation(pairs):
    text = " ".join((Path(__file__).parents[2] / "docs" / "operating.md").read_text().split())
    example = re.search(r"An example: (.*?) Capacity is counted", text)[1]
    turns, first, new, added, *rest = (
        int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", example)
    )
    talk = Conversation(first, new, turns, added)
    prompts_of = [talk.prompt_of(turn) for turn in range(1, turns + 1)]
    apart = [stored_pages(length, new, pairs) for length in prompts_of]
    assert rest == [*prompts_of, talk.pages(pairs), *apart]


@given(
    length=st.integers(1, 5000),
    new=st.integers(1, 700),
    turns=st.integers(1, 8),
    added=st.integers(1, 700),
    pairs=st.booleans(),
    name=st.sampled_from(["grid", "tails", "combined"]),
)
def test_a_conversation_holds_one_path(length, new, turns, added, pairs, name):
    talk = Conversation(length, new, turns, added)
    alone = Conversation(talk.last, new)
    policy = policy_of(name, page_size=PAGE, spare=1 + pairs)
    assert talk.last == length + (turns - 1) * (new + added)
    assert talk.pages(pairs) == alone.pages(pairs) == stored_pages(talk.last, new, pairs)
    assert talk.running_pages(8) == running_pages(talk.last, new, 8)
    kept = talk.checkpoints(pairs, policy)
    assert kept <= talk.pages(pairs)
    # A later turn adds, and never takes away.
    assert kept >= replace(talk, turns=max(turns - 1, 1)).checkpoints(pairs, policy)
    if name == "tails":
        # Neither of its ends of a prompt, nor the one of an output.
        assert kept <= 3 * turns
