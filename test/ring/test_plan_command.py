"""``sglang-unified-kv plan``: what it prints, plans and refuses. Once as a process of its own."""

import json
import logging
from dataclasses import fields, replace

import pytest
from plan_runs import SERVER, machine, process_state, run_plan, write_pro
from ring_objects import PAGE
from sglang_unified_kv.cli.plan import _planner
from sglang_unified_kv.edits.exact.pool_sizing import staging_bytes
from sglang_unified_kv.edits.ring import sizing as ring_sizing
from sglang_unified_kv.plan.capacity import GB, HOST_RESERVE, Machine, Sizes, checkpoints
from sglang_unified_kv.plan.choice import SLACK, best_split
from sglang_unified_kv.plan.conversation import Conversation, stored_pages

HICACHE = (
    "--enable-hierarchical-cache --hicache-write-policy write_through --hicache-io-backend direct "
    "--hicache-mem-layout page_first_direct"
).split()
BUDGET = "SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB"


def command(model, *options, weights=125, host=250, flags=()) -> list[str]:
    return [*machine(weights, host), *options, "--", *launch(model), *flags]


def launch(model) -> list[str]:
    return ["--model-path", str(model), *SERVER, *HICACHE]


def planned(*args, env=(), **kwargs):
    """The command in this process: exit code and output."""
    return run_plan(command(*args, **kwargs), env)


def report_of(*args, code=0, **kwargs) -> dict:
    found, output = planned(args[0], "--json", *args[1:], **kwargs)
    assert found == code, output
    report = json.loads(output)
    assert bool(report["refusals"]) == (report["launch"] is None) == (code == 1)
    return report


@pytest.fixture(scope="module")
def pro(tmp_path_factory):
    return write_pro(tmp_path_factory.mktemp("pro"))


def test_the_command_reports_and_draws(forks, pro, tmp_path):
    picture = tmp_path / "capacity.png"
    script = "import sys; from sglang_unified_kv.cli import app; app(sys.argv[1:])"
    done = forks.run(script, argv=["x", *command(pro, "--json", "--plot", str(picture))])
    assert done.rc == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["per_token"] == pytest.approx(8918.0, abs=0.1)
    assert report["slots"] == 129 and report["tokens"] > 1.7 * report["tokens_scaled"]
    assert report["available"] == int((288 * 0.85 - 125) * 1e9)
    assert picture.read_bytes().startswith(b"\x89PNG")
    budget = {"SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB": "0.1"}
    code, table = planned(pro, env=budget)
    assert code == 0
    assert f"{report['tokens']:,}" in table and "warning: checkpoints run out" in table
    assert table.index("warning:") < table.index("python -m sglang.launch_server")


def test_what_sglang_derives_from_a_gpu_is_asked_for_or_said(pro):
    flags = [f for f in command(pro) if f not in ("--mem-fraction-static", "0.85")]
    code, output = run_plan(flags, ())
    assert code == 2 and "--mem-fraction-static is not given" in " ".join(output.split())
    said = "--chunked-prefill-size is not given, and SGLang chooses it by the GPU"
    assert any(said in line for line in report_of(pro)["warnings"])
    given = report_of(pro, flags=["--chunked-prefill-size=8192"])["warnings"]
    assert not any(said in line for line in given)


def test_what_is_not_given_is_chosen_and_a_launch_that_says_so_is_planned_alike(pro):
    flags = [f for f in launch(pro) if f not in ("--max-running-requests", "1024")]
    options = [*machine(host=150), "--json", "--new-tokens", "500"]
    code, output = run_plan([*options, "--", *flags])
    first = json.loads(output)
    assert code == 0 and sum("because none is given" in note for note in first["notes"]) == 2
    chosen = first["launch"]["command"][3 + len(flags) :]
    ratio, running = first["best_split"]["hicache_ratio"], first["running"]["server"]
    assert chosen == ["--hicache-ratio", f"{ratio:g}", "--max-running-requests", str(running)]
    budget = first["launch"]["env"][BUDGET]
    assert float(budget) == first["best_split"]["checkpoint_host_gb"]
    assert first["slots"] - 1 == first["running"]["rank"] == running // 8

    code, output = run_plan([*options, "--", *flags, *chosen], {BUDGET: budget})
    again = json.loads(output)
    assert code == 0 and not any("because none is given" in note for note in again["notes"])
    assert again["launch"] == first["launch"]
    same = [name for name in first if name not in ("notes", "best_split")]
    assert [again[name] for name in same] == [first[name] for name in same]


def test_a_chosen_division_fits_with_slack_and_holds_the_most(pro):
    found = report_of(pro, host=200)
    split = found["best_split"]
    held = found["prompts"]
    assert held["host pages"] == split["prompts"] <= held["checkpoints"]
    used = sum(found["host_bytes"].values())
    assert 0.93 * 200e9 < used <= 0.95 * 200e9
    ratio = f"--hicache-ratio={split['hicache_ratio'] + 0.03:.2f}"
    budget = {BUDGET: str(split["checkpoint_host_gb"])}
    more = report_of(pro, host=200, env=budget, flags=[ratio])
    assert sum(more["host_bytes"].values()) > 0.95 * 200e9 and more["host_shortfall"] == 0
    assert more["best_split"]["prompts"] <= more["prompts"]["host pages"]
    assert f"{split['prompts']:,} of 50,000 + 1,000 tokens; chosen" in found["notes"][1]


def test_what_is_given_of_the_hosts_division_stays(pro):
    budget = report_of(pro, env={BUDGET: "40"})
    assert budget["launch"]["env"][BUDGET] == "40"
    assert budget["host_bytes"]["checkpoints"] == pytest.approx(40e9, abs=1e7)
    assert 0.93 * 250e9 < sum(budget["host_bytes"].values()) <= 0.95 * 250e9
    # The pages' prompts need 7 GB, which the default has not beside so many pages.
    ratio = report_of(pro, host=125, flags=["--hicache-ratio", "1"])
    assert "--hicache-ratio" not in ratio["launch"]["command"][3 + len(launch(pro)) + 2 :]
    assert ratio["prompts"]["checkpoints"] >= ratio["prompts"]["host pages"]
    assert 6.9 < float(ratio["launch"]["env"][BUDGET]) < 7.1
    # With more room it is the default, as if nothing were said.
    room = report_of(pro, flags=["--hicache-ratio", "1"])
    assert room["records"] == room["host_pages"] // 16
    # And never more than the pages leave.
    little = report_of(pro, host=119, flags=["--hicache-ratio", "1"])
    assert little["host_shortfall"] == 0 and any("run out" in w for w in little["warnings"])
    assert sum(little["host_bytes"].values()) == pytest.approx(119e9, abs=3e7)


def test_a_division_never_exceeds_the_host_and_is_none_where_no_prompt_fits(pro):
    found = report_of(pro, host=200)
    names = {field.name for field in fields(Sizes)}
    sizes = Sizes(**{name: value for name, value in found.items() if name in names})
    page, one = sum(sizes.host_page.values()), sizes.per_checkpoint
    for host in (*(0.3 + i / 100 for i in range(20)), 3.3, 17.7, 120, 200, 777.7):
        bytes_of = Machine(288, 125, host + HOST_RESERVE / GB)
        usable = bytes_of.host_bytes * (1 - SLACK)
        for length in (300, 5_000, 50_000, 700_000):
            talk = Conversation(length, 100)
            best = best_split(sizes, bytes_of, talk)
            prompt = stored_pages(length, 100, sizes.pairs) * page
            prompt += checkpoints(sizes, talk) * one
            # Three digits, a hundredth of a GB, and what is left of a prompt or a page.
            slack = host * GB / 100 + 10**7 + prompt
            if best is None:
                assert usable < prompt + slack
                continue
            assert best.prompts > 0
            pages = int(best.hicache_ratio * sizes.tokens) // PAGE
            records = int(best.checkpoint_host_gb * GB // one)
            assert pages * page + records * one <= usable
            assert records >= max(best.prompts * checkpoints(sizes, talk), 1)
            assert best.prompts * prompt > usable - 2 * slack
            # Without checkpoints, or beside a given budget of them.
            plain = best_split(replace(sizes, exact=False), bytes_of, talk)
            assert plain.checkpoint_host_gb == 0 and plain.prompts >= best.prompts
            given = best_split(sizes, bytes_of, talk, best.checkpoint_host_gb)
            assert given.prompts == pytest.approx(best.prompts, rel=0.02, abs=1)


def test_what_would_be_refused_is_said_and_no_line_is_printed(pro):
    budget = {BUDGET: "120"}
    flags = ["--hicache-ratio", "2"]
    whole = report_of(pro, env=budget, host=1000, flags=flags)
    assert whole["host_shortfall"] == 0
    needed = sum(whole["host_bytes"].values())
    small = report_of(pro, code=1, env=budget, host=60, flags=flags)
    assert small["host_bytes"] == whole["host_bytes"]
    assert small["host_shortfall"] == needed - 60 * 10**9
    assert (
        f"the host pools need {needed / 1e9:.1f} GB of the rank's 60.0 GB" in small["refusals"][0]
    )
    # Without a budget checkpoints get what the pages leave, which is nothing here.
    none = report_of(pro, code=1, host=60, flags=flags)
    assert none["records"] == 0 and none["host_shortfall"] > 0
    assert any("no checkpoint of" in line for line in none["refusals"])
    code, table = planned(pro, host=60, flags=flags)
    assert code == 1 and "no: the host pools need" in table
    assert "sglang.launch_server" not in table
    # What would hold something is said all the same.
    assert none["best_split"]["prompts"] > 100 and "; chosen" not in none["notes"][1]
    assert f", {BUDGET}=" in none["notes"][1]


def test_nothing_that_fits_is_refused(pro):
    found = report_of(pro, code=1, host=0.1)
    (line,) = found["refusals"]
    assert "none holds one conversation of 50,000 + 1,000 tokens with its checkpoints" in line
    (line,) = report_of(pro, code=1, host=50, env={BUDGET: "50"})["refusals"]
    assert f"beside {BUDGET}=50 in the rank's 50.0 GB" in line
    (line,) = report_of(pro, "--prompt-tokens", "20000000", code=1, host=500)["refusals"]
    assert "and no request of 20,000,000 + 1,000" in line


def test_ranks_of_a_host_share_its_memory(pro):
    def share(*flags, options=()):
        report = report_of(pro, *options, flags=flags)
        whole = report["machine"]["host_gb"] * GB - HOST_RESERVE
        return round(whole / report["machine"]["host_bytes"], 3), report["machine"]

    assert share() == (8, report_of(pro)["machine"])
    assert share("--nnodes", "2")[0] == 4
    assert share("--attn-dp-size", "1", "--dp-size", "2")[0] == 16
    ranks, found = share(options=("--ranks-per-host", "2"))
    assert ranks == found["ranks_per_host"] == 2 and found["host_bytes"] == pytest.approx(1e12)


def test_as_many_requests_as_fit_are_advised(pro):
    found = report_of(pro)
    rank = found["running"]["rank"]
    assert found["running"]["server"] == 8 * rank
    assert (
        f"{rank:,} of 50,000 + 1,000 tokens fit on a rank at once, {8 * rank:,} on the server"
        in (note := found["notes"][0])
    )
    assert note.endswith("; given is 1,024")
    for more in (0, 1):
        running = ("--max-running-requests", str(8 * (rank + more)))
        held = report_of(pro, flags=running)["prompts"]
        assert held["request slots"] == rank + more
        assert (held["device tokens"] >= rank + more) == (not more)


def test_turns_that_grow_hold_one_path(pro):
    turns = ("--turns", "5", "--turn-tokens", "2000")
    found, alone = report_of(pro, *turns), report_of(pro, "--prompt-tokens", "62000")
    talk = found["conversation"]
    assert talk["last"] == 50_000 + 4 * 3_000 == alone["prompt_tokens"]
    assert talk["name"] == "5 turns to 62,000 + 1,000 tokens"
    assert talk["pages"] == alone["conversation"]["pages"] == (63_000 - 1) // PAGE
    assert talk["checkpoints"] > alone["conversation"]["checkpoints"] == 3
    for name in ("device tokens", "request slots"):
        assert found["prompts"][name] == alone["prompts"][name]
    assert found["best_split"]["prompts"] < alone["best_split"]["prompts"]
    code, table = planned(pro, *turns)
    assert code == 0 and f"pages of {talk['name']} {talk['pages']}" in table


def test_a_cap_on_tokens_is_planned(pro):
    free = report_of(pro)
    capped = report_of(pro, flags=("--max-total-tokens", "100100"))
    assert capped["tokens"] == capped["tokens_scaled"] == 100100 // PAGE * PAGE
    assert capped["tokens_fitting"] == free["tokens"]
    assert any("--max-total-tokens leaves" in line for line in capped["warnings"])
    # The host holds as much of them as before.
    assert capped["best_split"]["hicache_ratio"] > 50 * free["best_split"]["hicache_ratio"]
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
    assert code == 2 and "--hicache-size 90: SGLang does not size HiCache" in output
    # What --lora-paths implies is known after SGLang's own checks.
    code, output = planned(pro, flags=("--hicache-storage-backend", "file", "--lora-paths", "a=b"))
    assert code == 2 and "--enable-lora (--lora-paths sets it) with a storage" in output
    code, output = planned("/nonexistent/model")
    assert code == 2 and "SGLang rejects this" in output
