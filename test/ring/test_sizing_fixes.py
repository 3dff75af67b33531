"""G4, G6, G7: sizes of the pools."""

import logging

import pytest
from ring_objects import PAGE, sizer

GIB = 1 << 30


def tokens(configurator, gib=118.6) -> int:
    return configurator.calculate_pool_sizes(int(gib * GIB), PAGE).max_total_num_tokens


def test_g4_a_draft_layer_without_compressed_rows_costs_no_tokens():
    with sizer(False) as stock, sizer(True) as fixed, sizer(False, speculative=False) as alone:
        assert stock.bytes_per_full_token == pytest.approx(9064.2, abs=0.1)
        assert fixed.bytes_per_full_token == pytest.approx(alone.bytes_per_full_token)
        assert fixed._fixed_swa_bytes(128) == stock._fixed_swa_bytes(128)
        assert tokens(fixed) / tokens(stock) == pytest.approx(62 / 61, abs=1e-4)


@pytest.mark.parametrize("unified, speculative", [(True, False), (False, True), (False, False)])
def test_g4_changes_nothing_else(unified, speculative):
    same = dict(unified=unified, speculative=speculative)
    with sizer(False, **same) as stock, sizer(True, **same) as fixed:
        assert fixed.bytes_per_full_token == stock.bytes_per_full_token
        assert tokens(fixed) == tokens(stock)


def warned(caplog, fixes, **options) -> list[str]:
    caplog.clear()
    with sizer(fixes, **options) as configurator, caplog.at_level(logging.WARNING):
        tokens(configurator, gib=400)
    return [r.getMessage() for r in caplog.records if "request slots" in r.getMessage()]


def test_g6_unasked_slots_are_said_with_their_cost(caplog):
    (line,) = warned(caplog, True, running=None)
    with sizer(True, running=None) as configurator:
        running = configurator._resolve_max_running_requests_per_worker(400 * GIB)
        rings = configurator._fixed_swa_bytes(running)
    assert "--max-running-requests is unset" in line and f"{running + 1} request slots" in line
    assert float(line.split("take ")[1].split(" GB")[0]) > rings / 1e9 > 10


def test_g6_is_silent_where_nothing_was_left_open(caplog):
    assert warned(caplog, True, running=1024) == []
    assert warned(caplog, True, running=None, unified=False) == []
    assert warned(caplog, False, running=None) == []


# SGLang sets the extra slots of a decode node itself, so there they are a number.
@pytest.mark.parametrize(
    "mode, extra",
    [(mode, extra) for mode in ("prefill", "null") for extra in (None, 0, 64)]
    + [("decode", 0), ("decode", 64)],
)
def test_g7_a_node_that_may_change_roles_has_the_decode_nodes_slots(mode, extra):
    same = dict(mode=mode, extra_slots=extra, switch=True)
    with sizer(False, **same) as stock, sizer(True, **same) as fixed:
        assert fixed._get_num_req_slots(128) == 129 + (extra or 0)
        if mode != "decode":
            assert stock._get_num_req_slots(128) == 129


def test_g7_only_with_the_role_switch():
    with sizer(True, mode="prefill", extra_slots=64) as configurator:
        assert configurator._get_num_req_slots(128) == 129
