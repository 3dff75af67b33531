"""What SGLang has right, kept against an upgrade: rings and C4 states are paid per slot."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_objects import PAGE, sizer

GIB = 1 << 30
budgets = st.integers(20 * GIB, 250 * GIB)
requests = st.integers(1, 300)


@pytest.fixture(scope="module", params=[False, True], ids=["stock", "fixed"])
def configurator(request):
    with sizer(request.param) as found:
        yield found


def footprint(configurator, tokens: int, running: int) -> float:
    return (
        tokens * configurator.bytes_per_full_token
        + configurator._fixed_swa_bytes(running)
        + configurator._fixed_c4_state_bytes(running)
        + configurator._get_c128_state_fixed_bytes(running)
    )


def sized(configurator, budget: int, running: int) -> int:
    configurator.requested_max_running_requests_per_worker = running
    return configurator.calculate_pool_sizes(budget, PAGE).max_total_num_tokens


@given(running=requests, more=requests)
def test_a_slot_costs_the_same_whoever_has_it(configurator, running, more):
    ring = configurator._fixed_swa_bytes
    per_slot = ring(1) / 2
    assert ring(running) == pytest.approx(per_slot * (running + 1), rel=1e-6)
    assert configurator._fixed_c4_state_bytes(running + more) > configurator._fixed_c4_state_bytes(
        running
    )


@settings(deadline=None)
@given(budget=budgets, running=requests)
def test_the_budget_is_kept_and_used(configurator, budget, running):
    tokens = sized(configurator, budget, running)
    assert footprint(configurator, tokens, running) <= budget
    assert footprint(configurator, tokens + PAGE, running) > budget
    assert tokens % PAGE == 0


@settings(deadline=None)
@given(budget=budgets, more=st.integers(0, 50 * GIB), running=requests, others=requests)
def test_more_memory_gives_more_tokens_and_more_requests_fewer(
    configurator, budget, more, running, others
):
    assert sized(configurator, budget, running) <= sized(configurator, budget + more, running)
    few, many = sorted((running, others))
    assert sized(configurator, budget, many) <= sized(configurator, budget, few)


@settings(deadline=None)
@given(budget=budgets, running=requests, share=st.floats(0.01, 1))
def test_a_cap_never_raises_capacity(configurator, budget, running, share):
    tokens = sized(configurator, budget, running)
    capped = configurator.calculate_pool_sizes_from_max_tokens(int(tokens * share), PAGE)
    assert capped.max_total_num_tokens <= tokens
    assert footprint(configurator, capped.max_total_num_tokens, running) <= budget


def test_states_are_sized_once_concurrency_is_known(configurator):
    config = configurator.calculate_pool_sizes(100 * GIB, PAGE)
    assert config.c4_state_pool_size == 0
    config.max_running_requests = 128
    final = configurator.finalize_with_max_running_requests(config)
    assert final.c4_state_pool_size == 129 * configurator.ring_sizes[4]
    assert final.c128_state_pool_size == 129 * configurator.ring_sizes[128]
