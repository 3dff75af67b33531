"""``sglang-unified-kv plan`` with ``--enable-hisparse``: what it prints, plans and refuses."""

import json
import re
from pathlib import Path

import pytest
from plan_runs import SERVER, machine, run_plan, write_pro
from sglang_unified_kv.config import BIT_EXACT_HICACHE, HISPARSE
from sglang_unified_kv.launches import LINES
from sglang_unified_kv.names import SWITCHES
from sglang_unified_kv.plan.capacity import GB, HOST_RESERVE


@pytest.fixture(scope="module")
def pro(tmp_path_factory):
    return write_pro(tmp_path_factory.mktemp("pro"))


def command(model, *options, host=250, ratio=2, buffer=4096, flags=()):
    config = {"top_k": 256, "device_buffer_size": buffer, "host_to_device_ratio": ratio}
    hisparse = ["--disable-radix-cache", "--enable-hisparse"]
    hisparse += ["--hisparse-config", json.dumps(config)]
    launch = ["--model-path", str(model), *SERVER, *hisparse]
    return [*machine(host=host), *options, "--", *launch, *flags]


@pytest.fixture(autouse=True)
def no_switches(monkeypatch):
    """As for an operator who sets none; an empty value counts as unset."""
    for switch in SWITCHES:
        monkeypatch.setenv(switch, "")


def test_the_command_plans_hisparse(pro, tmp_path, recwarn):
    code, output = run_plan(command(pro, "--json", host=300))
    assert code == 0, output
    report = json.loads(output)
    hisparse = report["hisparse"]
    c4 = 30 * (1024 / (4 * 2) + 132 / 4)
    assert report["per_token"] == pytest.approx(c4 + 31 * 1024 / 128 + 2)
    assert hisparse["rows"] == report["tokens"] // 8 // 64 * 64
    assert report["host_bytes"] == {"cold C4 rows": report["tokens"] // 4 * 30 * 1024}
    assert hisparse["cold_bytes"] == report["host_bytes"]["cold C4 rows"]
    assert hisparse["hot_buffers"] == hisparse["rows"] // 4224 > report["slots"]
    assert hisparse["prefills"] == hisparse["rows"] // 12544
    assert report["limits_running"] == "request slots" and report["limits_cached"] is None
    assert report["warnings"] == []

    picture = tmp_path / "capacity.png"
    code, table = run_plan(command(pro, "--plot", str(picture), host=60))
    assert code == 1 and picture.read_bytes().startswith(b"\x89PNG")
    assert "sglang.launch_server" not in table
    assert f"device C4 rows of a layer {hisparse['rows']:,}" in table
    said = "the start would be refused; set --max-total-tokens to at most "
    assert said in table
    most = table.split(said)[1].split()[0]
    code, capped = run_plan(command(pro, "--json", host=60, flags=("--max-total-tokens", most)))
    assert code == 0, capped
    capped = json.loads(capped)
    assert capped["tokens"] == int(most) and capped["host_shortfall"] == 0
    assert capped["refusals"] == [] and capped["launch"]
    assert not [w for w in recwarn if "has no effect" in str(w.message)]


def test_as_many_run_as_have_tokens_and_device_rows(pro):
    """By tokens, by rows at a large ratio; none where the rows hold no such prompt."""
    without = [f for f in SERVER if f not in ("--max-running-requests", "1024")]

    def planned(ratio, tokens, code=0):
        arguments = command(pro, "--json", "--prompt-tokens", tokens, host=900, ratio=ratio)
        arguments[arguments.index("--model-path") + 2 :] = [
            *without,
            *arguments[arguments.index("--disable-radix-cache") :],
        ]
        found, output = run_plan(arguments)
        assert found == code, output
        return json.loads(output)

    for ratio, limit in ((2, "logical tokens"), (16, "device C4 rows")):
        found = planned(ratio, "50000")
        held, rank = found["prompts"], found["running"]["rank"]
        assert min(held.values()) == held["request slots"] == rank
        assert rank <= held[limit] <= rank + 1
        assert found["launch"]["command"][-2:] == ["--max-running-requests", str(8 * rank)]
    none = planned(128, "1000000", code=1)
    assert none["running"]["rank"] == 0 and none["prompts"]["logical tokens"] > 1
    assert any("a prompt of 1,000,000 tokens would be refused" in r for r in none["refusals"])


def test_what_hisparse_refuses_is_not_planned(pro):
    code, output = run_plan(command(pro), env={HISPARSE: "0"})
    assert code == 2 and "--enable-hisparse while SGLANG_UNIFIED_KV_HISPARSE is off" in output
    code, output = run_plan(command(pro, flags=("--pp-size", "2")))
    assert code == 2 and "--pp-size 2: pipeline parallelism" in output
    code, output = run_plan(command(pro, buffer=256))
    assert code == 2 and "device_buffer_size=256: a decode step" in output


PAGE = (Path(__file__).parents[2] / "docs" / "hisparse.md").read_text()
ROWS = re.findall(r"^\| (off|\d) \| (\d[\d,]+ \| .*) \|$", PAGE, re.M)


def planned(model, ratio, rank_gb):
    """The plan of the page's launch with another ratio, or without HiSparse."""
    line = LINES["hisparse"]
    config = line.value("--hisparse-config")
    _, name, *words = line.plan
    words[words.index("--model-path") + 1] = str(model)
    words[words.index("--host-gb") + 1] = str(rank_gb * line.ranks + HOST_RESERVE / GB)
    at = words.index("--enable-hisparse")
    words[at:] = ["--enable-hisparse", "--hisparse-config", config] if ratio else []
    if ratio:
        words[-1] = json.dumps(json.loads(config) | {"host_to_device_ratio": ratio})
    env = {} if ratio else {BIT_EXACT_HICACHE: "0"}
    code, output = run_plan([name, "--json", *words], line.plan_env | env)
    return code, json.JSONDecoder().raw_decode(output)[0]


@pytest.fixture(scope="module")
def without(pro):
    return planned(pro, 0, 1000)[1]


@pytest.mark.parametrize("ratio, row", ROWS, ids=[ratio for ratio, _ in ROWS])
def test_the_pages_table_is_what_plan_says(pro, without, ratio, row):
    cells = [f"{without['tokens']:,}", "", f"{without['per_token']:,.0f}", "all", "", ""]
    cells += ["", str(without["prompts"]["device tokens"])]
    if ratio != "off":
        _, found = planned(pro, int(ratio), 1000)
        hisparse, prompts = found["hisparse"], found["prompts"]
        gain = f"{100 * (found['tokens'] / without['tokens'] - 1):+.3g} %"
        cells = [f"{found['tokens']:,}", gain, f"{found['per_token']:,.0f}"]
        cells += [f"{hisparse['rows']:,}", f"{found['host_bytes']['cold C4 rows'] / GB:.1f} GB"]
        cells += [f"{hisparse['longest_sequence']:,}", f"{prompts['device C4 rows']:,}"]
        cells += [f"{prompts['logical tokens']:,}"]
    assert [cell.strip() for cell in row.split("|")] == cells


def test_the_pages_limit_of_the_host_is_what_plan_says(pro):
    text = " ".join(PAGE.split())
    said = re.search(r"with (\d+) GB per rank S = (\d) is refused [^.]*? at most ([\d,]+),", text)
    gb, ratio, most = said.groups()
    code, report = planned(pro, int(ratio), int(gb))
    assert code == 1
    assert any(
        f"set --max-total-tokens to at most {most.replace(',', '')}" in r
        for r in report["refusals"]
    )
