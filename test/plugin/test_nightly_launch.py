"""The nightly jobs' command lines: SGLang parses them, and exact reuse or HiSparse would engage on them."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from plan_runs import machine, write_pro
from rich.console import Console
from sglang_unified_kv.cli import app
from sglang_unified_kv.nightly import dry_run
from sglang_unified_kv.nightly.dry_run import lines, opinion
from sglang_unified_kv.nightly.jobs import JOBS, Job, Phase
from sglang_unified_kv.nightly.machine import MI355X, REFERENCE
from sglang_unified_kv.nightly.steps import STOCK
from typer.main import get_command

SCRIPTS = Path(__file__).parents[2] / "scripts" / "nightly"
MACHINES = {m.name: m for m in (MI355X, REFERENCE)}
REFERENCE_ENGINE = {"SGLANG_UNIFIED_KV_REFERENCE_ENGINE": "1"}
COMMAND = "import sys; from sglang_unified_kv.cli import app; app(sys.argv[1:])"


@pytest.fixture(scope="module")
def pro(tmp_path_factory):
    """A model that reads as many rows in a step as DeepSeek-V4-Pro."""
    folder = write_pro(tmp_path_factory.mktemp("pro"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"index_topk": MI355X.top_k}))
    return folder


def commands(job, where, out, model="MODEL", data=None):
    """Environment and words of every command of a printed plan."""
    found = []
    for line in lines(JOBS[job](where), where, str(model), data, out):
        for part in line.splitlines():
            if part.startswith("  $ "):
                words = shlex.split(part.removeprefix("  $ "))
                first = next(i for i, word in enumerate(words) if not word.split("=")[0].isupper())
                env = dict(word.split("=", 1) for word in words[:first])
                found.append((env, words[first:]))
    return found


def launches(job, where, out, model="MODEL"):
    """Environment and flags by phase."""
    found = [
        (env, words[words.index("--model-path") :])
        for env, words in commands(job, where, out, model)
        if "sglang.launch_server" in words
    ]
    return dict(zip([phase.name for phase in JOBS[job](where).phases], found, strict=True))


def ours(job, out, model="MODEL"):
    """Environment and flags of the launch with our features, as it is measured."""
    found = launches(job, MI355X, out, model)
    return found.get("on", found.get("verify"))


def programs(module, out):
    return [
        words[3:]
        for job in JOBS
        for where in MACHINES.values()
        for _, words in commands(job, where, out, data="data.jsonl")
        if words[2] == module
    ]


def asked(forks, name, env, options, flags):
    """The JSON of one of our commands about this launch, on the reference engine.

    SGLang's own variables of the real machine stay out: they ask for its kernels.
    """
    ours = {n: v for n, v in env.items() if "UNIFIED_KV_" in n and "HACK" not in n}
    flags = [word.replace("PORT", "30000") for word in flags]
    arguments = ["x", name, "--json", *options, "--", *flags, "--device", "cpu"]
    ended = forks.run(COMMAND, ours | REFERENCE_ENGINE, (), arguments)
    assert ended.stdout.startswith("{"), ended.stdout + ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("job", JOBS)
def test_doctor_says_that_on_engages_and_off_is_stock(job, forks, pro, tmp_path):
    """As the dry run asks where no MI355X is."""
    said = {}
    for phase in JOBS[job](MI355X).phases:
        launch = phase.launch
        if phase.name == "verify" and job != "l3_restart":
            # Asked as "on": its environment has one variable more.
            (on,) = (p.launch for p in JOBS[job](MI355X).phases if p.name == "on")
            assert launch == on.with_env(SGLANG_SWA_DBG_CHECKSUM="1")
            continue
        if phase.name == "off-again":
            assert launch == next(p.launch for p in JOBS[job](MI355X).phases if p.name == "off")
            continue
        argv = ["x", *launch.doctor(str(pro), here=False)[3:]]
        ended = forks.run(COMMAND, launch.variables(tmp_path), (), argv)
        assert ended.stdout.startswith("{"), ended.stdout + ended.stderr
        report = json.loads(ended.stdout)
        found = opinion(phase.name, report)
        assert not found.reasons
        said[phase.name] = found.verdict
        assert (report["decision"] == "engaged") or phase.name in STOCK
        if phase.name in STOCK:
            assert report["checks"]["requested"]
            assert not any(name.startswith("SGLANG_UNIFIED_KV_") for name in launch.env)
    feature = "HiSparse" if job.startswith("hisparse") else "Exact reuse"
    assert said.pop("off", "stock SGLang takes the flags") == "stock SGLang takes the flags"
    assert list(said.values()) == [f"{feature} would engage on ROCm; the machine was not checked"]


@pytest.mark.slow
def test_a_dry_run_on_the_reference_engine_passes_and_writes_nothing(tmp_path):
    script = SCRIPTS / "l3_restart"
    command = [
        sys.executable,
        "-W",
        "ignore",
        script,
        "--dry-run",
        "--reference",
        "--out",
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\ndoctor\n  verify: Exact reuse would engage here\n")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def dry_run_of(forks, tmp_path):
    """Exit code and output of a dry run whose doctors are forks: they need not import SGLang each."""

    def asked(command, env):
        # The forks have the rest already, and nothing of SGLang's.
        ours = {n: v for n, v in env.items() if n.startswith("SGLANG_") or n not in os.environ}
        ended = forks.run(COMMAND, ours, (), ["x", *command[3:]])
        return ended.rc, ended.stdout, ended.stderr

    def run(job, model):
        with open(tmp_path / "said", "w") as said:
            code = dry_run.run(Console(file=said), job, MI355X, str(model), None, tmp_path, asked)
        return code, (tmp_path / "said").read_text()

    return run


def test_a_launch_that_doctor_refuses_is_named_with_the_reasons(pro, dry_run_of):
    (good,) = JOBS["l3_restart"](MI355X).phases
    flags = list(good.launch.flags)
    at = flags.index("--hicache-ratio")
    broken = replace(good.launch, flags=(*flags[:at], *flags[at + 2 :]))
    job = Job("job", "", (replace(good, launch=broken), Phase("on", good.launch, ())))
    code, said = dry_run_of(job, pro)
    assert code == 1
    assert "\n  verify: refused\n    - " in said and "--hicache-ratio is not given" in said
    assert "\n  on: Exact reuse would engage" in said
    assert said.endswith("\ndoctor refuses 1 of 2 launches: verify\n")
    assert "config.json" not in said
    assert "no /dev/kfd here: asked with --device cpu" in said


def test_launches_that_are_alike_are_asked_about_once(tmp_path):
    asked = []

    def ask(command, env):
        asked.append(env)
        report = {"checks": {"launch flags": [], "requested": []}, "platform_checked": True}
        return 0, json.dumps(report | {"feature": "Exact reuse"}), ""

    found = list(dry_run.opinions(JOBS["prefill"](MI355X), MI355X, "MODEL", tmp_path, ask))
    assert [opinion.phase for opinion in found] == ["verify", "off", "on", "off-again"]
    # off-again is off; verify compares its restores.
    assert len(asked) == 3


def test_a_model_whose_config_is_not_there_is_refused_and_the_remedy_is_said(tmp_path, dry_run_of):
    code, said = dry_run_of(JOBS["l3_restart"](MI355X), tmp_path)
    assert code == 1 and "\n  verify: refused\n    - launch flags: SGLang rejects them" in said
    assert f"it reads {tmp_path}'s config.json" in said
    assert "sglang-unified-kv plan --write-config DIR" in said


def test_a_doctor_that_breaks_says_neither_yes_nor_no(tmp_path):
    code = "raise SystemExit('no disk')"
    report = dry_run.report_of(*dry_run.ask_doctor([sys.executable, "-c", code], {}))
    assert opinion("on", report).reasons == ["it ended with exit code 1: no disk"]
    assert opinion("off", report).reasons == ["it ended with exit code 1: no disk"]

    refused = json.dumps({"checks": {"launch flags": ["no"]}, "platform_checked": True})
    (good,) = JOBS["l3_restart"](MI355X).phases
    other = replace(good, name="on", launch=replace(good.launch, env={"A": "1"}))

    def ask(command, env):
        return next(answers)

    for phases, expected in (((good, other), 1), ((good,), 2)):
        answers = iter([(1, "", "no disk"), (0, refused, "")])
        with open(tmp_path / "said", "w") as said:
            console, job = Console(file=said), Job("job", "", phases)
            assert dry_run.run(console, job, MI355X, None, None, tmp_path, ask) == expected
        text = (tmp_path / "said").read_text()
        assert "verify: doctor gave no answer\n    - it ended with exit code 1: no disk" in text
        assert "\ndoctor gave no answer for verify\n" in text
        assert ("doctor refuses 1 of 2 launches: on" in text) == (expected == 1)


def test_a_doctor_that_never_ends_is_ended(monkeypatch):
    monkeypatch.setattr(dry_run, "DOCTOR_S", 0.1)
    endless = [sys.executable, "-c", "import signal; signal.pause()"]
    report = dry_run.report_of(*dry_run.ask_doctor(endless, {}))
    assert "no answer within 0 s" in opinion("on", report).reasons[0]


def test_doctor_gets_the_environment_of_its_launch_and_no_other():
    code = "import json, os; print(json.dumps({'checks': {'on': [*os.environ.values()]}}))"
    _, stdout, _ = dry_run.ask_doctor([sys.executable, "-c", code], {"LC_ALL": "C", "A": "b"})
    assert set(json.loads(stdout)["checks"]["on"]) == {"C", "b"}


def test_what_doctor_says_on_stderr_is_shown():
    report = {"checks": {"launch flags": ["SGLang's parser rejects them, see stderr"]}}
    code = f"import sys; print({json.dumps(report)!r}); sys.exit('argument --page-size: what?')"
    ended = dry_run.ask_doctor([sys.executable, "-c", code], {})
    found = opinion("on", dry_run.report_of(*ended))
    assert found.verdict == "refused"
    assert found.reasons[-1] == "launch flags: argument --page-size: what?"


STOCK_REPORT = {"requested": ["none is set"], "conditions": ["HiCache"], "obstacles": ["a"]}


@pytest.mark.parametrize(
    ("checks", "reasons"),
    [
        ({"launch flags": []}, []),
        ({"launch flags": ["unknown"]}, ["unknown"]),
        (
            {"launch flags": [], "requested": []},
            ["the environment turns one of our features on"],
        ),
    ],
)
def test_of_stock_sglang_only_its_own_verdict_counts(checks, reasons):
    for phase in STOCK:
        assert opinion(phase, {"checks": STOCK_REPORT | checks}).reasons == reasons


WEIGHTS = {"prefill": 216, "decode": 125, "hisparse_tp8_dp8": 125}
"""Gigabytes of weights of one GPU, an assumption: four or eight GPUs hold them all."""


@pytest.mark.parametrize("job", WEIGHTS)
def test_pools_hold_what_the_benchmarks_send(job, forks, pro, tmp_path):
    env, flags = ours(job, tmp_path, pro)
    sizes = MI355X.sizes
    new = sizes.output if job != "prefill" else 1
    ranks = 4 if job == "prefill" else 8
    options = [*machine(WEIGHTS[job], host=400, ranks=ranks)[1:], "--new-tokens", str(new)]
    report = asked(forks, "plan", env, options, [*flags, "--skip-tokenizer-init"])
    at_once = sizes.prefill[1] if job == "prefill" else max(sizes.decode)
    assert report["prompt_tokens"] == sizes.input
    assert report["slots"] * ranks >= at_once
    assert min(report["prompts"].values()) * ranks >= at_once, report["prompts"]
    assert report.get("host_shortfall", 0) == 0


BENCH = """
import json, sys
from sglang.benchmark import serving
serving.run_benchmark = lambda args: print(json.dumps(vars(args)), flush=True)
for command in json.loads(sys.argv[1]):
    sys.argv = ["bench_serving", *command]
    serving.cli_main()
"""


def test_benchmarks_are_parsed_by_sglangs_client(forks, tmp_path):
    found = [
        [w.replace("PORT", "30000") for w in p] for p in programs("sglang.bench_serving", tmp_path)
    ]
    assert len(found) > 20
    ended = forks.run(BENCH, argv=["x", json.dumps(found)])
    parsed = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert len(parsed) == len(found), ended.stderr
    for args in parsed:
        total = args["gsp_system_prompt_len"] + args["gsp_question_len"]
        assert total in (50_000, 1_000)
        assert args["gsp_system_prompt_len"] / total in (0.6, 0.8)
        assert args["tokenize_prompt"] and args["cache_report"] and args["gsp_num_groups"] == 1
    on_mi355x = [a for a in parsed if a["gsp_output_len"] == 1024]
    assert {a["max_concurrency"] for a in on_mi355x} == {32, 48, 64}


EVAL = """
import json, runpy, sys, types
class Parsed(types.ModuleType):
    def __getattr__(self, name):
        if name == "dump_metric":
            raise KeyboardInterrupt
        raise AttributeError(name)
# The first thing that the client does with its arguments is to import this.
sys.modules["sglang.test.test_utils"] = Parsed("parsed")
for command in json.loads(sys.argv[1]):
    sys.argv = ["run_eval", *command]
    try:
        runpy.run_module("sglang.test.run_eval", run_name="__main__")
    except KeyboardInterrupt:
        print("parsed", flush=True)
"""


def test_evaluations_are_parsed_by_sglangs_client(forks, tmp_path):
    found = programs("sglang.test.run_eval", tmp_path)
    assert len(found) > 10
    ended = forks.run(EVAL, argv=["x", json.dumps(found)])
    assert ended.stdout.splitlines().count("parsed") == len(found), ended.stderr


def test_checks_are_parsed_by_our_own_command(tmp_path):
    found = programs("sglang_unified_kv.cli", tmp_path)
    assert len(found) == 12
    for name, *arguments in found:
        context = get_command(app).commands[name].make_context(name, arguments)
        assert context.params["url"] == "http://127.0.0.1:PORT"


def test_the_published_launches_are_there(tmp_path):
    """Spec by spec: parallelism, cache, speculation, storage."""

    def flags(job):
        return " ".join(ours(job, tmp_path)[1])

    hicache = (
        "--enable-hierarchical-cache --hicache-write-policy write_through "
        "--hicache-io-backend direct --hicache-mem-layout page_first_direct"
    )
    eagle = (
        "--speculative-algorithm EAGLE --speculative-num-steps 3 "
        "--speculative-num-draft-tokens 4 --speculative-eagle-topk 1"
    )
    common = (
        "--attention-backend dsv4 --page-size 256 --swa-full-tokens-ratio 0.1 --enable-cache-report"
    )
    assert all(common in flags(job) for job in JOBS)
    assert all(hicache in flags(job) for job in ("prefill", "decode", "l3_restart"))
    assert "--tp-size 4 --attn-dp-size 4" in flags("prefill")
    assert "--tp-size 8 --attn-dp-size 8" in flags("decode") and eagle in flags("decode")
    assert (
        "--hicache-storage-backend file --hicache-storage-prefetch-policy wait_complete"
        in flags("l3_restart")
    )
    env, _ = ours("l3_restart", tmp_path)
    assert env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] == str(tmp_path / "storage")
    assert "--enable-hierarchical-cache" not in flags("radix_only")
    assert "--tp-size 8" in flags("hisparse_tp8") and "dp-size" not in flags("hisparse_tp8")
    assert "--tp-size 8 --attn-dp-size 8" in flags("hisparse_tp8_dp8")
    assert MI355X.sizes.restart_prompt // 256 * 256 == 2304


def test_sglang_knows_the_environment_of_the_real_machine():
    from sglang.srt import environ

    known = {name for name in vars(environ.Envs)}
    unknown = {n for n in MI355X.env if n.startswith("SGLANG_") and n not in known}
    # Read by its start-up script of ROCm, past the list of typed variables.
    assert unknown <= {"SGLANG_USE_ROCM700A"}
