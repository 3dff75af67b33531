"""The table of launch lines: SGLang takes each, doctor says yes to each and no to broken ones."""

import doctest
import json
import shlex

import pytest
from plan_runs import run_plan, write_pro
from sglang_unified_kv import launches
from sglang_unified_kv.cli.plan import PRODUCT_SWITCHES
from sglang_unified_kv.launches import (
    LINES,
    REFERENCE_ENGINE,
    pairs,
    reduced,
)
from sglang_unified_kv.plan.capacity import GB

LINE = pytest.mark.parametrize("line", LINES.values(), ids=LINES)
ON_GPU = [line for line in LINES.values() if not line.on_reference_engine]
DOCTOR = "import sys; from sglang_unified_kv.cli import app; app(sys.argv[1:])"
SWITCHES = "SGLANG_UNIFIED_KV_"
BUDGET = "SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB"


@pytest.fixture(scope="module")
def pro(tmp_path_factory):
    return str(write_pro(tmp_path_factory.mktemp("pro")))


def ours(line):
    return {name: value for name, value in line.env.items() if name.startswith(SWITCHES)}


@pytest.fixture(scope="module")
def doctor(forks, pro):
    """The report on these flags; the real machine's kernels do not run here."""

    def run(env, flags):
        argv = ["x", "doctor", "--json", "--", *flags, "--model-path", pro, "--device", "cpu"]
        ended = forks.run(DOCTOR, env | REFERENCE_ENGINE, argv=argv)
        assert ended.stdout.startswith("{"), ended.stdout + ended.stderr
        report = json.loads(ended.stdout)
        assert report["engages"] is (ended.rc == 0)
        return report

    return run


def test_examples():
    ran = doctest.testmod(launches)
    assert ran.attempted > 3 and not ran.failed


@LINE
def test_a_line_is_printed_as_what_it_is(line):
    printed = launches.block(line.command, line.env)
    words = shlex.split(printed.replace("\\\n", ""))
    env = dict(word.split("=", 1) for word in words[: len(line.env)])
    assert env == line.env and words[len(env) :] == line.command
    assert max(map(len, printed.splitlines())) <= launches.WIDTH
    assert shlex.split(launches.shell(line.command, line.env)) == words


@LINE
def test_doctor_says_yes(line, doctor):
    report = doctor(ours(line), line.flags)
    wrong = {name: reasons for name, reasons in report["checks"].items() if reasons}
    assert report["engages"] and report["decision"] == "engaged" and not wrong, wrong
    assert report["feature"] == ("HiSparse" if line.hisparse else "Exact reuse")
    # The chunk is told to the server, and is a rank's.
    assert all(note.startswith("--chunked-prefill-size ") for note in report["notes"])


def without(flags, name):
    at = flags.index(name)
    end = next((i for i in range(at + 1, len(flags)) if flags[i].startswith("--")), len(flags))
    return (*flags[:at], *flags[end:])


GOOD = LINES["hicache"]
BROKEN = {
    "no ratio": (without(GOOD.flags, "--hicache-ratio"), "--hicache-ratio is not given"),
    "a size in GB": (
        (*without(GOOD.flags, "--hicache-ratio"), "--hicache-size", "90"),
        "--hicache-size 90",
    ),
    "a size in GB beside a ratio": ((*GOOD.flags, "--hicache-size", "90"), "--hicache-size 90"),
    "no host page": ((*GOOD.flags, "--hicache-ratio", "0"), "--hicache-ratio 0.0"),
    "a layout that V4 has not": (
        (*GOOD.flags, "--hicache-mem-layout", "page_head"),
        "--hicache-io-backend direct with --hicache-mem-layout page_head",
    ),
    "an NPU's copies": (
        (*GOOD.flags, "--hicache-io-backend", "kernel_ascend"),
        "--hicache-io-backend kernel_ascend with --hicache-mem-layout page_first_direct",
    ),
    "write back": (
        (*GOOD.flags, "--hicache-write-policy", "write_back"),
        "--hicache-write-policy write_back",
    ),
    "a storage backend without v2": (
        (*GOOD.flags, "--hicache-storage-backend", "simm"),
        "--hicache-storage-backend simm",
    ),
    "storage whose config is no JSON": (
        (
            *GOOD.flags,
            *("--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", "{"),
        ),
        "--hicache-storage-backend-extra-config: {:",
    ),
    "a dynamic backend without a class": (
        (
            *(*GOOD.flags, "--hicache-storage-backend", "dynamic"),
            *("--hicache-storage-backend-extra-config", '{"backend_name": "mine"}'),
        ),
        "a dynamic backend needs module_path, class_name",
    ),
    "pipeline parallelism": ((*GOOD.flags, "--pp-size", "2"), "--pp-size 2"),
    "HiSparse beside it": ((*GOOD.flags, "--enable-hisparse"), "--enable-hisparse: not supported"),
    "prefill graphs": (
        (*GOOD.flags, "--cuda-graph-backend-prefill", "breakable"),
        "--cuda-graph-backend-prefill breakable",
    ),
    "drafts that branch": (
        (*LINES["everything"].flags, "--speculative-eagle-topk", "4"),
        "--speculative-eagle-topk",
    ),
    "two-batch overlap": (
        (*GOOD.flags, "--enable-two-batch-overlap"),
        "--enable-two-batch-overlap",
    ),
    "no radix cache": ((*GOOD.flags, "--disable-radix-cache"), "disable-radix-cache"),
}
SPARSE = LINES["hisparse"]
BROKEN_SPARSE = {
    "a radix cache": (without(SPARSE.flags, "--disable-radix-cache"), "--disable-radix-cache"),
    "speculation": ((*SPARSE.flags, *launches.EAGLE), "--speculative-algorithm EAGLE"),
    "a small buffer": (
        (*SPARSE.flags, "--hisparse-config", '{"top_k": 512, "device_buffer_size": 256}'),
        "--hisparse-config device_buffer_size=256",
    ),
}


SWEPT = (
    *("a size in GB beside a ratio", "an NPU's copies", "storage whose config is no JSON"),
    *("two-batch overlap", "drafts that branch", "no radix cache", "a small buffer", "write back"),
)
"""The rules of these are tested without a process as well (``test_engage.py``)."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SWEPT else ())
        for name in (*BROKEN, *BROKEN_SPARSE)
    ],
)
def test_doctor_says_no_to_a_broken_line_and_names_the_flag(name, doctor):
    line = GOOD if name in BROKEN else SPARSE
    flags, named = (BROKEN | BROKEN_SPARSE)[name]
    report = doctor(ours(line), flags)
    assert not report["engages"]
    reasons = [reason for found in report["checks"].values() for reason in found]
    assert any(named in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    "more, note",
    [
        (("--page-size", "128"), "--page-size 128: SGLang runs with 256 instead"),
        (
            ("--hicache-mem-layout", "page_first"),
            "--hicache-mem-layout page_first: SGLang runs with page_first_direct instead",
        ),
        (
            ("--hicache-io-backend", "kernel"),
            "--hicache-io-backend kernel: SGLang runs with direct instead",
        ),
    ],
)
def test_doctor_says_what_sglang_replaces(more, note, doctor):
    report = doctor(ours(GOOD), (*GOOD.flags, *more))
    assert report["engages"] and note in report["notes"]


@pytest.fixture(scope="module")
def every_series():
    """SGLang loads plugins once in a process: with everything requested."""
    from sglang.srt.plugins import load_plugins

    with pytest.MonkeyPatch.context() as patch:
        for switch in PRODUCT_SWITCHES:
            patch.setenv(switch, "1")
        load_plugins()


@pytest.mark.parametrize("line", ON_GPU, ids=lambda line: line.name)
def test_a_line_is_the_one_that_plan_ends_with(line, pro, every_series):
    """On hosts of 8 MI355X, each rank of a line with its share of the memory that the line names."""
    name, command, *arguments = line.plan
    at = arguments.index("--model-path") + 1
    arguments[at] = pro
    # Those that the line does not set are not set for the plan either; empty counts as unset.
    unset = dict.fromkeys((*PRODUCT_SWITCHES, BUDGET), "")
    rc, output = run_plan([command, "--json", *arguments], unset | line.plan_env)
    # An import may warn afterwards.
    report, _ = json.JSONDecoder().raw_decode(output)
    assert rc == 0 and not report["warnings"], report["warnings"]
    words, env = report["launch"]["command"], report["launch"]["env"]
    assert words[:5] == [*launches.SERVER, "--model-path", pro]
    assert sorted(pairs(words[5:])) == sorted(pairs(line.flags))
    # The environment of this process stays in the line, and the reference engine's is there by now.
    asked = {name: value for name, value in line.env.items() if name.startswith("SGLANG_")}
    assert {name: env[name] for name in asked} == asked
    assert {name for name in env if name.startswith(SWITCHES)} == set(ours(line))
    pinned = sum(report["host_bytes"].values()) / GB
    assert pinned == pytest.approx(line.rank_host_gb, abs=0.05)


def test_only_what_is_listed_is_replaced_on_the_reference_engine(forks, pro):
    """Both lines, parsed by SGLang, differ in no other field."""
    lines = {line.name: (line.flags, reduced(line).flags) for line in ON_GPU}
    script = (
        "import json, sys\n"
        "from sglang.srt.arg_groups.arg_utils import record_fields\n"
        "from sglang.srt.server_args import ServerArgs, prepare_server_args\n"
        "fields = [field.name for field in record_fields(ServerArgs)]\n"
        "for name, lines in json.loads(sys.argv[1]).items():\n"
        "    one, two = (prepare_server_args(['--model-path', sys.argv[2], *l]) for l in lines)\n"
        "    print(json.dumps([n for n in fields if getattr(one, n) != getattr(two, n)]))\n"
    )
    ended = forks.run(script, argv=["x", json.dumps(lines), pro])
    assert ended.rc == 0, ended.stderr
    found = [json.loads(row) for row in ended.stdout.splitlines() if row.startswith('["')]
    assert len(found) == len(lines)
    replaced = {flag.removeprefix("--").replace("-", "_") for flag in launches.REPLACED}
    for fields in found:
        assert "device" in fields and set(fields) <= replaced, set(fields) - replaced
    assert set.union(*map(set, found)) == replaced - {"model_path", "port"}


@pytest.mark.parametrize("line", ON_GPU, ids=lambda line: line.name)
def test_our_own_variables_stay_on_the_reference_engine(line):
    small = reduced(line)
    kept = {name for name in line.env if name not in launches.NO_TINY_ENV}
    assert set(small.env) == kept | set(REFERENCE_ENGINE)
    changed = {name for name in kept if small.env[name] != line.env[name]}
    assert changed <= {"SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB"}
    assert reduced(small) == small
