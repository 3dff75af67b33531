"""``sglang-unified-kv plan``: what it prints, plans and refuses. Once as a process of its own."""

import json
import logging
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from plan_runs import SERVER, machine, process_state, run_plan, write_pro
from ring_objects import PAGE
from sglang_unified_kv.cli.plan import _planner
from sglang_unified_kv.edits import ring_sizing
from sglang_unified_kv.edits.pool_sizing import staging_bytes
from sglang_unified_kv.ring.capacity import (
    GB,
    Machine,
    Sizes,
    best_split,
    checkpoints,
    stored_pages,
)

HICACHE = (
    "--enable-hierarchical-cache --hicache-write-policy write_through --hicache-io-backend direct "
    "--hicache-mem-layout layer_first"
).split()


def command(model, *options, weights=125, host=250, flags=()) -> list[str]:
    return [*machine(weights, host), *options, "--", *launch(model), *flags]


def launch(model) -> list[str]:
    return ["--model-path", str(model), *SERVER, *HICACHE]


def planned(*args, env=(), **kwargs):
    """The command in this process: exit code and output."""
    return run_plan(command(*args, **kwargs), env)


def report_of(*args, **kwargs) -> dict:
    code, output = planned(args[0], "--json", *args[1:], **kwargs)
    assert code == 0, output
    return json.loads(output)


@pytest.fixture(scope="module")
def pro(tmp_path_factory):
    return write_pro(tmp_path_factory.mktemp("pro"))


def test_the_command_reports_and_draws(pro, tmp_path):
    picture = tmp_path / "capacity.png"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "sglang_unified_kv.cli"]
        + command(pro, "--json", "--plot", str(picture)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["per_token"] == pytest.approx(8918.0, abs=0.1)
    assert report["slots"] == 129 and report["tokens"] > 1.7 * report["tokens_scaled"]
    assert report["available"] == int((288 * 0.85 - 125) * 1e9)
    assert picture.read_bytes().startswith(b"\x89PNG")
    budget = {"SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB": "0.1"}
    code, table = planned(pro, env=budget)
    assert code == 0
    assert f"{report['tokens']:,}" in table and "warning: checkpoints run out" in table


def test_what_sglang_derives_from_a_gpu_is_asked_for_or_said(pro):
    flags = [f for f in command(pro) if f not in ("--mem-fraction-static", "0.85")]
    code, output = run_plan(flags, ())
    assert code == 2 and "--mem-fraction-static is not given" in " ".join(output.split())
    said = "--chunked-prefill-size is not given, and SGLang chooses it by the GPU"
    assert any(said in line for line in report_of(pro)["warnings"])
    given = report_of(pro, flags=["--chunked-prefill-size=8192"])["warnings"]
    assert not any(said in line for line in given)


def test_the_best_division_of_host_memory_fits_and_no_larger_one_does(pro):
    first = report_of(pro, host=200)["best_split"]
    budget = {"SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB": str(first["checkpoint_host_gb"])}
    ratio = first["hicache_ratio"]
    found = report_of(pro, env=budget, host=200, flags=[f"--hicache-ratio={ratio}"])
    assert found["host_shortfall"] == 0 and found["best_split"] == first
    held = found["prompts"]
    assert held["host pages"] == first["prompts"] <= held["checkpoints"]
    assert held["host pages"] > report_of(pro, host=200)["prompts"]["checkpoints"]
    more = report_of(pro, env=budget, host=200, flags=[f"--hicache-ratio={ratio + 0.02:.2f}"])
    assert more["host_shortfall"] > 0


def test_a_division_never_exceeds_the_host_and_is_none_where_no_prompt_fits(pro):
    found = report_of(pro, host=200)
    names = {field.name for field in fields(Sizes)}
    sizes = Sizes(**{name: value for name, value in found.items() if name in names})
    page, one = sum(sizes.host_page.values()), sizes.per_checkpoint
    for host in (*(0.3 + i / 100 for i in range(20)), 3.3, 17.7, 120, 200, 777.7):
        for length in (300, 5_000, 50_000, 700_000):
            best = best_split(sizes, Machine(288, 125, host), length, 100)
            prompt = stored_pages(length, 100, sizes.pairs) * page
            prompt += checkpoints(sizes, length, 100) * one
            # Three digits, a hundredth of a GB, and what is left of a prompt or a page.
            slack = host * GB / 100 + 10**7 + prompt
            if best is None:
                assert host * GB < prompt + slack
                continue
            assert best.prompts > 0
            pages = int(best.hicache_ratio * sizes.tokens) // PAGE
            records = int(best.checkpoint_host_gb * GB // one)
            assert pages * page + records * one <= host * GB
            assert records >= max(best.prompts * checkpoints(sizes, length, 100), 1)
            assert best.prompts * prompt > host * GB - 2 * slack
    assert best_split(replace(sizes, host_pages=0), Machine(288, 125, 200), 300, 100) is None
    assert best_split(replace(sizes, exact=False), Machine(288, 125, 200), 300, 100) is None


def test_too_little_host_memory_is_said(pro):
    budget = {"SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB": "120"}
    whole = report_of(pro, env=budget, host=1000)
    assert whole["host_shortfall"] == 0
    needed = sum(whole["host_bytes"].values())
    small = report_of(pro, env=budget, host=60)
    assert small["host_bytes"] == whole["host_bytes"]
    assert small["host_shortfall"] == needed - 60 * 10**9
    said = f"the host pools need {needed / 1e9:.1f} GB of 60.0 GB"
    assert any(said in line for line in small["warnings"]), small["warnings"]
    # Without a budget checkpoints take a quarter of what the pages leave, which is nothing here.
    none = report_of(pro, host=60)
    assert none["records"] == 0 and none["host_shortfall"] > 0
    assert any("no checkpoint of" in line for line in none["warnings"])


def test_a_cap_on_tokens_is_planned(pro):
    free = report_of(pro)
    capped = report_of(pro, flags=("--max-total-tokens", "100100"))
    assert capped["tokens"] == capped["tokens_scaled"] == 100100 // PAGE * PAGE
    assert capped["tokens_fitting"] == free["tokens"]
    assert any("--max-total-tokens leaves" in line for line in capped["warnings"])
    assert capped["host_pages"] < free["host_pages"] / 100
    more = report_of(pro, flags=("--max-total-tokens", str(1 << 30)))
    assert more["tokens"] == free["tokens"] and more["warnings"] == free["warnings"]


def test_the_fullest_pipeline_stage_is_planned(pro):
    released = {"SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "0"}
    one = report_of(pro, env=released)
    assert one["layers"] == [0, 61] and not one["exact"]
    two = report_of(pro, env=released, flags=("--pp-size", "2"))
    # The second half has 16 of the 30 C4 layers.
    assert two["layers"] == [30, 61]
    assert two["per_token"] == pytest.approx(one["per_token"] * 16 / 30, rel=0.01)
    assert two["tokens"] / one["tokens"] == pytest.approx(30 / 16, rel=0.02)
    uneven = {"SGLANG_PP_LAYER_PARTITION": "41,20"}
    heavy = report_of(pro, env=released | uneven, flags=("--pp-size", "2"))
    assert heavy["layers"] == [0, 41] and heavy["tokens"] < two["tokens"]
    code, output = planned(pro, flags=("--pp-size", "2"))
    assert code == 2 and "--pp-size 2: pipeline parallelism is not supported" in output


def test_g6_the_cost_of_slots_is_without_staging(pro, caplog, monkeypatch):
    with process_state():
        planner, _, _ = _planner(launch(pro))
        logging.disable(logging.NOTSET)
        (sizer,) = planner.stages
        sizer.requested_max_running_requests_per_worker = None
        assert staging_bytes(sizer) > 10**7
        # SGLang's own logging has taken pytest's handler from the root.
        monkeypatch.setattr(ring_sizing.logger, "handlers", [caplog.handler])
        sizer.calculate_pool_sizes(400 * 10**9, PAGE)
        slots = sizer._resolve_max_running_requests_per_worker(400 * 10**9)
        gigabytes = planner.fixed(sizer, slots) / 1e9
    (line,) = [r.getMessage() for r in caplog.records if "is unset" in r.getMessage()]
    assert f"take {gigabytes:.2f} GB of 400.00 GB" in line


def test_what_cannot_be_planned_is_said(pro):
    code, output = planned(pro, weights=250)
    assert code == 2 and "--weights-gb 250" in output
    code, output = planned(pro, flags=("--enable-deepseek-v4-fp4-indexer",))
    assert code == 2 and "--enable-deepseek-v4-fp4-indexer is True" in output
    assert "leave the flag out" in output
    code, output = planned(pro, flags=("--hicache-size", "90"))
    assert code == 2 and "--hicache-size 90: not for DeepSeek-V4; use --hicache-ratio" in output
    code, output = planned("/nonexistent/model")
    assert code == 2 and "SGLang rejects this" in output
